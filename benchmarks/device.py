"""How fast a trainer's step is on this device, compared with a plain torch loop with the same model.

    python benchmarks/device.py [--device cpu] [--sizes 10M ...] [--seconds 40] [--again] [--json]

The plain loop is the one that a person would write without us: the model, torch's cross entropy, fused AdamW, clipping.
Both train eagerly and compiled in bf16. On a CPU, which other programs use too, the four ways take steps in turns, a
ratio is the median over the turns, and seconds are those that the processor worked for this process (with one thread,
so that no thread waits for another). A card trains one way after the other, so that each has its whole memory.

    ratio            our step's tokens a second over the plain loop's
    compiled_ratio   the same, both compiled
    compiled_gain    our compiled step over the plain eager loop
    fp8_gain         our compiled step with products in fp8 over the one without, on a card that has them
    small_gain       our compiled step with `--memory-mode small` (moments of 8 bits) over the one without, on a card
    mfu              share of the device's peak in bf16, for devices whose peak is known
    bytes            per parameter at the peak, on a card (docs/results/memory.md has a CPU's)

Each size runs in a process of its own. Results are added to docs/results/device.json, one size at a time, with device,
commit and versions; a row of this commit is not measured again, so that any hour with a device extends the table of
docs/results/devices.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.comparison_tables import fill_tables
from benchmarks.revision import ROOT, commit
from node.model import LanguageModel, build_compiled_model, build_model, has_compiler, initial_weights, shape_table
from node.model.products import has_fp8
from node.run_dir import write_atomically
from node.trainer.devices.device import autocast_context, choose_device, device_class
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient
from optim.inner.adamw import AdamW
from optim.inner.eight_bit import EightBitAdamW
from protocol.manifest.model import ModelSection
from protocol.manifest.sections import TrainSection

RESULTS: Final = ROOT / "docs" / "results" / "device.json"
PAGE: Final = ROOT / "docs" / "results" / "devices.md"
PEAKS: Final = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # FLOP/s in bf16, dense
WAYS: Final = ("plain", "ours", "plain compiled", "ours compiled", "ours compiled fp8", "ours compiled small")
RATIOS: Final = {
    "ratio": ("ours", "plain"),
    "compiled_ratio": ("ours compiled", "plain compiled"),
    "compiled_gain": ("ours compiled", "plain"),
    "fp8_gain": ("ours compiled fp8", "ours compiled"),
    "small_gain": ("ours compiled small", "ours compiled"),
}
WARM_STEPS, LEAST_STEPS, STEPS_OF_A_CARD = 2, 3, 20
MAX_SECONDS: Final = 3600  # of a size, with compilation
TRAIN: Final = TrainSection(batch_tokens=1, learning_rate=1e-3)
Row = dict[str, Any]
Step = Callable[[Tensor], None]


@dataclass(frozen=True)
class Size:
    """A model and the batch of one step."""

    model: ModelSection
    sequences: int
    microbatch: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.model.context


def _size(width: int, layers: int, context: int, vocabulary: int, sequences: int, microbatch: int) -> Size:
    hidden = -(-width * 8 // 3 // 64) * 64
    heads = max(1, width // 64)
    model = ModelSection(
        vocabulary=vocabulary, width=width, layers=layers, heads=heads, hidden=hidden, context=context, tied=True
    )
    return Size(model, sequences, microbatch)


SIZES: Final = {
    "10M": _size(384, 6, 128, 256, 8, 4),
    "25M": _size(512, 7, 128, 8192, 8, 8),
    "124M": _size(768, 12, 1024, 50_304, 64, 32),
    "0.6B": _size(1536, 20, 2048, 50_304, 32, 8),
    "1B": _size(2048, 18, 2048, 50_304, 16, 4),
    "3B": _size(2560, 34, 2048, 50_304, 8, 2),
}
DEFAULT_SIZES: Final = {"cpu": ("10M", "25M"), "cuda": ("124M", "0.6B", "1B")}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES))
    parser.add_argument("--seconds", type=float, default=40, help="of a size on a CPU, without compilation")
    parser.add_argument("--threads", type=int, help="CPU threads (default: 1 on a CPU, all beside a card)")
    parser.add_argument("--again", action="store_true", help="measure also what stands in the results")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    device = choose_device(words.device)
    words.threads = words.threads or (torch.get_num_threads() if device.type == "cuda" else 1)
    if words.one:
        print(json.dumps(measure(SIZES[words.sizes[0]], device, words)))
        return 0
    sizes = words.sizes or DEFAULT_SIZES[device.type]
    rows = [row for name in sizes if (row := row_of(name, device, words)) is not None]
    print(json.dumps(rows) if words.json else make_table(rows))
    return 0 if len(rows) == len(sizes) else 1


def row_of(name: str, device: torch.device, words: argparse.Namespace) -> Row | None:
    """The figures of one size on this device, measured unless they stand in the results; None if that fails."""
    where = {"device": device_class(device), "threads": words.threads}
    made = {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    others = [row for row in read_results() if (row["size"], row["where"]) != (name, where)]
    known = next((row for row in read_results() if (row["size"], row["where"]) == (name, where)), None)
    if known is not None and known["made"]["commit"] == made["commit"] and not words.again:
        return known
    figures = in_process(name, words)
    if figures is None:
        return None
    row = {"size": name, "where": where, "made": made, "model": describe(SIZES[name]), **figures}
    rows = sorted([*others, row], key=lambda each: (each["where"]["device"], list(SIZES).index(each["size"])))
    write_atomically(RESULTS, (json.dumps(rows, indent=1) + "\n").encode())
    PAGE.write_text(fill_tables(PAGE.read_text(), {"devices": make_table(rows)}))
    return row


def read_results() -> list[Row]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def in_process(name: str, words: argparse.Namespace) -> Row | None:
    command = [sys.executable, "-m", "benchmarks.device", "--one", "--sizes", name, "--device", words.device]
    command += ["--seconds", str(words.seconds), "--threads", str(words.threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=MAX_SECONDS, cwd=ROOT)
    if done.returncode:
        sys.stderr.write(f"  {name}: not measured, see above\n")
        return None
    figures: Row = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(size: Size, device: torch.device, words: argparse.Namespace) -> Row:
    """All ways of training a model of this size, in this process."""
    torch.set_num_threads(words.threads)
    windows = torch.randint(size.model.vocabulary, (size.sequences, size.model.context + 1))
    ways = [way for way in WAYS if can_measure(way, device)]
    groups = [[way] for way in ways] if device.type == "cuda" else [ways]
    taken: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    for group in groups:
        taken |= take_turns(build_steps(group, size, device), windows, device, words.seconds)
        if device.type == "cuda":
            peaks[group[0]] = torch.cuda.max_memory_allocated(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return {"ways": figures_of(taken, peaks, size, device), **ratios_of(taken)}


def can_measure(way: str, device: torch.device) -> bool:
    if way.endswith("fp8") and not has_fp8(device):
        return False
    if way.endswith("small") and device.type != "cuda":
        return False
    return device.type == "cuda" or has_compiler() or "compiled" not in way


def build_steps(ways: Sequence[str], size: Size, device: torch.device) -> dict[str, Step]:
    """Return a step of each way; they train the same weights in turns."""
    weights = initial_weights(size.model, 0).to(device)
    gradient = torch.zeros_like(weights) if device.type == "cpu" else None  # a trainer's is in the shared memory
    steps: dict[str, Step] = {}
    for way in ways:
        is_plain, is_compiled = way.startswith("plain"), "compiled" in way
        model = (build_compiled_model if is_compiled and not is_plain else build_model)(size.model, device)
        model.use_memory(weights, None if is_plain else gradient)
        if way.endswith("fp8"):
            model.multiply_in_fp8()
        steps[way] = PlainLoop(model, size, is_compiled) if is_plain else OurLoop(model, size, way.endswith("small"))
    return steps


def take_turns(
    steps: Mapping[str, Step], windows: Tensor, device: torch.device, seconds: float
) -> dict[str, list[float]]:
    """Return the seconds of each step by way."""
    for step in steps.values():
        for _ in range(WARM_STEPS):
            step(windows)
    taken: dict[str, list[float]] = {way: [] for way in steps}
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    began = clock()
    while not is_enough(len(taken[next(iter(steps))]), clock() - began, seconds, device):
        for way, step in steps.items():
            _wait(device)
            before = clock()
            step(windows)
            _wait(device)
            taken[way].append(clock() - before)
    return taken


def is_enough(turns: int, passed: float, seconds: float, device: torch.device) -> bool:
    return turns >= STEPS_OF_A_CARD if device.type == "cuda" else turns >= LEAST_STEPS and passed > seconds


class OurLoop:
    """A trainer's step: accumulation into one flat gradient, clipping, our AdamW over the flat vector."""

    def __init__(self, model: LanguageModel, size: Size, has_small_memory: bool = False) -> None:
        self._model, self._size, self._count = model, size, 0
        self._optimizer = InnerOptimizer(model, TRAIN, EightBitAdamW() if has_small_memory else AdamW())

    def __call__(self, windows: Tensor) -> None:
        accumulate_gradient(self._model, windows, self._size.microbatch)
        self._optimizer.step(self._count)
        self._optimizer.clear_gradient()
        self._count += 1


