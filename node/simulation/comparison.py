"""Recipes side by side: each over the same seeds, beside the two baselines."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from node.data import Corpus
from node.simulation.baselines import DATA_PARALLEL, LOCAL, data_parallel, local
from node.simulation.measure import Examiner, Outcome, Recorder, loss_at, outcome
from node.simulation.setting import Setting
from node.simulation.swarm import Swarm
from optim.method import Method

Counted = Callable[[], None]


@dataclass(frozen=True)
class Series:
    """One recipe's outcomes, by seed."""

    name: str
    outcomes: tuple[Outcome, ...]

    @property
    def loss(self) -> float:
        return statistics.fmean(outcome.validation_loss for outcome in self.outcomes)

    @property
    def loss_deviation(self) -> float:
        """Over the seeds, of the sample; 0 for a single one."""
        losses = [outcome.validation_loss for outcome in self.outcomes]
        return statistics.stdev(losses) if len(losses) > 1 else 0.0

    def mean(self, figure: str) -> float:
        return statistics.fmean(getattr(outcome, figure) for outcome in self.outcomes)


@dataclass(frozen=True)
class Comparison:
    """`series`: the recipes in the order asked for, then the baselines."""

    series: tuple[Series, ...]

    def of(self, name: str) -> Series:
        return next(series for series in self.series if series.name == name)

    def data_parallel_at(self, seconds: float) -> float | None:
        """Its mean loss by that virtual time, where every seed had got anywhere by then."""
        losses = [loss_at(outcome.curve, seconds) for outcome in self.of(DATA_PARALLEL).outcomes]
        known = [loss for loss in losses if loss is not None]
        return statistics.fmean(known) if len(known) == len(losses) else None

    def to_json(self) -> dict[str, Any]:
        return {"recipes": {series.name: self._figures(series) for series in self.series}}

    def _figures(self, series: Series) -> dict[str, Any]:
        return {
            "validation_loss": {"mean": series.loss, "std": series.loss_deviation},
            **{name: series.mean(name) for name in FIGURES},
            "data_parallel_loss_at_equal_time": self.data_parallel_at(series.mean("virtual_seconds")),
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
    setting: Setting, methods: Mapping[str, Method], corpus: Corpus, seeds: int, points: int, counted: Counted
) -> Comparison:
    """`points` of each curve; `counted` is called after every inner step of every peer."""
    settings = [_seeded(setting, seed) for seed in range(seeds)]
    examiner = Examiner(setting, corpus)
    series = [
        Series(name, tuple(simulate(one, method, corpus, examiner, points, counted) for one in settings))
        for name, method in methods.items()
    ]
    together = tuple(data_parallel(one, corpus, examiner, max(points, CURVE), counted) for one in settings)
    alone = tuple(local(one, corpus, examiner, counted) for one in settings)
    return Comparison((*series, Series(DATA_PARALLEL, together), Series(LOCAL, alone)))


CURVE = 10  # points that an answer about equal time needs at least


def simulate(
    setting: Setting, method: Method, corpus: Corpus, examiner: Examiner, points: int, counted: Counted
) -> Outcome:
    """One run of one method under the manifest's seed."""
    started = time.process_time()
    recorder = Recorder(examiner, points)
    swarm = Swarm(setting, method, corpus, recorder.reached, counted)
    swarm.run()
    return outcome(swarm, recorder, time.process_time() - started)


def steps_in_all(setting: Setting, recipes: int, seeds: int) -> int:
    """Gradients that a comparison computes, if nobody dies."""
    return (recipes + 2) * seeds * setting.peers * setting.steps


def _seeded(setting: Setting, seed: int) -> Setting:
    manifest = setting.manifest
    run = manifest.run.model_copy(update={"seed": manifest.run.seed + seed})
    return replace(setting, manifest=manifest.model_copy(update={"run": run}))


def logic_share(outcomes: Sequence[Outcome]) -> float:
    """Of the processor's time, how much went into the round machines."""
    return sum(entry.logic_seconds for entry in outcomes) / max(
        1e-9, sum(entry.processor_seconds for entry in outcomes)
    )
