"""Peers that are apart for longer than votes are remembered: two chains come about, and end as one."""

import pytest

from tests.simulation.story import Story

BATCHES = 10
SEEDS_PER_BATCH = 40


@pytest.mark.parametrize("batch", range(BATCHES))
def test_long_partitions_end_on_one_chain(batch: int) -> None:
    for seed in range(batch * SEEDS_PER_BATCH, (batch + 1) * SEEDS_PER_BATCH):
        Story(seed, isolating=True).run()


def test_there_are_forks_to_heal() -> None:
    forks = 0
    for seed in range(60):
        story = Story(seed, isolating=True)
        story.run()
        forks += len(story.swarm.forks())
    assert forks > 0
    print(f"{forks} forks were healed")
