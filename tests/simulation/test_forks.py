"""Peers that are apart for longer than votes are remembered: two chains come about, and end as one; no work is applied
twice, and none gets lost."""

from collections.abc import Sequence

import pytest

from node.daemon.offers import Offers, Verdict
from protocol.rounds.chain import Head
from protocol.rounds.statements import Commit
from tests.simulation.seeds import broken
from tests.simulation.story import Story

BATCHES = 8
SEEDS_PER_BATCH = 40


@pytest.mark.parametrize("batch", range(BATCHES))
def test_long_partitions_end_on_one_chain(batch: int) -> None:
    forks = 0
    for seed in range(batch * SEEDS_PER_BATCH, (batch + 1) * SEEDS_PER_BATCH):
        story = Story(seed, isolating=True)
        story.run()
        forks += len(story.swarm.forks())
    assert forks > 0, "the control: there was nothing to heal"
    print(f"{forks} forks were healed")


def test_without_a_new_verdict_work_of_the_chain_that_was_left_gets_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of giving back."""
    monkeypatch.setattr(Offers, "_revise", lambda *arguments, **named: ())
    assert any("work got lost" in story.fault for story in broken(0, SEEDS_PER_BATCH, isolating=True))


@pytest.mark.parametrize("seed", [893])
def test_what_both_chains_have_is_taken_out_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of taking out: a seed of few under which the same work would be sent to a chain that has it."""
    judge = Offers.jump

    def forgetful(self: Offers, me: str, commits: Sequence[Commit], number: int, left: Head) -> Verdict:
        past = list(self.past)
        verdict = judge(self, me, commits, number, left)
        self.past[: len(past)] = past
        return Verdict(verdict.fate, tuple(entry for entry in verdict.revised if entry.was != "excluded"))

    monkeypatch.setattr(Offers, "jump", forgetful)
    assert ["applied" in story.fault for story in broken(seed, 1, isolating=True)] == [True]
    monkeypatch.undo()
    assert broken(seed, 1, isolating=True) == []