class PlainLoop:
    """The loop that one would write with torch alone."""

    def __init__(self, model: LanguageModel, size: Size, is_compiled: bool) -> None:
        self._model, self._size = model, size
        device = model.flat.device
        self._context = torch.autocast(device.type, torch.bfloat16) if is_compiled else autocast_context(device)
        self._loss = torch.compile(self._loss_of, dynamic=False) if is_compiled else self._loss_of
        parameters = list(model.parameters())
        groups = [
            {"params": [one for one in parameters if one.ndim > 1], "weight_decay": TRAIN.weight_decay},
            {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=TRAIN.learning_rate, betas=(TRAIN.beta1, TRAIN.beta2), fused=True
        )

    def __call__(self, windows: Tensor) -> None:
        for piece in torch.split(windows.to(self._model.flat.device), self._size.microbatch):
            with self._context:
                loss = self._loss(piece[:, :-1], piece[:, 1:]) * (len(piece) / len(windows))
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), TRAIN.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self._model(inputs).float().flatten(0, 1), targets.flatten())


def figures_of(
    taken: Mapping[str, Sequence[float]], peaks: Mapping[str, int], size: Size, device: torch.device
) -> dict[str, dict[str, float]]:
    parameters = shape_table(size.model).numel
    peak = next((value for name, value in PEAKS.items() if name in device_class(device)), None)
    found: dict[str, dict[str, float]] = {}
    for way, seconds in taken.items():
        speed = size.tokens / statistics.median(seconds)
        found[way] = {"tokens_per_second": speed, "steps": len(seconds)}
        found[way] |= {"mfu": speed * flops_per_token(size.model, parameters) / peak} if peak else {}
        found[way] |= {"bytes": peaks[way] / parameters} if way in peaks else {}
    return found


