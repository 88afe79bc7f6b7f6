"""Every recipe side by side: validation loss, bits, virtual time, over seeds, from scratch and from a warm start.

Eight virtual peers train the demo's model (0.82 million parameters) on the standard library's text with the round
machine, senders and mergers of real peers, 500 inner steps of 1,024 tokens each: 4.1 million tokens in all. From a warm
start, the first half of the steps is data parallel training, common to all recipes of a seed, and the other half is
theirs. Every recipe's step is tuned on the same small grid (factors 0.5, 1 and 2 of its learning rate: the inner one,
or that of the update where nothing moves between the rounds) in a run of a fifth of the length, the baselines' too; a
gain of less than one per cent changes nothing, for a search of one seed tells no more. Short runs favour high rates:
where whole runs were made at several (`--factor`), those decide.

    python benchmarks/recipes.py [--only NAME ...] [--seeds 3] [--settings scratch warm] [--grid] [--factor F] ...

All of it takes some seven hours of two cores, and may be made in pieces: each run is added to
benchmarks/results/recipes.json as soon as it is done, with the commit and the machine it was made on, and what stands
there is not made again. Several of these commands may add to one file. `--minutes` begins no run after so many;
`--report` begins none: it prints tables of what is there, puts them and two plots into the documentation, writes the
losses by which `murmur recipes --for` advises, and says what is missing.
"""

import argparse
import fcntl
import io
import json
import math
import multiprocessing
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import comparison_tables
from benchmarks.comparison_tables import BASELINES
from benchmarks.revision import commit
from node.data import Corpus, open_corpus
from node.model import shape_table
from node.run_dir import write_atomically
from node.simulation.comparison import (
    DATA_PARALLEL,
    LOCAL,
    Comparison,
    RecipeResults,
    run_simulation,
    train_data_parallel,
    train_locally,
)
from node.simulation.config import SimulationConfig
from node.simulation.measurement import CurvePoint, Evaluator, SimulationResult
from node.simulation.virtual.network import BYTES_PER_MEGABIT
from optim.compose import compose
from optim.inner.adamw import AdamW
from optim.inner.muon import Muon
from optim.options import OptionValue
from optim.recipes import RECIPES
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest

