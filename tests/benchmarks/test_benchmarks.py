"""The scripts that give the figures of the documentation, on a small model."""

import dataclasses
import re
from itertools import count, takewhile
from pathlib import Path

import pytest
import torch

from benchmarks import comparison_tables, paths, recipes, returns, traffic
from node.commands.recipes import bits_over_rounds
from node.from_manifest import build_program
from node.model import shape_table
from node.simulation.comparison import LOCAL, Comparison, RecipeResults
from node.simulation.measurement import CurvePoint, SimulationResult
from optim.compose import compose
from optim.outer import Sign
from optim.recipes import RECIPES
from optim.round_plan import RoundPlanner
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from protocol.transport.multipath_policy import BulkPath as Way

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs"
OUTCOME = SimulationResult(2.0, 0.1, 1.0, 10.0, 0.9, 4, 100, 5.0, (CurvePoint(100, 10.0, 5.0, 2.0),))
DEMO = shape_table(load_manifest(CONFIGS / "demo.toml").model)


@pytest.fixture
def manifest() -> Manifest:
    torch.set_num_threads(1)
    return load_manifest(CONFIGS / "demo.toml")


def test_every_script_that_is_documented_gives_an_object() -> None:
    text = (CONFIGS.parent / "docs" / "results" / "benchmarks.md").read_text()
    scripts = set(re.findall(r"^\| `python (benchmarks/\w+\.py)", text, re.MULTILINE))
    assert len(scripts) > 10
    assert not [script for script in scripts if '"--json"' not in (CONFIGS.parent / script).read_text()]


def test_what_a_return_costs_is_a_slope_behind_the_warm_up() -> None:
    starting = [1000 * number for number in range(returns.WARM_UP)]
    assert returns.cost([*starting, 50_000, 50_030, 50_060, 50_090]) == pytest.approx(30.0)
    assert returns.cost([*starting, 50_000, 50_900, 50_000]) == 0.0, "what comes and goes"
    assert "| one | 1.5 |" in returns.table(returns.Report(1.5, 28.6))


def test_what_two_paths_come_to() -> None:
    report = paths.summed_up({Way.LIBP2P: [(100.0, 0.6), (300.0, 0.9)], Way.DIRECT: [(400.0, 0.2)] * 2})
    assert report.rates == {"libp2p": 200, "direct": 400} and report.times_the_cost == pytest.approx(3.75)
    assert "libp2p costs 3.8 times as much (3.0 to 4.5)" in paths.table(report)


@pytest.mark.parametrize("recipe", RECIPES)
def test_traffic_of_every_recipe(manifest: Manifest, recipe: str) -> None:
    """What an upload is beside all-reduce follows from the bits a parameter and the steps of a period."""
    program = build_program(manifest, compose(recipe))
    row = traffic.traffic(program, 2)
    assert row["inner_steps"] == sum(program.plan(number).steps for number in program.cycle)
    # Of two peers each uploads one message: to the other, or half of it and half of what was reduced.
    by_bits = row["bits_per_parameter"] * program.numel / 8 / row["inner_steps"]
    assert row["bytes_a_step"] == pytest.approx(by_bits, rel=0.05)
    assert row["times_less"] == pytest.approx(4 * program.numel / row["bytes_a_step"])


def test_traffic_grows_with_the_swarm_as_the_topology_says(manifest: Manifest) -> None:
    rows = {
        recipe: [traffic.traffic(build_program(manifest, compose(recipe)), peers)["bytes_a_step"] for peers in (2, 5)]
        for recipe in ("diloco", "sparseloco", "noloco")
    }
    assert rows["diloco"][1] == pytest.approx(1.6 * rows["diloco"][0], rel=0.01)
    assert rows["sparseloco"][1] == pytest.approx(4 * rows["sparseloco"][0])
    assert rows["noloco"][1] == rows["noloco"][0]


def test_a_thousandth_is_what_its_rows_spend(manifest: Manifest) -> None:
    for row in recipes.thousandth():
        assert bits_of_a_step(row) <= 16 / 1000 * 1.005, row.name
    often = recipes.Row("often", "sparseloco", {"schedule": {"inner_steps": 5}})
    assert bits_of_a_step(often) > 16 / 1000, "the control: every 5 steps is too much"


def bits_of_a_step(row: recipes.Row) -> float:
    """A parameter, over a run's rounds: messages may change."""
    program = RoundPlanner(compose(row.recipe, row.tables), DEMO.layout, 1)
    rounds = takewhile(lambda number: program.steps_before(number) < recipes.STEPS, count())
    bits, steps = bits_over_rounds(program, rounds)
    return bits / steps


def test_every_row_can_be_run_and_none_has_another_period_than_the_others() -> None:
    rows = recipes.rows()
    assert {row.recipe for row in rows} >= RECIPES.keys()
    methods = {row.name: compose(row.recipe, row.tables) for row in rows if row.recipe != LOCAL}
    assert all(method.schedule.ahead <= recipes.PERIOD for name, method in methods.items() if name != "anarchic")
    assert all(methods[name].schedule.inner_steps <= recipes.PERIOD for name in RECIPES if not name.endswith("-warm"))


