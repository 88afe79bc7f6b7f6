"""The microbatches at a server: their tasks and outcomes, the memory that they hold, and the queue for the trainer.

`StageServer` and its `StepPolicy` both work on one `MicrobatchTable`, and both append to its actions.

Admission to a step (`OpenStep`): a stage that steps while microbatches are between their forward and their backward
computes gradients with newer weights than their activations, which costs up to 14 % of the loss. So a server admits the
forwards of one step, and steps when all of their backwards are done. Gradients whose forward was computed at another
peer join the open step. Forwards wait for a place, backwards never do: a microbatch holds a place only while later
stages work on it, so no two steps wait for each other.

Admission by bytes (`Memory`): a microbatch takes memory for its forwards in the order of the stages, then for its
backwards in reverse order. Backwards and replays have memory that no forward can take, so the last task in that order
can always proceed, and no deadlock is possible.
"""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Container
from dataclasses import dataclass, field, replace
from statistics import median

from protocol.blobs.blob import Blob
from protocol.conduct import Suspension
from protocol.identity import PeerId
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import Direction, Key, Outcome, Task
from protocol.pipeline.server_events import Action, Compute, Drop, FetchInputs, ServerCounts, TakeStep
from protocol.pipeline.stage import StageSettings
from protocol.recent import RecentTable

MAX_WAITING = 1024  # owners
RESERVED_SHARE = 0.25  # for backwards and replays
REMEMBERED = 4096  # ended microbatches, to answer late tasks
PATIENCE = 4.0  # multiple of the usual time from a forward to its backward, for which a step waits for one
MIN_PATIENCE, FIRST_PATIENCE = 1.0, 30.0  # seconds; the second while nothing is measured
MIN_KEPT_SECONDS, KEPT_PATIENCES = 60.0, 8.0  # for which a microbatch is kept without a word of its owner
TURNAROUND_SMOOTHING = 0.2
MAX_LATENESS = 6  # 64 patiences
FORGIVEN_AFTER = 64  # microbatches in time
MAX_FATAL, MAX_FATAL_LEVEL, FATAL_SECONDS = 1024, 8, 60.0  # the last one doubles with each death of the trainer


