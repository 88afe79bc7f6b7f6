"""The trainer of a virtual peer that serves one stage: its gradient comes from microbatches that pass through."""

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from torch import Tensor

from node.simulation.virtual.trainer import VirtualTrainer
from node.step_settings import StepSettings
from node.trainer.inner_step import loaded_weights
from node.trainer.stages.stage_pass import FORMATS, backward_stage, finish_microbatch, forward_stage
from node.trainer.stages.stage_work import stage_train
from optim.errors import CodecError
from protocol.errors import MurmurError

Result = TypeVar("Result")
NOT_FINITE = "a simulated peer's gradient is not finite; lower train.learning_rate"


class StageTrainer(VirtualTrainer):
    """Runs passes of microbatches, and makes an inner step of the gradients that they have added up."""

    def prepare(self) -> None:
        """Take the settings of a stage's inner steps; must be called before the first step."""
        self.train = stage_train(self._manifest.train, self._manifest.pipeline.stages)
        self._losses: list[float] = []
        pipeline = self._manifest.pipeline
        self._weight = pipeline.microbatch * self._manifest.model.context / self._manifest.train.batch_tokens
        self._format = FORMATS[pipeline.activations]

    def use_settings(self, settings: StepSettings) -> None:
        """Make the next inner steps with these settings, as far as a stage has them."""
        super().use_settings(settings)
        self.train = stage_train(settings.train, self._manifest.pipeline.stages)

    def forward(self, inputs: Tensor, tokens: Tensor) -> Tensor:
        """Return the activations of a microbatch after this stage."""
        return self._on_wire(self._at_predicted_weights(lambda: forward_stage(self._model, inputs, tokens)))

    def backward(self, inputs: Tensor, gradient: Tensor, tokens: Tensor) -> Tensor | None:
        """Add a microbatch's gradient; return that of its inputs, `None` at the first stage."""
        given = self._at_predicted_weights(lambda: backward_stage(self._model, inputs, gradient, tokens, self._weight))
        return None if given is None else self._on_wire(given)

    def finish(self, inputs: Tensor, targets: Tensor, tokens: Tensor) -> Tensor | None:
        """Add a microbatch's gradient at the last stage; return that of its inputs."""
        loss, given = self._at_predicted_weights(
            lambda: finish_microbatch(self._model, inputs, targets, self._weight, tokens)
        )
        self._losses.append(loss)
        return None if given is None else self._on_wire(given)

    def step(self) -> None:
        """Make an inner step of the microbatches since the last one. Raises MurmurError, as `VirtualTrainer.step`."""
        loss = statistics.fmean(self._losses) if self._losses else 0.0  # the stages before the last know none
        self._losses.clear()
        norm = self.state.take_step(self._manifest.train.batch_tokens, loss, 0)
        self._optimizer.clear_gradient()
        if norm is None:
            raise MurmurError(NOT_FINITE)

    def _on_wire(self, activation: Tensor) -> Tensor:
        try:
            return self._format.round_trip(activation)
        except CodecError as error:
            raise MurmurError(NOT_FINITE) from error

    def _at_predicted_weights(self, run: Callable[[], Result]) -> Result:
        """Run a pass at the weights at which the inner update rule takes its gradient."""
        weights = self._optimizer.lookahead_weights(self.state.counters.step)
        with nullcontext() if weights is None else loaded_weights(self._model, weights):
            return run()
