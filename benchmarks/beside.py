"""Measure how an exchange slows the trainer: the time of an inner step while peers merge, over that while they idle.

    python benchmarks/beside.py [--numel 25000000] [--turns 5] [--json]

Four peers, each behind a link of 100 Mbit/s, merge a dense fp16 vector over and over, on all cores but one. On that one
the demo's model is trained, as a trainer has its accelerator, or cores, to itself. Memory and caches are shared, and
with three peers more than in a real run. Steps beside idle peers and beside a merge alternate; the figure is the median
of the turns' ratios of medians. Needs two cores, root, iproute2, nftables and iptables. Exit code 1 above 1.05.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from benchmarks.links import DEMO, PEERS, RUN_SECONDS, SETTINGS, Place
from benchmarks.merge.training_step import Stepper
from benchmarks.merge.worker import Team
from tests.netlab.lab.laboratory import Laboratory
from tests.netlab.lab.namespaces import reason_unavailable

TARGET = 1.05
IDLE_STEPS = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    reason = reason_unavailable() or (None if len(cores) > 1 else "it takes two cores")
    if reason is not None:
        parser.error(reason)
    with Laboratory() as laboratory:
        place = Place.built(laboratory, SETTINGS["100"], PEERS)
        with on_cores(cores[:-1]):  # what is started here stays there
            team = place.team("benchmarks.merge.murmuration_peer", numel=words.numel, recipe="averaging", codec="fp16")
            with team as merging, on_cores(cores[-1:]):
                ratio = step_ratio(merging, Stepper(DEMO, 0), words.turns)
    print(json.dumps({"step_ratio": ratio}) if words.json else f"an inner step beside a merge takes {ratio:.3f} times")
    return int(ratio > TARGET)


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """This thread, and what it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def step_ratio(team: Team, stepper: Stepper, turns: int) -> float:
    """Median over turns, the first left out: then connections are made, and loops loaded."""
    torch.set_num_threads(1)
    ratios = []
    with ThreadPoolExecutor(1) as pool:
        for turn in range(turns + 1):
            idle = [stepper.timed_step() for _ in range(IDLE_STEPS)]
            team.request_all(prepare=True)
            merge, busy = pool.submit(team.merge, RUN_SECONDS), []
            while not merge.done():
                busy.append(stepper.timed_step())
            merge.result()
            ratios.append(statistics.median(busy) / statistics.median(idle))
            sys.stderr.write(f"turn {turn}: {len(busy)} steps beside a merge, {ratios[-1]:.3f} of one beside none\n")
    return statistics.median(ratios[1:])


if __name__ == "__main__":
    sys.exit(main())
