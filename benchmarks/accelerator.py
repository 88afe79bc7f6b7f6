"""Measure the seconds of trainers with a graphics card, in real peers behind limited links.

    python benchmarks/accelerator.py [--peers 1 2] [--rounds 8] [--inner-steps 60] [--layers 12] [--width 768]
        [--batch-tokens 32768] [--rate 20mbit] [--device cuda] [--json]

First the inner step alone, in this process. Then swarms of so many peers, on one card together, by the default recipe,
each with its rate as the limit of what it sends and receives. By swarm, from its second round on: the shares of the
trainers' seconds by activity, and `device_share`: tokens that all trainers took in a second over those of the bare
step. The cost of a message, an adoption and a snapshot follows from the model's size; how much that is of a round, from
how long a round lasts.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.merge.training_step import Stepper
from node.options import threads_per_process
from node.trainer.devices.device import choose_device
from protocol.errors import DeviceError
from protocol.manifest.run import Manifest
from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, manifest_with, running_swarm, write_run

WARM_STEPS, STEPS = 5, 40
HEAD, SHARE = 64, 8 / 3  # values of an attention head; of the width, inside the gated layer
CONTEXT = 512
RUN_SECONDS = 600.0
FIRST = 2  # round from which on is counted: before it peers meet, and loops are loaded
TOKENS = "tokens"
Figures = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--inner-steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch-tokens", type=int, default=32_768)
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    try:
        choose_device(words.device)
    except DeviceError as error:
        parser.error(str(error))
    bare = bare_speed(manifest_of(words, 1), words.device)
    print(f"  the step alone: {bare:,.0f} tokens a second", file=sys.stderr)
    figures = {f"{count}": run_swarm(words, count, bare) for count in words.peers}
    print(json.dumps({"bare": bare, **figures}) if words.json else table(bare, figures))
    return 0


def manifest_of(words: argparse.Namespace, peers: int) -> Manifest:
    width = words.width
    return manifest_with(
        run={"min_peers": peers},
        model={
            "width": width, "layers": words.layers, "heads": width // HEAD,
            "hidden": round(SHARE * width), "context": CONTEXT,
        },
        data={"source": "python-stdlib", "path": ""},
        train={"batch_tokens": words.batch_tokens, "microbatch": 64, "learning_rate": 6e-4, "warmup_steps": 100},
        method={"recipe": "frugal", "schedule": {"inner_steps": words.inner_steps, "ahead": words.inner_steps}},
        target={"rounds": ENDLESS},
    )  # fmt: skip


def bare_speed(manifest: Manifest, device: str) -> float:
    """Tokens a second."""
    with tempfile.TemporaryDirectory() as folder:
        stepper = Stepper(write_run(Path(folder), manifest), 0, device)
    taken = [stepper.timed_step() for _ in range(WARM_STEPS + STEPS)][WARM_STEPS:]
    del stepper
    if device == "cuda":
        torch.cuda.empty_cache()  # the peers need it
    return manifest.train.batch_tokens / statistics.median(taken)


def run_swarm(words: argparse.Namespace, count: int, bare: float) -> Figures:
    own = ["--device", words.device, "--threads", str(threads_per_process(count))]
    own += ["--upload", words.rate, "--download", words.rate]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mm", dir="/tmp"))
        swarm = stack.enter_context(running_swarm(Path(folder), manifest_of(words, count), count, *own))
        swarm.start()
        swarm.wait_for_round(FIRST, seconds=RUN_SECONDS)
        began, before = time.monotonic(), told(swarm)
        swarm.wait_for_round(FIRST + words.rounds, seconds=RUN_SECONDS)
        seconds, since = time.monotonic() - began, told(swarm)
        since.subtract(before)
        swarm.leave()
    tokens = since.pop(TOKENS)
    round_seconds, whole = seconds / words.rounds, sum(since.values())
    print(f"  {count} peers, {round_seconds:.1f} s a round, by trainers: {dict(since)}", file=sys.stderr)
    shares = {activity: taken / whole for activity, taken in since.items()}
    return {"device_share": tokens / seconds / bare, "round_seconds": round_seconds, **shares}


def told(swarm: ProcessSwarm) -> "Counter[str]":
    """Of all trainers so far: seconds by activity, and tokens."""
    sums: Counter[str] = Counter()
    for status in swarm.poll():
        sums.update({TOKENS: status.tokens, **status.seconds})
    return sums


def table(bare: float, figures: dict[str, Figures]) -> str:
    rows = sorted({name for found in figures.values() for name in found})
    lines = [f"the step alone: {bare:,.0f} tokens a second", "", "| peers | " + " | ".join(figures) + " |"]
    lines += ["|---" * (len(figures) + 1) + "|"]
    for name in rows:
        values = " | ".join(f"{found.get(name, 0):.3f}" for found in figures.values())
        lines.append(f"| {name.replace('_', ' ')} | {values} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
