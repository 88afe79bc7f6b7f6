"""Fewer than a third of the voters lie: the honest agree, apply nothing made up, lose nothing and go on."""

from collections.abc import Callable

import pytest

from node.loop.peers.syncing import Syncing
from protocol.conduct import Conduct
from protocol.consensus import machine, view_change
from protocol.consensus.knowledge import RoundKnowledge
from protocol.consensus.topology import Butterfly, Topology, draw_reducers
from protocol.electorate import Electorate
from tests.simulation.liars import LIARS
from tests.simulation.seeded_run import InvariantError, SeededRun
from tests.slices import sliced

pytestmark = pytest.mark.slow

SEEDS = 10  # of a batch


@pytest.mark.parametrize("batch", sliced(range(2), 1))
@pytest.mark.parametrize("lie", LIARS)
def test_a_lie_harms_nobody(lie: str, batch: int) -> None:
    told = 0
    for seed in range(SEEDS * batch, SEEDS * (batch + 1)):
        story = SeededRun(seed, lies=(lie,))
        story.run()
        told += len(story.swarm.lies_told)
    assert told > SEEDS / 2, "the lie is hardly ever told"


def sums_each_part_once(patch: pytest.MonkeyPatch) -> None:
    """Acknowledges sums that one peer alone has signed, and that nobody has checked."""

    def assign_once(self: Butterfly, seed: bytes, contributors: tuple[str, ...]) -> tuple[str, ...]:
        return draw_reducers(seed, contributors, self.parts, 1)

    patch.setattr(Butterfly, "assign_reducers", assign_once)
    patch.setattr(Butterfly, "accepts_commit", Topology.accepts_commit)


def believes_in_any_contributor(patch: pytest.MonkeyPatch) -> None:
    """Follows rosters and acknowledges commits with contributions that nobody made."""
    patch.setattr(machine, "unknown_contributors", lambda state, entries: frozenset())
    for module in (machine, view_change):
        patch.setattr(module, "proposal_fault", lambda state, proposal: None)


def lets_a_simple_majority_decide(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Electorate, "quorum_size", lambda self, count: count // 2 + 1)


def forgets_locks_on_proposals_of_liars(patch: pytest.MonkeyPatch) -> None:
    """Members that are bound to what an excluded key proposed never join a later view."""
    patch.setattr(RoundKnowledge, "is_lock", lambda self, digest: False)


@pytest.mark.parametrize(
    ("bug", "lie", "word", "first"),
    [
        (sums_each_part_once, "made up sums", "a sum of something else", 0),
        (believes_in_any_contributor, "invented contributors", "contributions of keys that nobody has", 0),
        (lets_a_simple_majority_decide, "two commits", "two commits of one round", 20),
        (forgets_locks_on_proposals_of_liars, "two commits", "stuck", 0),
    ],
)
def test_without_a_rule_its_lie_succeeds(
    bug: Callable[[pytest.MonkeyPatch], None], lie: str, word: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    found = next((seed for seed in range(first, first + 60) if word in fault_of(seed, lie)), None)
    assert found is not None
    monkeypatch.undo()
    assert not fault_of(found, lie)


def fault_of(seed: int, lie: str) -> str:
    """Return what broke under a seed; empty if nothing did."""
    try:
        SeededRun(seed, lies=(lie,)).run()
    except InvariantError as error:
        print(error)
        return str(error)
    return ""


def stays_on_its_branch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Syncing, "is_due", lambda self, state, now: False)


def compares_no_chains(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Conduct, "compare", lambda self, ours, theirs: [])


# Seeds under which the first commit founds an electorate of three, one of whom proposes twice.
OUTVOTED = (1046, 1135, 1223)


@pytest.mark.parametrize("seed", OUTVOTED)
def test_what_liars_with_a_third_of_the_votes_decide_twice_heals_and_excludes_them(seed: int) -> None:
    story = SeededRun(seed, lies=("two commits",))
    story.run()
    assert story.swarm.double_decisions.places, "the control: nothing is decided twice"


@pytest.mark.parametrize("bug", [stays_on_its_branch, compares_no_chains])
def test_without_a_rule_what_is_decided_twice_is_not_repaired(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    assert any(fault_of(seed, "two commits") for seed in OUTVOTED)


def count_excluded(lie: str) -> int:
    """Return in how many runs every honest peer excludes every liar."""
    count = 0
    for seed in range(SEEDS):
        story = SeededRun(seed, lies=(lie,))
        story.run()
        honest = [peer for peer in story.swarm.alive() if peer.name not in story.swarm.liars]
        count += all(peer.loop.conduct.excluded == story.swarm.liars for peer in honest)
    return count


def test_peers_that_contribute_twice_are_excluded_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control ignores equivocation, as before."""
    assert count_excluded("two contributions") > 0.8 * SEEDS
    monkeypatch.setattr(Conduct, "_prove", lambda self, first, second: None)
    assert count_excluded("two contributions") == 0
