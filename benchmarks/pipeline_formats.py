"""The loss that smaller activations cost: formats and subspaces, against what travels between stages in fp32.

    OMP_NUM_THREADS=1 python -m benchmarks.pipeline_formats [--steps 150] [--seeds 3] [--rows NAME ...] [--json]

One process trains a model of four stages of one layer (width 128, bytes of Python's standard library): activations and
their gradients are encoded and decoded between stages as on their way between peers. No rounds, no routes: everything
but the format is equal in all rows, so are the tokens. Prints the validation loss in nats a byte, and its ratio to fp32
at full width with the same seeds.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.data import BatchReader, Corpus, open_corpus
from node.data.batches import validation_batches
from node.model import LanguageModel, all_cuts, build_model, initial_weights
from node.trainer.inner_step import InnerOptimizer, validation_loss
from node.trainer.stages.stage_pass import FORMATS, backward_stage, finish_microbatch, forward_stage
from node.trainer.stages.stage_work import stage_train
from optim.inner.adamw import AdamW
from protocol.manifest.model import ModelSection
from protocol.manifest.sections import Activations, DataSection, PipelineSection, TrainSection

STAGES = 4
WIRE: tuple[Activations, ...] = ("fp32", "bf16", "int8")
CONTEXT, BATCH_TOKENS, SEQUENCES = 128, 1024, 2  # tokens of a sequence and of a step; sequences of a microbatch
VALIDATION_TOKENS = 16_384


@dataclass(frozen=True)
class Row:
    """One setup: `width / part` values of a token travel, in the format `activations`."""

    activations: Activations = "fp32"
    part: int = 1
    embedding: float = 1.0  # factor of the initial embedding

    @property
    def name(self) -> str:
        """Return the words of the table."""
        words: list[str] = [self.activations]
        words += [f"subspace of width/{self.part}"] if self.part > 1 else []
        words += [f"initial embedding times {self.embedding:g}"] if self.embedding != 1 else []
        return ", ".join(words)

    def bytes_per_token(self, width: int) -> float:
        """Return the bytes of a token that a stage sends in each direction."""
        table = PipelineSection(stages=STAGES, microbatch=SEQUENCES, activations=self.activations)
        return table.activation_bytes(CONTEXT, width // self.part) / (SEQUENCES * CONTEXT)


ROWS: Mapping[str, Row] = {
    row.name: row
    for row in (
        Row("fp32"),
        Row("fp32", embedding=10.0),
        *(Row(activations) for activations in WIRE[1:]),
        *(Row(activations, part) for part in (8, 16) for activations in WIRE),
    )
}


def make_model(width: int, part: int) -> ModelSection:
    """Return a model with four layers."""
    hidden = 8 * round(width / 3)
    model = ModelSection(width=width, layers=STAGES, heads=4, hidden=hidden, context=CONTEXT, tied=False)
    return model if part == 1 else model.model_copy(update={"subspace": width // part})


class StagedTraining:
    """A model in four stages, which one process trains."""

    def __init__(self, row: Row, model: ModelSection, steps: int, seed: int, corpus: Corpus) -> None:
        self._wire = FORMATS[row.activations]
        self._stages: list[LanguageModel] = []
        for cut in all_cuts(STAGES):
            self._stages.append(build_model(model, cut=cut))
            self._stages[-1].load_flat(initial_weights(model, seed, cut))
        embedding, *_ = self._stages[0].shapes.views(self._stages[0].flat).values()
        embedding.mul_(row.embedding)
        train = TrainSection(batch_tokens=BATCH_TOKENS, learning_rate=3e-3, warmup_steps=10, decay_steps=steps)
        self._optimizers = [InnerOptimizer(stage, stage_train(train, STAGES), AdamW()) for stage in self._stages]
        self._reader = BatchReader(corpus, CONTEXT, seed, "owner")

    def step(self, number: int) -> None:
        """Make an inner step of all stages."""
        count = BATCH_TOKENS // (SEQUENCES * CONTEXT)
        for _ in range(count):
            self._pass(self._reader.next_batch(SEQUENCES), 1 / count)
        for optimizer in self._optimizers:
            optimizer.step(number)
            optimizer.clear_gradient()

    def _pass(self, windows: Tensor, weight: float) -> None:
        """Send a microbatch forward and back."""
        tokens, *inputs = windows[:, :-1], windows[:, :-1]
        for stage in self._stages[:-1]:
            inputs.append(self._wire.round_trip(forward_stage(stage, inputs[-1], tokens)))
        _, gradient = finish_microbatch(self._stages[-1], inputs[-1], windows[:, 1:], weight, tokens)
        for stage, given in zip(self._stages[-2::-1], inputs[-2::-1], strict=True):
            assert gradient is not None
            gradient = backward_stage(stage, given, self._wire.round_trip(gradient), tokens)

    @property
    def weights(self) -> Tensor:
        """Return the weights of the whole model."""
        return torch.cat([stage.flat for stage in self._stages])


def run_row(row: Row, width: int, steps: int, seed: int, corpus: Corpus) -> float:
    """Return the validation loss after training, in nats a byte."""
    model = make_model(width, row.part)
    training = StagedTraining(row, model, steps, seed, corpus)
    for number in range(steps):
        training.step(number)
    batches = validation_batches(corpus, CONTEXT, VALIDATION_TOKENS)
    return validation_loss(build_model(model), training.weights, batches)[0]


def summarise(losses: Mapping[str, list[float]], width: int) -> dict[str, Any]:
    """Return bytes, mean, deviation and ratio to the first row of each row."""
    base = next(iter(losses.values()))
    return {
        name: {
            "bytes_per_token": ROWS[name].bytes_per_token(width),
            "loss": statistics.fmean(found),
            "deviation": statistics.stdev(found) if len(found) > 1 else 0.0,
            "ratio": statistics.fmean(ours / theirs for ours, theirs in zip(found, base, strict=True)),
        }
        for name, found in losses.items()
    }


def markdown(report: Mapping[str, Any]) -> str:
    """Return the table of the report."""
    lines = ["| what travels | bytes a token | loss | compared with fp32 |", "|---|---:|---:|---:|"]
    for name, row in report.items():
        ratio = "" if row["ratio"] == 1 else f"{row['ratio'] - 1:+.1%}"
        lines.append(
            f"| {name} | {row['bytes_per_token']:.3g} | {row['loss']:.4f} +- {row['deviation']:.4f} | {ratio} |"
        )
    return "\n".join(lines)


def measure(names: Iterable[str], width: int, steps: int, seeds: int) -> dict[str, list[float]]:
    """Run all seeds of the rows of these names."""
    corpus = open_corpus(DataSection(source="python-stdlib"), Path())
    losses: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(seeds):
        for name, found in losses.items():
            found.append(run_row(ROWS[name], width, steps, seed, corpus))
            sys.stderr.write(f"{name}, seed {seed}: {found[-1]:.4f}\n")
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    torch.set_num_threads(1)
    report = summarise(measure(words.rows, words.width, words.steps, words.seeds), words.width)
    print(json.dumps(report, indent=1) if words.json else markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
