"""A training loop of the user in a swarm: steps go in, and the weights change when a round is over."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from murmuration.daemon import NodeProcess, tell
from murmuration.own_model import OwnModel
from node.monitoring.display import WAITING_PHASES
from node.monitoring.status import NodeStatus
from node.trainer.devices.device import device_name
from node.trainer.exchange_loop import ExchangeLoop
from node.trainer.inner_step import ValidationLoss
from node.trainer.ipc.channel import Activity, ChannelClosed, TrainerChannel, TrainerConfig
from node.trainer.ipc.shared_memory import SharedMemory
from node.trainer.state import TrainerState
from protocol.errors import MurmurError
from protocol.manifest.sections import TargetSection

Evaluation = Callable[[], tuple[float, int]]  # mean loss in nats per token, tokens
QUIET_SECONDS = 5.0  # a wait that is shorter needs no word
REPEAT_SECONDS = 60.0
PROGRESS_SECONDS = 2.0
LAST_LINES_SECONDS = 30.0  # until the others have the final state


class WaitNotices:
    """Decides when a person should read what the loop waits for: after some seconds, then at each change."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._asked_at = self._printed_at = -math.inf
        self._text = ""

    def end(self) -> None:
        """Take note that a step may be made."""
        self._since = None

    def is_due(self, now: float) -> bool:
        """Return whether to find out the reason of the wait, at most every QUIET_SECONDS."""
        if self._since is None:
            self._since = self._asked_at = now
        if now - self._asked_at < QUIET_SECONDS:
            return False
        self._asked_at = now
        return True

    def line(self, now: float, status: NodeStatus | None) -> str | None:
        """Return the line to print, None for one that was printed lately."""
        assert self._since is not None, "a wait has begun"
        text = describe_wait(status)
        if text == self._text and now - self._printed_at < REPEAT_SECONDS:
            return None
        self._text, self._printed_at = text, now
        return f"{text} (for {now - self._since:.0f} s)"


def describe_wait(status: NodeStatus | None) -> str:
    """Return why a loop waits, in the words of its node."""
    if status is None:
        return "waiting: the node does not say for what; see daemon.log"
    if status.phase in (*WAITING_PHASES, "paused"):
        return f"{status.phase}: {status.reason}" if status.reason else status.phase
    return f"waiting for the result of round {status.round + 1}"


class UnknownOptimizer:
    """The optimizer of the user, of whose state rounds know nothing."""

    def __init__(self) -> None:
        self.vectors: dict[str, Tensor] = {}
        self.age_at_join = self.moments_age_at_join = 0


class OwnLoop(ExchangeLoop):
    """The part of rounds in a loop of the user."""

    def __init__(
        self,
        config: TrainerConfig,
        state: TrainerState,
        shared_memory: SharedMemory,
        channel: TrainerChannel,
        model: OwnModel,
        evaluation: Evaluation | None,
    ) -> None:
        super().__init__(config, state, shared_memory, channel)
        self._model = model
        self._evaluation = evaluation
        self.optimizer: Optimizer | None = None
        self.node: NodeProcess | None = None
        self._notices = WaitNotices()

    @property
    def device(self) -> str:
        return device_name(self._model.flat.device)

    @property
    def evaluates(self) -> bool:
        return self._evaluation is not None

    @property
    def steps(self) -> int:
        """Return the number of steps counted since this node joined, over restarts."""
        return self._state.counters.step

    @property
    def round(self) -> int:
        """Return the round whose result the weights contain."""
        return self._state.counters.round

    def count_step(self, tokens: int, loss: float) -> None:
        """Count a step that the optimizer has made."""
        self._state.count_step(tokens, loss, self.steps + 1)
        self.report_step(tokens, loss)

    def learning_rate(self, step: int) -> float:
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer is not None else 0.0

    @torch.no_grad()
    def validate(self, round_number: int) -> ValidationLoss:
        assert self._evaluation is not None, "the daemon knows that this loop does not evaluate"
        own = self._model.flat.clone()
        self._model.load_flat(self._shared_memory.anchor(round_number)[: own.numel()])
        try:
            return ValidationLoss(*self._evaluation())
        finally:
            self._model.load_flat(own)

    def prepare_step(self) -> bool:
        """Do what the rounds ask for until a step may be made; a long wait is explained."""
        may_go_on = super().prepare_step()
        self._notices.end()
        return may_go_on

    def save(self) -> None:
        """Write a snapshot, from which the next loop goes on."""
        self._save()

    def _wait(self, activity: Activity) -> None:
        now = time.monotonic()
        node, is_due = self.node, self._notices.is_due(now)
        if node is not None and is_due and (line := self._notices.line(now, node.status())):
            tell(line)
        super()._wait(activity)


