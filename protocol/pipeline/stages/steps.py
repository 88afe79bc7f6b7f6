"""Which gradients count at a server, and when the trainer steps: the part of a server that depends on the mode.

In `local` mode (here) each server steps once it has the gradients of its own step. In `exact` mode
(`protocol.pipeline.exact.steps`) a round is a step of all servers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import AnswerKind, Key, Task
from protocol.pipeline.stages.gate import Gate
from protocol.pipeline.stages.server_events import Compute, TakeStep, TrainerRestarted
from protocol.pipeline.stages.settings import StageSettings
from protocol.pipeline.stages.table import MicrobatchTable, Work

MAX_ROUND_DISTANCE = 8  # stages keep one round apart themselves, but a trainer in mid-step may be behind its stage


class StepPolicy(ABC):
    """Decides which gradients of the table count. A server calls it for every task and every change of the trainer."""

    def __init__(self, settings: StageSettings) -> None:
        self.table = MicrobatchTable(settings)
        self.open_step = Gate(settings.step_size)
        self.ledger = Ledger()  # of the steps since the last contribution; exact steps have a StepLedger instead

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
        """Forget the gradients that a dead trainer had and its snapshot does not contain."""

    @abstractmethod
    def next_work(self) -> Compute | TakeStep | None:
        """Return what the trainer must do before any queued task."""

    @abstractmethod
    def make_room(self, task: Task) -> None:
        """Free memory for a task, if there is some to free."""

    @abstractmethod
    def close(self) -> None:
        """End the open step early."""

    @abstractmethod
    def begin_round(self, number: int, now: float) -> None:
        """Begin a round, because the trainer has its weights."""

    def size_after(self, work: Work) -> int:
        """Return the bytes that a finished backward still holds: those of its result."""
        return self.table.settings.result_bytes("backward")

    def keep(self, keys: Iterable[Key]) -> set[Key]:
        """Return which of these microbatches stay, although their owners are gone or need them no more."""
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
        self._contributed = Ledger()  # of earlier contributions, while their microbatches are open

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
                self.table.end(key)  # its owner may live after all

    def next_work(self) -> TakeStep | None:
        return TakeStep(self.open_step.added.copy()) if self.open_step.is_complete else None

    def finish_step(self) -> None:
        self.ledger = self.ledger | self.open_step.take()

    def make_room(self, task: Task) -> None:
        """Free nothing: all that is in memory is needed."""

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
