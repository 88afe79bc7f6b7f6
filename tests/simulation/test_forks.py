"""Peers that are apart for longer than votes are remembered: two chains come about, and end as one; no work is applied
twice, and none gets lost."""

from collections.abc import Sequence

import pytest

from node.loop.contributions import ContributionTracker, ForkOutcome
from protocol.consensus import fork_choice
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages.contributions import Commit
from tests.simulation.seeded_run import END, InvariantError, SeededRun
from tests.simulation.seeds import broken_runs
from tests.simulation.virtual.network import Scenario
from tests.simulation.virtual.swarm import SimulatedSwarm
from tests.slices import sliced

pytestmark = pytest.mark.slow

AWAY = 40.0  # seconds; far more than votes are remembered
BATCHES = 8
SEEDS_PER_BATCH = 40


@pytest.mark.parametrize("batch", sliced(range(BATCHES), 1))
def test_long_partitions_end_on_one_chain(batch: int) -> None:
    forks = 0
    for seed in range(batch * SEEDS_PER_BATCH, (batch + 1) * SEEDS_PER_BATCH):
        story = SeededRun(seed, isolating=True)
        story.run()
        forks += len(story.swarm.forks())
    assert forks > 0, "the control: there was nothing to heal"
    print(f"{forks} forks were healed")


def heads_after_a_return() -> tuple[ChainHead, ChainHead | None]:
    """Return the head that two of seven voters reached alone, and the common one after four of the others came back."""
    scenario = Scenario(7, "gather", 1, rounds=3, loss=0.0, duplication=0.0, delay=0.1, transfer=0.1, training=2.0)
    swarm = SimulatedSwarm(scenario, seed=0, forks_allowed=True)
    dead, *away, _, last = swarm.peers
    swarm.start()
    alone: list[ChainHead] = []

    def strike() -> None:
        swarm.kill(dead)
        for name in away:
            swarm.kill(name, AWAY)

    swarm.network.schedule(4.0, strike)
    swarm.network.schedule(4.0 + AWAY - 0.1, lambda: alone.append(swarm.peers[last].chain.head))
    swarm.network.run(END, swarm.is_done)
    return alone[0], swarm.peers[last].chain.head if swarm.is_done() else None


def test_voters_that_come_back_together_do_not_follow_a_few_that_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no quorum, but decide once those ahead are forgotten; then the two come over.

    Control: where each chain counts as certified, the chain of the two is followed.
    """
    alone, common = heads_after_a_return()
    assert alone.round >= 3 and common is not None and common.digest != alone.digest
    monkeypatch.setattr(fork_choice, "is_certified", lambda *given: True)
    alone, common = heads_after_a_return()
    assert common is not None and common.digest == alone.digest


def test_without_a_new_verdict_work_of_the_chain_that_was_left_gets_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of giving back."""
    monkeypatch.setattr(ContributionTracker, "_revise_settled", lambda *arguments, **named: ())
    assert any("work got lost" in story.fault for story in broken_runs(0, SEEDS_PER_BATCH, isolating=True))


def fault_after_splits(seed: int) -> str:
    """Return what broke under a seed whose only faults are splits; empty if nothing did."""
    story = SeededRun(seed, isolating=True, faults=("split",))
    try:
        story.run()
    except InvariantError:
        assert story.swarm.forks()
    return story.fault


@pytest.mark.parametrize("seed", [233, 243])
def test_what_both_chains_have_is_taken_out_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of taking out: seeds of few under which the same work would be sent to a chain that has it."""
    judge = ContributionTracker.on_fork

    def forgetful(
        self: ContributionTracker, me: str, commits: Sequence[Commit], number: int, left: ChainHead
    ) -> ForkOutcome:
        past = list(self.settled)
        verdict = judge(self, me, commits, number, left)
        self.settled[: len(past)] = past
        return ForkOutcome(
            verdict.outcome, tuple(entry for entry in verdict.revised if entry.previous_outcome != "excluded")
        )

    monkeypatch.setattr(ContributionTracker, "on_fork", forgetful)
    assert "applied" in fault_after_splits(seed)
    monkeypatch.undo()
    assert not fault_after_splits(seed)
