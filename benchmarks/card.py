"""What the product does on a card: a queue of runs that any hour with a card extends.

    python -m benchmarks.card [--budget-minutes 60] [--side 8] [--only NAME ...]
    python -m benchmarks.card --list          what is in the queue, and what is recorded
    python -m benchmarks.card --cpu           all runs of correctness, tiny, on a CPU: tests the queue itself
    python -m benchmarks.card --roof          the least seconds of a step on known cards

First the runs that say whether each option is right (`benchmarks/card_runs.py`), side by side, because they are small;
then, one at a time, the rows of docs/results/device.json, and swarms of one large peer beside the bare step. The order
is that of their value, so that a short hour answers the first questions. Each result is added to docs/results/card.json
as soon as it is there, with command, device, commit and date, and the tables of docs/results/devices.md are made anew.
A result stands, and is not measured again, if the run was right and its commit has the newest change of the product:
`--since COMMIT` lets older ones stand, `--again` none. No run begins that may end after the budget. Exit code 1 if a
result of this call is wrong.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.card_runs import (
    BYTES,
    CUT,
    EXPERTS,
    ROOT,
    Adapter,
    Example,
    Part,
    Recipes,
    Result,
    Run,
    RunFailed,
    Workshop,
    count_cards,
    device_tests,
    doctor,
    execute,
    export_and_measure,
    generation,
    two_kinds,
)
from benchmarks.comparison_tables import fill_tables
from benchmarks.device import PAGE, PEAKS, SIZES, Size, flops_per_token, read_results
from benchmarks.revision import commit
from node.model import LanguageModel, build_model, shape_table
from node.monitoring.training_log.file import METRICS_FILE
from node.run_dir import write_atomically
from node.trainer.devices.device import device_class
from protocol.errors import MurmurError

RESULTS: Final = ROOT / "docs" / "results" / "card.json"
PRODUCT: Final = ("node", "optim", "protocol", "murmuration")
SLACK: Final = 3.0  # a run may take so many times its usual minutes
CPU_SLACK: Final = 20.0  # two busy cores
BANDWIDTHS: Final = {"A100": 2.0e12, "H100": 3.35e12, "H200": 4.8e12}  # bytes a second of the card's own memory
STEP_BYTES: Final = {"norm": 4, "clip": 8, "decay": 8, "clamp": 8, "AdamW": 28, "clear": 4}  # a parameter, fp32
TARGETS: Final = {"computing": 0.99, "share_of_bare": 0.95, "mfu": 0.40}
Row = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """An entry of the queue; `minutes` are the usual ones on a card. A timing has the machine alone."""

    name: str
    minutes: float
    part: Part
    question: str
    is_timing: bool = False


@dataclass(frozen=True)
class DeviceRow:
    """The row of a size in docs/results/device.json."""

    size: str

    def __call__(self, shop: Workshop, seconds: float) -> Result:
        """Measure it in a process of its own."""
        command = [sys.executable, "-m", "benchmarks.device", "--sizes", self.size, "--device", shop.device, "--again"]
        found = json.loads(execute([*command, "--json"], shop.folder(f"row-{self.size}"), seconds))[0]
        ways = {way: {name: round(value, 3) for name, value in each.items()} for way, each in found["ways"].items()}
        return {
            "ways": ways,
            **{name: round(found[name], 3) for name in ("compiled_ratio", "fp8_gain") if name in found},
        }


@dataclass(frozen=True)
class LawRows:
    """Rows of docs/results/law.json."""

    sizes: tuple[str, ...]
    steps: tuple[int, ...]

    def __call__(self, shop: Workshop, seconds: float) -> Result:
        """Make those that are missing and fit in half the time, for each row ends before the time does."""
        lengths = map(str, self.steps)
        command = [sys.executable, "-m", "benchmarks.law", "--sizes", *self.sizes, "--steps", *lengths]
        command += ["--device", shop.device, "--max-minutes", f"{seconds / 120:.1f}", "--json"]
        found = json.loads(execute(command, ROOT, seconds, log=shop.folder(f"law-{self.sizes[0]}") / "log"))
        return {"laws": found["laws"]}


@dataclass(frozen=True)
class LargePeer:
    """One peer that trains a size of `benchmarks.device` with `--compile`, compared with the bare compiled step."""

    size: str
    rounds: int = 4
    inner_steps: int = 40

    def __call__(self, shop: Workshop, seconds: float) -> Result:
        """Train; the speed is that of the rounds after the first one, in which the model is compiled."""
        size = SIZES[self.size]
        names = ("width", "layers", "heads", "hidden", "context")
        run = Run(
            f"swarm-{self.size}",
            ("--compile",),
            peers=1,
            rounds=self.rounds,
            model=f"vocabulary = {size.model.vocabulary}\n",  # that of the bare step; the text uses 256 of it
            method=f"[method.schedule]\ninner_steps = {self.inner_steps}\nahead = {self.inner_steps}",
            sizes={name: getattr(size.model, name) for name in names}
            | {"batch": size.tokens, "microbatch": size.microbatch},
        )
        result = run(shop, seconds)
        speed = steady_speed(read_metrics(shop.work / run.name / "swarm"))
        return result | compare_speed(self.size, speed, device_class(torch.device(shop.device)), result["computing"])


def compare_speed(name: str, speed: float, device: str, computing: float) -> Result:
    """Return tokens a second beside those of the bare step and the peak of the device, and the targets missed."""
    found: Result = {"tokens_per_second": round(speed)}
    bare: Row = next(
        (row["ways"] for row in read_results() if row["size"] == name and row["where"]["device"] == device), {}
    )
    if "ours compiled" in bare:
        found["share_of_bare"] = round(speed / bare["ours compiled"]["tokens_per_second"], 3)
    peak = next((value for card, value in PEAKS.items() if card in device), None)
    if peak is not None:
        model = SIZES[name].model
        found["mfu"] = round(speed * flops_per_token(model, shape_table(model).numel) / peak, 3)
    reached = found | {"computing": computing}
    return found | {"missed": [target for target, least in TARGETS.items() if reached.get(target, least) < least]}


def read_metrics(folder: Path) -> list[Row]:
    """Return the lines of the one peer of a swarm."""
    path = next(iter(sorted(folder.rglob(METRICS_FILE))), None)
    if path is None:
        raise RunFailed(f"no {METRICS_FILE} in {folder.name}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def steady_speed(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the tokens a second between the first and the last line after round 0."""
    later = [line for line in lines if line["round"] > 0]
    if len(later) < 2:
        raise RunFailed("fewer than two rounds have lines")
    return float((later[-1]["tokens"] - later[0]["tokens"]) / (later[-1]["time"] - later[0]["time"]))


