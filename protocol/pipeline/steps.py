"""Which gradients count at a server, and when the trainer steps: the part of a server that depends on the mode.

In `local` mode a server steps by itself, once it has the gradients of a step. In `exact` mode a round is one step of
all servers, and a sum of gradients counts in its round only.

In `exact` mode a server keeps the inputs of the gradients that it counts while there is memory, so that it can compute
a gradient again and subtract it from its sum. If it must subtract a gradient whose inputs are gone, it restarts its
sum, and owners send the microbatches again.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

from protocol.pipeline.exact import StepAgreement
from protocol.pipeline.ledger import Ledger, StepLedger
from protocol.pipeline.messages import MAX_ROUND_DISTANCE, AnswerKind, Key, Task
from protocol.pipeline.microbatch_table import MicrobatchTable, OpenStep, Work
from protocol.pipeline.server_events import Compute, DropSum, TakeStep, TrainerRestarted
from protocol.pipeline.stage import StageSettings

KEPT_SHARE = 0.5  # of the memory of forwards, for inputs of gradients that count


class StepPolicy(ABC):
    """Decides which gradients of the table count. A server calls it for every task and every change of the trainer."""

    judges_owners = True  # whether late owners and gradients without forwards are turned away

    def __init__(self, settings: StageSettings) -> None:
        self.table = MicrobatchTable(settings)
        self.open_step = OpenStep(settings.step_size)
        self.ledger = Ledger()  # steps since the last contribution; exact steps use a StepLedger instead

    @abstractmethod
    def refusal(self, task: Task, life: int, round_number: int) -> AnswerKind | None:
        """Return why a task cannot count at a server of this life and round."""

    @abstractmethod
    def has_counted(self, key: Key) -> bool:
        """Return whether the gradient of a microbatch counts here."""

    @abstractmethod
    def begin(self, work: Work) -> Compute:
        """Return the computation of a task that the trainer begins now."""

    @abstractmethod
    def on_computed(self, running: Compute, is_valid: bool, now: float) -> None:
        """Count the gradient of a computation that has ended, even if its microbatch was dropped meanwhile."""

    @abstractmethod
    def restart(self, event: TrainerRestarted, now: float) -> None:
        """Forget the gradients that a crashed trainer had and its snapshot does not contain."""

    @abstractmethod
    def next_work(self) -> Compute | TakeStep | None:
        """Return what the trainer must do before any queued task."""

    @abstractmethod
    def make_room(self, task: Task) -> None:
        """Free memory for a task if possible."""

    @abstractmethod
    def close(self) -> None:
        """End the open step early."""

    @abstractmethod
    def begin_round(self, number: int, now: float) -> None:
        """Begin a round, whose weights the trainer has."""

    def size_after(self, work: Work) -> int:
        """Return the bytes that a finished backward still holds: its result."""
        return self.table.settings.result_bytes("backward")

    def keep(self, keys: Iterable[Key]) -> set[Key]:
        """Return which of these microbatches to keep, although their owners have released them or are gone."""
        return set()

    def finish_step(self) -> None:
        """Record that the trainer has made its step."""
        self.open_step.take()

    def take_ledger(self) -> Ledger:
        """Return the microbatches of all steps since the last contribution, which now contains them."""
        taken, self.ledger = self.ledger, Ledger()
        return taken


class LocalSteps(StepPolicy):
    """Steps of one server. `ledger`: the microbatches of its steps since its last contribution."""

    def __init__(self, settings: StageSettings, ledger: Ledger) -> None:
        super().__init__(settings)
        self.ledger = ledger
        self._contributed = Ledger()  # in earlier contributions, while their microbatches are open

    def refusal(self, task: Task, life: int, round_number: int) -> AnswerKind | None:
        if task.life not in (0, life):
            return "other life"
        # A step that waits for the microbatch could not end without it, and neither could its round.
        if abs(task.round - round_number) > MAX_ROUND_DISTANCE and not self.open_step.holds(task.key):
            return "other round"
        has_room = self.ledger.has_room_for(task.key) and self.open_step.added.has_room_for(task.key)
        return None if has_room else "refused"

    def has_counted(self, key: Key) -> bool:
        return key in self.ledger or key in self.open_step.added or key in self._contributed

    def begin(self, work: Work) -> Compute:
        task = work.task
        adds = task.direction == "backward" and not task.replay and not self.has_counted(task.key)
        return Compute(task, work.token, adds)

    def on_computed(self, running: Compute, is_valid: bool, now: float) -> None:
        key = running.task.key
        if running.adds and is_valid:
            self.open_step.add(key)
            if key not in self.table.entries:
                self.table.end(key)  # the owner may be back later and must not have it added twice

    def next_work(self) -> TakeStep | None:
        return TakeStep(self.open_step.added.copy()) if self.open_step.is_complete else None

    def finish_step(self) -> None:
        self.ledger = self.ledger | self.open_step.take()

    def make_room(self, task: Task) -> None:
        """Free nothing: everything in memory is needed."""

    def close(self) -> None:
        self.open_step.close()

    def begin_round(self, number: int, now: float) -> None:
        """Change nothing, because steps do not end with rounds."""

    def restart(self, event: TrainerRestarted, now: float) -> None:
        acknowledged = self.ledger | self.open_step.take()
        self._contributed = self._contributed | event.contributed
        self.table.counts.lost += len(acknowledged - event.ledger - self._contributed)
        self.ledger = event.ledger

    def take_ledger(self) -> Ledger:
        taken = super().take_ledger()
        self._contributed = Ledger(key for key in self._contributed | taken if key in self.table.entries)
        return taken


class ExactSteps(StepPolicy):
    """Steps that all servers make together. The owner of the same peer shares `agreement`."""

    judges_owners = False  # a step has only its own microbatches, and waits for all of them

    def __init__(self, settings: StageSettings, agreement: StepAgreement) -> None:
        super().__init__(settings)
        self.agreement = agreement
        self._kept: dict[int, Key] = {}  # counted gradients whose inputs are here
        self._released: set[Key] = set()  # kept microbatches that their owners have released
        self._to_take_away: list[Work] = []
        self._is_offering = False

    def offer(self, duplicates: StepLedger, now: float) -> None:
        """Subtract the gradients that others count too, then contribute the rest.

        Call `StageServer.advance` next.
        """
        self.table.counts.subtracted += len(duplicates)
        keys = [self._kept[number] for number in duplicates if number in self._kept]
        self._to_take_away = [work for key in keys if (work := self.table.find(key, "backward")) is not None]
        self._is_offering = len(self._to_take_away) == len(duplicates)
        if not self._is_offering:  # the inputs of a duplicate are gone
            self._to_take_away = []
            self._forget_kept()
            self.agreement.drop(now)
            self.table.actions.append(DropSum())

    def refusal(self, task: Task, life: int, round_number: int) -> AnswerKind | None:
        if task.round != round_number:
            return "other round"
        if task.number is None or task.number >= self.agreement.count:
            return "refused"
        if task.life not in (0, life):
            return "other life"
        adds = task.direction == "backward" and not task.replay
        # After sealing, a server still computes for other owners, but its sum does not change.
        agreement = self.agreement
        is_new = adds and task.number not in agreement.ledger
        return "sealed" if is_new and (agreement.phase != "open" or not agreement.may_add) else None

    def has_counted(self, key: Key) -> bool:
        entry = self.table.entries.get(key)
        return entry is not None and entry.number is not None and entry.number in self.agreement.ledger

    def begin(self, work: Work) -> Compute:
        task = work.task
        adds = task.direction == "backward" and not task.replay and not self.has_counted(task.key)
        self.agreement.is_adding = adds and self.agreement.phase == "open"
        return Compute(task, work.token, self.agreement.is_adding)

    def on_computed(self, running: Compute, is_valid: bool, now: float) -> None:
        task = running.task
        if task.direction == "backward":
            self.open_step.withdraw(task.key)
        self.agreement.is_adding = False
        if running.adds and is_valid and task.number is not None and task.round == self.agreement.round:
            self.agreement.add(task.number, now)

    def next_work(self) -> Compute | TakeStep | None:
        """Return the next work of an offer, which has priority over all tasks."""
        if not self._is_offering:
            return None
        if self._to_take_away:
            return Compute(self._to_take_away.pop().task, self.table.new_token(), adds=False, takes_away=True)
        self._is_offering = False
        return TakeStep(Ledger())

    def make_room(self, task: Task) -> None:
        """Evict kept inputs for new work, unless an offer still needs them."""
        while self._kept and not self._is_offering and not self.table.has_memory_for(task):
            self._evict()

    def size_after(self, work: Work) -> int:
        """Keep the inputs of a gradient that counts, so that it can be subtracted later."""
        number, size = work.task.number, self.table.settings.task_bytes("backward")
        if number is None or self._is_offering or number not in self.agreement.ledger or number in self._kept:
            return super().size_after(work)
        while self._kept and (len(self._kept) + 1) * size > KEPT_SHARE * self.table.memory.forward_capacity:
            self._evict()
        self._kept[number] = work.task.key
        work.keeps_inputs = True
        return size

    def keep(self, keys: Iterable[Key]) -> set[Key]:
        """Keep the microbatches whose inputs are kept until the round ends."""
        kept = set(self._kept.values()).intersection(keys)
        self._released |= kept
        for key in kept:
            self.table.entries[key].deadline = math.inf
        return kept

    def restart(self, event: TrainerRestarted, now: float) -> None:
        self.table.counts.lost += len(self.agreement.ledger)
        self._to_take_away, self._is_offering = [], False
        self.agreement.restart(event.life, now)
        self._forget_kept()
        self.open_step.take()

    def close(self) -> None:
        """Change nothing, because an exact step ends only when it is complete."""

    def begin_round(self, number: int, now: float) -> None:
        """Discard the previous step."""
        self._forget_kept()
        self._to_take_away, self._is_offering = [], False
        for key in list(self.table.entries):
            self.open_step.withdraw(key)
            self.table.forget(key)
        self.table.queue.clear()
        self.table.failed.clear()
        self.agreement.begin(number, self.agreement.life, now)

    def _forget_kept(self) -> None:
        while self._kept:
            self._evict()

    def _evict(self) -> None:
        """Free the inputs that have been kept longest."""
        key = self._kept.pop(next(iter(self._kept)))
        work = self.table.find(key, "backward")
        if key in self._released:
            self._released.discard(key)
            self.table.end(key)
        elif work is not None:
            work.keeps_inputs, work.size = False, super().size_after(work)
            self.table.free_unneeded(key)