class OpenStep:
    """The open step of a server. `size`: microbatches in a step."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_closing = False
        self._open: set[Key] = set()
        self._late: set[Key] = set()  # left behind; their gradients may still join a later step
        self._added = Ledger()
        self._count = 0

    @property
    def places(self) -> int:
        """The number of forwards that the open step can still admit."""
        members = len(self._open) + self._count
        return 0 if self.is_closing and members else max(0, self.size - members)

    @property
    def is_complete(self) -> bool:
        """Whether the step has all of its gradients."""
        return not self._open and self._count > 0 and (self.is_closing or self._count >= self.size)

    @property
    def added(self) -> Ledger:
        """The microbatches whose gradients the open step has."""
        return self._added

    @property
    def open_count(self) -> int:
        return len(self._open)

    def holds(self, key: Key) -> bool:
        """Return whether the step waits for the backward of this microbatch."""
        return key in self._open

    def enter(self, key: Key) -> None:
        self._open.add(key)

    def withdraw(self, key: Key) -> bool:
        """Forget a microbatch; return whether the step waited for it."""
        self._late.discard(key)
        if key not in self._open:
            return False
        self._open.discard(key)
        return True

    def leave_behind(self, key: Key) -> None:
        """Stop waiting for a microbatch whose owner is late."""
        self._open.discard(key)
        self._late.add(key)

    def is_late(self, owner: PeerId) -> bool:
        """Return whether microbatches of an owner were left behind and have not ended."""
        return any(key.owner == owner for key in self._late)

    def add(self, key: Key) -> None:
        """Count a gradient."""
        self._open.discard(key)
        self._late.discard(key)
        self._added.add(key)
        self._count += 1

    def close(self) -> None:
        """Admit no more forwards, so that a step that has begun ends early."""
        self.is_closing = True

    def take(self) -> Ledger:
        """End the step and return its microbatches; open ones carry over to the next step."""
        added, self._added, self._count, self.is_closing = self._added, Ledger(), 0, False
        return added


class Punctuality:
    """How soon owners come back with the backwards of their forwards; it decides how long a step waits for one.

    The measure is the time that our own microbatches take, because we trust it, or else the median owner's. An owner
    that a step has left behind gets no places for twice as long each time.
    """

    def __init__(self) -> None:
        self.me: PeerId | None = None
        self._means: dict[str, float] = {}  # seconds from a forward to its backward, by owner
        self._late: dict[str, Suspension] = {}  # owners that steps left behind, until their forwards are admitted

    @property
    def patience(self) -> float:
        """Return the seconds that a step waits for a microbatch."""
        if not self._means:
            return FIRST_PATIENCE
        usual = self._means.get(self.me or "", median(self._means.values()))
        return max(MIN_PATIENCE, PATIENCE * usual)

    @property
    def keeping(self) -> float:
        """Return the seconds that a server keeps a microbatch without a word of its owner."""
        return max(MIN_KEPT_SECONDS, KEPT_PATIENCES * self.patience)

    def record(self, owner: str, seconds: float, *, is_late: bool) -> None:
        """Record the backward of a microbatch."""
        self._means[owner] = self._means.get(owner, seconds) + TURNAROUND_SMOOTHING * (
            seconds - self._means.get(owner, seconds)
        )
        record = self._late.get(owner)
        if record is not None and not is_late and record.count_good(FORGIVEN_AFTER):
            del self._late[owner]

    def leave_behind(self, owner: str, now: float) -> None:
        """Turn an owner away for a while; more of its microbatches in that time change nothing."""
        record = self._late.setdefault(owner, Suspension())
        if record.raise_level(now, MAX_LATENESS):
            record.until = now + 2.0**record.level * self.patience

    def pause(self, owner: str, now: float) -> float:
        """Return for how many seconds an owner gets no places; 0 if nobody else makes use of them."""
        record = self._late.get(owner)
        if record is None or self._means.keys() <= {owner}:
            return 0.0
        return max(0.0, record.until - now)

    def keep_only(self, owners: Container[str]) -> None:
        """Forget owners that are gone."""
        self._means = {owner: mean for owner, mean in self._means.items() if owner in owners}
        self._late = {owner: record for owner, record in self._late.items() if owner in owners}


class FatalTasks:
    """The owners whose tasks the trainer died of.

    A trainer may die by chance during any task, so the first time has no consequence. From the second one on the task
    is invalid, and its owner gets nothing computed for twice as long each time.
    """

    def __init__(self) -> None:
        self._records = RecentTable[str, Suspension](MAX_FATAL)  # by share of the memory
        self._tasks = RecentTable[tuple[Key, Direction], int](MAX_FATAL)  # deaths

    def record_task(self, key: Key, direction: Direction) -> bool:
        """Record a death of the trainer during a task; return whether it was not the first one."""
        self._tasks[key, direction] = self._tasks.get((key, direction), 0) + 1
        return self.is_fatal(key, direction)

    def record(self, share: str, now: float) -> bool:
        """Record a death during a task of a peer's making; return whether it is to blame."""
        record = self._records.setdefault(share, Suspension())
        if record.raise_level(now, MAX_FATAL_LEVEL) and record.level > 1:
            record.until = now + FATAL_SECONDS * 2.0 ** (record.level - 2)
        return record.level > 1

    def record_computed(self, share: str) -> None:
        """Record that the trainer has computed a task."""
        if share in self._records and self._records[share].count_good(FORGIVEN_AFTER):
            del self._records[share]

    def is_fatal(self, key: Key, direction: Direction) -> bool:
        """Return whether the trainer died of this very task more than once."""
        return self._tasks.get((key, direction), 0) > 1

    def pause(self, share: str, now: float) -> float:
        """Return for how many seconds nothing is computed for an owner."""
        return max(0.0, self._records[share].until - now) if share in self._records else 0.0


