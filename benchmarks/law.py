"""The gap to data parallel by size of the model, length of the run and bits: measured rows, and a law fitted to them.

    python benchmarks/law.py [--sizes 0.06M 0.2M 0.8M] [--steps 50 100 ...] [--methods ...] [--max-minutes M]
    python benchmarks/law.py --report          fit what is recorded, and write docs/results/law.md

Four virtual peers train the demo's model at another width on the standard library's text, 512 tokens each a step, from
scratch. `local` peers never exchange; its loss is the mean of two of them. The learning rate of a size is the best of
half, once and twice 3e-3 * 128 / width for data parallel after 100 steps, and every method trains with it; it falls
over the whole of each run. Methods with long periods send every 25 steps.

Each row is added to docs/results/law.json as soon as it is there, with its seconds, and is not made again. The order is
that of the value: lengths and sizes from small to large, and at each of them all methods. No row begins after
`--max-minutes`. Sizes of 3M and more want a card (`--device cuda`).

For each method, gap = A * parameters^a * steps^b * bits^c is fitted in logarithms; a power is left out where the rows
do not differ in it. The error is that of leaving each row out in turn, as a factor, beside the error with the gaps
shuffled among the rows. Outside the rows' range a law says nothing.
"""

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.comparison_tables import fill_tables
from benchmarks.recipes import LATENCY, MEGABITS, for_short_runs, machine
from benchmarks.revision import commit
from node.data import open_corpus
from node.model import shape_table
from node.run_dir import write_atomically
from node.simulation.comparison import DATA_PARALLEL, LOCAL, run_simulation, train_data_parallel, train_locally
from node.simulation.config import SimulationConfig
from node.simulation.measurement import Evaluator, SimulationResult
from node.simulation.virtual.network import BYTES_PER_MEGABIT
from optim.compose import compose
from optim.options import OptionValue
from optim.recipes import RECIPES
from protocol.manifest.reading import load_manifest

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "docs" / "results" / "law.json"
PAGE: Final = RESULTS.with_suffix(".md")
PEERS, BATCH, ALONE = 4, 512, 2
HEAD: Final = 32  # values of an attention head
HIDDEN: Final = 8 / 3  # of the width
USUAL_RATE, USUAL_WIDTH = 3e-3, 128
FACTORS: Final = (1.0, 2.0, 0.5)
SEARCH_STEPS: Final = 100
SHUFFLES: Final = 40
FROM_CHANCE: Final = 0.5  # a law's error in logarithms is at most so much of that of shuffled gaps
SIZES: Final = {
    "0.06M": (32, 4),
    "0.2M": (64, 4),
    "0.8M": (128, 4),
    "3M": (256, 4),
    "10M": (384, 6),
    "30M": (512, 10),
    "124M": (896, 13),
}  # width and layers
METHODS: Final = (DATA_PARALLEL, LOCAL, "streaming-diloco", "frugal")
VARIANTS: Final[Mapping[str, tuple[str, Mapping[str, Mapping[str, OptionValue]]]]] = {
    "frugal k16": ("frugal", {"codec": {"k": 16}}),
    "frugal k256": ("frugal", {"codec": {"k": 256}}),
}  # other bits of a method
Table = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run; `factor` is that of its learning rate."""

    size: str
    steps: int
    method: str
    seed: int = 0
    factor: float = 1.0

    @property
    def key(self) -> str:
        return f"{self.size} / {self.steps} / {self.method} / seed {self.seed} / rate x {self.factor:g}"


@dataclass(frozen=True)
class Point:
    """A gap to data parallel: the loss over data parallel's, less 1."""

    method: str
    parameters: int
    steps: int
    bits: float
    gap: float


@dataclass(frozen=True)
class Law:
    """gap = scale * parameters^size * steps^length * bits^spent; `error` and `chance` are factors of a gap."""

    method: str
    points: int
    scale: float
    size: float
    length: float
    spent: float
    error: float
    chance: float

    @property
    def holds(self) -> bool:
        return math.log(self.error) <= FROM_CHANCE * math.log(self.chance)


