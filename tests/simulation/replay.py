"""`python -m tests.simulation.replay SEED` shows what happens under a seed; with `--seeds 100000` many are tried."""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence

from tests.simulation.seeded_run import InvariantError, SeededRun
from tests.simulation.seeds import BATCH, broken_runs


def show(seed: int, isolating: bool, lies: Sequence[str]) -> str:
    """What broke; empty where nothing did."""
    story = SeededRun(seed, isolating, lies=lies)
    try:
        story.run()
    except InvariantError as broken:
        story.print_trace()
        return str(broken)
    story.print_trace()
    return ""


def outcomes(batch: tuple[int, int, bool]) -> list[str]:
    """What broke under these seeds."""
    return [story.fault for story in broken_runs(*batch)]


def sweep(first: int, count: int, isolating: bool, workers: int) -> int:
    """How many seeds broke."""
    batches = [(start, min(BATCH, first + count - start), isolating) for start in range(first, first + count, BATCH)]
    faults, started = 0, time.monotonic()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for done, found in enumerate(pool.imap_unordered(outcomes, batches), 1):
            faults += len(found)
            sys.stdout.writelines(f"{line}\n" for line in found)
            if done % 50 == 0 or done == len(batches):
                passed, seconds = min(done * BATCH, count), time.monotonic() - started
                sys.stdout.write(f"{passed} seeds, {faults} broken, {seconds:.0f} s\n")
            sys.stdout.flush()
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.replay")
    parser.add_argument("seed", type=int, nargs="?", help="show what happens under this seed")
    parser.add_argument("--seeds", type=int, default=0, help="try so many instead")
    parser.add_argument("--first", type=int, default=0, help="the first of these")
    parser.add_argument("--workers", type=int, default=2, help="processes that try them")
    parser.add_argument("--isolating", action="store_true", help="peers may be apart for long, and chains fork")
    parser.add_argument("--lies", default="", metavar="A,B", help="the lies that peers may tell under SEED")
    given = parser.parse_args()
    if given.seed is not None:
        lies = [lie.replace("-", " ") for lie in given.lies.split(",") if lie]
        sys.exit(show(given.seed, given.isolating, lies) or 0)
    if not given.seeds:
        parser.error("a SEED, or --seeds N")
    faults = sweep(given.first, given.seeds, given.isolating, given.workers)
    sys.exit(f"{faults} seeds broke" if faults else 0)


if __name__ == "__main__":
    main()
