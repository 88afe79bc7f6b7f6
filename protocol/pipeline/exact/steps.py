"""Exact steps at a server: a round is a step, and a sum of gradients counts in its round only. No I/O.

A server keeps the inputs of the gradients that it counts while there is memory, so that it can take one out of its sum
again. If it must take out one whose inputs are gone, it begins its sum again, and owners send those microbatches again.
"""

import math
from collections.abc import Iterable

from protocol.pipeline.exact.ledger import StepLedger
from protocol.pipeline.exact.settlement import Settlement
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import AnswerKind, Key, Task
from protocol.pipeline.stages.server_events import Compute, DropSum, TakeStep, TrainerRestarted
from protocol.pipeline.stages.settings import StageSettings
from protocol.pipeline.stages.steps import StepPolicy
from protocol.pipeline.stages.table import Work

KEPT_SHARE = 0.5  # of the memory of forwards, for inputs of gradients that count


class ExactSteps(StepPolicy):
    """Steps of all servers together. `settlement` is shared with the owner of the same peer."""

    def __init__(self, settings: StageSettings, settlement: Settlement) -> None:
        super().__init__(settings)
        self.settlement = settlement
        self._kept: dict[int, Key] = {}  # counted gradients whose inputs are here
        self._released: set[Key] = set()  # those of them that their owners need no more
        self._to_take_away: list[Work] = []
        self._is_offering = False

    def offer(self, doubles: StepLedger, now: float) -> None:
        """Take what others count too out of the sum, and then contribute the rest; call `StageServer.advance` next."""
        self.table.counts.subtracted += len(doubles)
        keys = [self._kept[number] for number in doubles if number in self._kept]
        self._to_take_away = [work for key in keys if (work := self.table.find(key, "backward")) is not None]
        self._is_offering = len(self._to_take_away) == len(doubles)
        if not self._is_offering:  # the inputs of a double are gone
            self._to_take_away = []
            self._forget_kept()
            self.settlement.drop(now)
            self.table.actions.append(DropSum())

    def refusal(self, task: Task, life: int, round_number: int) -> AnswerKind | None:
        if task.round != round_number:
            return "other round"
        if task.number is None or task.number >= self.settlement.count:
            return "refused"
        if task.life not in (0, life):
            return "other life"
        adds = task.direction == "backward" and not task.replay
        # After it has sealed, a server computes for others, but its sum does not change any more.
        is_late = adds and task.number not in self.settlement.ledger and self.settlement.phase != "open"
        return "sealed" if is_late else None

    def has_counted(self, key: Key) -> bool:
        entry = self.table.entries.get(key)
        return entry is not None and entry.number is not None and entry.number in self.settlement.ledger

    def begin(self, work: Work) -> Compute:
        task = work.task
        adds = task.direction == "backward" and not task.replay and not self.has_counted(task.key)
        self.settlement.is_adding = adds and self.settlement.phase == "open"
        return Compute(task, work.token, self.settlement.is_adding)

    def on_computed(self, running: Compute, is_valid: bool, now: float) -> None:
        task = running.task
        if task.direction == "backward":
            self.open_step.strike(task.key)
        self.settlement.is_adding = False
        if running.adds and is_valid and task.number is not None and task.round == self.settlement.round:
            self.settlement.add(task.number, now)

    def next_work(self) -> Compute | TakeStep | None:
        """Return the next piece of an offer, which goes before all tasks."""
        if not self._is_offering:
            return None
        if self._to_take_away:
            return Compute(self._to_take_away.pop().task, self.table.new_token(), adds=False, takes_away=True)
        self._is_offering = False
        return TakeStep(Ledger())

    def make_room(self, task: Task) -> None:
        """Give up kept inputs for new work, unless they are about to be computed again."""
        while self._kept and not self._is_offering and not self.table.has_memory_for(task):
            self._evict()

    def size_after(self, work: Work) -> int:
        """Keep the inputs of a gradient that counts, so that it can be taken away again."""
        number, size = work.task.number, self.table.settings.task_bytes("backward")
        if number is None or self._is_offering or number not in self.settlement.ledger or number in self._kept:
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
        self.table.counts.lost += len(self.settlement.ledger)
        self._to_take_away, self._is_offering = [], False
        self.settlement.restart(event.life, now)
        self._forget_kept()
        self.open_step.take()

    def close(self) -> None:
        """Change nothing, because a step ends when all of it is there."""

    def begin_round(self, number: int, now: float) -> None:
        """Forget everything of the step before."""
        self._forget_kept()
        self._to_take_away, self._is_offering = [], False
        for key in list(self.table.entries):
            self.open_step.strike(key)
            self.table.forget(key)
        self.table.queue.clear()
        self.table.failed.clear()
        self.settlement.begin(number, self.settlement.life, now)

    def _forget_kept(self) -> None:
        while self._kept:
            self._evict()

    def _evict(self) -> None:
        """Give up the inputs that are kept for longest."""
        key = self._kept.pop(next(iter(self._kept)))
        work = self.table.find(key, "backward")
        if key in self._released:
            self._released.discard(key)
            self.table.end(key)
        elif work is not None:
            work.keeps_inputs, work.size = False, super().size_after(work)
            self.table.free_unneeded(key)