def setting_of(run: Run, device: str = "cpu") -> SimulationConfig:
    """Return the demo's run at another width, so many steps long."""
    given, (width, layers) = load_manifest(ROOT / "configs" / "demo.toml"), SIZES[run.size]
    shape = {"width": width, "layers": layers, "heads": width // HEAD, "hidden": round(width * HIDDEN / 8) * 8}
    rate = USUAL_RATE * USUAL_WIDTH / width * run.factor
    train = {
        "batch_tokens": BATCH,
        "microbatch": BATCH // given.model.context,
        "decay_steps": run.steps,
        "learning_rate": rate,
    }
    manifest = given.model_copy(
        update={
            "model": given.model.model_copy(update=shape),
            "train": given.train.model_copy(update=train),
            "run": given.run.model_copy(update={"seed": run.seed}),
        }
    )
    peers = ALONE if run.method == LOCAL else PEERS
    links = (MEGABITS * BYTES_PER_MEGABIT,) * peers
    return SimulationConfig(
        manifest, ROOT / "configs", peers, run.steps, (1.0,) * peers, links, LATENCY, compiled=True, device=device
    )


def measure(run: Run, device: str = "cpu") -> SimulationResult:
    """Train, and measure the loss at the end alone."""
    setting = setting_of(run, device)
    corpus = open_corpus(setting.manifest.data, setting.base)
    examiner = Evaluator(setting, corpus)
    if run.method == DATA_PARALLEL:
        return train_data_parallel(setting, corpus, examiner, 1, lambda: None)
    if run.method == LOCAL:
        return train_locally(setting, corpus, examiner, lambda: None)
    recipe, tables = VARIANTS.get(run.method, (run.method, {}))
    method = compose(recipe, {**for_short_runs(recipe), **tables})
    return run_simulation(setting, method, corpus, examiner, 1, lambda: None)


class Rows:
    """The recorded rows by key."""

    def __init__(self, path: Path = RESULTS) -> None:
        self._path = path
        self.runs: dict[str, Table] = json.loads(path.read_text())["runs"] if path.exists() else {}

    def add(self, run: Run, outcome: SimulationResult, seconds: float) -> None:
        """Record a row on disk."""
        self.runs[run.key] = {
            **asdict(run),
            "parameters": parameters_of(run.size),
            "loss": outcome.validation_loss,
            "bits": outcome.bits_per_parameter_step,
            "tokens": run.steps * PEERS * BATCH,
            "seconds": round(seconds, 1),
            "processor_seconds": round(outcome.processor_seconds, 1),
            "commit": commit(40),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
        }
        kept = {"command": "python benchmarks/law.py", "runs": self.runs}
        write_atomically(self._path, (json.dumps(kept, indent=1) + "\n").encode())

    def best_factor(self, size: str) -> float | None:
        """Return the factor of the least loss of data parallel, or `None` while one of them is missing."""
        losses = {factor: self.loss(Run(size, SEARCH_STEPS, DATA_PARALLEL, 0, factor)) for factor in FACTORS}
        known = {factor: loss for factor, loss in losses.items() if loss is not None}
        return min(known, key=known.__getitem__) if len(known) == len(FACTORS) else None

    def loss(self, run: Run) -> float | None:
        row = self.runs.get(run.key)
        return None if row is None else float(row["loss"])

    def points(self) -> list[Point]:
        """Return the gaps at the best rate of each size, means over seeds, where the row of data parallel is there."""
        found = dict[tuple[str, int, int], list[tuple[float, float]]]()
        for row in self.runs.values():
            base = Run(row["size"], row["steps"], DATA_PARALLEL, row["seed"], row["factor"])
            ideal = self.loss(base)
            if row["method"] != DATA_PARALLEL and ideal is not None and row["factor"] == self.best_factor(row["size"]):
                place = (row["method"], row["parameters"], row["steps"])
                found.setdefault(place, []).append((row["bits"], row["loss"] / ideal - 1))
        return [Point(*place, *map(statistics.fmean, zip(*each, strict=True))) for place, each in found.items()]


def parameters_of(size: str) -> int:
    return shape_table(setting_of(Run(size, 1, DATA_PARALLEL)).manifest.model).numel


def missing(words: argparse.Namespace, rows: Rows) -> Iterator[Run]:
    """Yield what is to be made: the search of a size before its first row, then the rows from short to long."""
    for steps, size in sorted(
        ((steps, size) for size in words.sizes for steps in words.steps),
        key=lambda one: one[0] * parameters_of(one[1]) ** 0.5,
    ):
        for factor in FACTORS:
            yield Run(size, SEARCH_STEPS, DATA_PARALLEL, 0, factor)
        best = rows.best_factor(size) or FACTORS[0]
        for seed in range(words.seeds):
            yield from (Run(size, steps, method, seed, best) for method in words.methods)


def perform(words: argparse.Namespace, rows: Rows) -> None:
    """Make the rows that are missing, one after the other, and begin none after `--max-minutes`."""
    ends = time.monotonic() + 60 * words.max_minutes
    for run in missing(words, rows):
        if run.key in rows.runs:
            continue
        if time.monotonic() > ends:
            sys.stderr.write(f"left for another hour: {run.key} and what follows\n")
            return
        began = time.monotonic()
        outcome = measure(run, words.device)
        rows.add(run, outcome, time.monotonic() - began)
        sys.stderr.write(f"{run.key}: {outcome.validation_loss:.4f}, {outcome.processor_seconds:.0f} s\n")


def fit(points: Sequence[Point]) -> Law | None:
    """Return the law of one method; `None` if the rows are too few to leave one out."""
    held = [point for point in points if point.gap > 0]
    features, gaps = logarithms(held)
    if len(held) < features.shape[1] + 2:
        return None
    powers = solve(features, gaps)
    order, chance = random.Random(0), list[float]()
    for _ in range(SHUFFLES):
        chance.append(error_left_out(features, gaps[order.sample(range(len(gaps)), len(gaps))]))
    scale, size, length, spent = (float(power) for power in powers)
    error = math.exp(error_left_out(features, gaps))
    chances = math.exp(statistics.median(chance))
    return Law(held[0].method, len(held), math.exp(scale), size, length, spent, error, chances)


def logarithms(points: Sequence[Point]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (points, 4): one, parameters, steps and bits, zeros where all are alike; and the gaps."""
    values = np.array([[one.parameters, one.steps, max(one.bits, 1e-9)] for one in points], float).reshape(-1, 3)
    logs = np.log(values)
    logs[:, np.ptp(logs, axis=0) < math.log(2) if len(points) else []] = 0.0
    features = np.column_stack([np.ones(len(points)), logs])
    return features, np.log(np.array([one.gap for one in points]))


def solve(features: NDArray[np.float64], gaps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least squares powers; that of a column of zeros is 0."""
    found = np.linalg.lstsq(features, gaps, rcond=None)[0]
    return np.where(features.any(axis=0), found, 0.0)


def error_left_out(features: NDArray[np.float64], gaps: NDArray[np.float64]) -> float:
    """Return the root mean square error of each row by the law of all others."""
    errors = []
    for out in range(len(gaps)):
        others = np.arange(len(gaps)) != out
        errors.append(float(features[out] @ solve(features[others], gaps[others]) - gaps[out]))
    return math.sqrt(statistics.fmean(error**2 for error in errors))


def fit_all(points: Sequence[Point]) -> list[Law]:
    """Return the laws of all methods; variants are rows of their method at other bits."""
    families = dict[str, list[Point]]()
    for point in points:
        family = VARIANTS.get(point.method, (point.method, {}))[0]
        families.setdefault(family, []).append(replace(point, method=family))
    return [law for name in sorted(families) if (law := fit(families[name])) is not None]


def crossing(points: Sequence[Point], method: str, parameters: int) -> tuple[int | None, int | None]:
    """Return the longest run in which a method is no better than `local`, and the next longer one; `None`: no such."""
    gaps = {(one.method, one.steps): one.gap for one in points if one.parameters == parameters}
    lengths = sorted(steps for name, steps in gaps if name == method and (LOCAL, steps) in gaps)
    worse = [steps for steps in lengths if gaps[method, steps] >= gaps[LOCAL, steps]]
    better = [steps for steps in lengths if not worse or steps > worse[-1]]
    return (worse[-1] if worse else None, better[0] if better else None)


def make_tables(points: Sequence[Point]) -> dict[str, str]:
    """Return the tables of docs/results/law.md by the name in the mark."""
    return {"gaps": gap_table(points), "laws": law_table(fit_all(points)), "crossings": crossing_table(points)}


def gap_table(points: Sequence[Point]) -> str:
    gaps = {(one.parameters, one.steps, one.method): one for one in points}
    methods = list(dict.fromkeys(one.method for one in points))
    places = sorted({(one.parameters, one.steps) for one in points})
    rows = (
        [f"{size / 1e6:.2f} M", f"{steps:,}", *(_percent(gaps.get((size, steps, name))) for name in methods)]
        for size, steps in places
    )
    return _table(["parameters", "steps", *methods], rows)


def law_table(laws: Sequence[Law]) -> str:
    head = ["method", "rows", "power of size", "of steps", "of bits", "error", "gaps shuffled", "holds"]
    rows = (
        [
            law.method,
            str(law.points),
            *(f"{power:+.2f}" if power else "-" for power in (law.size, law.length, law.spent)),
            f"x {law.error:.2f}",
            f"x {law.chance:.2f}",
            "yes" if law.holds else "no",
        ]
        for law in laws
    )
    return _table(head, rows)


def crossing_table(points: Sequence[Point]) -> str:
    sizes = sorted({one.parameters for one in points})
    names = [name for name in dict.fromkeys(one.method for one in points) if name != LOCAL]
    rows = (
        [
            f"{size / 1e6:.2f} M",
            name,
            *(f"{steps:,} steps" if steps else "none" for steps in crossing(points, name, size)),
        ]
        for size in sizes
        for name in names
        if crossing(points, name, size) != (None, None)
    )
    return _table(["parameters", "method", "not better than `local` at", "better from"], rows)


def _percent(point: Point | None) -> str:
    return "" if point is None else f"{point.gap:+.1%}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |\n" for cells in (head, *rows)]
    return "".join((lines[0], f"|{'---|' * len(head)}\n", *lines[1:]))


def main(arguments: Sequence[str]) -> int:
    words = _parser().parse_args(arguments)
    rows = Rows(words.results)
    torch.set_num_threads(words.threads)
    if not words.report:
        perform(words, rows)
    points = rows.points()
    if words.report:
        PAGE.write_text(fill_tables(PAGE.read_text(), make_tables(points)))
    if words.json:
        print(json.dumps({"points": [*map(asdict, points)], "laws": [*map(asdict, fit_all(points))]}, indent=1))
    else:
        print("\n".join(make_tables(points).values()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["0.06M", "0.2M", "0.8M"], choices=SIZES, metavar="SIZE")
    parser.add_argument("--steps", nargs="+", type=int, default=[50, 100, 200, 400])
    names = [*RECIPES, LOCAL, *VARIANTS]
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=names, metavar="METHOD")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-minutes", type=float, default=math.inf, help="begin no row after so many")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="run nothing, and write the page")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
