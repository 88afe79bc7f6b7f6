"""Peers are dealt to stages without loss, and layers in proportion to their speeds."""

import pytest

from benchmarks.pipelining.dealt_layers import PEERS, STAGES, dealt, mixed

SPEEDS = [1.0, 2.0, 4.0, 8.0] * STAGES


def test_mixed_stages_have_all_speeds_and_equal_sums() -> None:
    assert mixed(SPEEDS) == ((1.0, 2.0, 4.0, 8.0),) * STAGES


@pytest.mark.parametrize(("layers", "slowest"), [(12, 12.0), (15, 15.0), (24, 13.71), (48, 14.77)])
def test_stages_of_like_speed_are_as_fast_as_whole_layers_allow(layers: int, slowest: float) -> None:
    stages = dealt(SPEEDS, layers)
    assert sum(map(len, stages)) == PEERS and all(len(set(stage)) == 1 for stage in stages)
    assert min(map(sum, stages)) == pytest.approx(slowest, abs=0.01)
