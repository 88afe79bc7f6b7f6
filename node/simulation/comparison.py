"""Recipes side by side: each over the same seeds, beside the two baselines."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from node.data import Corpus
from node.simulation.baselines import DATA_PARALLEL, LOCAL, train_data_parallel, train_locally
from node.simulation.measure import Evaluator, SimulationResult, CurveRecorder, interpolate_loss, compute_result
from node.simulation.setting import SimulationConfig
from node.simulation.swarm import VirtualSwarm
from optim.method import Method

OnStep = Callable[[], None]


@dataclass(frozen=True)
class RecipeResults:
    """One recipe's outcomes, by seed."""

    name: str
    results: tuple[SimulationResult, ...]

    @property
    def loss(self) -> float:
        return statistics.fmean(outcome.validation_loss for outcome in self.results)

    @property
    def loss_deviation(self) -> float:
        """Over the seeds, of the sample; 0 for a single one."""
        losses = [outcome.validation_loss for outcome in self.results]
        return statistics.stdev(losses) if len(losses) > 1 else 0.0

    def mean(self, figure: str) -> float:
        return statistics.fmean(getattr(outcome, figure) for outcome in self.results)


@dataclass(frozen=True)
class Comparison:
    """`series`: the recipes in the order asked for, then the baselines."""

    recipes: tuple[RecipeResults, ...]

    def recipe(self, name: str) -> RecipeResults:
        return next(series for series in self.recipes if series.name == name)

    def data_parallel_loss_at(self, seconds: float) -> float | None:
        """Its mean loss by that virtual time, where every seed had got anywhere by then."""
        losses = [interpolate_loss(outcome.curve, seconds) for outcome in self.recipe(DATA_PARALLEL).results]
        known = [loss for loss in losses if loss is not None]
        return statistics.fmean(known) if len(known) == len(losses) else None

    def to_json(self) -> dict[str, Any]:
        return {"recipes": {series.name: self._figures(series) for series in self.recipes}}

    def _figures(self, recipe: RecipeResults) -> dict[str, Any]:
        return {
            "validation_loss": {"mean": recipe.loss, "std": recipe.loss_deviation},
            **{name: recipe.mean(name) for name in FIGURES},
            "data_parallel_loss_at_equal_time": self.data_parallel_loss_at(recipe.mean("virtual_seconds")),
        }


FIGURES = (
    "bits_per_parameter_step",
    "bits_per_parameter_sync",
    "virtual_seconds",
    "compute_share",
    "rounds",
    "tokens",
    "sent_bytes",
)


def compare(
    config: SimulationConfig, methods: Mapping[str, Method], corpus: Corpus, seeds: int, points: int, on_step: OnStep
) -> Comparison:
    """`points` of each curve; `counted` is called after every inner step of every peer."""
    settings = [_with_seed(config, seed) for seed in range(seeds)]
    examiner = Evaluator(config, corpus)
    series = [
        RecipeResults(name, tuple(run_simulation(one, method, corpus, examiner, points, on_step) for one in settings))
        for name, method in methods.items()
    ]
    together = tuple(train_data_parallel(one, corpus, examiner, max(points, MIN_CURVE_POINTS), on_step) for one in settings)
    alone = tuple(train_locally(one, corpus, examiner, on_step) for one in settings)
    return Comparison((*series, RecipeResults(DATA_PARALLEL, together), RecipeResults(LOCAL, alone)))


MIN_CURVE_POINTS = 10  # points that an answer about equal time needs at least


def run_simulation(
    config: SimulationConfig, method: Method, corpus: Corpus, evaluator: Evaluator, points: int, on_step: OnStep
) -> SimulationResult:
    """One run of one method under the manifest's seed."""
    started = time.process_time()
    recorder = CurveRecorder(evaluator, points)
    swarm = VirtualSwarm(config, method, corpus, recorder.on_new_head, on_step)
    swarm.run()
    return compute_result(swarm, recorder, time.process_time() - started)


def count_steps(config: SimulationConfig, recipes: int, seeds: int) -> int:
    """Gradients that a comparison computes, if nobody dies."""
    return (recipes + 2) * seeds * config.peers * config.steps


def _with_seed(config: SimulationConfig, seed: int) -> SimulationConfig:
    manifest = config.manifest
    run = manifest.run.model_copy(update={"seed": manifest.run.seed + seed})
    return replace(config, manifest=manifest.model_copy(update={"run": run}))


def logic_time_fraction(results: Sequence[SimulationResult]) -> float:
    """Of the processor's time, how much went into the round machines."""
    return sum(entry.logic_seconds for entry in results) / max(
        1e-9, sum(entry.processor_seconds for entry in results)
    )
