"""The server of a stage in exact steps: a round is a step, and its sum counts in that round only. No I/O.

It keeps the inputs of the gradients that it counts while there is memory, so that it can take one out of its sum again.
If it must take out one whose inputs are gone, it begins its sum again, and owners send those microbatches again.
"""

import math
from collections.abc import Iterable

from protocol.pipeline.exact.ledger import StepLedger
from protocol.pipeline.exact.settlement import Settlement
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import Answer, AnswerKind, Key, Task
from protocol.pipeline.stages.entry import Work
from protocol.pipeline.stages.server import StageServer
from protocol.pipeline.stages.server_events import (
    Action,
    CloseStep,
    Compute,
    Computed,
    DropSum,
    Event,
    ReleasedBy,
    RoundChanged,
    TakeStep,
    TrainerRestarted,
)
from protocol.pipeline.stages.settings import StageSettings

KEPT_SHARE = 0.5  # of the memory of forwards, for inputs of gradients that count


class ExactServer(StageServer):
    """One stage at one peer. `settlement` is shared with the owner of the same peer."""

    def __init__(self, settings: StageSettings, life: int, round_number: int, settlement: Settlement) -> None:
        super().__init__(settings, life, round_number, Ledger())
        self.settlement = settlement
        self._kept: dict[int, Key] = {}  # counted gradients whose inputs are here
        self._released: set[Key] = set()  # those of them that their owners need no more
        self._to_take_away: list[Work] = []
        self._is_offering = False
        self._now = 0.0

    def ask(self, task: Task, now: float) -> tuple[Answer, list[Action]]:
        """Answer a task at once, and start it if it is accepted."""
        self._now = now
        return super().ask(task, now)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event and return the actions that follow from it."""
        self._now = now
        match event:
            case RoundChanged():
                self._begin_round(event.round)
            case TrainerRestarted():
                self.counts.lost += len(self.settlement.ledger)
                self._to_take_away, self._is_offering = [], False
                self.settlement.restart(event.life, now)
                self._forget_kept()
            case CloseStep():
                return []  # a step ends when all of it is there
        return super().handle(event, now)

    def offer(self, doubles: StepLedger) -> list[Action]:
        """Take what others count too out of the sum, and then let the trainer contribute the rest."""
        keys = [self._kept[number] for number in doubles if number in self._kept]
        self.counts.subtracted += len(doubles)
        self._to_take_away = [work for key in keys if (work := self._work(key, "backward")) is not None]
        if len(self._to_take_away) == len(doubles):
            self._is_offering = True
            self._run()
        else:
            self._drop_sum()
        return self._take_actions()

    def _drop_sum(self) -> None:
        """Begin the sum again, because the inputs of a double are gone."""
        self._to_take_away = []
        self._forget_kept()
        self.settlement.drop(self._now)
        self._actions.append(DropSum())

    def _begin_round(self, number: int) -> None:
        """Forget everything of the step before."""
        self._forget_kept()
        self._to_take_away, self._is_offering = [], False
        for key in list(self._entries):
            self.gate.strike(key)
            self._forget(key)
        self._ready.clear()
        self._failed.clear()
        self.settlement.begin(number, self.life, self._now)

    def _forget_kept(self) -> None:
        while self._kept:
            self._evict()

    # Admission

    def _refusal(self, task: Task) -> AnswerKind | None:
        if task.run == self.settings.run and task.round != self.round:
            return "other round"
        if task.number is None or task.number >= self.settlement.count:
            return "refused"
        return super()._refusal(task) or ("sealed" if self._is_too_late(task) else None)

    def _is_too_late(self, task: Task) -> bool:
        """Return whether this would add a gradient after the server has sealed."""
        adds = task.direction == "backward" and not task.replay
        is_counted = task.number is not None and task.number in self.settlement.ledger
        return adds and not is_counted and self.settlement.phase != "open"

    def _busy_ms(self, task: Task) -> int:
        """Give up kept inputs for new work, unless they are about to be computed again."""
        while self._kept and not self._is_offering and self._lacks_memory(task):
            self._evict()
        return super()._busy_ms(task)

    def _lacks_memory(self, task: Task) -> bool:
        size = self._needed_bytes(task)
        if task.direction == "backward":
            return not self.memory.admits_backward(size)
        return not (self.memory.admits_replay(size) if task.replay else self.memory.admits_forward(task.key, size))

    def _evict(self) -> None:
        """Give up the inputs that are kept for longest."""
        key = self._kept.pop(next(iter(self._kept)))
        work = self._work(key, "backward")
        if key in self._released:
            self._released.discard(key)
            self._end(key)
        elif work is not None:
            work.keeps_inputs, work.size = False, super()._size_after(work)
            self._keep_results(key)

    # Progress

    def _on_computed(self, event: Computed) -> None:
        computing = self._computing
        if not isinstance(computing, Compute) or computing.token != event.token:
            return
        self._computing = None
        if computing.task.direction == "backward":
            self.gate.strike(event.key)
        self.settlement.is_adding = False
        number, is_current = computing.task.number, computing.task.round == self.round
        if computing.adds and event.valid and number is not None and is_current:
            self.settlement.add(number, self._now)

    def _run(self) -> None:
        """Let the trainer begin its next piece of work; an offer goes before all else."""
        if self._is_offering and self._computing is None:
            self._continue_offer()
        if not self._is_offering:
            super()._run()

    def _continue_offer(self) -> None:
        if self._to_take_away:
            self._tokens += 1
            self._start(Compute(self._to_take_away.pop().task, self._tokens, adds=False, takes_away=True))
        else:
            self._is_offering = False
            self._start(TakeStep(Ledger()))

    def _start(self, action: Compute | TakeStep) -> None:
        self.settlement.is_adding = isinstance(action, Compute) and action.adds
        super()._start(action)

    def _has_counted(self, key: Key) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.number is not None and entry.number in self.settlement.ledger

    def _adds(self, task: Task) -> bool:
        return super()._adds(task) and self.settlement.phase == "open"

    def _size_after(self, work: Work) -> int:
        """Keep the inputs of a gradient that counts, so that it can be taken away again."""
        number, size = work.task.number, self.settings.task_bytes("backward")
        if number is None or self._is_offering or number not in self.settlement.ledger or number in self._kept:
            return super()._size_after(work)
        while self._kept and (len(self._kept) + 1) * size > KEPT_SHARE * self.memory.forward_capacity:
            self._evict()
        self._kept[number] = work.task.key
        work.keeps_inputs = True
        return size

    # Ends

    def _on_release(self, event: ReleasedBy) -> None:
        kept = {key.serial for key in self._kept.values() if key.owner == event.owner}
        self._released |= {Key(event.owner, serial) for serial in kept.intersection(event.serials)}
        super()._on_release(ReleasedBy(event.owner, tuple(each for each in event.serials if each not in kept)))

    def _strike(self, keys: Iterable[Key]) -> None:
        """Give up microbatches whose owner is gone or too late; what the sum counts stays until the round ends."""
        kept = set(self._kept.values())
        listed = list(keys)
        for key in kept.intersection(listed):
            self._entries[key].deadline = math.inf
            self._released.add(key)
        super()._strike(key for key in listed if key not in kept)
