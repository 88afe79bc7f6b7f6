"""Fewer than a third of the voters lie: the honest agree, apply nothing made up, lose nothing and go on."""

import pytest

from tests.simulation.liars import LIARS
from tests.simulation.seeded_run import SeededRun

pytestmark = pytest.mark.slow

SEEDS = 20


@pytest.mark.parametrize("lie", sorted(LIARS.keys() - {"two commits"}))
def test_a_lie_harms_nobody(lie: str) -> None:
    told = 0
    for seed in range(SEEDS):
        story = SeededRun(seed, lies=(lie,))
        story.run()
        told += len(story.swarm.lies_told)
    assert told > SEEDS / 2, "the lie is hardly ever told"
