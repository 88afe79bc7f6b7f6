"""Thousands of seeds: one commit a round, nothing applied twice, no work lost, nobody stuck, small tables."""

import pytest

from tests.simulation.seeds import BATCHES, run_batch

pytestmark = pytest.mark.seeds


@pytest.mark.parametrize("first", BATCHES)
def test_nothing_breaks(first: int) -> None:
    run_batch(first)
