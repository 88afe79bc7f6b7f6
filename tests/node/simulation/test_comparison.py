"""The baselines, the comparison, its figures and its charts."""

import csv
import io
import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

import node.data.batches
from node.simulation import plot, report
from node.simulation.comparison import (
    Comparison,
    all_reduce_step_seconds,
    compare,
    count_steps,
    train_data_parallel,
    train_locally,
)
from node.simulation.measurement import CurvePoint, Evaluator, interpolate_loss
from tests.node.simulation.virtual_swarm import make_config, make_corpus, make_method

GIVEN = make_config(2, 6, bandwidth=1e5, speeds=(1.0, 0.5))


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    methods = {name: make_method(name, 3) for name in ("diloco", "sparseloco")}
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    found = compare(GIVEN, methods, make_corpus(), 2, 3, count)
    assert steps >= count_steps(GIVEN, 2, 2) - 2 * 2 * 3
    return found


def test_figures_of_a_comparison(comparison: Comparison) -> None:
    figures = json.loads(json.dumps(comparison.to_json(), allow_nan=False))["recipes"]
    assert list(figures) == ["diloco", "sparseloco", "data-parallel", "local"]
    for name in figures:
        assert set(figures[name]["validation_loss"]) == {"mean", "std"}
        assert figures[name]["validation_loss"]["std"] > 0
        assert 0 < figures[name]["compute_share"] <= 1
    assert figures["data-parallel"]["bits_per_parameter_step"] == 32
    assert figures["local"]["bits_per_parameter_step"] == figures["local"]["sent_bytes"] == 0
    assert 8 < figures["diloco"]["bits_per_parameter_sync"] < 9
    assert 2.5 < figures["diloco"]["bits_per_parameter_step"] < 5, "8 bits every 3 steps, the slow peer's more often"
    assert figures["sparseloco"]["bits_per_parameter_sync"] < 1


def test_table_has_a_row_for_each_recipe(comparison: Comparison) -> None:
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(report.build_table(comparison, 160))
    text = console.export_text()
    for name in ("diloco", "sparseloco", "data-parallel", "local", "bits/param/step"):
        assert name in text
    assert "of it in the round machines" in report.format_logic_time(comparison)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_table_fits_the_terminal_and_names_the_columns_that_it_leaves_out(comparison: Comparison, width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(report.build_table(comparison, width))
    text = console.export_text()
    assert "data-parallel" in text and "validation loss" in text and "…" not in text
    assert ("left out because the terminal is narrow" in " ".join(text.split())) == (width < 160)


def test_single_seed_has_no_deviation(comparison: Comparison) -> None:
    first = comparison.recipes[0]
    single = Comparison((replace(first, results=first.results[:1]), *comparison.recipes[1:]))
    cells = [report._cells(recipe, single)[1] for recipe in single.recipes[:2]]
    assert cells[0] == f"{single.recipes[0].loss:.4f} -" and "+- 0." in cells[1]


def test_charts_are_well_formed(comparison: Comparison) -> None:
    root = ElementTree.fromstring(plot.render_svg(comparison))
    space = "{http://www.w3.org/2000/svg}"
    charts = root.findall(f"{space}g")
    assert [len(chart.findall(f"{space}polyline")) for chart in charts] == [4, 4]
    for chart in charts:
        for dot in chart.iter(f"{space}circle"):
            assert plot.LEFT <= float(dot.attrib["cx"]) <= plot.CHART_WIDTH - plot.RIGHT
            assert plot.TOP <= float(dot.attrib["cy"]) <= plot.CHART_HEIGHT - plot.BOTTOM


def test_charts_show_the_deviation_over_seeds_and_a_single_seed_has_none(comparison: Comparison) -> None:
    single = Comparison(tuple(replace(recipe, results=recipe.results[:1]) for recipe in comparison.recipes))
    bars = plot.render_svg(comparison).count('class="error"')
    assert bars > 4 and 'class="error"' not in plot.render_svg(single)
    first = comparison.recipes[0]
    losses = [result.curve[-1].loss for result in first.results]
    assert plot.deviations(first)[-1] == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)


def test_csv_has_a_row_for_each_recipe_and_seed(comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(report.render_csv(comparison))))
    assert [(row["recipe"], row["seed"]) for row in rows[:3]] == [("diloco", "0"), ("diloco", "1"), ("sparseloco", "0")]
    assert len(rows) == 8 and {"rounds", "sent_bytes", "virtual_seconds"} <= rows[0].keys()
    losses = [float(row["validation_loss"]) for row in rows[:2]]
    assert sum(losses) / 2 == pytest.approx(comparison.recipes[0].loss)


def test_recipes_that_exchanged_too_rarely_are_named(comparison: Comparison) -> None:
    rounds = {"diloco": 1, "sparseloco": 0, "data-parallel": 1, "local": 0}
    few = Comparison(
        tuple(
            replace(recipe, results=tuple(replace(result, rounds=rounds[recipe.name]) for result in recipe.results))
            for recipe in comparison.recipes
        )
    )
    (line,) = report.format_short_runs(few)
    assert line.startswith("too short to compare: diloco once, sparseloco never exchanged in the whole run")
    rounds |= {"diloco": 5, "sparseloco": 9}
    enough = (
        replace(recipe, results=tuple(replace(result, rounds=rounds[recipe.name]) for result in recipe.results))
        for recipe in comparison.recipes
    )
    assert report.format_short_runs(Comparison(tuple(enough))) == []


def test_data_parallel_step_takes_the_time_of_its_all_reduce() -> None:
    # The slowest peer takes 2 s; 2 * 1/2 * 4 * 1000 bytes over 1e5 bytes a second; two latencies of 0.05 s.
    assert all_reduce_step_seconds(GIVEN, 1000) == pytest.approx(2 + 0.04 + 0.1)


def test_data_parallel_with_equal_data_equals_one_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(peers: int) -> float:
        given = make_config(peers, 5)
        return train_data_parallel(
            given, make_corpus(), Evaluator(given, make_corpus()), 1, lambda: None
        ).validation_loss

    assert loss(2) != pytest.approx(loss(1), abs=1e-6)
    monkeypatch.setattr(node.data.batches, "order_key", lambda seed, peer, source: seed)
    assert loss(2) == pytest.approx(loss(1), abs=1e-6)


def test_baselines_of_a_single_peer_are_equal() -> None:
    given, text = make_config(1, 5), make_corpus()
    examiner = Evaluator(given, text)
    alone = train_locally(given, text, examiner, lambda: None)
    assert alone.validation_loss == train_data_parallel(given, text, examiner, 1, lambda: None).validation_loss
    assert alone.sent_bytes == 0


def test_loss_is_interpolated_between_curve_points() -> None:
    curve = (CurvePoint(1, 10.0, 0.0, 4.0), CurvePoint(2, 20.0, 0.0, 3.0))
    assert [interpolate_loss(curve, seconds) for seconds in (9.0, 10.0, 15.0, 20.0, 99.0)] == [None, 4.0, 3.5, 3.0, 3.0]
