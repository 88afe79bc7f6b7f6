"""No leader and no single reducer can make up a sum, and no announcement of one peer alone holds up a round."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from protocol.blobs.blob import Blob
from protocol.consensus import machine as machine_module
from protocol.consensus import reduction, view_change
from protocol.consensus.events import Fetch, Reduce
from protocol.consensus.messages.contributions import Commit
from protocol.errors import ForgedError
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE, Cluster
from tests.protocol.consensus.test_acceptance import deliver, locks
from tests.protocol.consensus.test_knowledge import signed_message
from tests.simulation.virtual.network import fake_reduce

NOISE = b"noise"


def true_sums(table: Cluster, commit: Commit) -> tuple[Blob, ...]:
    return tuple(fake_reduce(part, commit.contributions) for part in range(len(commit.parts)))


def cluster_with_liars(liars: Iterable[int], reducers: int = 2, peers: int = 4, parts: int = 4) -> Cluster:
    """Let some peers announce noise as the sum of every part that they reduce, all the same noise."""
    table = Cluster(peers, "butterfly", parts, reducers=reducers)
    false = {table.names[number] for number in liars}

    def reduce_part(name: PeerId, order: Reduce) -> Blob:
        return Blob.of(NOISE + bytes([order.part])) if name in false else fake_reduce(order.part, order.contributions)

    table.reduce_part = reduce_part
    table.contribute(*table.names)
    return table


@pytest.mark.parametrize("liar", range(4))
def test_a_reducer_that_lies_is_proved_wrong_and_its_parts_are_summed_by_others(liar: int) -> None:
    table = cluster_with_liars([liar])
    table.elapse(12.0)
    honest = [name for name in table.names if name != table.names[liar]]
    for name in honest:
        commit = table.commit(name)
        assert commit is not None and commit.parts == true_sums(table, commit)
    accused = [{peer for peer, reason in table.rejections_by(name) if reason == "wrong sum"} for name in honest]
    assert set().union(*accused) == {table.names[liar]}


def test_control_with_one_reducer_a_part_its_lie_is_committed() -> None:
    table = cluster_with_liars([3], reducers=1)
    commit = table.commit(table.names[0])
    assert commit is not None and commit.parts != true_sums(table, commit)


def with_two_liars(secret: bytes) -> Cluster:
    """Let both reducers of part 0 announce the same noise, and be honest otherwise; all others are a quorum."""
    plain = Cluster(7, "butterfly", 5)
    plain.drop = lambda sender, receiver, kind: kind == "part"
    plain.contribute(*plain.names)
    view = plain.machines[plain.names[0]]._state.current_view
    assert view is not None
    liars = view.reducers_of(0)

    def reduce_part(name: PeerId, order: Reduce) -> Blob:
        true = fake_reduce(order.part, order.contributions)
        return Blob.of(NOISE) if order.part == 0 and name in liars else true

    table = Cluster(7, "butterfly", 5)
    for machine in table.machines.values():
        machine._state.audit_secret = secret
    table.reduce_part = reduce_part
    table.contribute(*table.names)
    table.elapse(20.0)
    return table


def shares_found(count: int = 24) -> tuple[float, float]:
    """Return the shares of cases in which somebody finds two liars, and in which the true sum is committed."""
    found = prevented = 0
    for number in range(count):
        table = with_two_liars(bytes([number]))
        reasons = {reason for name in table.names for _, reason in table.rejections_by(name)}
        commits = [commit for name in table.names if (commit := table.commit(name))]
        assert commits
        found += "wrong sum" in reasons
        prevented += all(commit.parts == true_sums(table, commit) for commit in commits)
    return found / count, prevented / count


def test_two_liars_that_reduce_the_same_part_are_found_by_the_draws_of_the_others() -> None:
    """Five others draw one of four or five parts each: about 1 - (3/4)^5 = 0.76."""
    found, prevented = shares_found()
    print(f"found {found:.2f}, prevented {prevented:.2f}")
    assert 0.45 < found < 0.95 and prevented > 0.4


def test_control_without_draws_two_liars_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "drawn_part", lambda view, secret, me: None)
    assert shares_found(4) == (0.0, 0.0)


def leader_makes_up_the_sums() -> Cluster:
    table = Cluster(4, "butterfly", 4)
    leader, *others = table.names
    table.drop = lambda sender, receiver, kind: sender == leader and kind == "commit"
    table.contribute(*table.names)
    honest = next(iter(table.machines[leader]._state.knowledge.proposals.values())).body
    noise = tuple(Blob.of(NOISE + bytes([part])) for part in range(4))
    for blob in noise:
        table.stores[leader].add(blob.digest)
    assert honest.evidence is not None
    evidence = replace(honest.evidence, peers=(leader, table.names[1]) * 4)  # as if it had the other one's key
    deliver(table, leader, Commit(0, 0, BASE, honest.contributions, noise, evidence=evidence))
    return table


def test_sums_that_a_leader_makes_up_have_no_signatures() -> None:
    """The message is refused before the machine sees it."""
    table = Cluster(4, "butterfly", 4)
    table.contribute(*table.names)
    commit = table.commit(table.names[1])
    assert commit is not None and commit.evidence is not None
    noise = tuple(Blob.of(NOISE + bytes([part])) for part in range(4))
    with pytest.raises(ForgedError):
        table.network.open(signed_message(table.names[0], replace(commit, parts=noise)).signed)
    assert table.network.open(signed_message(table.names[0], commit).signed).body == commit
    assert not table.scenario.settings().topology.accepts_commit(replace(commit, evidence=None))


def test_a_leader_that_signs_all_sums_itself_is_not_believed() -> None:
    table = leader_makes_up_the_sums()
    leader, *others = table.names
    assert all((leader, "false proposal") in table.rejections_by(name) for name in others)
    assert not locks(table)[1:]


def test_a_ghost_sum_does_not_stop_the_round() -> None:
    """A reducer announces sums that it never serves; the second reducer of each part serves them."""
    table = Cluster(4, "butterfly", 4)
    ghost = table.names[3]
    sums: set[bytes] = set()

    def reduce_part(name: PeerId, order: Reduce) -> Blob:
        blob = fake_reduce(order.part, order.contributions)
        sums.add(blob.digest)
        return blob

    table.reduce_part = reduce_part
    transfer = table._transfer

    def without_ghost() -> bool:
        for key, fetch in list(table.pending_fetches.items()):
            sources = tuple(peer for peer in fetch.sources if peer != ghost or fetch.part_blob.blob.digest not in sums)
            table.pending_fetches[key] = Fetch(fetch.part_blob, sources, fetch.is_reduced)
        return transfer()

    table._transfer = without_ghost  # type: ignore[method-assign]
    table.contribute(*table.names)
    assert len(table.included_peers()) == 1 and table.now == 0.0


def test_control_with_one_reducer_a_part_a_ghost_stops_the_round() -> None:
    table = Cluster(4, "butterfly", 4, reducers=1)
    ghost = table.names[3]
    sums: set[bytes] = set()

    def reduce_part(name: PeerId, order: Reduce) -> Blob:
        blob = fake_reduce(order.part, order.contributions)
        if name == ghost:
            sums.add(blob.digest)
        return blob

    table.reduce_part = reduce_part
    table.is_slow = lambda peer, digest: digest in sums
    table.contribute(*table.names)
    table.elapse(1.0)
    assert table.included_peers() == set()


def test_control_without_the_checks_a_sum_of_other_reducers_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (machine_module, view_change):
        monkeypatch.setattr(module, "proposal_fault", lambda state, proposal: None)
    assert len(locks(leader_makes_up_the_sums())) > 1


def test_the_only_survivor_of_a_round_makes_a_commit_that_every_peer_accepts() -> None:
    """It has no second reducer, so it includes its own contribution alone; the others send theirs again."""
    table = Cluster(3, "butterfly", 2)
    survivor, *others = table.names
    table.drop = lambda sender, receiver, kind: kind in ("part", "holding")
    table.contribute(*table.names)
    table.kill(*others)
    table.elapse(30.0)
    commit = table.commit(survivor)
    assert commit is not None and set(commit.by_sender) == {survivor}
    assert table.scenario.settings().topology.accepts_commit(commit)


def test_a_leader_that_waits_no_longer_appoints_as_many_reducers_as_members_follow() -> None:
    """All but one peer lack most contributions; members refuse an assignment with one reducer for each part."""
    table = Cluster(4, "butterfly", 2)
    leader = table.names[0]
    table.is_slow = lambda peer, digest: peer != leader and table.now < 11.0
    table.contribute(*table.names)
    table.elapse(16.0)
    assert len(table.included_peers()) == 1
    assert all(commit is not None and commit.view == 0 for commit in map(table.commit, table.names))
