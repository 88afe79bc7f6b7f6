"""Measure the cost of random routes and deaths in `local` pipelines, compared with full replicas.

A model of 231,000 parameters (4 layers, width 64, bytes of the Python standard library) trains in virtual time, whole
or in 4 stages, on equally many tokens: 4 microbatches of 256 tokens a step and peer, AdamW, 2 peers at each stage,
averaging after every 15 steps. Rows with deaths have 4 peers at each stage, a quarter of which die in each round.

    OMP_NUM_THREADS=1 python benchmarks/pipeline_local.py [--steps 60] [--seeds 3] [--rows NAME ...] [--json]

Prints validation losses in nats a byte, their ratio to the row of full replicas with the same seeds, and what became of
the microbatches. Exit code 1 if random routes without deaths cost more than 1 %.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from node.data import Corpus, open_corpus
from node.simulation.comparison import run_simulation
from node.simulation.config import SimulationConfig
from node.simulation.measurement import Evaluator
from node.simulation.pipeline import run_pipeline
from node.simulation.virtual.network import BYTES_PER_MEGABIT
from optim.compose import compose
from optim.method import Method
from protocol.manifest.model import ModelSection
from protocol.manifest.run import Manifest
from protocol.manifest.sections import (
    DataSection,
    MembershipSection,
    MethodSection,
    PipelineSection,
    RoundSection,
    RunSection,
    TrainSection,
)

MODEL = ModelSection(width=64, layers=4, heads=4, hidden=172, context=128, tied=False)
STAGES = 4
BATCH_TOKENS = 1024
MAX_RATIO = 1.01
COUNTS = ("done", "replayed", "lost", "partly_counted")
REPLICAS, PIPELINE = "full replicas", "pipeline"


@dataclass(frozen=True)
class Row:
    """One setup; `clip` is the largest norm of the gradient of the whole model, `base` the row to compare with."""

    base: str = REPLICAS
    stages: int = STAGES
    peers: int = 2
    microbatch: int = 2
    recipe: str = "averaging"
    activations: str = "fp32"
    clip: float = 1.0
    churn: float = 0.0


FULL = Row(stages=1)
DEATHS = Row(base="full replicas, deaths", peers=4, churn=0.25)
ROWS: Mapping[str, Row] = {
    REPLICAS: FULL,
    "full replicas, clip 1/2": replace(FULL, clip=0.5),
    PIPELINE: Row(),
    "pipeline, bf16 on the way": Row(activations="bf16"),
    "pipeline, clip 1 at each stage": Row(clip=2.0),
    "full replicas, deaths": replace(DEATHS, stages=1),
    "pipeline, deaths": DEATHS,
    "full replicas, frugal": replace(FULL, recipe="frugal"),
    "pipeline, frugal": Row(base="full replicas, frugal", recipe="frugal"),
}


def make_config(row: Row, steps: int, seed: int) -> SimulationConfig:
    """Return the setting of one run."""
    pipeline = {"stages": row.stages, "microbatch": row.microbatch, "activations": row.activations}
    manifest = Manifest(
        run=RunSection(name="pipeline", seed=seed),
        model=MODEL,
        data=DataSection(source="python-stdlib"),
        train=TrainSection(
            batch_tokens=BATCH_TOKENS, learning_rate=3e-3, warmup_steps=10, decay_steps=steps, clip=row.clip
        ),
        method=MethodSection(recipe=row.recipe),
        round=RoundSection(grace=5.0, leader_timeout=3.0, exchange_timeout=60.0),
        membership=MembershipSection(),
        pipeline=PipelineSection.model_validate(pipeline),
    )
    links = (100 * BYTES_PER_MEGABIT,) * row.peers
    return SimulationConfig(manifest, Path(), row.peers, steps, (1.0,) * row.peers, links, 0.02, row.churn)


def make_method(row: Row) -> Method:
    """Return the recipe with rounds of 15 steps."""
    return compose(row.recipe, {"schedule": {"inner_steps": 15}})


def run_row(row: Row, steps: int, seed: int, corpus: Corpus) -> dict[str, Any]:
    """Return the figures of one run."""
    config = make_config(row, steps, seed)
    evaluator = Evaluator(config, corpus)
    if row.stages == 1:
        result = run_simulation(config, make_method(row), corpus, evaluator, 1, _ignore)
        return {"loss": result.validation_loss, "busy": result.compute_share, "seconds": result.virtual_seconds}
    pipelined = run_pipeline(config, make_method(row), corpus, evaluator, 1, _ignore)
    result = pipelined.result
    return {
        "loss": result.validation_loss,
        "busy": result.compute_share,
        "seconds": result.virtual_seconds,
        "round_spread": pipelined.round_spread,
        **asdict(pipelined.counts),
    }


def _ignore() -> None:
    """Take no notice of an inner step."""


def summarise(results: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return mean, deviation and ratio of the losses of each row, and its sums of microbatches."""
    report: dict[str, Any] = {}
    for name, runs in results.items():
        losses = [run["loss"] for run in runs]
        base = results.get(ROWS[name].base, [])
        ratios = [run["loss"] / other["loss"] for run, other in zip(runs, base, strict=False)]
        report[name] = {
            "loss": statistics.fmean(losses),
            "deviation": statistics.stdev(losses) if len(losses) > 1 else 0.0,
            "ratio": statistics.fmean(ratios) if ratios else None,
            "busy": statistics.fmean(run["busy"] for run in runs),
            **{key: sum(run[key] for run in runs) for key in COUNTS if key in runs[0]},
        }
    return report


def markdown(report: Mapping[str, Any]) -> str:
    """Return the table of the report."""
    count_words = (key.replace("_", " ") for key in COUNTS[1:])
    head = ("setup", "loss", "compared with full replicas", "busy", "microbatches", *count_words)
    lines = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for name, row in report.items():
        ratio = "" if row["ratio"] is None else f"{row['ratio'] - 1:+.1%}"
        counts = [str(row.get(key, "")) for key in COUNTS]
        cells = [name, f"{row['loss']:.4f} +- {row['deviation']:.4f}", ratio, f"{row['busy']:.0%}", *counts]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measure(names: Iterable[str], steps: int, seeds: int) -> dict[str, list[dict[str, Any]]]:
    """Run all seeds of the rows of these names."""
    corpus = open_corpus(DataSection(source="python-stdlib"), Path())
    results: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        for seed in range(seeds):
            results.setdefault(name, []).append(run_row(ROWS[name], steps, seed, corpus))
            sys.stderr.write(f"{name}, seed {seed}: {json.dumps(results[name][-1])}\n")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    torch.set_num_threads(1)
    report = summarise(measure(words.rows, words.steps, words.seeds))
    print(json.dumps(report, indent=1) if words.json else markdown(report))
    ratio = report.get(PIPELINE, {}).get("ratio")
    return 1 if ratio is not None and ratio > MAX_RATIO else 0


if __name__ == "__main__":
    sys.exit(main())
