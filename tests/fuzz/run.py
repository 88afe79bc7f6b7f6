"""Hand drawn frames to their targets under a bound of time and memory, and record what goes wrong."""

import logging
import random
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.fuzz.frames import Target
from tests.fuzz.targets import all_targets

SECONDS_PER_FRAME = 2.0  # of CPU time
HANG_SECONDS = 30
MAX_GROWTH_BYTES = 512 << 20


@dataclass
class Find:
    """A frame that a target did not take as it should."""

    target: str
    frame: bytes
    reason: str


@dataclass
class Report:
    """What became of the frames, by target."""

    frames: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)
    finds: list[Find] = field(default_factory=list)
    growth_bytes: int = 0


def fuzz(frames: int, seed: int, only: str = "", seconds: float = float("inf")) -> Report:
    """Draw so many frames, or for so many seconds."""
    draw, report = random.Random(f"murmur fuzz {seed}"), Report()
    targets = [target for target in all_targets() if only in target.name]
    weights = [target.weight for target in targets]
    before, ends = _peak_bytes(), time.monotonic() + seconds
    logging.disable(logging.WARNING)  # the receivers log what they refuse
    for target in draw.choices(targets, weights, k=frames):
        if time.monotonic() > ends:
            break
        run_frame(target, target.make(draw), report)
    logging.disable(logging.NOTSET)
    report.growth_bytes = _peak_bytes() - before
    return report


def run_frame(target: Target, frame: bytes, report: Report) -> None:
    """Hand one frame to a target."""
    report.frames[target.name] += 1
    started = time.process_time()
    try:
        with _alarm():
            target.decode(frame)
        report.accepted[target.name] += 1
    except target.refusals as error:
        report.refused[type(error).__name__] += 1
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {str(error)[:200]} ({place.filename}:{place.lineno})"
        report.finds.append(Find(target.name, frame, reason))
    spent = time.process_time() - started
    report.slowest[target.name] = max(report.slowest.get(target.name, 0.0), spent)
    if spent > SECONDS_PER_FRAME:
        report.finds.append(Find(target.name, frame, f"{spent:.1f} s"))


@contextmanager
def _alarm() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise RuntimeError(f"hangs for {HANG_SECONDS} s")

    signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(HANG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
