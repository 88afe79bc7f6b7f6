"""Seeded swarms with faults: every microbatch ends, counts at most once at each stage, and leaves no memory behind."""

import pytest

from tests.protocol.pipeline.seeded_run import SeededRun

pytestmark = pytest.mark.slow

BATCHES = 4
SEEDS = 40


@pytest.mark.parametrize("batch", range(BATCHES))
def test_faults_lose_and_double_nothing_in_silence(batch: int) -> None:
    for seed in range(batch * SEEDS // BATCHES, (batch + 1) * SEEDS // BATCHES):
        SeededRun(seed).run()


def test_without_faults_everything_is_done() -> None:
    for seed in range(10):
        run = SeededRun(seed, faults=())
        run.run()
        assert set(run.swarm.begun.values()) == {"done"}