class Swarm:
    """The run, as a training loop sees it. `murmuration.join` returns one.

    Use it as a context manager, or call `close`: it leaves the run. If the loop ends by an error or is killed, its node
    stays in the run, and the next `join` in the same folder goes on where the last snapshot was written (at most ten
    seconds before).
    """

    def __init__(self, loop: OwnLoop, daemon: NodeProcess, optimizer: Optimizer | None) -> None:
        self._loop = loop
        self._daemon = daemon
        self._optimizer = loop.optimizer = optimizer
        self._is_open = True
        self._progress = 0.0
        self._asked_at = -math.inf
        loop.node = daemon
        self.is_over = False
        self._guard(loop.open)
        tell(f"in the run at round {self.round}, step {self.steps}")
        self._prepare()

    @property
    def round(self) -> int:
        """Return the number of the newest round that the weights contain."""
        return self._loop.round

    @property
    def steps(self) -> int:
        """Return how many steps this node has counted since it joined, over restarts: where to go on in the data."""
        return self._loop.steps

    @property
    def progress(self) -> float:
        """Return how far the run is on the way to its target, from 0 to 1, as the node saw it within two seconds."""
        now = time.monotonic()
        if not self.is_over and now - self._asked_at >= PROGRESS_SECONDS:
            self._asked_at = now
            status = self._daemon.status()
            if status is not None:
                target = TargetSection(rounds=status.target_rounds, tokens=status.target_tokens)
                progress = target.progress(status.round, status.chain_tokens)
                self._progress = max(self._progress, min(1.0, progress))
        return 1.0 if self.is_over else self._progress

    def step(self, *, tokens: int, loss: float | Tensor) -> bool:
        """Count a step that the optimizer has made; send, apply and save what the rounds ask for.

        The weights may change meanwhile. The call waits where the method lets no peer train ahead.

        Args:
            tokens: tokens that the step was made with; they weigh the contribution.
            loss: mean loss of the step in nats per token.

        Returns:
            True while the run goes on; False once it has reached its target, and then nothing is counted.

        Raises:
            ValueError: `tokens` is not positive, or the loss is not finite: the weights may be spoiled.
            MurmurError: The node of this loop has ended.
        """
        value = float(loss)
        if tokens < 1:
            raise ValueError(f"a step with {tokens} tokens")
        if not math.isfinite(value):
            raise ValueError(f"the loss is {value}; the step is not counted. Skip steps whose gradient is not finite")
        if self.is_over:
            return False
        self._loop.count_step(tokens, max(0.0, value))
        self._guard(self._loop.report_and_save)
        return self._prepare()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and the number of steps; weights and progress are in the node's folder."""
        return {
            "steps": self.steps,
            "optimizer": self._optimizer.state_dict() if self._optimizer is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the optimizer's state. The weights stay those of the node, which may be newer."""
        if self._optimizer is not None and state["optimizer"] is not None:
            self._optimizer.load_state_dict(state["optimizer"])

    def close(self, *, leave: bool = True) -> None:
        """Save, and leave the run; with `leave = False` the node stays in it and waits for the next loop.

        When the run is over, the node ends by itself as soon as the others have the final state; the call waits for
        that at most LAST_LINES_SECONDS, and prints the lines of the end.
        """
        if not self._is_open:
            return
        self._is_open = False
        if not self.is_over:
            self._guard(self._loop.save)
        self._loop.close()
        if self.is_over:
            self._tell_end()
        elif leave:
            self._daemon.end()

    def __enter__(self) -> "Swarm":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(leave=kind is None)

    def _prepare(self) -> bool:
        self.is_over = not self._guard(self._loop.prepare_step)
        if self.is_over:
            tell(f"the run has reached its target; this loop made {self.steps:,} steps")
        return not self.is_over

    def _tell_end(self) -> None:
        lines = self._daemon.last_lines(LAST_LINES_SECONDS)
        for line in lines or ["the node gives the final state to others and then ends; its last lines: daemon.log"]:
            tell(line)

    def _guard(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except ChannelClosed as error:
            raise MurmurError(
                f"the node of this loop has ended: {self._daemon.last_line()}; start the script again"
            ) from error
