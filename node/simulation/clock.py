"""The virtual clock: things happen in the order of their times, and of equal times in the order they were asked for."""

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """`now` in virtual seconds since the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def schedule(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._numbers), action))

    def run(self, is_finished: Callable[[], bool]) -> bool:
        """Until `finished`; False when nothing is left to happen before that."""
        while not is_finished():
            if not self._queue:
                return False
            self.now, _, action = heapq.heappop(self._queue)
            action()
        return True