class WaitingOwners:
    """Owners that a busy server turned away, in the order of their invitations."""

    def __init__(self) -> None:
        self._owners: dict[PeerId, None] = {}

    def add(self, owner: PeerId) -> None:
        """Queue an owner for an invitation; beyond MAX_WAITING owners must ask again by themselves."""
        if len(self._owners) < MAX_WAITING:
            self._owners[owner] = None

    def keep_only(self, owners: Container[PeerId]) -> None:
        """Remove owners that are gone."""
        self._owners = {owner: None for owner in self._owners if owner in owners}

    def invite(self, places: int, last: Container[PeerId] = ()) -> list[PeerId]:
        """Remove and return the owners to invite now, one for each place; those in `last` after all others."""
        invited = sorted(self._owners, key=lambda owner: owner in last)[:places]
        for owner in invited:
            del self._owners[owner]
        return invited


class Memory:
    """The bytes of activations that one server holds for all owners.

    Each owner with standing has a share of the memory of forwards; all other keys have one share together, because a
    key costs nothing.

    `backward_bytes`: the most that one backward needs; replays leave that much free.
    """

    def __init__(self, capacity: int, backward_bytes: int) -> None:
        self.capacity = capacity
        self.backward_bytes = backward_bytes
        self.shares = 1
        self._standing: frozenset[PeerId] | None = None  # None: every owner has a share of its own
        self._held: defaultdict[Key, int] = defaultdict(int)
        self._by_owner = Counter[PeerId]()
        self._used = 0

    @property
    def used(self) -> int:
        return self._used

    @property
    def forward_capacity(self) -> int:
        """The bytes that forwards may take."""
        return self.capacity - max(int(self.capacity * RESERVED_SHARE), self.backward_bytes)

    def admits_forward(self, key: Key, size: int) -> bool:
        """Return whether a forward fits into the memory of forwards and its owner's share."""
        limit = self.forward_capacity
        share = max(size, limit // self.shares)
        return self._used + size <= limit and self._held_in_share(key.owner) + size <= share

    def set_owners(self, owners: Collection[PeerId], standing: frozenset[PeerId] | None) -> None:
        """Divide the memory among the live owners with standing, and once more if there are others."""
        self._standing = standing
        strangers = [owner for owner in owners if self.is_stranger(owner)]
        self.shares = max(1, len(owners) - len(strangers) + bool(strangers))

    def share_of(self, owner: PeerId) -> str:
        """Return the name of the share that an owner uses: its own, or "" for that of all strangers."""
        return "" if self.is_stranger(owner) else owner

    def is_stranger(self, owner: PeerId) -> bool:
        """Return whether an owner has no share of its own."""
        return self._standing is not None and owner not in self._standing

    def _held_in_share(self, owner: PeerId) -> int:
        if not self.is_stranger(owner):
            return self._by_owner[owner]
        return sum(held for other, held in self._by_owner.items() if self.is_stranger(other))

    def forward_places(self, size: int) -> int:
        """Return how many forwards fit, whoever owns them."""
        return max(0, self.forward_capacity - self._used) // size

    def admits_replay(self, key: Key, size: int) -> bool:
        """Return whether a replay fits, and leaves room for a backward in the memory and in its owner's share."""
        fits = self._used + size + self.backward_bytes <= self.capacity
        return fits and self._held_in_share(key.owner) + size <= self._whole_share()

    def admits_backward(self, key: Key, size: int) -> bool:
        """Return whether a backward fits into the memory and its owner's share."""
        fits = self._used + size <= self.capacity
        return fits and self._held_in_share(key.owner) + size <= self._whole_share() + self.backward_bytes

    def _whole_share(self) -> int:
        """Return the bytes that an owner's forwards and replays may take: a replay fits beside all of its forwards."""
        forwards = max(self.backward_bytes, self.forward_capacity // self.shares)
        return max(self.capacity // self.shares, forwards + self.backward_bytes)

    def take(self, key: Key, size: int) -> None:
        """Allocate bytes to a microbatch."""
        self._held[key] += size
        self._by_owner[key.owner] += size
        self._used += size

    def shrink(self, key: Key, size: int) -> None:
        """Keep only `size` bytes of a microbatch."""
        self.take(key, size - self._held.get(key, 0))
        if not size:
            del self._held[key]
            if not self._by_owner[key.owner]:
                del self._by_owner[key.owner]


@dataclass
class Work:
    """One task in progress, or its outcome; `size`: the bytes that it holds."""

    task: Task
    token: int
    size: int
    outcome: Outcome | None = None
    keeps_inputs: bool = False  # for subtracting its gradient later

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
    """The state of a microbatch at a server.

    Args:
        deadline: when it may be forgotten.
        number: its id in an exact step.
        began: when its forward was accepted; None if that was at another peer.
        awaited: until when the open step waits for its backward.
    """

    deadline: float
    number: int | None = None
    began: float | None = None
    awaited: float = math.inf
    is_ready: bool = False  # the inputs of its backward are here
    work: dict[Direction, Work] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(work.size for work in self.work.values())

    @property
    def waits_for_owner_until(self) -> float:
        """Return when the open step goes on without this microbatch, because its owner is late."""
        return math.inf if self.is_ready else self.awaited

    def blobs(self) -> frozenset[Blob]:
        """Return the blobs that must stay in memory."""
        return frozenset[Blob]().union(*(work.blobs() for work in self.work.values()))


class MicrobatchTable:
    """All microbatches at a server, and the actions that changes of the table require."""

    def __init__(self, settings: StageSettings) -> None:
        self.settings = settings
        self.counts = ServerCounts()
        self.memory = Memory(settings.memory, settings.task_bytes("backward"))
        self.punctuality = Punctuality()
        self.fatal = FatalTasks()
        self.entries: dict[Key, Entry] = {}
        self.ended: OrderedDict[Key, None] = OrderedDict()
        # Answers for late copies of a request, because the owner may have asked another peer since.
        self.failed: OrderedDict[tuple[Key, Direction], Outcome] = OrderedDict()
        self.queue: deque[Work] = deque()  # tasks whose inputs are here
        self.running: Compute | TakeStep | None = None  # at the trainer
        self.unfinished: set[int] = set()  # tokens of tasks without an outcome
        self.actions: list[Action] = []
        self._tokens = 0

    def new_token(self) -> int:
        """Return an id for a computation; the event that ends it has the same id."""
        self._tokens += 1
        return self._tokens

    def find(self, key: Key, direction: Direction) -> Work | None:
        """Return the task of a microbatch in a direction, finished or not."""
        entry = self.entries.get(key)
        return entry.work.get(direction) if entry is not None else None

    def has_forward(self, key: Key) -> bool:
        """Return whether the forward of a microbatch was computed here, which means its inputs are here."""
        work = self.find(key, "forward")
        return work is not None and work.outcome is not None and work.outcome.status == "done"

    def needed_bytes(self, task: Task) -> int:
        """Return the bytes that a task needs in addition to the inputs that its forward left here."""
        size = self.settings.task_bytes(task.direction)
        has_inputs = task.direction == "backward" and self.has_forward(task.key)
        return size - sum(self.settings.input_bytes("forward").values()) if has_inputs else size

    def has_memory_for(self, task: Task) -> bool:
        """Return whether the memory admits a task now."""
        size = self.needed_bytes(task)
        if task.direction == "backward":
            return self.memory.admits_backward(task.key, size)
        return self.memory.admits_replay(task.key, size) if task.replay else self.memory.admits_forward(task.key, size)

    def add(self, task: Task, now: float) -> None:
        """Add a task, and fetch the inputs that are not here."""
        key, size = task.key, self.needed_bytes(task)
        self.memory.take(key, size)
        task, is_resumed = self._with_inputs_of_forward(task), self.has_forward(key)
        inputs = task.inputs.named()
        if task.direction == "backward" and is_resumed:
            inputs = {name: held for name, held in inputs.items() if name == "gradient"}
        entry = self.entries.setdefault(key, Entry(now, task.number))
        self.extend(task, now)
        work = entry.work[task.direction] = Work(task, self.new_token(), size)
        self.unfinished.add(work.token)
        if inputs:
            self.actions.append(FetchInputs(key, task.direction, work.token, tuple(inputs.items())))
        else:
            self.queue.append(work)

    def _with_inputs_of_forward(self, task: Task) -> Task:
        """Return a backward with the inputs of its forward, whatever it names itself: only those are here.

        An honest owner names others if their maker has gone and a replay on another device has given other bits.
        """
        forward = self.find(task.key, "forward")
        if task.direction == "forward" or forward is None or not self.has_forward(task.key):
            return task
        return replace(task, inputs=replace(forward.task.inputs, gradient=task.inputs.gradient))

    def extend(self, task: Task, now: float) -> None:
        """Extend the deadline of a microbatch to the deadline of this task, if that is later."""
        entry = self.entries[task.key]
        entry.deadline = max(entry.deadline, now + min(task.deadline_ms / 1000, self.punctuality.keeping))

    def start(self, action: Compute | TakeStep) -> None:
        """Send work to the trainer, which handles one piece at a time."""
        self.running = action
        self.actions.append(action)

    def finish(self, work: Work, outcome: Outcome) -> None:
        """Keep the outcome of a task; a finished backward needs its forward no more."""
        self.unfinished.discard(work.token)
        work.outcome = outcome
        if work.task.direction == "backward":
            forward = self.entries[work.task.key].work.pop("forward", None)
            self.unfinished.discard(forward.token if forward is not None else work.token)

    def fail(self, work: Work, outcome: Outcome) -> None:
        """Remove a task that cannot be computed; its outcome answers a late copy of the same request."""
        key, direction = work.task.key, work.task.direction
        del self.entries[key].work[direction]
        self.entries[key].is_ready = False
        self.unfinished.discard(work.token)
        self.free_unneeded(key)
        if outcome.status != "void":  # lost to a restart, so it may be computed again
            self.failed[key, direction] = outcome
            if len(self.failed) > REMEMBERED:
                self.failed.popitem(last=False)

    def free_unneeded(self, key: Key) -> None:
        """Free blobs that no task of a microbatch needs, or its entry if it has no task."""
        (self.free if self.entries[key].work else self.forget)(key)

    def free(self, key: Key) -> None:
        """Free a microbatch's blobs, except those that its entry needs or the trainer is reading."""
        entry, running = self.entries.get(key, Entry(0.0)), self.running
        size, kept = entry.size, entry.blobs()
        if isinstance(running, Compute) and running.task.key == key:
            size = max(size, self.settings.task_bytes(running.task.direction))
            kept |= {held.blob for held in running.task.inputs.named().values()}
        self.memory.shrink(key, size)
        self.actions.append(Drop(key, kept))

    def forget(self, key: Key) -> None:
        """Remove a microbatch; its tasks may be sent again."""
        entry = self.entries.pop(key, None)
        self.unfinished -= {work.token for work in entry.work.values()} if entry is not None else set()
        self.free(key)

    def end(self, key: Key) -> None:
        """Remove a microbatch for good; later tasks get the outcome `ended`."""
        self.forget(key)
        self.ended[key] = None
        if len(self.ended) > REMEMBERED:
            self.ended.popitem(last=False)
