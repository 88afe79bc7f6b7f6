"""Measure how far repeated work differs between kinds of devices, and how far false work does.

    python benchmarks/audit_tolerance.py [--steps 30] [--json]

One contribution of a small model is made again from the same state: with other instructions of the CPU, another number
of threads, and matrix products in bf16; then with fewer steps, with other text, and with the sign turned. Each row has
the distance of the contribution and of the inner state after it (`node.daemon.audits.repeater.distance`) from those of
the first row, or from those in bf16. A process of its own makes each, because torch chooses its instructions once.
JSON: a list of rows with `recipe`, `setting`, `is_false`, `contribution` and `state`.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from node.daemon.audits.repeater import decode_parts, distance
from node.data import Corpus
from node.data.corpus import TokenArray
from node.from_manifest import build_program
from node.model import build_model
from node.simulation.virtual.trainer import VirtualTrainer
from optim.exchange import ContributionEncoder
from protocol.manifest.model import ModelSection
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection, MethodSection, RunSection, TrainSection

RECIPES = ("diloco", "sparseloco")
MODEL = ModelSection(vocabulary=256, width=64, layers=2, heads=4, hidden=192, context=64)
ROUNDS = 2  # the first one fills the moments and the residual
SETTINGS: dict[str, tuple[str, int, bool]] = {  # instructions, threads, bf16
    "same again": ("avx2", 1, False),
    "two threads": ("avx2", 2, False),
    "plain instructions": ("default", 1, False),
    "bf16": ("avx2", 1, True),
    "plain, both in bf16": ("default", 1, True),
}
LIES = ("half of the steps", "one step less", "other text", "sign turned")


def make_corpus(seed: int) -> Corpus:
    chance = random.Random(seed)
    words = [bytes(chance.randbytes(5)) for _ in range(200)]
    tokens = np.frombuffer(b" ".join(chance.choice(words) for _ in range(20_000)), np.uint8)
    return Corpus.of(TokenArray([tokens[:100_000]]), TokenArray([tokens[100_000:]]), 256)


def make_contribution(recipe: str, steps: int, is_bf16: bool, lie: str, path: Path) -> None:
    """Make contributions of two rounds; the lie is in the second. Write its values and the state after it."""
    manifest = Manifest(
        run=RunSection(name="tolerance", seed=1),
        model=MODEL,
        data=DataSection(source="text"),
        train=TrainSection(batch_tokens=512, learning_rate=2e-3, warmup_steps=5),
        method=MethodSection(recipe=recipe, schedule={"inner_steps": steps}),
    )
    planner = build_program(manifest)
    model = build_model(manifest.model, torch.device("cpu"))
    torch.manual_seed(0)
    start = torch.randn(planner.numel) * 0.05
    trainer = VirtualTrainer(model, manifest, planner, make_corpus(0), ContributionEncoder(planner), "peer")
    trainer.start(0, [start])
    with torch.autocast("cpu", torch.bfloat16) if is_bf16 else nullcontext():
        for number in range(ROUNDS):
            is_false = bool(lie) and number == ROUNDS - 1
            if number:
                trainer.apply_known_anchor(number, [start], "excluded")
            if is_false and lie == "other text":
                trainer._corpus = make_corpus(9)
                trainer._open_batches(trainer.state.counters.position)
            made = {"half of the steps": steps // 2, "one step less": steps - 1}.get(lie, steps) if is_false else steps
            for _ in range(made):
                trainer.step()
            _, payloads = trainer.make_contribution()
    trainer.state.save()
    values = decode_parts(planner, ROUNDS - 1, payloads)
    snapshot = trainer.shared_memory.copy_snapshot()
    assert snapshot is not None
    vectors = {name: vector.clone() for name, vector in snapshot[0].vectors.items()}
    torch.save({"values": -values if lie == "sign turned" else values, "vectors": vectors}, path)


def run_child(recipe: str, steps: int, setting: str, lie: str, folder: Path) -> Any:
    instructions, threads, is_bf16 = SETTINGS[setting]
    path = folder / f"{recipe}-{setting}-{lie}"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": instructions}
    order = json.dumps([recipe, steps, threads, is_bf16, lie, str(path)])
    subprocess.run([sys.executable, __file__, "--child", order], check=True, env=environment)
    return torch.load(path)


def measure(recipe: str, steps: int) -> Iterator[dict[str, object]]:
    """Yield a row for each setting and each lie."""
    with tempfile.TemporaryDirectory() as name:
        first, rounded = (run_child(recipe, steps, setting, "", Path(name)) for setting in ("same again", "bf16"))
        for setting, lie in [*((setting, "") for setting in SETTINGS), *(("same again", lie) for lie in LIES)]:
            base = rounded if "both" in setting else first
            other = run_child(recipe, steps, setting, lie, Path(name))
            state = max(distance(other["vectors"][key], base["vectors"][key]) for key in base["vectors"])
            near = distance(other["values"], base["values"])
            yield {"recipe": recipe, "setting": lie or setting, "is_false": bool(lie), "contribution": near,
                   "state": state}  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        recipe, steps, threads, is_bf16, lie, path = json.loads(options.child)
        torch.set_num_threads(threads)
        make_contribution(recipe, steps, is_bf16, lie, Path(path))
        return
    rows = (row for recipe in RECIPES for row in measure(recipe, options.steps))
    if options.json:
        print(json.dumps(list(rows), indent=1))
        return
    for row in rows:
        print(f"{row['recipe']:12}{row['setting']:22}{row['contribution']:12.2e}{row['state']:12.2e}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
