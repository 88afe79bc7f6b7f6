"""Where a trainer's time goes."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from node.channel import Activity


class Stopwatch:
    """Seconds spent by activity, added to those of earlier lives."""

    def __init__(self, earlier: Mapping[Activity, float], clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[Activity, float] = dict(earlier)
        self._clock = clock

    @contextmanager
    def spend(self, activity: Activity) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[activity] = self.seconds.get(activity, 0.0) + self._clock() - start
