"""Measure a trainer's threads on a machine that other programs use as well.

    python benchmarks/busy.py [--turns 3] [--seconds 6] [--json]

Inner steps of the demo by as many threads as there are cores, and by one, on a machine that is otherwise idle and
beside as many processes as cores and one more that train with one thread each; with the waits that a trainer is given
(`trainer_process.SPIN_LIMITS`) and with torch's own. Steps a second, medians of alternating turns. Takes five minutes.
Exit code 1 where all cores beside others are not 1.5 times as fast as with torch's own waits, or are slower than three
quarters of them on an idle machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.merge.training_step import Stepper
from node.options import threads_per_process
from node.paths import demo_manifest
from node.trainer.ipc.trainer_process import SPIN_LIMITS, THREAD_VARIABLES

CORES = threads_per_process(1)
GAIN, KEPT = 1.5, 0.75
OTHERS_SECONDS = 600.0  # and no longer, whatever becomes of us
KINDS = {"ours": (CORES, True), "torch's own": (CORES, False), "one thread": (1, True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.child is not None:
        train(words.child, words.seconds)
        return 0
    idle = turns(words.turns, words.seconds)
    with others(CORES + 1):
        busy = turns(words.turns, words.seconds)
    print(json.dumps({"idle": idle, "busy": busy}) if words.json else table(idle, busy))
    gained, kept = (found["ours"] / found["torch's own"] for found in (busy, idle))
    return int(gained < GAIN or kept < KEPT)


def turns(count: int, seconds: float) -> dict[str, float]:
    """Steps a second by kind."""
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(count):
        for kind, (threads, is_patient) in KINDS.items():
            process = child(threads, is_patient, seconds)
            speeds[kind].append(float(process.communicate()[0].splitlines()[-1]))
    return {kind: statistics.median(found) for kind, found in speeds.items()}


@contextmanager
def others(count: int) -> Iterator[None]:
    """So many processes that train with one thread; they run from before the first turn to the end."""
    processes = [child(1, True, OTHERS_SECONDS) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def child(threads: int, is_patient: bool, seconds: float) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in SPIN_LIMITS}
    environment |= dict.fromkeys(THREAD_VARIABLES, str(threads)) | (dict(SPIN_LIMITS) if is_patient else {})
    command = [sys.executable, __file__, "--child", str(threads), "--seconds", str(seconds)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def train(threads: int, seconds: float) -> None:
    """Prints a line once it is under way, and its steps a second in the end."""
    torch.set_num_threads(threads)
    stepper = Stepper(demo_manifest(), 0)
    stepper.timed_step()
    print("under way", flush=True)
    taken: list[float] = []
    while sum(taken) < seconds:
        taken.append(stepper.timed_step())
    print(len(taken) / sum(taken))


def table(idle: dict[str, float], busy: dict[str, float]) -> str:
    lines = [f"{CORES} cores, steps a second", "", "| waits | alone | beside others |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {kind} | {idle[kind]:.2f} | {busy[kind]:.2f} |" for kind in KINDS)])


if __name__ == "__main__":
    sys.exit(main())
