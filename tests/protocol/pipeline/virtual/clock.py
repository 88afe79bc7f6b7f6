"""Virtual time: actions in the order of their times."""

import heapq
from collections.abc import Callable


class Clock:
    """A queue of actions, and the time of the last one that was taken."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._sequence = 0

    def schedule(self, delay: float, act: Callable[[], object]) -> None:
        self.schedule_at(self.now + delay, act)

    def schedule_at(self, time: float, act: Callable[[], object]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (time, self._sequence, act))

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        while self._queue and self._queue[0][0] <= until and not stop():
            self.now, _, act = heapq.heappop(self._queue)
            act()
        if not stop():
            self.now = until
