"""Choose the rounds whose states are kept: multiples of a power of two. PURE.

Keepers of different stages meet at such rounds without a word to each other, so the states that they hold join to one
model. The power grows until the downloads take a small share of the time.
"""

import math

from node.daemon.steering.round_clock import RoundClock

MAX_PERIOD = 1024  # rounds


class Marks:
    """The rounds to keep, for all keepers of one node.

    Args:
        min_seconds: the least time between two marks.
        link_share: the share of the time that downloads may take.
    """

    def __init__(self, min_seconds: float, link_share: float) -> None:
        self._clock = RoundClock()
        self._min_seconds = min_seconds
        self._link_share = link_share
        self._fetch_seconds: dict[str, float] = {}

    @property
    def period(self) -> int:
        """Return the rounds between two marks."""
        if not self._clock.seconds:
            return 1
        pause = max(self._min_seconds, sum(self._fetch_seconds.values()) / self._link_share)
        needed = min(MAX_PERIOD, max(1.0, pause / self._clock.seconds))
        return int(2 ** math.ceil(math.log2(needed)))

    def is_mark(self, round_number: int) -> bool:
        return round_number % self.period == 0

    def observe(self, round_number: int, now: float) -> None:
        """Note a round that enough peers of a stage report."""
        self._clock.observe(round_number, now)

    def record_fetch(self, run: str, seconds: float) -> None:
        """Note how long the last download of a run's state took."""
        self._fetch_seconds[run] = seconds

    def forget(self, run: str) -> None:
        """Count the downloads of a run no longer."""
        self._fetch_seconds.pop(run, None)
