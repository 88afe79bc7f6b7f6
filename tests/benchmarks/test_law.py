"""The law of the gap to data parallel: what the fit finds again, and what it refuses to find."""

import dataclasses
import math
import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks import law
from benchmarks.law import Point, Rows, Run
from node.simulation.measurement import SimulationResult

SIZES, LENGTHS, NOISE = (60_000, 200_000, 800_000), (50, 100, 200, 400), 0.05


def planted(bits: tuple[float, ...] = (0.2,)) -> list[Point]:
    """Return rows of gap = 0.5 N^-0.2 T^0.4 B^-0.3 with little noise."""
    noise = random.Random(1)
    return [
        Point(
            "frugal", size, steps, each, 0.5 * size**-0.2 * steps**0.4 * each**-0.3 * (1 + noise.gauss(0, NOISE))
        )
        for size, steps, each in product(SIZES, LENGTHS, bits)
    ]  # fmt: skip


def test_a_planted_law_is_found_and_shuffled_gaps_have_none() -> None:
    points = planted((0.01, 0.04))
    found = law.fit(points)
    assert found is not None and found.holds and found.error < 1 + 2 * NOISE
    assert (found.size, found.length, found.spent) == pytest.approx((-0.2, 0.4, -0.3), abs=0.06)
    gaps = random.Random(2).sample([point.gap for point in points], len(points))
    control = law.fit([dataclasses.replace(point, gap=gap) for point, gap in zip(points, gaps, strict=True)])
    assert control is not None and not control.holds and control.error > 1 + 4 * NOISE


def test_error_of_a_row_is_that_of_the_law_of_all_others() -> None:
    ones, gaps = np.ones((3, 1)), np.array([0.0, 0.0, 3.0])
    assert law.error_left_out(ones, gaps) == pytest.approx(math.sqrt((1.5**2 + 1.5**2 + 3**2) / 3))


def test_a_power_that_the_rows_do_not_show_is_left_out() -> None:
    found = law.fit(planted())
    assert found is not None and found.spent == 0 and found.length == pytest.approx(0.4, abs=0.06)
    one_size = law.fit([point for point in planted((0.01, 0.04)) if point.parameters == SIZES[0]])
    assert one_size is not None and one_size.size == 0
    assert law.fit(planted()[:4]) is None, "too few rows to leave one out"


def test_gaps_are_those_of_the_rate_that_data_parallel_likes_best(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "law.json")

    def add(method: str, factor: float, loss: float) -> None:
        outcome = SimulationResult(loss, 0.1, 1.0, 10.0, 0.9, 4, 100, 5.0)
        rows.add(Run("0.06M", law.SEARCH_STEPS, method, 0, factor), outcome, 1.0)

    for factor, loss in zip(law.FACTORS, (3.0, 2.0, 4.0), strict=True):
        assert rows.best_factor("0.06M") is None
        add("data-parallel", factor, loss)
    best = law.FACTORS[1]
    add("local", law.FACTORS[0], 3.1)
    add("local", best, 2.5)
    assert rows.best_factor("0.06M") == best
    assert [(one.method, one.gap) for one in Rows(tmp_path / "law.json").points()] == [("local", 0.25)]


def test_a_method_crosses_peers_that_never_exchange_once_it_stays_better() -> None:
    gaps = {"local": (0.1, 0.2, 0.3), "streaming-diloco": (0.2, 0.2, 0.25), "frugal": (0.05, 0.1, 0.1)}
    points = [
        Point(name, 1, steps, 0.1, gap)
        for name, each in gaps.items()
        for steps, gap in zip((50, 100, 200), each, strict=True)
    ]
    assert law.crossing(points, "streaming-diloco", 1) == (100, 200)
    assert law.crossing(points, "frugal", 1) == (None, 50)
    assert law.crossing(
        [*points, Point("frugal", 1, 400, 0.1, 0.5), Point("local", 1, 400, 0.1, 0.4)], "frugal", 1
    ) == (400, None)


def test_only_missing_rows_are_made_and_none_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()

    def instead(run: Run, device: str) -> SimulationResult:
        made.append(run.key)
        return SimulationResult(2.0 + run.factor, 0.1, 1.0, 10.0, 0.9, 4, 100, 5.0)

    monkeypatch.setattr(law, "measure", instead)
    common = ["--results", str(tmp_path / "law.json"), "--sizes", "0.06M", "--steps", "50"]
    law.main([*common, "--max-minutes", "-1"])
    assert not made
    law.main(common)
    assert len(made) == len(set(made)) == len(law.FACTORS) + len(law.METHODS)
    law.main([*common, "--methods", "averaging", *law.METHODS])
    assert len(made) == len(law.FACTORS) + len(law.METHODS) + 1


def test_sizes_are_what_they_are_called() -> None:
    for name in law.SIZES:
        assert law.parameters_of(name) / 1e6 == pytest.approx(float(name[:-1]), rel=0.08)
