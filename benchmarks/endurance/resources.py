"""Measure the resources that daemons take over time, and whether they grow."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import psutil

from node.commands.up.peer_process import PeerProcess
from tests.swarm.process_swarm import daemon_pid

WARM_UP_SECONDS = 900.0  # of a life, usually: until the tables of the last 64 rounds are full
MIN_LIFE_SECONDS = 1200.0  # behind it: in minutes, an hour's megabyte is far below what comes and goes
LOW_SECONDS = 60.0  # of which the least counts: the rest is what a round takes and gives back
SAMPLE_SECONDS = 2.0
MEGABYTE = 1e6
UNITS: Final[Mapping[str, float]] = MappingProxyType(
    {"resident_mb": MEGABYTE, "shared_mb": MEGABYTE, "descriptors": 1.0, "threads": 1.0}
)
Samples = list[tuple[float, float]]  # seconds, and how much there was then


class Slope(NamedTuple):
    """Of one life, an hour, with its standard error."""

    rate: float
    error: float


class Growth(NamedTuple):
    """An hour: the middle and the greatest of so many lives, and the standard error of the middle one of them."""

    middle: float
    greatest: float
    error: float
    lives: int


@dataclass
class ResourceMonitor:
    """By quantity, and by life of a daemon. `warm_up`: so many seconds of each life do not count."""

    warm_up: float = WARM_UP_SECONDS
    lives: dict[str, dict[int, Samples]] = field(default_factory=lambda: {name: {} for name in UNITS})
    _next: float = 0.0

    def sample(self, peers: Iterable[PeerProcess], now: float) -> None:
        """Now and then."""
        if now < self._next:
            return
        self._next = now + SAMPLE_SECONDS
        for peer in peers:
            try:
                process = psutil.Process(daemon_pid(peer))
                memory = process.memory_info()
                taken = (memory.rss, memory.shared, process.num_fds(), process.num_threads())
            except psutil.NoSuchProcess:
                continue
            for (name, unit), amount in zip(UNITS.items(), taken, strict=True):
                self.lives[name].setdefault(process.pid, []).append((now, amount / unit))

    def growth(self) -> dict[str, Growth]:
        """Of the lives that were long enough; a quantity is left out where none was."""
        slopes = {
            name: [fit_slope(samples, self.warm_up) for samples in lives.values()] for name, lives in self.lives.items()
        }
        long_enough = {name: [slope for slope in found if slope is not None] for name, found in slopes.items()}
        return {name: summarize_slopes(found) for name, found in long_enough.items() if found}


def summarize_slopes(slopes: Sequence[Slope]) -> Growth:
    rates = [slope.rate for slope in slopes]
    return Growth(statistics.median(rates), max(rates), statistics.median(slope.error for slope in slopes), len(rates))


def fit_slope(samples: Sequence[tuple[float, float]], warm_up: float) -> Slope | None:
    """The line of least squares through each minute's least behind the warm-up; None where that is short."""
    begins = samples[0][0] + warm_up
    if samples[-1][0] - begins < MIN_LIFE_SECONDS:
        return None
    lows: dict[int, float] = {}
    for now, amount in samples:
        if now >= begins:
            minute = int((now - begins) / LOW_SECONDS)
            lows[minute] = min(amount, lows.get(minute, amount))
    line, covariance = np.polyfit(list(lows), list(lows.values()), 1, cov=True)
    per_hour = 3600 / LOW_SECONDS
    return Slope(float(line[0]) * per_hour, math.sqrt(covariance[0, 0]) * per_hour)
