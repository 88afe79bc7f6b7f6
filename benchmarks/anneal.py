"""Learning-rate schedules and final anneals side by side: validation loss after a run from trained weights.

    python benchmarks/anneal.py [--recipes diloco frugal] [--seeds 3] [--only NAME ...] [--warm-steps 1200] [--json]

Four virtual peers train a small model for 160 inner steps of 256 tokens each, from weights that have had 1,200 steps of
1,024 tokens at the peak rate: only there does a schedule's end matter, because in a short run from scratch the highest
rate wins whatever follows. `outer`: the outer optimizer turns into plain averaging, or loses most of its momentum,
where the anneal begins. "mean of k": the mean of the last k anchors, as an export could have it.

Takes 10 seconds of one core a row and seed, and two minutes for the trained weights.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from node.data import Corpus, open_corpus
from node.simulation.comparison import run_simulation, train_data_parallel
from node.simulation.config import SimulationConfig, default_manifest
from node.simulation.measurement import Evaluator
from optim.compose import compose
from optim.options import OptionValue

PEERS, STEPS, BATCH, INNER_STEPS = 4, 160, 256, 10
WARM_BATCH, WARM_STEPS = 1024, 1200
SHARE = 0.3  # of the run, in which the rate falls
FEW_ROUNDS = 11  # of 16, before the outer optimizer changes
MEANS = (2, 4, 8)
Tables = Mapping[str, Mapping[str, OptionValue]]


def after(first: float, then: float) -> OptionValue:
    return [{"value": first, "rounds": FEW_ROUNDS}, then]


@dataclass(frozen=True)
class Row:
    """A schedule: keys of [train], the share of the final anneal, and options of the method."""

    train: Mapping[str, str | float]
    share: float = 0.0
    tables: Tables | None = None


CONSTANT: Final[Mapping[str, str | float]] = {"decay_steps": 0}
WSD: Final[Mapping[str, str | float]] = {"schedule": "wsd", "decay_share": SHARE, "final_share": 0.1}
ROWS: Final[Mapping[str, Row]] = {
    "constant": Row(CONSTANT),
    "cosine": Row({"schedule": "cosine", "final_share": 0.1}),
    "wsd": Row(WSD),
    "wsd + anneal": Row(CONSTANT, SHARE),
    "cosine + anneal": Row({"schedule": "cosine", "final_share": 0.1}, SHARE),
    "wsd + anneal, outer 1/0": Row(
        CONSTANT, SHARE, {"update": {"learning_rate": after(0.7, 1.0), "momentum": after(0.9, 0.0)}}
    ),
    "wsd + anneal, outer 0.7/0.6": Row(CONSTANT, SHARE, {"update": {"momentum": after(0.9, 0.6)}}),
}


class Anchors(Evaluator):
    """Keeps the anchors of a run, and measures the last one and means of the last ones afterwards."""

    def __init__(self, config: SimulationConfig, corpus: Corpus) -> None:
        super().__init__(config, corpus)
        self.seen: list[Tensor] = []

    def loss(self, flat: Tensor) -> float:
        self.seen.append(flat.clone())
        return 0.0

    def losses(self) -> dict[str, float]:
        found = {"last": super().loss(self.seen[-1])}
        for count in MEANS:
            found[f"mean of {count}"] = super().loss(torch.stack(self.seen[-count:]).mean(0))
        return found


def config_of(row: Row, seed: int, weights: Tensor | None, steps: int, peers: int) -> SimulationConfig:
    given = default_manifest(steps)
    batch = BATCH if weights is not None else WARM_BATCH
    train = given.train.model_copy(update={"batch_tokens": batch, "warmup_steps": 10, **row.train})
    anneal = given.anneal.model_copy(update={"share": row.share})
    run = given.run.model_copy(update={"seed": seed})
    manifest = given.model_copy(update={"train": train, "anneal": anneal, "run": run})
    links = (2.5e6,) * peers
    return SimulationConfig(manifest, Path(), peers, steps, (1.0,) * peers, links, 0.05, initial=weights)


def warm_weights(corpus: Corpus, steps: int) -> Tensor:
    """Train at the peak rate."""
    config = config_of(ROWS["constant"], 0, None, steps, 1)
    anchors = Anchors(config, corpus)
    train_data_parallel(config, corpus, anchors, 1, lambda: None)
    return anchors.seen[-1]


def measure(recipe: str, name: str, seed: int, weights: Tensor, corpus: Corpus) -> dict[str, float]:
    row, schedule = ROWS[name], {} if recipe == "frugal" else {"schedule": {"inner_steps": INNER_STEPS}}
    config = config_of(row, seed, weights, STEPS, PEERS)
    anchors = Anchors(config, corpus)
    method = compose(recipe, {**schedule, **(row.tables or {})})
    run_simulation(config, method, corpus, anchors, STEPS, lambda: None)
    return anchors.losses()


def fits(recipe: str, row: Row) -> bool:
    return recipe == "diloco" or row.tables is None


def table(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    columns = ("last", *(f"mean of {count}" for count in MEANS))
    lines = ["| recipe, schedule | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, seeds in found.items():
        cells = [_mean([losses[column] for losses in seeds]) for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _mean(values: Sequence[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.4f} ± {spread:.4f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=["diloco", "frugal"])
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--warm-steps", type=int, default=WARM_STEPS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = open_corpus(default_manifest(STEPS).data, Path())
    weights = warm_weights(corpus, options.warm_steps)
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        for recipe in options.recipes:
            for name in options.only:
                if fits(recipe, ROWS[name]):
                    losses = measure(recipe, name, seed, weights, corpus)
                    found.setdefault(f"{recipe}, {name}", []).append(losses)
                    print(f"  {recipe}, {name}, seed {seed}: {losses}", file=sys.stderr, flush=True)
    print(json.dumps(found) if options.json else "\n".join(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
