"""Compare recipes over the same seeds with two baselines.

The baselines train on equally many tokens, with the same inner optimizer and the same data per peer:

data-parallel   ring all-reduce of fp32 gradients in each step:
                step = 1 / slowest speed + 2 (P - 1) / P * 4 n / narrowest link + 2 (P - 1) * latency
local           every peer trains alone without any exchange; the loss is the mean over the peers

If the manifest has a pipeline, each recipe is also simulated with its stages, with as many peers at each stage as the
other rows have in all, so that all rows train on equally many tokens.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from node.data import BatchReader, Corpus
from node.simulation.config import SimulationConfig
from node.simulation.measurement import (
    CurvePoint,
    CurveRecorder,
    Evaluator,
    SimulationResult,
    compute_result,
    interpolate_loss,
)
from node.simulation.pipeline import PipelineCounts, PipelineResult, run_pipeline
from node.simulation.swarm import VirtualSwarm, simulated_peer_id
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient
from optim.inner.adamw import AdamW
from optim.inner.base import InnerUpdateRule
from optim.method import Method

FLOAT_BYTES = 4
USUAL_INNER: Final = AdamW()
DATA_PARALLEL = "data-parallel"
LOCAL = "local"


class _SharedModel:
    """One model that is trained on the data of several peers together."""

    def __init__(
        self, config: SimulationConfig, corpus: Corpus, slots: Sequence[int], inner: InnerUpdateRule = USUAL_INNER
    ) -> None:
        manifest = config.manifest
        self.model = config.build_model()
        self._train = manifest.train
        self.model.load_flat(config.start_weights())
        self._optimizer = InnerOptimizer(self.model, manifest.train, inner)
        context, seed = manifest.model.context, manifest.run.seed
        self._sequences = manifest.train.batch_tokens // context
        self._readers = [BatchReader(corpus, context, seed, simulated_peer_id(slot)) for slot in slots]

    def step(self, step: int, on_step: Callable[[], None]) -> None:
        for reader in self._readers:
            accumulate_gradient(self.model, reader.next_batch(self._sequences), self._train.microbatch)
            on_step()
        gradient = self.model.flat_gradient
        assert gradient is not None
        gradient /= len(self._readers)
        self._optimizer.step(step)
        self._optimizer.clear_gradient()


def train_data_parallel(
    config: SimulationConfig, corpus: Corpus, evaluator: Evaluator, points: int, on_step: Callable[[], None],
    inner: InnerUpdateRule = USUAL_INNER,
) -> SimulationResult:  # fmt: skip
    """Train the data-parallel baseline with an inner optimizer on the mean gradient."""
    started = time.process_time()
    group = _SharedModel(config, corpus, range(config.peers), inner)
    numel = group.model.flat.numel()
    sent = all_reduce_bytes(numel, config.peers)
    seconds = all_reduce_step_seconds(config, numel)
    recorder = CurveRecorder(evaluator, points)
    for step in range(config.steps):
        group.step(step, on_step)
        if recorder.is_due((step + 1) / config.steps):
            tokens = config.target_tokens * (step + 1) // config.steps
            recorder.record(tokens, seconds * (step + 1), sent * (step + 1), lambda: group.model.flat)
    return SimulationResult(
        validation_loss=recorder.curve[-1].loss,
        bits_per_parameter_step=8.0 * FLOAT_BYTES,
        bits_per_parameter_sync=8.0 * FLOAT_BYTES,
        virtual_seconds=seconds * config.steps,
        compute_share=statistics.fmean(1 / speed / seconds for speed in config.speeds),
        rounds=config.steps,
        tokens=config.target_tokens,
        sent_bytes=sent * config.steps,
        curve=tuple(recorder.curve),
        processor_seconds=time.process_time() - started,
    )


def train_locally(
    config: SimulationConfig, corpus: Corpus, evaluator: Evaluator, on_step: Callable[[], None]
) -> SimulationResult:
    """Train the baseline without exchange."""
    started = time.process_time()
    losses = []
    for slot in range(config.peers):
        group = _SharedModel(config, corpus, [slot])
        for step in range(config.steps):
            group.step(step, on_step)
        losses.append(evaluator.loss(group.model.flat))
    loss, seconds = statistics.fmean(losses), config.steps / min(config.speeds)
    return SimulationResult(
        validation_loss=loss,
        bits_per_parameter_step=0.0,
        bits_per_parameter_sync=0.0,
        virtual_seconds=seconds,
        compute_share=statistics.fmean(min(config.speeds) / speed for speed in config.speeds),
        rounds=0,
        tokens=config.target_tokens,
        sent_bytes=0.0,
        curve=(CurvePoint(config.target_tokens, seconds, 0.0, loss),),
        processor_seconds=time.process_time() - started,
    )


def all_reduce_bytes(numel: int, peers: int) -> float:
    """Return the bytes that each peer sends in one all-reduce."""
    return 2 * (peers - 1) / peers * FLOAT_BYTES * numel


def all_reduce_step_seconds(config: SimulationConfig, numel: int) -> float:
    """Return the virtual seconds of one step of the slowest peer and its all-reduce."""
    transfer = all_reduce_bytes(numel, config.peers) / min(config.bandwidths)
    return 1 / min(config.speeds) + transfer + 2 * (config.peers - 1) * config.latency


OnStep = Callable[[], None]


@dataclass(frozen=True)
class RecipeResults:
    """The results of one recipe, one per seed."""

    name: str
    results: tuple[SimulationResult, ...]

    @property
    def loss(self) -> float:
        return statistics.fmean(result.validation_loss for result in self.results)

    @property
    def loss_deviation(self) -> float:
        """Return the sample standard deviation over the seeds; 0 for a single seed."""
        losses = [result.validation_loss for result in self.results]
        return statistics.stdev(losses) if len(losses) > 1 else 0.0

    def mean(self, figure: str) -> float:
        """Return the mean over the seeds of a field of SimulationResult."""
        return statistics.fmean(getattr(result, figure) for result in self.results)


@dataclass(frozen=True)
class PipelineResults:
    """The pipelined runs of one recipe, one per seed."""

    recipe: str
    stages: int
    runs: tuple[PipelineResult, ...]

    @property
    def row(self) -> RecipeResults:
        """Return the results as a row of the comparison."""
        return RecipeResults(f"{self.recipe}, {self.stages} stages", tuple(run.result for run in self.runs))

    @property
    def counts(self) -> PipelineCounts:
        """Return the microbatches of all seeds."""
        return sum((run.counts for run in self.runs), PipelineCounts())

    @property
    def round_spread(self) -> int:
        """Return the largest distance of two stages in rounds."""
        return max(run.round_spread for run in self.runs)


@dataclass(frozen=True)
class Comparison:
    """The results of all recipes, in the order of the command line and followed by the baselines."""

    recipes: tuple[RecipeResults, ...]
    pipelines: tuple[PipelineResults, ...] = ()

    def loss_ratio(self, pipeline: PipelineResults) -> float:
        """Return the loss of a pipeline over that of full replicas at equal tokens."""
        return pipeline.row.loss / self.recipe(pipeline.recipe).loss

    def recipe(self, name: str) -> RecipeResults:
        """Return the results of the recipe called `name`."""
        return next(recipe for recipe in self.recipes if recipe.name == name)

    def data_parallel_loss_at(self, seconds: float) -> float | None:
        """Return the baseline's mean loss at a virtual time; `None` if a seed has no curve point by then."""
        losses = [interpolate_loss(result.curve, seconds) for result in self.recipe(DATA_PARALLEL).results]
        known = [loss for loss in losses if loss is not None]
        return statistics.fmean(known) if len(known) == len(losses) else None

    def to_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        return {
            "recipes": {recipe.name: self._figures(recipe) for recipe in self.recipes},
            "pipelines": {
                pipeline.row.name: {
                    "loss_ratio": self.loss_ratio(pipeline),
                    "microbatches": asdict(pipeline.counts),
                    "round_spread": pipeline.round_spread,
                }
                for pipeline in self.pipelines
            },
        }

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
    """Simulate all methods and the baselines.

    Args:
        config: the setting of every run, apart from its seed.
        methods: the methods by name.
        corpus: the text.
        seeds: number of runs of each method.
        points: number of points of each curve.
        on_step: called after every inner step of every peer.
    """
    configs = [_with_seed(config, seed) for seed in range(seeds)]
    evaluator = Evaluator(config, corpus)
    recipes = [
        RecipeResults(name, tuple(run_simulation(one, method, corpus, evaluator, points, on_step) for one in configs))
        for name, method in methods.items()
    ]
    pipelines = tuple(
        PipelineResults(
            name,
            config.manifest.pipeline.stages,
            tuple(run_pipeline(one, method, corpus, evaluator, points, on_step) for one in configs),
        )
        for name, method in methods.items()
        if config.manifest.pipeline.is_cut
    )
    data_parallel = tuple(
        train_data_parallel(one, corpus, evaluator, max(points, MIN_CURVE_POINTS), on_step) for one in configs
    )
    local = tuple(train_locally(one, corpus, evaluator, on_step) for one in configs)
    baselines = (RecipeResults(DATA_PARALLEL, data_parallel), RecipeResults(LOCAL, local))
    return Comparison((*recipes, *(pipeline.row for pipeline in pipelines), *baselines), pipelines)


