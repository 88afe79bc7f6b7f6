"""Where a trainer's time goes."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from node.channel import Activity


class ActivityTimer:
    """Seconds spent by activity, added to those of earlier lives."""

    def __init__(self, seconds: Mapping[Activity, float], clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[Activity, float] = dict(seconds)
        self._clock = clock

    @contextmanager
    def measure(self, activity: Activity) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[activity] = self.seconds.get(activity, 0.0) + self._clock() - start
