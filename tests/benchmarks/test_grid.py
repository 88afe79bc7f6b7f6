"""The recorded grid agrees with the plan, and the model is that of the setting."""

import pytest

from benchmarks.grid import PEERS, TOLERANCE, Point, manifest_of, planned_share, recorded, render_svg
from node.model import shape_table


def test_setting_has_the_parameters_that_were_published() -> None:
    assert shape_table(manifest_of(128).model).numel == 30_846_720


@pytest.mark.parametrize("point", recorded(), ids=lambda point: point.name)
def test_plan_predicts_each_recorded_point(point: Point) -> None:
    planned = planned_share(point.steps, point.mbit, point.cores / PEERS)
    assert planned == pytest.approx(point.computing, rel=TOLERANCE)
    assert point.planned == pytest.approx(planned, abs=1e-3), "the record is that of this plan"


def test_cores_of_their_own_let_cards_compute_in_short_rounds_too() -> None:
    assert planned_share(8, 1000, 0.5) < 0.2 < 0.8 < planned_share(8, 1000, 4.0)


def test_plot_has_two_bars_for_each_point() -> None:
    assert render_svg(recorded()).count("<rect") == 1 + 2 * 2 + 2 * len(recorded())
