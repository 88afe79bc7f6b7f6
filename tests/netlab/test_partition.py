"""The internet fails in parts, and whole peers with it; nobody is needed to mend the run.

One swarm of five for all tests of this file, whole again after each. After every round that anybody showed, equal
chains must have come to equal states. All five found the run and have a vote; parts that go on alone for eight rounds
take the vote of the others, so what needs more than two voters comes first. A peer leaves at most 64 rounds of its own
chain for another one without a person, so the rounds are slow: no part makes that many before the others have met.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from node.commands.up.peer_process import PeerProcess
from node.daemon.state.outer_state import RoundCompute
from protocol.consensus.chain import ChainHead, extend_head
from protocol.consensus.fork_choice import MAX_LOST_ROUNDS
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.quorum import Election
from tests.netlab.lab.blob_archive import BlobArchive
from tests.netlab.lab.lab_swarm import LabSwarm, running_lab_swarm
from tests.netlab.lab.laboratory import Laboratory, Link
from tests.swarm.peers.paced_trainer import STEP_SECONDS
from tests.swarm.process_swarm import ENDLESS, manifest_with

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(300)]

PEERS = 5
INNER_STEPS = 20  # a round takes 0.8 s at least
EXPIRY = 2.0
APART_ROUNDS = 3
APART_SECONDS = INNER_STEPS * STEP_SECONDS * MAX_LOST_ROUNDS * 0.8  # the rest is for the way back


@pytest.fixture(scope="module")
def swarm(permitted: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabSwarm]:
    manifest = manifest_with(
        run={"min_peers": PEERS},
        target={"rounds": ENDLESS},
        method={"schedule": {"inner_steps": INNER_STEPS}},
        membership={"expiry": EXPIRY},
    )
    with Laboratory() as laboratory:
        nodes = [laboratory.node(Link(up=20, down=50, delay=0.01)) for _ in range(PEERS)]
        with running_lab_swarm(tmp_path_factory.mktemp("partition"), manifest, laboratory, nodes) as made:
            for peer in made.lab_peers:
                peer.replace_module("tests.swarm.peers.paced_peer")
            made.start()
            yield made


@pytest.fixture(autouse=True)
def whole(swarm: LabSwarm) -> Iterator[None]:
    """Before and after each test all are there and agree."""
    wait_until_whole(swarm)
    yield
    swarm.laboratory.heal()
    wait_until_whole(swarm)
    assert all(len(states) == 1 for states in swarm.states.values()), "one chain of commits, one state"


def wait_until_whole(swarm: LabSwarm) -> None:
    def met() -> bool:
        told = swarm.poll()
        return len(told) == PEERS and all(s.peers == PEERS and s.describe_contributing() == "yes" for s in told)

    swarm.wait_until(met, "all are there and contribute")


class ChainObserver:
    """The digests that groups of peers have shown, by round."""

    def __init__(self, swarm: LabSwarm, groups: Sequence[Sequence[PeerProcess]]) -> None:
        self._swarm = swarm
        self._groups = groups
        self.shown: list[dict[int, set[str]]] = [{} for _ in groups]

    def poll(self) -> list[int]:
        """The round that all of a group have reached, by group."""
        reached = []
        for group, shown in zip(self._groups, self.shown, strict=True):
            statuses = self._swarm.poll(*group)
            for status in statuses:
                shown.setdefault(status.round, set()).add(status.digest)
            reached.append(min(status.round for status in statuses))
        return reached

    def differ_at(self, number: int) -> bool:
        """Whether no two groups have shown the same digest of that round."""
        digests = [digest for shown in self.shown for digest in shown.get(number, ())]
        return len(digests) == len(set(digests))


def partition_and_heal(swarm: LabSwarm, *groups: Sequence[PeerProcess]) -> None:
    """Each group goes on alone for some rounds, the internet heals, and all come together again."""
    laboratory, peers = swarm.laboratory, swarm.lab_peers
    before = swarm.highest_round()
    laboratory.partition(*([peer.node for peer in peers if peer in group] for group in groups))
    chains = ChainObserver(swarm, groups)
    apart = swarm.wait_until(lambda: min(chains.poll()) > before + APART_ROUNDS, "every group goes on", APART_SECONDS)
    assert chains.differ_at(before + APART_ROUNDS), "the control: they did go separate ways"
    told = {status.peer_id: status for status in swarm.poll()}
    made = [swarm.highest_round(*group) - before for group in groups]
    laboratory.heal()
    healed = swarm.highest_round()
    seconds = swarm.wait_until(lambda: len({s.digest for s in swarm.poll()}) == 1, "all are on one chain")
    agreed = swarm.wait_for_agreement(after=healed)
    print(f"{apart:.1f} s and {made} rounds apart; {seconds:.1f} s, {agreed - healed} rounds to one chain")

    def contribute_again() -> bool:
        return all(
            now.contributions_included > told[now.peer_id].contributions_included
            and now.describe_contributing() == "yes"
            for now in swarm.poll()
        )

    swarm.wait_until(contribute_again, "everyone's work goes in again")


def test_one_way_silence_between_two_holds_nobody(swarm: LabSwarm) -> None:
    heard, deaf, *_ = swarm.lab_peers
    votes = sum(status.has_vote is True for status in swarm.poll())
    assert votes >= 3, f"two voters that miss each other hold a run in which nobody else has a vote; {votes} have one"
    logs = {peer: len(swarm.log(peer)) for peer in (heard, deaf)}
    swarm.laboratory.block(heard.node, deaf.node)

    def miss_each_other() -> bool:
        return any(has_missed(swarm.log(one)[logs[one] :], other) for one, other in ((heard, deaf), (deaf, heard)))

    swarm.wait_until(miss_each_other, "the control: one of the two misses the other")
    before = swarm.highest_round()
    seconds = swarm.wait_until(
        lambda: min(status.round for status in swarm.poll()) >= before + APART_ROUNDS, "all go on"
    )
    print(f"{seconds:.1f} s for {APART_ROUNDS} rounds")


def has_missed(words: str, peer: PeerProcess) -> bool:
    assert peer.status is not None
    return (
        re.search(rf"gossip with {peer.status.peer_id} failed|{peer.status.peer_id} counts as gone", words) is not None
    )


def test_two_parts_go_on_and_become_one_again(swarm: LabSwarm) -> None:
    partition_and_heal(swarm, swarm.peers[:3], swarm.peers[3:])


@pytest.mark.nightly
def test_three_fragments_become_one_again(swarm: LabSwarm) -> None:
    partition_and_heal(swarm, swarm.peers[:2], swarm.peers[2:4], swarm.peers[4:])


def test_a_leader_that_is_cut_off_holds_the_others_for_a_moment(swarm: LabSwarm) -> None:
    began = swarm.highest_round()
    swarm.wait_until(lambda: swarm.highest_round() > began, "a round begins")
    newest = max(swarm.poll(), key=lambda status: status.round)
    number, by_id = newest.round, {peer.status.peer_id: peer for peer in swarm.lab_peers if peer.status}
    leader = Election(bytes.fromhex(newest.digest)).leader(0, frozenset(by_id))
    assert leader is not None
    victim = by_id[leader]
    others = [peer for peer in swarm.peers if peer is not victim]
    swarm.laboratory.cut(victim.node)
    chains = ChainObserver(swarm, [[victim], others])
    seconds = swarm.wait_until(lambda: chains.poll()[1] >= number + APART_ROUNDS, "the others go on")
    print(f"{seconds:.1f} s for {APART_ROUNDS} rounds without the leader of the first")
    assert chains.differ_at(number + APART_ROUNDS), "the control: it did not take part in them"


def test_who_introduced_the_others_dies(swarm: LabSwarm) -> None:
    first, *others = swarm.peers
    number = swarm.highest_round()
    first.kill()
    seconds = swarm.wait_until(
        lambda: min(status.round for status in swarm.poll(*others)) >= number + APART_ROUNDS, "they go on"
    )
    print(f"{seconds:.1f} s for {APART_ROUNDS} rounds")
    assert all(status.round <= number + 1 for status in swarm.poll(first)), "the control: it is dead"
    first.start(())  # nobody is named: it knows them from before


def test_what_went_in_is_what_is_said(swarm: LabSwarm, tmp_path: Path) -> None:
    """Sums are computed again from the contributions that a commit names, while one of the peers comes and goes."""
    laboratory, spare = swarm.laboratory, swarm.laboratory.node()
    with BlobArchive(tmp_path / "archive", swarm.manifest, [peer.folder for peer in swarm.peers]) as archive:
        swarm.wait_for_round(swarm.highest_round() + 1)  # of the round before, a part may have gone unseen
        began = swarm.highest_round()
        swarm.wait_for_round(began + 3)
        laboratory.cut(swarm.nodes[4])
        swarm.wait_for_round(began + 8, *swarm.peers[:4])
        laboratory.heal()
        wait_until_whole(swarm)
    commits = archive.request_commits(laboratory, spare, swarm.lab_peers[0].public_addresses()[0], began)
    known = [commit for commit in commits if archive.has_all([given.body for given in commit.contributions])]
    print(f"{len(known)} of {len(commits)} rounds can be computed again")
    assert len(known) >= 5 and len({len(commit.contributions) for commit in known}) > 1, swarm.describe()
    check_sums(archive.make_round_compute(), known)
    check_words(swarm, commits)


def check_sums(workshop: RoundCompute, commits: Sequence[Commit]) -> None:
    for commit in commits:
        given = [statement.body for statement in commit.contributions]
        for part, blob in enumerate(commit.parts):
            assert workshop.reduce_part(commit.round, part, given).blob == blob, f"round {commit.round}, part {part}"
            if len(given) > 1:
                fewer = workshop.reduce_part(commit.round, part, given[1:]).blob
                assert fewer != blob, "the control: what went in cannot be less than what is said"


def check_words(swarm: LabSwarm, commits: Sequence[Commit]) -> None:
    """What every peer said of each round of this chain."""
    senders = {
        extend_head(ChainHead(c.round, c.base, 0), c).digest.hex()[:8]: {g.sender for g in c.contributions}
        for c in commits
    }
    for peer in swarm.peers:
        assert peer.status is not None
        pattern = r"round (\d+): (\d+) contributions?, ours (\w+).*\n(?:.*\n)*?.*round \1 has the digest (\w{8})"
        said = [found[1:] for found in re.findall(pattern, swarm.log(peer))]
        heard = [(int(count), fate, senders[digest]) for count, fate, digest in said if digest in senders]
        assert len(heard) >= 2, "who takes a state over says nothing of the rounds before"
        for count, fate, entered in heard:
            assert count == len(entered)
            assert (fate == "included") == (peer.status.peer_id in entered)
