"""What a server keeps of each microbatch."""

from dataclasses import dataclass, field

from protocol.blobs.blob import Blob
from protocol.pipeline.messages import Direction, Outcome, Task


@dataclass
class Work:
    """One task in progress, or its outcome; `size`: the bytes that it holds."""

    task: Task
    token: int
    size: int
    outcome: Outcome | None = None

    def blobs(self) -> set[Blob]:
        """Return the blobs that must stay in memory for it."""
        outcome = self.outcome
        inputs = {held.blob for held in self.task.inputs.named().values()}
        if outcome is None:
            return inputs
        result = {outcome.result} if outcome.result is not None else set()
        return result if self.task.direction == "backward" else inputs | result


@dataclass
class Entry:
    """What the server knows of a microbatch. `deadline`: when it may be forgotten."""

    deadline: float
    work: dict[Direction, Work] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(work.size for work in self.work.values())

    def blobs(self) -> frozenset[Blob]:
        """Return the blobs that must stay in memory."""
        return frozenset[Blob]().union(*(work.blobs() for work in self.work.values()))
