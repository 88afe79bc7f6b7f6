"""The server of one stage: admits tasks, has their inputs fetched and computed, and keeps the ledger. No I/O.

A server never waits for another server, and holds nothing that only an owner's word can free: deadlines and the death
of an owner free it too.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from protocol.identity import PeerId
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import Answer, AnswerKind, Direction, Key, Outcome, OutcomeStatus, Task
from protocol.pipeline.stages.entry import ComputeTimes, Entry, Work
from protocol.pipeline.stages.gate import Gate, WaitingOwners
from protocol.pipeline.stages.memory import Memory
from protocol.pipeline.stages.server_events import (
    Action,
    CloseStep,
    Compute,
    Computed,
    Drain,
    Drop,
    Event,
    Fetch,
    Fetched,
    FetchFailed,
    Invite,
    OwnersChanged,
    ReleasedBy,
    RoundChanged,
    ServerCounts,
    Stepped,
    TakeStep,
    Tell,
    Tick,
    TrainerRestarted,
)
from protocol.pipeline.stages.settings import StageSettings

MAX_ROUND_DISTANCE = 8  # stages keep one round apart themselves, but a trainer in mid-step may be behind its stage
MIN_PAUSE_MS, MAX_PAUSE_MS, UNINVITED_PAUSE_MS = 50, 2000, 10_000
QUEUE_SECONDS, MAX_QUEUED = 1.25, 64  # work that waits here before forwards are turned away; tasks at an unknown rate
REMEMBERED = 4096  # ended microbatches, to refuse late tasks


class StageServer:
    """One stage at one peer. `life` is larger than that of every earlier process; `ledger`: what its state contains."""

    def __init__(self, settings: StageSettings, life: int, round_number: int, ledger: Ledger) -> None:
        self.settings = settings
        self.life = life
        self.round = round_number
        self.ledger = ledger  # of the steps since the last contribution
        self.gate = Gate(settings.step_size)
        self.memory = Memory(settings.memory, settings.task_bytes("backward"))
        self.counts = ServerCounts()
        self.is_draining = False
        self._entries: dict[Key, Entry] = {}
        self._contributed = Ledger()  # of earlier contributions, while their microbatches are open
        self._failed: OrderedDict[tuple[Key, Direction], Outcome] = OrderedDict()  # the owner may be elsewhere by now
        self._ended: OrderedDict[Key, None] = OrderedDict()
        self._ready: deque[tuple[Key, Direction, int]] = deque()
        self._computing: Compute | TakeStep | None = None
        self._unfinished: set[int] = set()  # tokens of the tasks without an outcome
        self._waiting = WaitingOwners()
        self._owners: Mapping[PeerId, int] = {}  # the live ones, with their first serials
        self._tokens = 0
        self._times = ComputeTimes()
        self._actions: list[Action] = []

    @property
    def rate(self) -> float:
        """Return the microbatches a second that this peer computes, 0 while it is unknown."""
        return self._times.rate

    @property
    def is_idle(self) -> bool:
        """Return whether a draining server may leave: its step is made, and nobody needs a result of it."""
        return self._computing is None and not self.gate.added and not self._entries

    def next_deadline(self) -> float | None:
        """Return the time of the next Tick that does something."""
        return min((entry.deadline for entry in self._entries.values()), default=None)

    def take_ledger(self) -> Ledger:
        """Return the microbatches of all steps since the last contribution, which now contains them."""
        taken, self.ledger = self.ledger, Ledger()
        self._contributed = Ledger(key for key in self._contributed | taken if key in self._entries)
        return taken

    def ask(self, task: Task, now: float) -> tuple[Answer, list[Action]]:
        """Answer a task at once, and start it if it is accepted."""
        answer = self._judge(task, now)
        self.counts.answers[answer.kind] += 1
        return answer, self._take_actions()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event and return the actions that follow from it."""
        match event:
            case Fetched() | FetchFailed() | Computed():
                self._on_progress(event)
            case Stepped():
                self._on_step()
            case ReleasedBy():
                self._on_release(event)
            case OwnersChanged():
                self._on_owners(event)
            case TrainerRestarted():
                self._on_restart(event)
            case CloseStep():
                self.gate.close()
            case Drain():
                self.is_draining = True
                self.gate.close()
            case RoundChanged():
                self.round = event.round
            case Tick():
                self._strike([key for key, entry in self._entries.items() if entry.deadline <= now])
        self._run()
        self._actions += map(Invite, self._waiting.invite(self._places()))
        return self._take_actions()

    def _take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    # Admission

    def _judge(self, task: Task, now: float) -> Answer:
        refusal = self._refusal(task)
        if refusal is not None:
            return self._answer(refusal)
        if task.key in self._ended:
            return self._answer("known", self._outcome(task, "ended"))
        work = self._work(task.key, task.direction)
        if work is not None:
            self._extend(task, now)
            self.counts.duplicates += 1
            return self._answer("accepted") if work.outcome is None else self._answer("known", work.outcome)
        failed = self._failed.get((task.key, task.direction))
        if failed is not None and task.attempt <= failed.attempt:
            return self._answer("known", failed)
        busy = self._busy_ms(task)
        if busy:
            return replace(self._answer("busy"), retry_ms=busy)
        self._accept(task, now)
        return self._answer("accepted")

    def _answer(self, kind: AnswerKind, outcome: Outcome | None = None) -> Answer:
        return Answer(kind, self.life, self.round, self.rate, outcome=outcome)

    def _refusal(self, task: Task) -> AnswerKind | None:
        """Return why a task is not for this server at all."""
        if task.run != self.settings.run:
            return "other stage"
        if task.life not in (0, self.life):
            return "other life"
        if abs(task.round - self.round) > MAX_ROUND_DISTANCE and not self.gate.holds(task.key):
            return "other round"  # a step that waits for the microbatch could not end, and its round neither
        sizes = {name: held.blob.size for name, held in task.inputs.named().items()}
        has_room = self.ledger.has_room_for(task.key) and self.gate.added.has_room_for(task.key)
        if sizes != self.settings.input_bytes(task.direction) or not has_room:
            return "refused"
        return "sealed" if self.is_draining and not self._belongs_here(task) else None

    def _belongs_here(self, task: Task) -> bool:
        is_known = task.key in self._entries or task.key in self._ended
        return is_known and (task.direction == "backward" or self.gate.holds(task.key))

    def _extend(self, task: Task, now: float) -> None:
        entry = self._entries[task.key]
        entry.deadline = max(entry.deadline, now + task.deadline_ms / 1000)

    def _busy_ms(self, task: Task) -> int:
        """Return after how many milliseconds to ask again; 0 if the task is admitted."""
        size = self._needed_bytes(task)
        if task.serial < self._owners.get(task.owner, 0):  # of an earlier process; or we know an earlier process only
            return MAX_PAUSE_MS
        if task.direction == "backward":
            admitted = self.memory.admits_backward(size)
        elif task.replay:
            admitted = self.memory.admits_replay(size)
        elif not self._places():
            self._waiting.add(task.owner)
            return UNINVITED_PAUSE_MS
        else:
            admitted = self.memory.admits_forward(task.key, size)
        waiting = len(self._ready) + 1
        return 0 if admitted else int(min(MAX_PAUSE_MS, max(MIN_PAUSE_MS, 500 * waiting / max(self.rate, 0.1))))

    def _places(self) -> int:
        """Return how many forwards may come in now; the queue has two tasks of each microbatch."""
        limit = math.ceil(2 * self.rate * QUEUE_SECONDS) + 1 if self.rate else MAX_QUEUED
        queue, memory = limit - len(self._unfinished), self.memory.forward_places(self.settings.task_bytes("forward"))
        return 0 if self.is_draining else max(0, min(queue, memory, self.gate.places))

    def _needed_bytes(self, task: Task) -> int:
        """Return the bytes that a task needs beside those that the forward of its microbatch left here."""
        size = self.settings.task_bytes(task.direction)
        has_inputs = task.direction == "backward" and self._holds_forward(task.key)
        return size - sum(self.settings.input_bytes("forward").values()) if has_inputs else size

    def _holds_forward(self, key: Key) -> bool:
        work = self._work(key, "forward")
        return work is not None and work.outcome is not None and work.outcome.status == "done"

    def _accept(self, task: Task, now: float) -> None:
        key, size = task.key, self._needed_bytes(task)
        self.memory.take(key, size)
        inputs = task.inputs.named()
        if task.direction == "backward" and self._holds_forward(key):
            inputs = {name: held for name, held in inputs.items() if name == "gradient"}
        entry = self._entries.setdefault(key, Entry(now, task.number))
        self._extend(task, now)
        self._tokens += 1
        entry.work[task.direction] = Work(task, self._tokens, size)
        self._unfinished.add(self._tokens)
        if task.direction == "forward" and not task.replay:
            self.gate.enter(key)
        if inputs:
            self._actions.append(Fetch(key, task.direction, self._tokens, tuple(inputs.items())))
        else:
            self._ready.append((key, task.direction, self._tokens))
            self._run()

    # Progress

    def _on_progress(self, event: Fetched | FetchFailed | Computed) -> None:
        if isinstance(event, Computed):
            self._on_computed(event)
        work = self._work(event.key, event.direction)
        if work is None or work.token != event.token or work.outcome is not None:
            self._free(event.key)  # what came in for a task that was given up meanwhile
            return
        if isinstance(event, Fetched):
            self._ready.append((event.key, event.direction, event.token))
        elif isinstance(event, FetchFailed):
            self._give_up(work, replace(self._outcome(work.task, "missing"), missing=event.missing))
        elif not event.valid:
            self.counts.invalid += 1
            self._give_up(work, self._outcome(work.task, "invalid"))
        else:
            self._finish(work, event)

    def _on_computed(self, event: Computed) -> None:
        """Let the trainer go on; its sum has the gradient, also if the microbatch was struck meanwhile."""
        computing = self._computing
        if isinstance(computing, Compute) and computing.token == event.token:
            self._computing = None
            if computing.adds and event.valid:
                self.gate.add(event.key)
                if event.key not in self._entries:
                    self._end(event.key)  # its owner may live after all

    def _run(self) -> None:
        """Let the trainer begin its next piece of work: a complete step, or the task that is ready for longest."""
        if self._computing is None and self.gate.is_complete:
            self._start(TakeStep(self.gate.added.copy()))
        while self._ready and self._computing is None:
            key, direction, token = self._ready.popleft()
            work = self._work(key, direction)
            if work is not None and work.token == token:
                self._start(Compute(work.task, token, self._adds(work.task)))

    def _start(self, action: Compute | TakeStep) -> None:
        self._computing = action
        self._actions.append(action)

    def _work(self, key: Key, direction: Direction) -> Work | None:
        entry = self._entries.get(key)
        return entry.work.get(direction) if entry is not None else None

    def _adds(self, task: Task) -> bool:
        return task.direction == "backward" and not task.replay and not self._has_counted(task.key)

    def _has_counted(self, key: Key) -> bool:
        return key in self.ledger or key in self.gate.added or key in self._contributed

    def _finish(self, work: Work, event: Computed) -> None:
        task = work.task
        self._unfinished.discard(work.token)
        self.counts.computed += 1
        self.counts.replayed += task.replay
        self._times.record(task.direction, event.compute_ms)
        work.outcome = replace(
            self._outcome(task, "done"),
            result=event.result,
            added=task.direction == "backward" and self._has_counted(task.key),
            loss=event.loss,
            compute_ms=event.compute_ms,
            rate=self.rate,
        )
        if task.direction == "backward":
            work.size = self._size_after(work)
            self._entries[task.key].work.pop("forward", None)
            self._keep_results(task.key)
        self._actions.append(Tell(task.owner, work.outcome))

    def _size_after(self, work: Work) -> int:
        """Return the bytes that a finished backward still holds: those of its result."""
        return self.settings.result_bytes("backward")

    def _outcome(self, task: Task, status: OutcomeStatus) -> Outcome:
        return Outcome(task.run, task.serial, task.direction, task.attempt, self.life, status)

    def _give_up(self, work: Work, outcome: Outcome) -> None:
        """Forget a task that cannot be computed, and tell its owner."""
        key, direction = work.task.key, work.task.direction
        entry = self._entries[key]
        del entry.work[direction]
        self._unfinished.discard(work.token)
        if direction == "forward":
            self.gate.strike(key)
        self._keep_results(key)
        if outcome.status != "void":
            self._failed[key, direction] = outcome
            if len(self._failed) > REMEMBERED:
                self._failed.popitem(last=False)
        self._actions.append(Tell(work.task.owner, outcome))

    def _keep_results(self, key: Key) -> None:
        """Free the blobs of a microbatch that nobody needs any more."""
        (self._free if self._entries[key].work else self._forget)(key)

    def _free(self, key: Key) -> None:
        """Free all of a microbatch but what its entry needs, and what the trainer reads at this moment."""
        entry, running = self._entries.get(key, Entry(0.0)), self._computing
        size, kept = entry.size, entry.blobs()
        if isinstance(running, Compute) and running.task.key == key:
            size = max(size, self.settings.task_bytes(running.task.direction))
            kept |= {held.blob for held in running.task.inputs.named().values()}
        self.memory.shrink(key, size)
        self._actions.append(Drop(key, kept))

    def _on_step(self) -> None:
        if isinstance(self._computing, TakeStep):
            self._computing = None
            self.counts.steps += 1
            self.ledger = self.ledger | self.gate.take()

    # Ends

    def _forget(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        self._unfinished -= {work.token for work in entry.work.values()} if entry is not None else set()
        self._free(key)

    def _on_release(self, event: ReleasedBy) -> None:
        for serial in event.serials:
            key = Key(event.owner, serial)
            if key in self._entries:
                self.counts.struck += self.gate.strike(key)
                self._end(key)

    def _end(self, key: Key) -> None:
        self._forget(key)
        self._ended[key] = None
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _on_owners(self, event: OwnersChanged) -> None:
        self._owners = event.owners
        self._waiting.keep_only(event.owners)
        self.memory.owners = max(1, len(event.owners))
        gone = [key for key in self._entries if key.serial < event.owners.get(key.owner, math.inf)]
        self.counts.torn += sum(map(self._has_counted, gone))
        self._strike(gone)

    def _strike(self, keys: Iterable[Key]) -> None:
        """Give up microbatches whose owner is gone, has restarted, or is too late."""
        for key in keys:
            self.counts.struck += self.gate.strike(key)
            if self._has_counted(key):
                self._end(key)
            else:
                self._forget(key)

    def _on_restart(self, event: TrainerRestarted) -> None:
        """Begin a new life: what the snapshot does not contain was never added."""
        acknowledged = self.ledger | self.gate.added
        self._contributed = self._contributed | event.contributed
        self.counts.lost += len(acknowledged - event.ledger - self._contributed)
        self.life, self.ledger = event.life, event.ledger
        self.gate.take()
        interrupted, self._computing = self._computing, None
        if isinstance(interrupted, Compute):
            self._free(interrupted.task.key)
        self._ready.clear()
        self._failed.clear()
        for work in [work for entry in self._entries.values() for work in entry.work.values()]:
            if work.outcome is None or self._is_lost(work):
                self._give_up(work, self._outcome(work.task, "void"))
            else:
                work.outcome = replace(work.outcome, life=self.life)

    def _is_lost(self, work: Work) -> bool:
        """Return whether a gradient was told to be counted and is not."""
        return work.outcome is not None and work.outcome.added and not self._has_counted(work.task.key)
