"""Keep the state of each microbatch at a server, and the time that it computes."""

from dataclasses import dataclass, field

from protocol.blobs.blob import Blob
from protocol.pipeline.messages import Direction, Outcome, Task

SMOOTHING = 0.2  # of compute times


@dataclass
class Work:
    """One task in progress, or its outcome; `size`: the bytes that it holds."""

    task: Task
    token: int
    size: int
    outcome: Outcome | None = None
    keeps_inputs: bool = False  # to compute its gradient again

    def blobs(self) -> set[Blob]:
        """Return the blobs that must stay in memory for it."""
        outcome = self.outcome
        inputs = {held.blob for held in self.task.inputs.named().values()}
        if outcome is None:
            return inputs
        result = {outcome.result} if outcome.result is not None else set()
        return result if self.task.direction == "backward" and not self.keeps_inputs else inputs | result


@dataclass
class Entry:
    """The state of a microbatch at a server. `deadline`: when it may be forgotten; `number`: its id."""

    deadline: float
    number: int | None = None
    work: dict[Direction, Work] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(work.size for work in self.work.values())

    def blobs(self) -> frozenset[Blob]:
        """Return the blobs that must stay in memory."""
        return frozenset[Blob]().union(*(work.blobs() for work in self.work.values()))


class ComputeTimes:
    """Smoothed milliseconds of a forward and of a backward."""

    def __init__(self) -> None:
        self._milliseconds: dict[Direction, float] = {}

    @property
    def rate(self) -> float:
        """Return the microbatches a second, 0 while it is unknown."""
        return 1000 / max(1e-3, sum(self._milliseconds.values())) if len(self._milliseconds) == 2 else 0.0

    def record(self, direction: Direction, milliseconds: float) -> None:
        mean = self._milliseconds.get(direction, milliseconds)
        self._milliseconds[direction] = mean + SMOOTHING * (milliseconds - mean)
