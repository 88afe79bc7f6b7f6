"""The first half of the seeds: one commit a round, nothing applied twice, no work lost, nobody stuck, small tables."""

import pytest

from tests.simulation.seeds import FIRST_HALF, run_batch

pytestmark = pytest.mark.seeds


@pytest.mark.parametrize("first", FIRST_HALF)
def test_nothing_breaks(first: int) -> None:
    run_batch(first)
