"""The server of one stage: admits tasks, has their inputs fetched and computed, and reports outcomes. No I/O.

A server never waits for another server, and never depends on an owner to free memory: deadlines free it too, and so
does the loss of the owner.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from protocol.identity import PeerId
from protocol.pipeline.messages import Answer, AnswerKind, Direction, Key, Outcome, OutcomeStatus, Task
from protocol.pipeline.microbatch_table import WaitingOwners, Work
from protocol.pipeline.server_events import (
    Action,
    CloseStep,
    Compute,
    Computed,
    Drain,
    Event,
    InputMissing,
    InputsFetched,
    Invite,
    OwnersChanged,
    ReleasedBy,
    RoundChanged,
    SendOutcome,
    Stepped,
    TakeStep,
    TrainerEnded,
    TrainerRestarted,
)
from protocol.pipeline.steps import StepPolicy

MIN_PAUSE_MS, MAX_PAUSE_MS, UNINVITED_PAUSE_MS = 50, 2000, 10_000
MAX_ADOPTED = 16  # backwards of a stranger whose forwards were at other peers
LATE_PAUSE = 1.0  # seconds, while microbatches of an owner are late
QUEUE_SECONDS, MAX_QUEUED = 1.25, 64  # queue limit for admitting forwards; in tasks while the rate is unknown
SMOOTHING = 0.2  # of compute times


class ComputeTimes:
    """Smoothed milliseconds of a forward and of a backward."""

    def __init__(self) -> None:
        self._milliseconds: dict[Direction, float] = {}

    @property
    def rate(self) -> float:
        """Microbatches a second; 0 while unknown."""
        return 1000 / max(1e-3, sum(self._milliseconds.values())) if len(self._milliseconds) == 2 else 0.0

    def record(self, direction: Direction, milliseconds: float) -> None:
        mean = self._milliseconds.get(direction, milliseconds)
        self._milliseconds[direction] = mean + SMOOTHING * (milliseconds - mean)


class StageServer:
    """One stage at one peer.

    Args:
        steps: decides which gradients count, and holds the table of microbatches.
        life: larger than that of every earlier process.
    """

    def __init__(self, steps: StepPolicy, life: int, round_number: int) -> None:
        self.steps = steps
        self.table = steps.table
        self.settings = steps.table.settings
        self.counts = steps.table.counts
        self.life = life
        self.round = round_number
        self.is_draining = False
        self._waiting = WaitingOwners()
        self._owners: Mapping[PeerId, int] = {}  # live owners with their first serials
        self._forwards = Counter[PeerId]()  # of live owners, less the backwards whose forwards were elsewhere
        self._times = ComputeTimes()

    @property
    def rate(self) -> float:
        """Microbatches a second that this peer computes; 0 while unknown."""
        return self._times.rate

    @property
    def is_idle(self) -> bool:
        """Whether a draining server may leave: its step is made, and no owner needs its results."""
        return self.table.running is None and not self.steps.open_step.added and not self.table.entries

    def next_deadline(self) -> float | None:
        """Return when to call `advance`."""
        open_step = self.steps.open_step
        times = (
            min(entry.deadline, entry.waits_for_owner_until if open_step.holds(key) else math.inf)
            for key, entry in self.table.entries.items()
        )
        return min(times, default=None)

    def ask(self, task: Task, now: float) -> tuple[Answer, list[Action]]:
        """Answer a task at once, and start it if it is accepted."""
        answer = self._judge(task, now)
        self.counts.answers[answer.kind] += 1
        return answer, self._take_actions()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event and return the resulting actions."""
        match event:
            case InputsFetched() | InputMissing() | Computed():
                self._on_progress(event, now)
            case Stepped():
                self._on_step()
            case ReleasedBy():
                self._on_release(event)
            case OwnersChanged():
                self._on_owners(event)
            case TrainerRestarted():
                self._on_restart(event, now)
            case CloseStep():
                self.steps.close()
            case Drain():
                self.is_draining = True
                self.steps.close()
            case RoundChanged():
                self.steps.begin_round(event.round, now)
                self.round = event.round
        return self._proceed()

    def advance(self, now: float) -> list[Action]:
        """Return the actions that are due; call it at `next_deadline`."""
        self._leave_behind(now)
        self._withdraw([key for key, entry in self.table.entries.items() if entry.deadline <= now])
        return self._proceed()

    def _leave_behind(self, now: float) -> None:
        """Let the open step go on without the microbatches whose owners have been away for too long."""
        open_step, punctuality = self.steps.open_step, self.table.punctuality
        for key, entry in self.table.entries.items():
            if entry.waits_for_owner_until <= now and open_step.holds(key):
                open_step.leave_behind(key)
                self.counts.withdrawn += 1
                self.counts.left_behind += 1
                punctuality.leave_behind(self.table.memory.share_of(key.owner), now)

    def _proceed(self) -> list[Action]:
        self._run()
        strangers = [owner for owner in self._owners if self.table.memory.is_stranger(owner)]
        self.table.actions += map(Invite, self._waiting.invite(self._places(), last=strangers))
        return self._take_actions()

    def _take_actions(self) -> list[Action]:
        actions, self.table.actions = self.table.actions, []
        return actions

    # Admission

    def _judge(self, task: Task, now: float) -> Answer:
        refusal = self._refusal(task)
        if refusal is not None:
            return self._answer(refusal)
        if task.key in self.table.ended:
            return self._answer("known", self._outcome(task, "ended"))
        work = self.table.find(task.key, task.direction)
        if work is not None:
            self.table.extend(task, now)
            self.counts.duplicates += 1
            return self._answer("accepted") if work.outcome is None else self._answer("known", work.outcome)
        if self.table.fatal.is_fatal(task.key, task.direction):
            return self._answer("known", self._outcome(task, "invalid"))
        failed = self.table.failed.get((task.key, task.direction))
        if failed is not None and task.attempt <= failed.attempt:
            return self._answer("known", failed)
        if not self._may_add(task):
            self.counts.without_forward += 1
            return self._answer("no forward")
        busy = self._busy_ms(task, now)
        if busy:
            return replace(self._answer("busy"), retry_ms=busy)
        self._accept(task, now)
        return self._answer("accepted")

    def _answer(self, kind: AnswerKind, outcome: Outcome | None = None) -> Answer:
        return Answer(kind, self.life, self.round, self.rate, outcome=outcome)

    def _refusal(self, task: Task) -> AnswerKind | None:
        """Return why this server refuses a task, or None."""
        if task.run != self.settings.run:
            return "other stage"
        refusal = self.steps.refusal(task, self.life, self.round)
        if refusal is not None:
            return refusal
        sizes = {name: held.blob.size for name, held in task.inputs.named().items()}
        if sizes != self.settings.input_bytes(task.direction):
            return "refused"
        return "sealed" if self.is_draining and not self._belongs_here(task) else None

    def _belongs_here(self, task: Task) -> bool:
        is_known = task.key in self.table.entries or task.key in self.table.ended
        return is_known and (task.direction == "backward" or self.steps.open_step.holds(task.key))

    def _may_add(self, task: Task) -> bool:
        """Return whether an owner may have a gradient added: a stranger only as often as it had forwards here."""
        adds = task.direction == "backward" and not task.replay
        is_trusted = not self.table.memory.is_stranger(task.owner) or not self.steps.judges_owners
        return not adds or is_trusted or self._has_forward(task) or self._forwards[task.owner] > 0

    def _has_forward(self, task: Task) -> bool:
        return self.table.find(task.key, "forward") is not None

    def _busy_ms(self, task: Task, now: float) -> int:
        """Return after how many milliseconds to ask again; 0 if the task is admitted."""
        self.steps.make_room(task)
        # The task is from an earlier process of the owner, or our list of owners is out of date.
        if task.serial < self._owners.get(task.owner, 0):
            return MAX_PAUSE_MS
        if seconds := self.table.fatal.pause(self.table.memory.share_of(task.owner), now):
            self.counts.turned_away += 1
            return int(min(UNINVITED_PAUSE_MS, 1000 * seconds))
        is_new = task.direction == "forward" and not task.replay
        if is_new and (seconds := self._pause_of(task.owner, now)):
            self.counts.turned_away += 1
            return int(min(UNINVITED_PAUSE_MS, max(MIN_PAUSE_MS, 1000 * seconds)))
        if is_new and self._places_for(task.owner) <= 0:
            self._waiting.add(task.owner)
            return UNINVITED_PAUSE_MS
        if task.key not in self.table.entries and self._is_above_share(task.owner):
            return MAX_PAUSE_MS
        if self.table.has_memory_for(task):
            return 0
        waiting = len(self.table.queue) + 1
        return int(min(MAX_PAUSE_MS, max(MIN_PAUSE_MS, 500 * waiting / max(self.rate, 0.1))))

    def _pause_of(self, owner: PeerId, now: float) -> float:
        """Return for how many seconds an owner gets no places, because steps had to go on without its microbatches."""
        if not self.steps.judges_owners:
            return 0.0
        pause = self.table.punctuality.pause(self.table.memory.share_of(owner), now)
        return pause or (LATE_PAUSE if self.steps.open_step.is_late(owner) and len(self._owners) > 1 else 0.0)

    def _places(self) -> int:
        """Return how many forwards to admit now; each microbatch puts two tasks into the queue."""
        limit = math.ceil(2 * self.rate * QUEUE_SECONDS) + 1 if self.rate else MAX_QUEUED
        queue = limit - len(self.table.unfinished)
        memory = self.table.memory.forward_places(self.settings.task_bytes("forward"))
        return 0 if self.is_draining else max(0, min(queue, memory, self.steps.open_step.places))

    def _places_for(self, owner: PeerId) -> int:
        """Return how many forwards of an owner to admit; keys without standing have one share of a step together."""
        memory, places = self.table.memory, self._places()
        if not memory.is_stranger(owner):
            return places
        return min(places, self._places_of_strangers())

    def _places_of_strangers(self) -> int:
        memory = self.table.memory
        held = sum(memory.is_stranger(key.owner) for key in self.table.entries)
        return max(1, self.settings.step_size // memory.shares) - held

    def _is_above_share(self, owner: PeerId) -> bool:
        """Return whether strangers have as many microbatches here as their share allows, replays and all."""
        return self.table.memory.is_stranger(owner) and self._places_of_strangers() <= 0

    def _accept(self, task: Task, now: float) -> None:
        if task.direction == "backward" and not task.replay and not self._has_forward(task):
            self._forwards[task.owner] -= self._forwards[task.owner] > 0
        self.table.add(task, now)
        if task.direction == "forward" and not task.replay:
            self._forwards[task.owner] = min(MAX_ADOPTED, self._forwards[task.owner] + 1)
            self.steps.open_step.enter(task.key)
            patience = min(task.deadline_ms / 1000, self.table.punctuality.patience)
            entry = self.table.entries[task.key]
            entry.began, entry.awaited = now, now + patience
        elif any(work.task.key == task.key for work in self.table.queue):
            self._on_ready(task, now)
        self._run()

    def _on_ready(self, task: Task, now: float) -> None:
        """Note that the inputs of a task are here; from now on its end depends on this peer alone."""
        entry = self.table.entries[task.key]
        if task.direction == "forward":
            return
        entry.is_ready = True
        if entry.began is not None:
            share = self.table.memory.share_of(task.owner)
            self.table.punctuality.record(share, now - entry.began, is_late=now > entry.awaited)
            entry.began = None

    # Progress

    def _on_progress(self, event: InputsFetched | InputMissing | Computed, now: float) -> None:
        if isinstance(event, Computed):
            self._on_computed(event, now)
        work = self.table.find(event.key, event.direction)
        if work is None or work.token != event.token or work.outcome is not None:
            self.table.free(event.key)  # the task was dropped meanwhile
            return
        if isinstance(event, InputsFetched):
            self.table.queue.append(work)
            self._on_ready(work.task, now)
        elif isinstance(event, InputMissing):
            self._give_up(work, replace(self._outcome(work.task, "missing"), missing=event.missing))
        elif not event.valid:
            self.counts.invalid += 1
            self._give_up(work, self._outcome(work.task, "invalid"))
        else:
            self._finish(work, event)

    def _on_computed(self, event: Computed, now: float) -> None:
        """Free the trainer; its sum has the gradient, even if the microbatch was withdrawn meanwhile."""
        running = self.table.running
        if isinstance(running, Compute) and running.token == event.token:
            self.table.running = None
            self.steps.on_computed(running, event.valid, now)

    def _run(self) -> None:
        """Start the trainer's next work: work of the step first, then the task that has been ready longest."""
        if self.table.running is None and (action := self.steps.next_work()) is not None:
            self.table.start(action)
        while self.table.queue and self.table.running is None:
            work = self.table.queue.popleft()
            if self.table.find(work.task.key, work.task.direction) is work:
                self.table.start(self.steps.begin(work))

    def _finish(self, work: Work, event: Computed) -> None:
        task = work.task
        self.counts.computed += 1
        self.table.fatal.record_computed(self.table.memory.share_of(task.owner))
        self.counts.replayed += task.replay
        self.counts.clipped += event.clipped
        self._times.record(task.direction, event.compute_ms)
        outcome = replace(
            self._outcome(task, "done"),
            result=event.result,
            added=task.direction == "backward" and self.steps.has_counted(task.key),
            loss=event.loss,
            compute_ms=event.compute_ms,
            rate=self.rate,
            signed=event.signed,
        )
        self.table.finish(work, outcome)
        if task.direction == "backward":
            work.size = self.steps.size_after(work)
            self.table.free_unneeded(task.key)
        self.table.actions.append(SendOutcome(task.owner, outcome))

    def _outcome(self, task: Task, status: OutcomeStatus) -> Outcome:
        return Outcome(task.run, task.serial, task.direction, task.attempt, self.life, status)

    def _give_up(self, work: Work, outcome: Outcome) -> None:
        """Drop a task that cannot be computed, and report it to the owner."""
        if work.task.direction == "forward":
            self.steps.open_step.withdraw(work.task.key)
        self.table.fail(work, outcome)
        self.table.actions.append(SendOutcome(work.task.owner, outcome))

    def _on_step(self) -> None:
        if isinstance(self.table.running, TakeStep):
            self.table.running = None
            self.counts.steps += 1
            self.steps.finish_step()

    # Ends

    def _on_release(self, event: ReleasedBy) -> None:
        keys = [Key(event.owner, serial) for serial in event.serials]
        kept = self.steps.keep(keys)
        for key in keys:
            if key in self.table.entries and key not in kept:
                self.counts.withdrawn += self.steps.open_step.withdraw(key)
                self.table.end(key)

    def _on_owners(self, event: OwnersChanged) -> None:
        self._owners = event.owners
        self._waiting.keep_only(event.owners)
        self._forwards = Counter({owner: count for owner, count in self._forwards.items() if owner in event.owners})
        self.table.memory.set_owners(event.owners, event.standing)
        self.table.punctuality.me = event.me
        self.table.punctuality.keep_only({self.table.memory.share_of(owner) for owner in event.owners})
        gone = [key for key in self.table.entries if key.serial < event.owners.get(key.owner, math.inf)]
        self.counts.partly_counted += sum(map(self.steps.has_counted, gone))
        self._withdraw(gone)

    def _withdraw(self, keys: Iterable[Key]) -> None:
        """Drop microbatches whose owner is gone or has restarted, or whose deadline has passed."""
        listed = list(keys)
        kept = self.steps.keep(listed)
        for key in listed:
            if key in kept:
                continue
            self.counts.withdrawn += self.steps.open_step.withdraw(key)
            if self.steps.has_counted(key):
                self.table.end(key)
            else:
                self.table.forget(key)

    def _on_restart(self, event: TrainerRestarted, now: float) -> None:
        """Begin a new life, in which only the gradients of the snapshot count."""
        self.steps.restart(event, now)
        self.life = event.life
        interrupted, self.table.running = self.table.running, None
        fatal: Task | None = None
        if isinstance(interrupted, Compute):
            self.table.free(interrupted.task.key)
            fatal = interrupted.task if self._is_fatal(interrupted.task, now) else None
        self.table.queue.clear()
        self.table.failed.clear()
        for work in [work for entry in self.table.entries.values() for work in entry.work.values()]:
            if work.outcome is None or self._is_lost(work):
                self._give_up(work, self._outcome(work.task, "invalid" if work.task is fatal else "void"))
            else:
                work.outcome = replace(work.outcome, life=self.life)

    def _is_fatal(self, task: Task, now: float) -> bool:
        """Record that the trainer died during a task; return whether it is invalid for that.

        The owner made it, or for one of our own the peers whose results are its inputs.
        """
        me, memory, fatal = self.table.punctuality.me, self.table.memory, self.table.fatal
        holders = {held.holder for held in task.inputs.named().values()} - {me}
        makers = holders if task.owner == me else {task.owner}
        guilty = [maker for maker in sorted(makers) if fatal.record(memory.share_of(maker), now)]
        self.table.actions += map(TrainerEnded, guilty)
        is_invalid = fatal.record_task(task.key, task.direction) or bool(guilty)
        self.counts.invalid += is_invalid
        return is_invalid

    def _is_lost(self, work: Work) -> bool:
        """Return whether a gradient was acknowledged and no longer counts."""
        return work.outcome is not None and work.outcome.added and not self.steps.has_counted(work.task.key)