MUON: Final = '[method.inner]\nkind = "muon"\n[method.schedule]\ninner_steps = 8\nahead = 8'
QUEUE: Final = (
    Item("plain", 0.7, Run("plain"), "two peers of an ordinary run agree"),
    Item("compile", 1.5, Run("compile", ("--compile",), compares=True), "`--compile` learns as well"),
    Item("generation", 0.7, generation, "text with the cache is the text without it"),
    Item("two kinds", 1.0, two_kinds, "a card and a CPU end one run with the same bits"),
    Item("bf16", 0.7, Run("bf16", ("--weights", "bf16"), compares=True, needs="card"),
         "`--weights bf16` learns as well"),
    Item("fp8", 1.5, Run("fp8", ("--compile", "--fp8"), compares=True, needs="card"),
         "`--fp8 --compile` learns as well"),
    Item("fp8 eager", 0.7, Run("fp8-eager", ("--fp8",), compares=True, needs="card"), "`--fp8` learns as well"),
    Item("bf16 compiled", 1.5, Run("bf16-c", ("--weights", "bf16", "--compile"), compares=True, needs="card"),
         "`--weights bf16 --compile` learns as well"),
    Item("small memory", 0.7, Run("small", ("--memory-mode", "small"), compares=True),
         "`--memory-mode small` learns as well"),
    Item("small compiled", 1.5, Run("small-c", ("--memory-mode", "small", "--compile"), compares=True),
         "the same, compiled"),
    Item("small bf16", 0.7, Run("small-bf16", ("--memory-mode", "small", "--weights", "bf16"), compares=True,
         needs="card"), "`--memory-mode small --weights bf16` learns as well"),
    Item("recompute", 1.5, Run("recompute", ("--recompute", "full", "--compile"), compares=True),
         "`--recompute full --compile` learns as well"),
    Item("death", 1.0, Run("death", ("--drill",), rounds=4, compares=True), "a killed peer comes back"),
    Item("Muon", 0.7, Run("muon", method=MUON), "Muon learns"),
    Item("qwen3", 1.5, Run("qwen3", ("--compile",), model=BYTES + 'kind = "qwen3"'), "qwen3 learns, compiled"),
    Item("olmo2", 0.7, Run("olmo2", model=BYTES + 'kind = "olmo2"'), "olmo2 learns"),
    Item("experts", 0.7, Run("experts", model=EXPERTS), "experts learn"),
    Item("experts compiled", 1.5, Run("experts-c", ("--compile",), model=EXPERTS), "experts learn, compiled"),
    Item("documents", 1.5, Run("documents", ("--compile",), model=BYTES + "document_end = 0"),
         "attention within documents learns, compiled"),
    Item("adapter int8", 1.0, Adapter("int8"), "an adapter of a model in int8 learns"),
    Item("adapter nf4", 1.0, Adapter("nf4"), "an adapter of a model in nf4 learns"),
    Item("pipeline", 1.5, Run("pipeline", peers=4, model=BYTES + "tied = false", rest=CUT.format(mode="local")),
         "four peers train two stages"),
    Item("exact steps", 1.5, Run("exact", peers=4, model=BYTES + "tied = false", recipe="data-parallel", method="",
         rest=CUT.format(mode="exact")), "four peers train two stages in exact steps"),
    Item("ranks", 1.0, Run("ranks", peers=1, compares=True, needs="cards"), "several devices train as one peer"),
    Item("recipes", 3.0, Recipes(("diloco", "sparseloco", "streaming-diloco", "demo", "noloco")),
         "other recipes learn"),
    Item("own loop", 0.7, Example("own_loop.py"), "a plain torch loop trains in a swarm"),
    Item("Hugging Face", 1.0, Example("hugging_face.py"), "the Trainer of transformers trains in a swarm"),
    Item("export", 1.0, export_and_measure, "export, generate and eval"),
    Item("doctor", 0.3, doctor, "`murmur doctor`"),
    Item("tests", 3.0, device_tests, "the tests of devices"),
    *(
        Item(f"row {size}", minutes, DeviceRow(size), f"the step at {size} beside a plain loop", is_timing=True)
        for size, minutes in (("124M", 4.0), ("0.6B", 5.0), ("1B", 5.0))
    ),
    Item("swarm 0.6B", 4.0, LargePeer("0.6B"), "a peer at 0.6B keeps the speed of the bare step", is_timing=True),
    Item("row 3B", 6.0, DeviceRow("3B"), "the step at 3B, with small memory", is_timing=True),
    Item("swarm 1B", 5.0, LargePeer("1B", rounds=3), "a peer at 1B keeps the speed of the bare step", is_timing=True),
    Item("law 3M and 10M", 20.0, LawRows(("3M", "10M"), (100, 200, 400)),
         "the law of gaps at 3 and 10 million parameters", is_timing=True),
    Item("law 30M and 124M", 40.0, LawRows(("30M", "124M"), (100, 200, 400)), "the same at 30 and 124 million",
         is_timing=True),
)  # fmt: skip


