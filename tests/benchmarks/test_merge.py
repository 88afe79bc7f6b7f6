"""The merges that are measured side by side: the same vectors, and the exact mean to compare with."""

import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks import arithmetic, beside, results_page, sync
from benchmarks.links import DEMO
from benchmarks.merge.random_vectors import BLOCK, random_vector, relative_error
from benchmarks.merge.training_step import Stepper
from benchmarks.sync import Cost

pytestmark = pytest.mark.slow


def test_the_error_of_a_mean_is_told_however_long_the_vectors_are() -> None:
    for numel in (1000, BLOCK + 1000):
        vectors = [random_vector(rank, numel) for rank in range(3)]
        mean = torch.stack(vectors).mean(0)
        assert vectors[0].shape == (numel,) and not torch.equal(vectors[0], vectors[1])
        assert relative_error(mean, 3) < 1e-6
        assert relative_error(1.01 * mean, 3) == pytest.approx(0.01, rel=1e-3)
        assert relative_error(vectors[0], 3) > 1, "the control: one peer's vector is no mean"


def test_a_target_is_missed_by_what_is_slower_or_worse() -> None:
    rival = Cost(1.0, 2.0, 1e6, 0.03)
    good = {"hivemind_8bit": rival, "ours_dense": Cost(0.7, 1.4, 1e6, 0.01), "ours_sparse": Cost(0.15, 9.0, 1e5, 0.9)}
    assert all(sync.reached(good)) and len(sync.reached(good)) == 4
    for name, worse in {
        "ours_dense": (Cost(0.8, 1.4, 0, 0.01), Cost(0.7, 1.5, 0, 0.01), Cost(0.7, 1.4, 0, 0.04)),
        "ours_sparse": (Cost(0.2, 0.1, 0, 0.1),),
    }.items():
        for cost in worse:
            assert sync.reached(good | {name: cost}).count(False) == 1
    assert not sync.reached({"ours_dense": rival}), "without a rival there is nothing to reach"


def test_the_median_is_of_each_figure_by_itself() -> None:
    assert sync.median([Cost(1, 6, 1, 1), Cost(2, 5, 1, 1), Cost(3, 4, 9, 1)]) == Cost(2, 5, 1, 1)


def test_costs_are_recorded_with_commit_date_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "RESULTS", tmp_path / "merge.json")
    sync.record({"ours_dense": Cost(1.23456, 2, 3, 0.01)}, 1000, 4)
    found = json.loads((tmp_path / "merge.json").read_text())
    assert found["costs"]["ours_dense"]["seconds"] == 1.235 and found["turns"] == 4
    assert {"commit", "date", "load", "cores"} <= set(found)
    assert set(json.loads((results_page.ROOT / "docs" / "results" / "merge.json").read_text())) == set(found)


def test_a_thread_is_on_its_cores_for_as_long_as_it_is_told() -> None:
    before = os.sched_getaffinity(0)
    with beside.on_cores({min(before)}):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_a_step_moves_the_model_by_its_gradient() -> None:
    stepper = Stepper(DEMO, 0)
    first = stepper.gradient().clone()
    stepper.apply()
    second = stepper.gradient().clone()
    assert first.ndim == 1 and first.isfinite().all() and not torch.equal(first, second)
    assert torch.equal(Stepper(DEMO, 0).gradient(), first), "the same text, the same weights"


@pytest.mark.swarm
@pytest.mark.nightly
def test_real_peers_merge_ours_and_theirs() -> None:
    costs = sync.measure(["ours_dense", "ours_sparse", "hivemind_8bit", "gloo_fp32"], numel=50_000, turns=1)
    assert costs["ours_dense"].relative_error < 0.02
    assert costs["hivemind_8bit"].relative_error < 0.1, "as shipped three quarters of it are not averaged"
    assert costs["gloo_fp32"].relative_error < 1e-6
    assert all(cost.seconds > 0 for cost in costs.values()) and costs["ours_dense"].cpu_seconds > 0
    assert costs["ours_sparse"].bytes < costs["ours_dense"].bytes < costs["gloo_fp32"].bytes


def test_the_arithmetic_that_is_timed_is_that_of_a_merge() -> None:
    dense, sparse = (arithmetic.Merge(recipe, 2 * BLOCK) for recipe in ("averaging", "sparseloco"))
    spent, message_spent = dense.run(), sparse.run()
    assert spent.keys() - message_spent.keys() == {"sum"}
    assert dense.error() < 0.02 < sparse.error() < 1, "what a sparse message leaves out is not in the mean"


def test_of_four_peers_on_two_cores_each_core_has_two() -> None:
    cost = arithmetic.cost_of([{"encode": 30.0, arithmetic.STATE: 9.0}, {"encode": 50.0, arithmetic.STATE: 9.0}], 2)
    assert cost.all == 40.0 and cost.least_seconds == pytest.approx(0.08)
