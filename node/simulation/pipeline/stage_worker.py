"""One virtual peer at work on microbatches: its intake, its queue and the open inner step.

A peer takes in the microbatches of one inner step, and makes the step when all their backward passes are done, so both
passes of a microbatch are at the same weights. With a staleness of n it takes in those of n more steps meanwhile.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from node.simulation.pipeline.stage_trainer import StageTrainer
from node.simulation.virtual.peer import VirtualPeer

if TYPE_CHECKING:
    from node.simulation.pipeline.microbatch_flow import MicrobatchFlow

Direction = Literal["forward", "backward"]
FORWARD_UNITS, BACKWARD_UNITS = 1, 3  # a third of a forward and backward pass; the latter computes the former again


@dataclass(eq=False)
class Microbatch:
    """One microbatch on its way: the worker of each stage that it has reached, and that stage's input."""

    targets: Tensor
    inputs: list[Tensor]
    route: list["StageWorker"] = field(default_factory=list)
    is_struck: bool = False  # its owner, the worker of the first stage, is gone
    has_counted: bool = False  # at some stage, since its backward pass is done there


@dataclass(frozen=True, eq=False)
class Task:
    """A pass of a microbatch at one stage; `gradient` is that of the stage's output, in a backward pass."""

    microbatch: Microbatch
    direction: Direction
    gradient: Tensor | None = None


class StageWorker:
    """The microbatches at one peer of one stage."""

    def __init__(self, peer: VirtualPeer, stage: int, flow: "MicrobatchFlow") -> None:
        self.peer = peer
        self.stage = stage
        self._flow = flow
        self.pending: set[Microbatch] = set()  # taken in, with a backward pass to come
        self.returned = 0  # backward passes since the last inner step
        self._began_at: float | None = None
        self._is_open = False
        self._is_busy = False
        self._tasks: deque[Task] = deque()

    @property
    def can_take(self) -> bool:
        """Return whether another microbatch may come in."""
        peer, quota = self.peer, self._flow.per_step
        if not peer.is_alive or peer.trainer is None:
            return False
        if peer.is_done:  # it makes no more steps, but other stages need it
            return len(self.pending) < quota
        return self._is_open and len(self.pending) + self.returned < quota * (1 + self._flow.staleness)

    def open_step(self) -> None:
        """Begin an inner step."""
        self._began_at = self._flow.clock.now if self._began_at is None else self._began_at
        self._is_open = True
        if self.returned >= self._flow.per_step:
            self._make_step()
        self._flow.on_room(self.stage)

    def training_seconds(self) -> float:
        """Return the virtual seconds since the first inner step began; waiting for microbatches counts."""
        return 0.0 if self._began_at is None else self._flow.clock.now - self._began_at

    def take(self, microbatch: Microbatch) -> None:
        """Reserve a place for a microbatch."""
        self.pending.add(microbatch)

    def start(self, task: Task) -> None:
        """Queue a task whose data has arrived; backward passes come first."""
        if task.direction == "backward":
            self._tasks.appendleft(task)
        else:
            self._tasks.append(task)
        self._work()

    def leave(self) -> list[Task]:
        """Return the tasks that a dead peer has left."""
        tasks = [*self._tasks]
        self._tasks.clear()
        return tasks

    def strike(self, microbatch: Microbatch) -> None:
        """Forget a microbatch whose owner is gone."""
        self.pending.discard(microbatch)

    @property
    def _trainer(self) -> StageTrainer:
        assert isinstance(self.peer.trainer, StageTrainer)
        return self.peer.trainer

    def _work(self) -> None:
        while self._tasks and self._tasks[0].microbatch.is_struck:
            self._tasks.popleft()
        if self._is_busy or not self._tasks:
            return
        self._is_busy = True
        units = FORWARD_UNITS if self._tasks[0].direction == "forward" and not self._is_last else BACKWARD_UNITS
        seconds = units * self._flow.unit_seconds(self.peer)
        self._flow.busy_seconds += seconds
        task = self._tasks.popleft()
        self._flow.clock.schedule(seconds, partial(self._finish, task))

    @property
    def _is_last(self) -> bool:
        return self.stage == self._flow.stages - 1

    def _finish(self, task: Task) -> None:
        self._is_busy = False
        if not self.peer.is_alive:
            return self._flow.redirect(task, self.stage)
        if not task.microbatch.is_struck:
            self._run(task)
        self._work()

    def _run(self, task: Task) -> None:
        microbatch, inputs, tokens = task.microbatch, task.microbatch.inputs[self.stage], task.microbatch.inputs[0]
        if task.direction == "forward" and not self._is_last:
            return self._flow.on_forward(microbatch, self.stage, self._trainer.forward(inputs, tokens))
        if self._is_last:
            gradient = self._trainer.finish(inputs, microbatch.targets, tokens)
        else:
            assert task.gradient is not None
            gradient = self._trainer.backward(inputs, task.gradient, tokens)
        self.pending.discard(microbatch)
        microbatch.has_counted = True
        self.returned += 1
        self._flow.on_backward(microbatch, self.stage, gradient)
        if self._is_open and self.returned >= self._flow.per_step:
            self._make_step()

    def _make_step(self) -> None:
        self._is_open = False
        self.returned -= self._flow.per_step
        self._flow.clock.schedule(0.0, self.peer.if_alive(self.peer.on_step))
