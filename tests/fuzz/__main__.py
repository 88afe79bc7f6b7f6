"""`python -m tests.fuzz [--frames N] [--seed S] [--only TARGET] [--seconds T]`: fuzz every decoder, print a report."""

import argparse
import sys

import torch

from tests.fuzz.corpus import save
from tests.fuzz.run import MAX_GROWTH_BYTES, Report, fuzz

SHOWN_FINDS = 20


def show(report: Report) -> None:
    for name, count in sorted(report.frames.items()):
        slowest = report.slowest[name] * 1000
        print(f"{name:62} {count:9,} frames  {report.accepted[name]:8,} accepted  slowest {slowest:7.1f} ms")
    print("refused:", ", ".join(f"{name} {count:,}" for name, count in report.refused.most_common()))
    print(f"memory grew by {report.growth_bytes >> 20} MB; {len(report.finds)} finds")
    for find in report.finds[:SHOWN_FINDS]:
        print(f"  {find.target}: {find.reason}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets whose name contains this")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--save", action="store_true", help="add the finds to the corpus")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = fuzz(options.frames, options.seed, options.only, options.seconds)
    show(report)
    if options.save:
        save(report.finds)
    return int(bool(report.finds) or report.growth_bytes > MAX_GROWTH_BYTES)


if __name__ == "__main__":
    sys.exit(main())