def test_what_was_run_is_found_again_and_the_grid_chooses(tmp_path: Path) -> None:
    path, row = tmp_path / "results" / "recipes.json", recipes.rows()[2]
    ledger = recipes.Ledger(path)
    for setting, factor, loss in (("grid", 0.5, 2.0), ("grid", 2.0, 1.5), ("scratch", 2.0, 1.2)):
        ledger.add(recipes.Job(row, setting, 0, factor), dataclasses.replace(OUTCOME, validation_loss=loss))
    again = recipes.Ledger(path)
    assert again.best_factor(row.name) == 2.0 and again.best_factor("another") == 1.0
    assert again.comparison("scratch", [row.name]).recipe(row.name).loss == 1.2
    assert f"| {row.name} | 1.200 " in comparison_tables.make_table(again.comparison("scratch", [row.name]))
    recipes.perform([recipes.Job(row, "scratch", 0, 2.0)], again, workers=1)  # is there: nothing is started
    assert again.runs.keys() == ledger.runs.keys()
    ledger.add(recipes.Job(row, "grid", 0, 1.0), dataclasses.replace(OUTCOME, validation_loss=1.51))
    assert ledger.best_factor(row.name) == 1.0, "hardly better"
    ledger.add(recipes.Job(row, "scratch", 0, 0.5), dataclasses.replace(OUTCOME, validation_loss=1.1))
    assert ledger.best_factor(row.name) == 0.5, "whole runs tell more than the search"


def test_lines_that_another_beats_in_both_are_not_drawn() -> None:
    costs = {"data-parallel": (2.0, 9.0), "good": (1.5, 3.0), "frugal": (1.9, 0.1), "worse": (1.6, 3.5)}
    outcomes = {
        name: dataclasses.replace(OUTCOME, validation_loss=loss, bits_per_parameter_step=bits)
        for name, (loss, bits) in costs.items()
    }
    comparison = Comparison(tuple(RecipeResults(name, (outcome,)) for name, outcome in outcomes.items()))
    assert [one.name for one in comparison_tables.pareto_front(comparison).recipes] == [
        "data-parallel",
        "good",
        "frugal",
    ]


def test_tables_are_made_anew_between_their_marks_and_the_rest_is_left() -> None:
    text = "a\n<!-- compared: scratch -->\n\nold\n\n<!-- end -->\nb\n<!-- compared: warm -->\n\n| c |\n\n<!-- end -->\n"
    comparison = Comparison((RecipeResults("frugal", (OUTCOME,)), RecipeResults("another", (OUTCOME,))))
    made = comparison_tables.make_tables({"scratch": comparison})
    new = comparison_tables.fill_tables(text, made)
    assert new == text.replace("old\n", made["scratch"]) and comparison_tables.fill_tables(new, made) == new
    assert "| another |" in new and "| another |" not in made["scratch, in short"]


def test_the_documentation_shows_the_results_that_are_kept() -> None:
    ledger = recipes.Ledger(recipes.RESULTS)
    names = [row.name for row in recipes.rows()]
    made = comparison_tables.make_tables(
        {setting: ledger.comparison(setting, names) for setting in ("scratch", "warm")}
    )
    for name in ("README.md", "docs/results/recipes.md"):
        text = (comparison_tables.HOME / name).read_text()
        assert "<!-- compared: " in text
        assert comparison_tables.fill_tables(text, made) == text, "python benchmarks/recipes.py --report"


def test_results_come_in_pieces_from_several_processes_and_none_is_lost(tmp_path: Path) -> None:
    path, row = tmp_path / "recipes.json", recipes.rows()[0]
    ledgers = [recipes.Ledger(path) for _ in range(2)]  # both began with nothing
    jobs = [recipes.Job(row, "scratch", seed, 1.0) for seed in range(3)]
    for ledger, job in zip(ledgers, jobs, strict=False):
        ledger.add(job, OUTCOME)
    kept = recipes.Ledger(path).runs
    assert list(kept) == [job.key for job in jobs[:2]]
    assert all(run["commit"] and run["machine"] for run in kept.values())
    recipes.perform(jobs, ledgers[1], workers=1, minutes=0)  # the third is missing, but no time is left
    assert recipes.Ledger(path).runs == kept


def test_every_result_that_is_kept_says_where_it_was_made() -> None:
    runs = recipes.Ledger(recipes.RESULTS).runs
    assert runs and all(len(run["commit"]) == 40 and run["machine"] for run in runs.values())


def test_the_step_of_a_row_is_moved_where_its_weights_move() -> None:
    rows = {row.name: row for row in recipes.rows()}
    inner, outer = (recipes.Job(rows[name], "scratch", 0, 2.0) for name in ("diloco", "demo"))
    assert (
        recipes.setting_of(inner).manifest.train.learning_rate
        == 2 * recipes.setting_of(outer).manifest.train.learning_rate
    )
    usual, moved = (
        compose(rows["demo"].recipe, tables).update for tables in (rows["demo"].tables, recipes.tables_of(outer))
    )
    assert isinstance(usual, Sign) and isinstance(moved, Sign)
    assert moved.learning_rate == 2 * usual.learning_rate


def test_courses_are_as_long_as_the_run() -> None:
    for steps in (100, 500):
        row = next(row for row in recipes.rows(steps) if row.name == "frugal 1")
        method = compose(row.recipe, row.tables)
        assert (
            method.at_round(steps - 1).feedback
            != method.at_round(steps).feedback
            == method.at_round(steps + 1).feedback
        )
