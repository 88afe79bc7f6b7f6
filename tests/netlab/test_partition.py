"""The internet falls apart and comes together again; nobody is needed to mend the run."""

from collections.abc import Iterator, Sequence

import pytest

from node.local.peer_process import PeerProcess
from tests.netlab.laboratory import Laboratory, Link
from tests.netlab.scattered import ScatteredFlock, scattered
from tests.swarm.flock import ENDLESS, manifest_with

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(90)]

PEERS = 5
INNER_STEPS = 20
EXPIRY = 2.0
APART_ROUNDS = 3


@pytest.fixture(scope="module")
def flock(permitted: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScatteredFlock]:
    manifest = manifest_with(
        target={"rounds": ENDLESS},
        method={"schedule": {"inner_steps": INNER_STEPS}},
        membership={"expiry": EXPIRY},
    )
    with Laboratory() as laboratory:
        nodes = [laboratory.node(Link(up=20, down=50, delay=0.01)) for _ in range(PEERS)]
        with scattered(tmp_path_factory.mktemp("partition"), manifest, laboratory, nodes) as made:
            made.start()
            yield made


@pytest.fixture(autouse=True)
def whole(flock: ScatteredFlock) -> Iterator[None]:
    """Before and after each test all are there and agree."""
    wait_until_whole(flock)
    yield
    flock.laboratory.heal()
    wait_until_whole(flock)


def wait_until_whole(flock: ScatteredFlock) -> None:
    def met() -> bool:
        told = flock.look()
        return len(told) == PEERS and all(s.peers == PEERS and s.contributing() == "yes" for s in told)

    flock.wait(met, "all are there and contribute")


def highest(flock: ScatteredFlock, *peers: PeerProcess) -> int:
    return max(status.round for status in flock.look(*peers))


class Chains:
    """The digests that groups of peers have shown, by round."""

    def __init__(self, flock: ScatteredFlock, groups: Sequence[Sequence[PeerProcess]]) -> None:
        self._flock, self._groups = flock, groups
        self.shown: list[dict[int, set[str]]] = [{} for _ in groups]

    def look(self) -> list[int]:
        """The round that all of a group have reached, by group."""
        reached = []
        for group, shown in zip(self._groups, self.shown, strict=True):
            statuses = self._flock.look(*group)
            for status in statuses:
                shown.setdefault(status.round, set()).add(status.digest)
            reached.append(min(status.round for status in statuses))
        return reached

    def differ_at(self, number: int) -> bool:
        """Whether no two groups have shown the same digest of that round."""
        digests = [digest for shown in self.shown for digest in shown.get(number, ())]
        return len(digests) == len(set(digests))


def fall_apart(flock: ScatteredFlock, *groups: Sequence[PeerProcess]) -> None:
    """Each group goes on alone for some rounds, the internet heals, and all come together again."""
    laboratory, peers = flock.laboratory, flock.scattered
    before = highest(flock)
    laboratory.partition(*([peer.node for peer in peers if peer in group] for group in groups))
    chains = Chains(flock, groups)
    apart = flock.wait(lambda: min(chains.look()) > before + APART_ROUNDS, "every group goes on", 40)
    assert chains.differ_at(before + APART_ROUNDS), "the control: they did go separate ways"
    told = {status.peer_id: status for status in flock.look()}
    laboratory.heal()
    healed = highest(flock)
    seconds = flock.wait(lambda: len({s.digest for s in flock.look()}) == 1, "all are on one chain", 40)
    agreed = flock.wait_for_agreement(after=healed)
    print(f"{apart:.1f} s for {APART_ROUNDS} rounds apart; {seconds:.1f} s, {agreed - healed} rounds to one chain")

    def contribute_again() -> bool:
        return all(
            now.contributions_included > told[now.peer_id].contributions_included and now.contributing() == "yes"
            for now in flock.look()
        )

    flock.wait(contribute_again, "everyone's work goes in again")


def test_two_parts_go_on_and_become_one_again(flock: ScatteredFlock) -> None:
    fall_apart(flock, flock.peers[:3], flock.peers[3:])


def test_three_fragments_become_one_again(flock: ScatteredFlock) -> None:
    fall_apart(flock, flock.peers[:2], flock.peers[2:4], flock.peers[4:])
