"""The microbatches at a server: their tasks and outcomes, the memory that they hold, and the queue for the trainer.

`StageServer` and its `StepPolicy` both work on one `MicrobatchTable`, and both append to its actions.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from protocol.blobs.blob import Blob
from protocol.pipeline.messages import Direction, Key, Outcome, Task
from protocol.pipeline.stages.memory import Memory
from protocol.pipeline.stages.server_events import Action, Compute, Drop, Fetch, ServerCounts, TakeStep
from protocol.pipeline.stages.settings import StageSettings

REMEMBERED = 4096  # ended microbatches, to refuse late tasks


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


class MicrobatchTable:
    """All microbatches at a server, and the actions that changes of the table require."""

    def __init__(self, settings: StageSettings) -> None:
        self.settings = settings
        self.counts = ServerCounts()
        self.memory = Memory(settings.memory, settings.task_bytes("backward"))
        self.entries: dict[Key, Entry] = {}
        self.ended: OrderedDict[Key, None] = OrderedDict()
        self.failed: OrderedDict[tuple[Key, Direction], Outcome] = OrderedDict()  # the owner may be elsewhere by now
        self.queue: deque[Work] = deque()  # tasks whose inputs are here
        self.running: Compute | TakeStep | None = None  # at the trainer
        self.unfinished: set[int] = set()  # tokens of the tasks without an outcome
        self.actions: list[Action] = []
        self._tokens = 0

    def new_token(self) -> int:
        """Return an id for a computation, which its end repeats."""
        self._tokens += 1
        return self._tokens

    def find(self, key: Key, direction: Direction) -> Work | None:
        """Return the task of a microbatch in a direction, finished or not."""
        entry = self.entries.get(key)
        return entry.work.get(direction) if entry is not None else None

    def has_forward(self, key: Key) -> bool:
        """Return whether the forward of a microbatch was computed here, so that its inputs are here too."""
        work = self.find(key, "forward")
        return work is not None and work.outcome is not None and work.outcome.status == "done"

    def needed_bytes(self, task: Task) -> int:
        """Return the bytes that a task needs beside those that the forward of its microbatch left here."""
        size = self.settings.task_bytes(task.direction)
        has_inputs = task.direction == "backward" and self.has_forward(task.key)
        return size - sum(self.settings.input_bytes("forward").values()) if has_inputs else size

    def has_memory_for(self, task: Task) -> bool:
        """Return whether the memory admits a task now."""
        size = self.needed_bytes(task)
        if task.direction == "backward":
            return self.memory.admits_backward(size)
        return self.memory.admits_replay(size) if task.replay else self.memory.admits_forward(task.key, size)

    def add(self, task: Task, now: float) -> None:
        """Take in a task, and fetch those of its inputs that are not here."""
        key, size = task.key, self.needed_bytes(task)
        self.memory.take(key, size)
        inputs = task.inputs.named()
        if task.direction == "backward" and self.has_forward(key):
            inputs = {name: held for name, held in inputs.items() if name == "gradient"}
        entry = self.entries.setdefault(key, Entry(now, task.number))
        self.extend(task, now)
        work = entry.work[task.direction] = Work(task, self.new_token(), size)
        self.unfinished.add(work.token)
        if inputs:
            self.actions.append(Fetch(key, task.direction, work.token, tuple(inputs.items())))
        else:
            self.queue.append(work)

    def extend(self, task: Task, now: float) -> None:
        """Move the deadline of a microbatch to that of a task of it, if this is later."""
        entry = self.entries[task.key]
        entry.deadline = max(entry.deadline, now + task.deadline_ms / 1000)

    def start(self, action: Compute | TakeStep) -> None:
        """Let the trainer begin a piece of work; it does one at a time."""
        self.running = action
        self.actions.append(action)

    def finish(self, work: Work, outcome: Outcome) -> None:
        """Keep the outcome of a task."""
        self.unfinished.discard(work.token)
        work.outcome = outcome

    def fail(self, work: Work, outcome: Outcome) -> None:
        """Remove a task that cannot be computed; its outcome answers a late copy of the same request."""
        key, direction = work.task.key, work.task.direction
        del self.entries[key].work[direction]
        self.unfinished.discard(work.token)
        self.free_unneeded(key)
        if outcome.status != "void":  # what a restart took can be computed again
            self.failed[key, direction] = outcome
            if len(self.failed) > REMEMBERED:
                self.failed.popitem(last=False)

    def free_unneeded(self, key: Key) -> None:
        """Free the blobs that no task of a microbatch needs any more, and its entry if it has no task."""
        (self.free if self.entries[key].work else self.forget)(key)

    def free(self, key: Key) -> None:
        """Free all of a microbatch but what its entry needs, and what the trainer reads at this moment."""
        entry, running = self.entries.get(key, Entry(0.0)), self.running
        size, kept = entry.size, entry.blobs()
        if isinstance(running, Compute) and running.task.key == key:
            size = max(size, self.settings.task_bytes(running.task.direction))
            kept |= {held.blob for held in running.task.inputs.named().values()}
        self.memory.shrink(key, size)
        self.actions.append(Drop(key, kept))

    def forget(self, key: Key) -> None:
        """Remove a microbatch, which may come back."""
        entry = self.entries.pop(key, None)
        self.unfinished -= {work.token for work in entry.work.values()} if entry is not None else set()
        self.free(key)

    def end(self, key: Key) -> None:
        """Remove a microbatch, of which later tasks are refused."""
        self.forget(key)
        self.ended[key] = None
        if len(self.ended) > REMEMBERED:
            self.ended.popitem(last=False)
