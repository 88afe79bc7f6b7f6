"""The memory of a forward and a backward pass: of the loss by vocabulary, and of layers by `--recompute`.

    python -m benchmarks.activations [--json]

Each figure is measured in a process of its own on one thread of the CPU: the peak of its memory over that before the
pass (weights and gradient are there already), and the processor's seconds. The control of the loss is torch's
cross entropy on all logits.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from node.model import build_model, initial_weights
from node.model.interface import Recompute, output_loss
from node.trainer.inner_step import accumulate_gradient
from protocol.manifest.model import ModelSection

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "docs" / "results" / "activations.json"
PAGE: Final = ROOT / "docs" / "results" / "devices.md"
TOKENS: Final = 1024
WIDTH: Final = 128
VOCABULARIES: Final = (32_768, 131_072)
LOSSES: Final = ("all logits", "in chunks")
DEEP: Final = ModelSection(vocabulary=256, width=256, layers=8, heads=4, hidden=704, context=512)
SEQUENCES: Final = 2
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "WAY"), help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.one:
        what, way = words.one
        print(json.dumps(measure_loss(int(what), way) if what.isdigit() else measure_layers(way)))
        return 0
    rows = [in_process(str(vocabulary), way) for vocabulary in VOCABULARIES for way in LOSSES]
    rows += [in_process("layers", way) for way in get_args(Recompute)]
    from benchmarks.comparison_tables import fill_tables  # imports far more than a measurement needs

    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(fill_tables(PAGE.read_text(), make_tables(rows)))
    print(json.dumps(rows) if words.json else "\n".join(make_tables(rows).values()))
    return 0


def in_process(what: str, way: str) -> Row:
    command = [sys.executable, "-m", "benchmarks.activations", "--one", what, way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1200, cwd=ROOT)
    return {"what": what, "way": way, **json.loads(done.stdout.splitlines()[-1])}


def measure_loss(vocabulary: int, way: str) -> Row:
    torch.set_num_threads(1)
    hidden = torch.randn(TOKENS, WIDTH).requires_grad_()
    weight = torch.randn(vocabulary, WIDTH).mul_(0.02).requires_grad_()
    hidden.grad, weight.grad = torch.ones_like(hidden), torch.ones_like(weight)
    targets = torch.randint(vocabulary, (TOKENS,))
    loss = output_loss if way == "in chunks" else whole_loss
    return measure(lambda: loss(hidden, weight, targets).backward())  # type: ignore[no-untyped-call]


def whole_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def measure_layers(way: str) -> Row:
    torch.set_num_threads(1)
    model = build_model(DEEP)
    model.recompute = next(each for each in get_args(Recompute) if each == way)
    model.load_flat(initial_weights(DEEP, 0))
    model.attach_gradient().fill_(1)
    windows = torch.randint(DEEP.vocabulary, (SEQUENCES, DEEP.context + 1))
    return measure(lambda: accumulate_gradient(model, windows, SEQUENCES))


def measure(work: Callable[[], object]) -> Row:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before, began = status_bytes("VmRSS"), time.process_time()
    work()
    return {"bytes": status_bytes("VmHWM") - before, "seconds": time.process_time() - began}


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def make_tables(rows: Sequence[Row]) -> dict[str, str]:
    """Return the tables of the loss and of layers, by the name in the mark."""
    found = {(row["what"], row["way"]): row for row in rows}
    losses: list[tuple[str, ...]] = [
        ("vocabulary", "memory: all logits", "in chunks", "seconds: all logits", "in chunks")
    ]
    for vocabulary in VOCABULARIES:
        pair = [found[str(vocabulary), way] for way in LOSSES]
        losses.append((f"{vocabulary:,}", *map(_megabytes, pair), *map(_seconds, pair)))
    layers: list[tuple[str, ...]] = [("`--recompute`", "memory", "seconds")]
    for way in get_args(Recompute):
        row = found["layers", way]
        layers.append((f"`{way}`", _megabytes(row), _seconds(row)))
    return {"losses": _table(losses), "layers": _table(layers)}


def _megabytes(row: Row) -> str:
    return f"{row['bytes'] / 1e6:,.0f} MB"


def _seconds(row: Row) -> str:
    return f"{row['seconds']:.2f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(row)} |\n" for row in rows)
    return "".join((head, f"|{'---|' * len(rows[0])}\n", *rest))


if __name__ == "__main__":
    sys.exit(main())
