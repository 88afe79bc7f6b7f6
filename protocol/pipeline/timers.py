"""Timers of an owner: when it sends a request again, and when it looks at the waiting microbatches of a stage."""

import heapq
from collections.abc import Iterator
from typing import NamedTuple


class AskAgain(NamedTuple):
    """A request of a microbatch, by its attempt."""

    serial: int
    attempt: int


class Wake(NamedTuple):
    """The waiting microbatches of a stage."""

    stage: int


class Timers:
    """All timers of an owner of `stages` stages; one for each stage, the earliest."""

    def __init__(self, stages: int) -> None:
        self._heap: list[tuple[float, int, AskAgain | Wake]] = []
        self._count = 0
        self._wake_at: list[float | None] = [None] * stages

    @property
    def due(self) -> float | None:
        """Return when the next one is due."""
        return self._heap[0][0] if self._heap else None

    def ask_again(self, time: float, serial: int, attempt: int) -> None:
        self._push(time, AskAgain(serial, attempt))

    def wake(self, stage: int, time: float | None) -> None:
        """Look at a stage at this time, if no earlier one is set; `None` sets none."""
        planned = self._wake_at[stage]
        if time is not None and (planned is None or time < planned):
            self._wake_at[stage] = time
            self._push(time, Wake(stage))

    def take(self, now: float) -> Iterator[AskAgain | Wake]:
        """Yield those that are due, also ones that are set meanwhile."""
        while self._heap and self._heap[0][0] <= now:
            _, _, timer = heapq.heappop(self._heap)
            if isinstance(timer, Wake):
                self._wake_at[timer.stage] = None
            yield timer

    def _push(self, time: float, timer: AskAgain | Wake) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, timer))
