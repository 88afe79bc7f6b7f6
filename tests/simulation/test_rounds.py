"""Whole rounds of many peers under faults, hundreds of seeds; each rule that keeps them right is also taken away.

A failing seed is shown by `python -m tests.simulation.replay SEED`.
"""

from collections.abc import Callable
from typing import Any

import pytest

from protocol.rounds.election import Electorate
from protocol.rounds.events import Skip
from protocol.rounds.leadership import Leadership
from protocol.rounds.state import RoundState
from tests.simulation.story import BrokenError, Story

BATCHES = 12
SEEDS_PER_BATCH = 10
SEARCHED = 150

Crippling = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("batch", range(BATCHES))
def test_one_commit_a_round_and_nobody_is_stuck(batch: int) -> None:
    for seed in range(batch * SEEDS_PER_BATCH, (batch + 1) * SEEDS_PER_BATCH):
        Story(seed).run()


@pytest.mark.parametrize("batch", range(2))
def test_long_partitions_end_on_one_chain(batch: int) -> None:
    forks = 0
    for seed in range(batch * SEEDS_PER_BATCH, (batch + 1) * SEEDS_PER_BATCH):
        story = Story(seed, isolating=True)
        story.run()
        forks += len(story.swarm.forks())
    print(f"{forks} forks were healed")


def test_faults_of_all_kinds_are_met() -> None:
    """The seeds above would prove nothing if they never came to the hard cases."""
    reasons: set[str] = set()
    for seed in range(40):
        story = Story(seed)
        story.run()
        reasons |= {reason for _, _, reason in story.swarm.skips}
    assert reasons >= {"leader silent", "leader left", "reducer left", "lost", "late", "left out", "stale view"}


def _without_majority(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Electorate, "is_quorum", lambda self, voters: bool(self.seen.keys() & set(voters)))


def _without_views(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoundState, "fault_of_leader", lambda self, now: None)
    patch.setattr(RoundState, "outvoting_view", lambda self: 0)


def _without_holders(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoundState, "needed", lambda self, proposal: ())
    patch.setattr(Leadership, "_is_stocked", lambda self, promised, blobs, now: True)


def _without_groups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoundState, "_of_my_group", lambda self, view: list(view.roster.body.contributions))


@pytest.mark.parametrize(
    ("cripple", "fault"),
    [
        (_without_majority, "two commits"),
        (_without_views, "stuck"),
        (_without_holders, "stuck"),
        (_without_groups, "outside of the group"),
    ],
)
def test_each_rule_is_needed(cripple: Crippling, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cripple(monkeypatch)
    found = next((seed for seed in range(SEARCHED) if fault in _outcome(seed)), None)
    assert found is not None, f"no seed shows {fault!r}"
    print(f"seed {found}: {fault}")
    monkeypatch.undo()
    Story(found).run()


def _outcome(seed: int) -> str:
    try:
        Story(seed).run()
    except BrokenError as broken:
        return str(broken)
    return ""


def test_the_same_seed_is_the_same_story() -> None:
    first, second = Story(5), Story(5)
    first.run()
    second.run()
    assert [_key(entry) for entry in first.swarm.network.trace] == [_key(entry) for entry in second.swarm.network.trace]


def _key(entry: tuple[float, str, Any]) -> tuple[float, str, str]:
    time, peer, what = entry
    return time, peer, what.reason if isinstance(what, Skip) else type(what).__name__
