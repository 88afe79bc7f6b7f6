"""Measure how far repeated work differs between kinds of devices, and how far false work does.

    python benchmarks/audit_tolerance.py [--steps 30] [--passes] [--json]

One contribution of a small model is made again from the same state: with other instructions of the CPU, another number
of threads, and matrix products in bf16; then with fewer steps, with other text, and with the sign turned. Each row has
the distance of the contribution and of the inner state after it (`node.daemon.audits.repeater.distance`) from those of
the first row, or from those in bf16. A process of its own makes each, because torch chooses its instructions once.
JSON: a list of rows with `recipe`, `setting`, `is_false`, `contribution` and `state`.

With `--passes`, the same of one forward and one backward pass through a stage of a pipeline: rows with `format`,
`setting`, `is_false`, `activation` and `gradient`. False are noise of a share of the spread, and weights that are one
step older.
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
from node.model import Cut, build_model, initial_weights
from node.simulation.virtual.trainer import VirtualTrainer
from node.trainer.stages.stage_pass import FORMATS, backward_stage, forward_stage
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
STAGE_MODEL = ModelSection(vocabulary=256, width=256, layers=3, heads=4, hidden=768, context=64, tied=False)
NOISES = {f"noise of {share:g}": share for share in (0.001, 0.01, 0.1)}  # of the spread
OLDER, STEP = "older weights", 1e-3  # by one step of each weight
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


def make_pass(is_bf16: bool, lie: str, path: Path) -> None:
    """Run the passes of a microbatch through the middle of three layers. Write the activation and the gradient."""
    cut = Cut(1, 3)
    model = build_model(STAGE_MODEL, cut=cut)
    weights = initial_weights(STAGE_MODEL, 0, cut)
    torch.manual_seed(0)
    step = torch.randn(weights.numel()).sign() * STEP
    model.load_flat(weights - step if lie == OLDER else weights)
    stream = torch.randn(4, STAGE_MODEL.context, STAGE_MODEL.width)
    above = torch.randn_like(stream) * 1e-3
    with torch.autocast("cpu", torch.bfloat16) if is_bf16 else nullcontext():
        activation, gradient = forward_stage(model, stream), backward_stage(model, stream, above)
    assert gradient is not None
    values = {"activation": activation.float(), "gradient": gradient.float()}
    share = NOISES.get(lie, 0.0)
    torch.save({name: value + share * value.std() * torch.randn_like(value) for name, value in values.items()}, path)


def measure_passes() -> Iterator[dict[str, object]]:
    """Yield a row for each format, setting and lie."""
    with tempfile.TemporaryDirectory() as name:
        honest = [setting for setting in SETTINGS if "both" not in setting]
        made = {setting: run_child("", 0, setting, "", Path(name)) for setting in honest}
        made |= {lie: run_child("", 0, honest[0], lie, Path(name)) for lie in (*NOISES, OLDER)}
        for word, codec in FORMATS.items():
            first = {way: codec.round_trip(value).flatten() for way, value in made[honest[0]].items()}
            for key, values in made.items():
                near = {way: distance(codec.round_trip(values[way]).flatten(), first[way]) for way in first}
                yield {"format": word, "setting": key, "is_false": key not in honest, **near}


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
    parser.add_argument("--passes", action="store_true", help="one pass through a stage, instead of a contribution")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        recipe, steps, threads, is_bf16, lie, path = json.loads(options.child)
        torch.set_num_threads(threads)
        if recipe:
            make_contribution(recipe, steps, is_bf16, lie, Path(path))
        else:
            make_pass(is_bf16, lie, Path(path))
        return
    rows = measure_passes() if options.passes else (row for recipe in RECIPES for row in measure(recipe, options.steps))
    if options.json:
        print(json.dumps(list(rows), indent=1))
        return
    for row in rows:
        name, setting, _, *distances = row.values()
        print(f"{name:12}{setting:22}" + "".join(f"{each:12.2e}" for each in distances), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