HOME: Final = Path(__file__).parent
RESULTS: Final = HOME / "results" / "recipes.json"
ADVICE: Final = HOME.parent / "node" / "commands" / "recipe_losses.json"
PEERS, STEPS, BATCH = 8, 500, 1024
MEGABITS, LATENCY = 20, 0.05
POINTS = 10
PERIOD = 25
FACTORS: Final = (0.5, 1.0, 2.0)
WARM_STEPS = STEPS // 2
LENGTHS: Final = {"scratch": STEPS, "warm": STEPS - WARM_STEPS, "grid": STEPS // 5}  # the recipe's steps
Tables = Mapping[str, Mapping[str, OptionValue]]
AVERAGED: Final[Mapping[str, OptionValue]] = {
    "kind": "gpa",
    "mu_x": 0.974,
}  # a mean over 38 steps: the paper's 300 are most of a short run
TWO_BITS: Final[Tables] = {  # the paper's outer rates and residual for two bits
    "codec": {"kind": "lloyd-max"},
    "feedback": {"kind": "error", "decay": 0.9},
    "topology": {"kind": "gather"},
    "update": {"learning_rate": 0.8, "momentum": 0.9},
}
CLEARLY = 0.99  # of the loss: less may be chance, or the shorter run's


@dataclass(frozen=True)
class Row:
    """A recipe as it is compared. `tables`: what differs from its defaults, for so short a run."""

    name: str
    recipe: str
    tables: Tables


def _row(name: str, recipe: str = "", **tables: Mapping[str, OptionValue]) -> Row:
    return Row(name, recipe or name, tables)


def rows(steps: int = STEPS) -> list[Row]:
    """The baselines, each recipe, variations that spend at most a thousandth of data parallel's bits, and what of their
    gap is left where messages are as frequent and whole: a hundred times the bits. `steps`: of the run."""
    recipes = [Row(name, name, for_short_runs(name)) for name in RECIPES if name not in BASELINES]
    whole = _row("averaging 5", "averaging", schedule={"inner_steps": 5})
    averaged = Row("averaging gpa", "averaging", {**for_short_runs("averaging"), "inner": AVERAGED})
    two_bits = Row("muloco 2 bits", "muloco", {**for_short_runs("muloco"), **TWO_BITS})
    return [
        _row(DATA_PARALLEL),
        _row(LOCAL),
        *recipes,
        *thousandth(steps),
        whole,
        *with_muon(steps),
        averaged,
        two_bits,
    ]


def for_short_runs(name: str) -> Tables:
    """Papers' periods are for runs of tens of thousands of steps: here all that are longer become PERIOD steps."""
    schedule = compose(name).schedule
    if schedule.inner_steps <= PERIOD or name.endswith("-warm"):
        return {}
    ahead = {"ahead": PERIOD} if schedule.ahead > PERIOD else {}
    delay = {"delay": PERIOD} if schedule.delay > PERIOD else {}
    return {"schedule": {"inner_steps": PERIOD, **ahead, **delay}}


def thousandth(steps: int = STEPS) -> list[Row]:
    """At most 0.016 bits a parameter and step.

    `frugal 1`: a message in each step, first of few values and in the end of eight times as many, and a residual that
    is kept the longer the less the weights move.
    """
    growing: OptionValue = {"start": 6, "end": 47, "rounds": steps, "curve": "exponential"}
    memory: OptionValue = {"start": 0.965, "end": 0.9965, "rounds": steps}
    codec = {"k": growing, "chunk": 16_384}
    often = {"inner_steps": 5, "ahead": 5}
    return [
        _row("frugal 1", "frugal", schedule={"inner_steps": 1, "ahead": 1}, codec=codec, feedback={"decay": memory}),
        _row("frugal 5", "frugal", schedule=often, codec={"k": 33}, feedback={"decay": 0.9}),
        _row("sparse 10", "sparseloco", schedule={"inner_steps": 10}),
        _row("senders 10", "sparseloco-senders", schedule={"inner_steps": 10}),
    ]


def with_muon(steps: int) -> list[Row]:
    """Muon as the inner optimizer, everything else as in the row of the recipe's name; the baseline is the control."""
    names = ("averaging", "diloco", "sparseloco", "frugal")
    rows = [Row(name, name, for_short_runs(name)) for name in names] + thousandth(steps)[:2]
    rows += [_row(DATA_PARALLEL)]
    return [Row(f"{row.name} muon", row.recipe, {**row.tables, "inner": {"kind": "muon"}}) for row in rows]


@dataclass(frozen=True)
class Job:
    row: Row
    setting: str  # of LENGTHS
    seed: int
    factor: float

    @property
    def key(self) -> str:
        return f"{self.setting} / {self.row.name} / seed {self.seed} / step x {self.factor:g}"


def setting_of(job: Job) -> SimulationConfig:
    """Two settings differ in the weights that training starts from, and in the steps from there."""
    given = load_manifest(HOME.parent / "configs" / "demo.toml")
    steps = LENGTHS[job.setting]
    moved = job.factor if inner_moves(job.row) else 1.0
    train = given.train.model_copy(
        update={
            "batch_tokens": BATCH,
            "microbatch": 8,
            "decay_steps": steps,
            "learning_rate": given.train.learning_rate * moved,
        }
    )
    run = given.run.model_copy(update={"seed": job.seed})
    manifest = given.model_copy(update={"train": train, "run": run})
    weights = warm_weights(manifest) if job.setting == "warm" else None
    speeds, bandwidths = (1.0,) * PEERS, (MEGABITS * BYTES_PER_MEGABIT,) * PEERS
    return SimulationConfig(manifest, HOME, PEERS, steps, speeds, bandwidths, LATENCY, initial=weights, compiled=True)


def inner_moves(row: Row) -> bool:
    return row.recipe in BASELINES or compose(row.recipe, row.tables).inner.kind != "gathering"


def warm_weights(manifest: Manifest) -> torch.Tensor:
    """After so many steps of data parallel training from the seed's own weights; made once."""
    kept = RESULTS.parent / f".warm-{manifest.run.seed}.pt"
    if not kept.exists():
        calm = manifest.train.model_copy(update={"decay_steps": 0})
        start = manifest.model_copy(update={"train": calm})
        links = (MEGABITS * BYTES_PER_MEGABIT,) * PEERS
        setting = SimulationConfig(start, HOME, PEERS, WARM_STEPS, (1.0,) * PEERS, links, LATENCY, compiled=True)
        corpus = corpus_of(start)
        kept.parent.mkdir(exist_ok=True)
        last = Keeping(setting, corpus)
        train_data_parallel(setting, corpus, last, 1, lambda: None)
        raw = io.BytesIO()
        torch.save(last.weights, raw)
        write_atomically(kept, raw.getvalue())  # another process may have made the same meanwhile
    loaded: torch.Tensor = torch.load(kept, weights_only=True)
    return loaded


class Keeping(Evaluator):
    """Keeps what it measured last."""

    weights: torch.Tensor

    def loss(self, flat: torch.Tensor) -> float:
        self.weights = flat.clone()
        return super().loss(flat)


def corpus_of(manifest: Manifest) -> Corpus:
    return open_corpus(manifest.data, HOME)


def run(job: Job) -> SimulationResult:
    return outcome_of(job, setting_of(job))


def outcome_of(job: Job, setting: SimulationConfig) -> SimulationResult:
    """In a process of its own, on one thread."""
    torch.set_num_threads(1)
    corpus = corpus_of(setting.manifest)
    examiner = Evaluator(setting, corpus)
    if job.row.recipe == DATA_PARALLEL:
        inner = Muon() if job.row.tables else AdamW()
        return train_data_parallel(setting, corpus, examiner, POINTS, lambda: None, inner)
    if job.row.name == LOCAL:
        return train_locally(setting, corpus, examiner, lambda: None)
    return run_simulation(setting, compose(job.row.recipe, tables_of(job)), corpus, examiner, POINTS, lambda: None)


def tables_of(job: Job) -> Tables:
    """The row's, with the update's step at the grid's factor where no inner optimizer moves."""
    row = job.row
    if inner_moves(row):
        return row.tables
    update = compose(row.recipe, row.tables).update
    rate = getattr(update, "learning_rate", None)
    if rate is None:
        return row.tables
    return {**row.tables, "update": {**row.tables.get("update", {}), "learning_rate": rate * job.factor}}


class Ledger:
    """The results' file: all runs by key, each with where it was made. Other processes may add to it too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.runs = self._read()

    def add(self, job: Job, outcome: SimulationResult) -> None:
        run = {
            "setting": job.setting,
            "name": job.row.name,
            "recipe": job.row.recipe,
            "tables": job.row.tables,
            "seed": job.seed,
            "factor": job.factor,
            "commit": commit(40),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "outcome": asdict(outcome),
        }
        with self._alone():
            self.runs = {**self._read(), job.key: run}
            kept = {"command": "python benchmarks/recipes.py", "runs": self.runs}
            write_atomically(self._path, json.dumps(kept, indent=1).encode())

    def _read(self) -> dict[str, dict[str, Any]]:
        runs: dict[str, dict[str, Any]] = json.loads(self._path.read_text())["runs"] if self._path.exists() else {}
        return runs

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._path.parent.mkdir(exist_ok=True)
        with self._path.with_name(f".{self._path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def best_factor(self, name: str) -> float:
        """Of whole runs from scratch, where several were made; else of the grid, where it is clearly better than 1;
        otherwise 1."""
        whole, tried = (self.losses(name, setting) for setting in ("scratch", "grid"))
        if len(whole) > 1:
            return min(whole, key=whole.__getitem__)
        best = min(tried, key=tried.__getitem__, default=1.0)
        return best if tried.get(best, math.inf) < CLEARLY * tried.get(1.0, math.inf) else 1.0

    def losses(self, name: str, setting: str) -> dict[float, float]:
        """Return the losses of the first seed by factor."""
        found = [run for run in self.runs.values() if (run["name"], run["setting"], run["seed"]) == (name, setting, 0)]
        return {float(run["factor"]): float(run["outcome"]["validation_loss"]) for run in found}

    def comparison(self, setting: str, names: Sequence[str]) -> Comparison:
        """Those that were run there."""
        series = []
        for name in names:
            found = [run for run in self.runs.values() if run["setting"] == setting and run["name"] == name]
            factor = self.best_factor(name)
            outcomes = tuple(_outcome(run["outcome"]) for run in found if run["factor"] == factor)
            if outcomes:
                series.append(RecipeResults(name, outcomes))
        return Comparison(tuple(series))


def losses_for_advice(ledger: Ledger) -> dict[str, Any]:
    """Return the losses by which `murmur recipes --for` advises, over data parallel's, less 1."""
    whole = {results.name: results.loss for results in ledger.comparison("scratch", [LOCAL, *RECIPES]).recipes}
    base, first = whole[DATA_PARALLEL], min(ledger.losses(DATA_PARALLEL, "grid").values())

    def early(name: str) -> float | None:
        found = ledger.losses(name, "grid")
        return round(min(found.values()) / first - 1, 4) if found else None

    return {
        "parameters": shape_table(load_manifest(HOME.parent / "configs" / "demo.toml").model).numel,
        "steps": STEPS,
        "early_steps": LENGTHS["grid"],
        "tokens": PEERS * STEPS * BATCH,
        "losses": {name: {"early": early(name), "end": round(whole[name] / base - 1, 4)} for name in sorted(whole)},
    }


def _outcome(values: dict[str, Any]) -> SimulationResult:
    return SimulationResult(**{**values, "curve": tuple(CurvePoint(**point) for point in values["curve"])})


def machine() -> str:
    return f"{platform.machine()}, {multiprocessing.cpu_count()} cores, torch {torch.__version__}"


def perform(jobs: Sequence[Job], ledger: Ledger, workers: int, minutes: float = math.inf) -> None:
    """Those that are missing, a few at a time; each is on disk once it is done. None begins after `minutes`."""
    missing = [job for job in jobs if job.key not in ledger.runs]
    end, waiting, running = time.monotonic() + 60 * minutes, iter(missing), dict[Future[SimulationResult], Job]()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        while True:
            while len(running) < workers and time.monotonic() < end and (job := next(waiting, None)):
                running[pool.submit(run, job)] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, outcome = running.pop(future), future.result()
                ledger.add(job, outcome)
                left = sum(job.key not in ledger.runs for job in missing)
                figures = f"{outcome.validation_loss:.4f} at {outcome.bits_per_parameter_step:.4g} bits"
                sys.stderr.write(f"{job.key}: {figures}, {outcome.processor_seconds:.0f} s; {left} to go\n")


def jobs_of(words: argparse.Namespace, ledger: Ledger) -> list[Job]:
    if words.grid:
        return [Job(row, "grid", 0, factor) for row in chosen("grid", words.only) for factor in FACTORS]
    return [
        Job(row, setting, seed, words.factor or ledger.best_factor(row.name))
        for setting in words.settings
        for seed in range(words.seeds)
        for row in chosen(setting, words.only)
    ]


def chosen(setting: str, names: Sequence[str]) -> list[Row]:
    """In the order of `names`, or all."""
    every = {row.name: row for row in rows(LENGTHS[setting])}
    return [every[name] for name in names or every]


def main(arguments: Sequence[str]) -> int:
    words = _parser().parse_args(arguments)
    names = [row.name for row in rows()]
    ledger = Ledger(words.results)
    jobs = jobs_of(words, ledger)
    if not words.report:
        perform(jobs, ledger, words.workers, words.minutes)
    found = {setting: ledger.comparison(setting, names) for setting in words.settings}
    settings = {setting: comparison for setting, comparison in found.items() if comparison.recipes}
    if words.json:
        sys.stdout.write(json.dumps(found[words.settings[0]].to_json(), indent=1) + "\n")
    else:
        sys.stdout.write(
            "".join(f"\n### {name}\n\n{comparison_tables.make_table(one)}" for name, one in settings.items())
        )
    if words.report:
        comparison_tables.publish(settings)
        ADVICE.write_text(json.dumps(losses_for_advice(ledger), indent=1) + "\n")
    there = sum(job.key in ledger.runs for job in jobs)
    sys.stderr.write(f"{there} of {len(jobs)} runs are there\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], choices=[row.name for row in rows()], metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", nargs="*", default=["scratch", "warm"], choices=["scratch", "warm"])
    parser.add_argument("--grid", action="store_true", help="search each recipe's step instead")
    parser.add_argument("--factor", type=float, choices=FACTORS, help="of the step; default: what was found best")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
