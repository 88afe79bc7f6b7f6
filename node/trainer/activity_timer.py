"""Measure how long a trainer spends on each activity."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from node.trainer.ipc.channel import Activity


class ActivityTimer:
    """Seconds spent on each activity, including those of earlier processes."""

    def __init__(self, seconds: Mapping[Activity, float], clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[Activity, float] = dict(seconds)
        self._clock = clock

    @contextmanager
    def measure(self, activity: Activity) -> Iterator[None]:
        """Add the time inside the context to `activity`."""
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[activity] = self.seconds.get(activity, 0.0) + self._clock() - start

    def share(self, activity: Activity) -> float:
        """Return the share of all seconds that an activity has taken, from 0 to 1."""
        total = sum(self.seconds.values())
        return self.seconds.get(activity, 0.0) / total if total else 0.0