def flops_per_token(model: ModelSection, parameters: int) -> float:
    """6 per parameter, and attention: 12 layers width context / 2, as it is causal (arXiv 2204.02311)."""
    return 6 * parameters + 6 * model.layers * model.width * model.context


def ratios_of(taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median over the turns of each ratio of speeds."""
    return {
        name: statistics.median(slow / fast for fast, slow in zip(taken[ours], taken[plain], strict=True))
        for name, (ours, plain) in RATIOS.items()
        if ours in taken
    }


def describe(size: Size) -> dict[str, Any]:
    return {"sequences": size.sequences, "microbatch": size.microbatch, **size.model.model_dump(exclude_defaults=True)}


def make_table(rows: Sequence[Row]) -> str:
    """Return a Markdown table of the results."""
    heads = ("device", "size", "tokens a second: plain, ours", "compiled: plain, ours", *RATIOS, "MFU", "bytes", "made")
    lines = [heads, ["---"] * len(heads), *(list(_cells(row)) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cells(row: Row) -> Iterator[str]:
    best = row["ways"].get("ours compiled", row["ways"]["ours"])
    threads = row["where"]["threads"]
    yield f"{row['where']['device']}, {threads} thread{'s' * (threads > 1)}"
    yield row["size"]
    for first, second in (WAYS[:2], WAYS[2:4]):
        pair = [row["ways"].get(way, {}).get("tokens_per_second") for way in (first, second)]
        yield ", ".join("-" if speed is None else f"{speed:,.0f}" for speed in pair)
    for name in RATIOS:
        yield f"{row[name]:.2f}" if name in row else "-"
    yield f"{best['mfu']:.0%}" if "mfu" in best else "-"
    yield f"{best['bytes']:.1f}" if "bytes" in best else "-"
    yield f"{row['made']['date']}, `{row['made']['commit']}`"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