MIN_CURVE_POINTS = 10  # minimum for a comparison at equal time


def run_simulation(
    config: SimulationConfig, method: Method, corpus: Corpus, evaluator: Evaluator, points: int, on_step: OnStep
) -> SimulationResult:
    """Simulate one run of one method with the manifest's seed."""
    started = time.process_time()
    recorder = CurveRecorder(evaluator, points)
    swarm = VirtualSwarm(config, method, corpus, recorder.on_new_head, on_step)
    swarm.run()
    return compute_result(swarm, recorder, time.process_time() - started)


def count_steps(config: SimulationConfig, recipes: int, seeds: int) -> int:
    """Return the number of inner steps of a comparison if no peer dies; those of a stage count as such."""
    pipeline = config.manifest.pipeline
    stages = pipeline.stages if pipeline.is_cut else 0
    return (recipes * (1 + stages) + 2) * seeds * config.peers * config.steps


def _with_seed(config: SimulationConfig, seed: int) -> SimulationConfig:
    manifest = config.manifest
    run = manifest.run.model_copy(update={"seed": manifest.run.seed + seed})
    return replace(config, manifest=manifest.model_copy(update={"run": run}))


def logic_time_fraction(results: Sequence[SimulationResult]) -> float:
    """Return the fraction of the CPU time that the round machines took."""
    return sum(entry.logic_seconds for entry in results) / max(1e-9, sum(entry.processor_seconds for entry in results))
