"""What daemons take of their machine over time, and whether it grows."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import psutil

from node.local.peer_process import PeerProcess
from tests.swarm.flock import pid_of

WARM_UP_SECONDS = 900.0  # of a life, not looked at: until the tables of the last 64 rounds are full
LEAST_SECONDS = 1200.0  # that are: in minutes, an hour's megabyte is far below what comes and goes
LOW_SECONDS = 60.0  # of which the least counts: the rest is what a round takes and gives back
SAMPLE_SECONDS = 2.0
MEGABYTE = 1e6
UNITS: Final[Mapping[str, float]] = MappingProxyType(
    {"resident_mb": MEGABYTE, "shared_mb": MEGABYTE, "descriptors": 1.0, "threads": 1.0}
)
Samples = list[tuple[float, float]]  # seconds, and how much there was then


@dataclass
class Resources:
    """By quantity, and by life of a daemon."""

    lives: dict[str, dict[int, Samples]] = field(default_factory=lambda: {name: {} for name in UNITS})
    _next: float = 0.0

    def look(self, peers: Iterable[PeerProcess], now: float) -> None:
        """Now and then."""
        if now < self._next:
            return
        self._next = now + SAMPLE_SECONDS
        for peer in peers:
            try:
                process = psutil.Process(pid_of(peer))
                memory = process.memory_info()
                taken = (memory.rss, memory.shared, process.num_fds(), process.num_threads())
            except psutil.NoSuchProcess:
                continue
            for (name, unit), amount in zip(UNITS.items(), taken, strict=True):
                self.lives[name].setdefault(process.pid, []).append((now, amount / unit))

    def growth(self) -> dict[str, list[float]]:
        """An hour, of each life that was long enough, smallest first."""
        return {
            name: sorted(slope for samples in lives.values() if (slope := slope_of(samples)) is not None)
            for name, lives in self.lives.items()
        }


def slope_of(samples: Sequence[tuple[float, float]]) -> float | None:
    """An hour, the line of least squares through each minute's least behind the warm-up; None where that is short."""
    begins = samples[0][0] + WARM_UP_SECONDS
    if samples[-1][0] - begins < LEAST_SECONDS:
        return None
    lows: dict[int, float] = {}
    for now, amount in samples:
        if now >= begins:
            minute = int((now - begins) / LOW_SECONDS)
            lows[minute] = min(amount, lows.get(minute, amount))
    slope, _ = statistics.linear_regression(list(lows), list(lows.values()))
    return slope * 3600 / LOW_SECONDS