def main() -> int:
    """Run the queue; returns 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the queue, and measure nothing")
    parser.add_argument("--roof", action="store_true", help="show the least seconds of a step, and measure nothing")
    parser.add_argument("--cpu", action="store_true", help="the runs of correctness, tiny, on a CPU")
    parser.add_argument("--budget-minutes", type=float, default=600.0)
    parser.add_argument("--side", type=int, help="runs side by side (default: a core for each of their peers)")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these entries, in the order of the queue")
    parser.add_argument("--since", metavar="COMMIT", help="results from this commit on stand")
    parser.add_argument("--again", action="store_true", help="no result stands")
    parser.add_argument("--commit", default=commit(), help="name of the commit, where there is no git")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, help="folder of the runs, which is kept (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print the results of this device as JSON")
    words = parser.parse_args()
    if words.roof:
        sys.stdout.write(roof_table())
        return 0
    if not words.cpu and not words.list and not torch.cuda.is_available():
        parser.error("no card here; --cpu runs what a CPU can")
    device = "cpu" if words.cpu or not torch.cuda.is_available() else "cuda"
    queue = Queue(words, device, device_class(torch.device(device)))
    if words.list:
        sys.stdout.write(queue.describe())
        return 0
    with tempfile.TemporaryDirectory(prefix="murmur-card-", dir="/tmp") as folder:
        made = queue.run(words.work or Path(folder))
    if words.json:
        print(json.dumps([row for row in queue.rows if row["device"] == queue.where]))
    return int(not all(row["right"] for row in made))


class Queue:
    """The entries of one call on one device, and what is recorded of them."""

    def __init__(self, words: argparse.Namespace, device: str, where: str) -> None:
        self.words, self.device, self.where = words, device, where
        self.rows: list[Row] = json.loads(words.results.read_text()) if words.results.exists() else []
        self._lock = threading.Lock()
        self._ends = time.monotonic() + 60 * words.budget_minutes
        self.items = [
            item
            for item in QUEUE
            if (words.only is None or item.name in words.only) and not (device == "cpu" and item.is_timing)
        ]
        if unknown := set(words.only or ()) - {item.name for item in QUEUE}:
            raise SystemExit(f"no entry is called {sorted(unknown)[0]!r}; see --list")

    def row_of(self, item: Item) -> Row | None:
        """Return the recorded result on this device."""
        return next((row for row in self.rows if (row["name"], row["device"]) == (item.name, self.where)), None)

    def stands(self, item: Item) -> bool:
        """Return whether the recorded result needs no repetition."""
        row = self.row_of(item)
        if row is None or not row["right"] or self.words.again:
            return False
        since = self.words.since or newest_change() or self.words.commit
        return bool(row["commit"]) and (row["commit"] == self.words.commit or is_ancestor(since, row["commit"]))

    def describe(self) -> str:
        """Return the queue as lines of text."""
        lines = [f"{self.where}"]
        for item in self.items:
            row = self.row_of(item)
            state = "to do" if row is None else f"{'right' if row['right'] else 'WRONG'} {row['date']} {row['commit']}"
            state += "" if row is None or self.stands(item) else ", to do again"
            lines.append(f"{item.name:17} {item.minutes:4.1f} min  {state:34} {item.question}")
        return "\n".join(lines) + "\n"

    def run(self, work: Path) -> list[Row]:
        """Run what does not stand; return the new rows."""
        todo = [item for item in self.items if not self.stands(item)]
        cores = os.cpu_count() or 1
        shop = Workshop(work, self.device, count_cards(), threads=1 if self.device == "cpu" else 2)
        side = self.words.side or max(1, cores // 2)
        first = [item for item in todo if item.name == "plain"]  # others are compared with it
        small = [item for item in todo if not item.is_timing and item not in first]
        made = [self._run_item(item, shop) for item in first]
        with ThreadPoolExecutor(side) as pool:
            made += pool.map(lambda item: self._run_item(item, shop), small)
        made += [self._run_item(item, shop) for item in todo if item.is_timing]
        return [row for row in made if row is not None]

    def _run_item(self, item: Item, shop: Workshop) -> Row | None:
        left = self._ends - time.monotonic()
        if left < 60 * item.minutes:
            print(f"{item.name:17} left for another hour: {item.minutes:g} min", file=sys.stderr)
            return None
        slack = CPU_SLACK if self.device == "cpu" else SLACK
        began, plain = time.monotonic(), self.row_of(QUEUE[0])
        loss = plain["result"]["losses"][1] if plain and plain["right"] else None
        try:
            result, right = item.part(replace(shop, plain_loss=loss), min(left, 60 * slack * item.minutes)), True
        except (RunFailed, MurmurError, RuntimeError, OSError, ValueError) as error:
            result, right = {"fault": f"{type(error).__name__}: {error}"[:600]}, False
        row = self._record(item, result, right, time.monotonic() - began)
        print(f"{item.name:17} {'right' if right else 'WRONG'} {row['seconds']:5.0f} s  {result}", file=sys.stderr)
        return row

    def _record(self, item: Item, result: Result, right: bool, seconds: float) -> Row:
        row = {
            "name": item.name,
            "device": self.where,
            "command": f"python -m benchmarks.card --only {item.name!r}" + " --cpu" * (self.device == "cpu"),
            "commit": self.words.commit,
            "date": time.strftime("%Y-%m-%d"),
            "seconds": round(seconds),
            "right": right,
            "result": result,
        }
        with self._lock:
            order = [each.name for each in QUEUE]
            others = [one for one in self.rows if (one["name"], one["device"]) != (item.name, self.where)]
            self.rows = sorted([*others, row], key=lambda one: (one["device"], order.index(one["name"])))
            write_atomically(self.words.results, (json.dumps(self.rows, indent=1) + "\n").encode())
            if self.words.results == RESULTS:
                PAGE.write_text(fill_tables(PAGE.read_text(), make_tables(self.rows)))
        return row


def newest_change() -> str:
    """Return the newest commit that changed the product; empty without git."""
    return _git("log", "-1", "--format=%h", "--", *PRODUCT)


def is_ancestor(older: str, newer: str) -> bool:
    """Return whether a commit is another one, or came before it."""
    return subprocess.run(
        ["git", "merge-base", "--is-ancestor", older, newer], cwd=ROOT, capture_output=True, check=False
    ).returncode == 0  # fmt: skip


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def make_tables(rows: Sequence[Row]) -> dict[str, str]:
    """Return the tables of docs/results/devices.md that this script makes."""
    return {"queue": queue_table(rows), "roof": roof_table()}


def queue_table(rows: Sequence[Row]) -> str:
    """Return a Markdown table: each entry by device."""
    devices = sorted({row["device"] for row in rows}) or ["no device yet"]
    found = {(row["name"], row["device"]): row for row in rows}
    lines = ["| entry | question | " + " | ".join(devices) + " |", "|---|---|" + "---|" * len(devices)]
    for item in QUEUE:
        cells = (_cell(found.get((item.name, device))) for device in devices)
        lines.append(f"| {item.name} | {item.question} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    word = "refused, as it should be" if "refused" in row["result"] else "right"
    return f"{word if row['right'] else 'wrong'}, {row['date']}, `{row['commit']}`"


def roof_table() -> str:
    """Return a Markdown table: what a step must compute and move, and the least time that this takes on a card."""
    lines = [
        "| size | parameters | TFLOP a step | counted / formula | optimizer, GB a step | "
        + " | ".join(f"{card}: ms of products, of the optimizer, largest MFU" for card in ("A100", "H100", "H200"))
        + " |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, size in SIZES.items():
        if name in ("10M", "25M"):
            continue
        numel, tokens = shape_table(size.model).numel, size.tokens
        flops, moved = tokens * flops_per_token(size.model, numel), numel * sum(STEP_BYTES.values())
        cells = [
            name,
            f"{numel / 1e6:,.0f}M",
            f"{flops / 1e12:.1f}",
            f"{counted_flops(size) / flops:.3f}",
            f"{moved / 1e9:.1f}",
        ]
        for card in ("A100", "H100", "H200"):
            products, optimizer = flops / PEAKS[card], moved / BANDWIDTHS[card]
            cells.append(f"{1e3 * products:.0f}, {1e3 * optimizer:.0f}, {products / (products + optimizer):.0%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def counted_flops(size: Size) -> float:
    """Count the FLOPs of a step's matrix products by running the model on torch's device without memory.

    Attention is counted as half of its products, because each token sees only those before it.
    """
    model = build_model(size.model, "meta")
    tokens = torch.zeros(1, size.model.context, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(model.output_factors(through_layers(model, tokens))[0].sum())
    whole = counter.get_total_flops()
    head = 6 * size.model.width * size.model.vocabulary * size.model.context
    squares = 12 * size.model.layers * size.model.heads * size.model.head_width * size.model.context**2
    return float((whole + head - squares / 2) * size.sequences)


def through_layers(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the residual stream behind the last layer."""
    model.see(tokens)
    stream = tokens
    for block in model.blocks[:-1]:
        stream = block(stream)
    return stream


if __name__ == "__main__":
    sys.exit(main())
