"""A training loop of the user in a swarm: steps go in, and the weights change when a round is over."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from murmuration.daemon import NodeProcess, tell
from murmuration.own_model import OwnModel
from node.trainer.devices.device import device_name
from node.trainer.exchange_loop import ExchangeLoop
from node.trainer.inner_step import ValidationLoss
from node.trainer.ipc.channel import ChannelClosed, TrainerChannel, TrainerConfig
from node.trainer.ipc.shared_memory import SharedMemory
from node.trainer.state import TrainerState
from protocol.errors import MurmurError

Evaluation = Callable[[], tuple[float, int]]  # mean loss in nats per token, tokens


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

    def save(self) -> None:
        """Write a snapshot, from which the next loop goes on."""
        self._save()


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

        When the run is over, the node ends by itself as soon as the others have the final state.
        """
        if not self._is_open:
            return
        self._is_open = False
        if not self.is_over:
            self._guard(self._loop.save)
        self._loop.close()
        if leave and not self.is_over:
            self._daemon.end()

    def __enter__(self) -> "Swarm":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(leave=kind is None)

    def _prepare(self) -> bool:
        self.is_over = not self._guard(self._loop.prepare_step)
        return not self.is_over

    def _guard(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except ChannelClosed as error:
            raise MurmurError(
                f"the node of this loop has ended: {self._daemon.last_line()}; start the script again"
            ) from error
