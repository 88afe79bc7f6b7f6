"""The work of a trainer that serves one stage of a pipeline: passes of microbatches, and steps with their gradients.

Gradients are sums over microbatches; a step divides them by their number, so it is the same whichever peers computed
the other stages. The norm of a whole model's gradient is the root of the sum of the stages' squares: each of S stages
is clipped at clip / sqrt(S).

Letters in comments: B sequences, T tokens, W width.
"""

import math
import time

import torch
from torch import Tensor

from node.data import BatchReader
from node.ipc.activation_memory import ActivationMemory
from node.ipc.stage_messages import ComputeStage, DrawMicrobatch, MicrobatchDrawn, StageComputed
from node.model import LanguageModel
from node.trainer.stage_pass import backward_stage, finish_microbatch, forward_stage
from protocol.errors import MalformedError
from protocol.manifest import Manifest, TrainSection

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _NotFiniteError(Exception):
    """An input or an output of a task has a value that is not finite."""


def _require_finite(stream: Tensor) -> Tensor:
    if not bool(torch.isfinite(stream).all()):
        raise _NotFiniteError
    return stream


def stage_train(train: TrainSection, stages: int) -> TrainSection:
    """Return the settings of one of several stages: the limit of the gradient's norm is clip / sqrt(stages)."""
    return train.model_copy(update={"clip": train.clip / math.sqrt(stages)})


class StageWork:
    """Computes the tasks of one stage. `batches` is the text of this peer's own microbatches."""

    def __init__(
        self, manifest: Manifest, model: LanguageModel, memory: ActivationMemory, batches: BatchReader
    ) -> None:
        self._model = model
        self._memory = memory
        self._batches = batches
        self._sequences = manifest.pipeline.microbatch
        self._context, self._width = manifest.model.context, manifest.model.width
        self._dtype = DTYPES[manifest.pipeline.activations]
        self._count = 0  # gradients in the open step
        self._loss = 0.0
        self.is_step_due = False

    @property
    def is_between_steps(self) -> bool:
        """Return whether no gradient was added since the last step."""
        return self._count == 0

    def draw(self, command: DrawMicrobatch) -> MicrobatchDrawn:
        """Write the next windows of this peer's text into a slot."""
        self._write(command.slot, self._batches.next_batch(self._sequences).to(torch.int32))
        return MicrobatchDrawn(serial=command.serial)

    def compute(self, command: ComputeStage) -> StageComputed:
        """Run a task; its gradient counts only if it is finite."""
        began = time.monotonic()
        try:
            loss, output = self._backward(command) if command.is_backward else (None, self._forward(command))
            if output is not None and command.output is not None:
                self._write(command.output, _require_finite(output).to(self._dtype))
        except _NotFiniteError:
            return StageComputed(task=command.task, seconds=time.monotonic() - began, fault="not finite")
        return StageComputed(task=command.task, seconds=time.monotonic() - began, loss=loss)

    def take(self) -> tuple[int, float]:
        """End the open step: divide the gradient by the number of microbatches; return their tokens and mean loss."""
        gradient, count = self._model.attach_gradient(), max(1, self._count)
        gradient.mul_(1 / count)
        totals = self._count * self._sequences * self._context, self._loss / count
        self._count, self._loss, self.is_step_due = 0, 0.0, False
        return totals

    def _forward(self, command: ComputeStage) -> Tensor | None:
        """Return the stream after this stage; the last one computes nothing before its backward pass."""
        inputs = self._inputs(command)
        return None if self._model.cut.has_head else forward_stage(self._model, inputs)

    def _backward(self, command: ComputeStage) -> tuple[float | None, Tensor | None]:
        """Add the gradient; return the loss, where this stage computes it, and the gradient of the input."""
        before = None if command.adds else self._model.attach_gradient().clone()
        inputs, loss = self._inputs(command), command.loss
        if self._model.cut.has_head:
            loss, gradient = finish_microbatch(self._model, inputs, self._targets(command), 1.0)
        else:
            gradient = backward_stage(self._model, inputs, self._read_stream(command.gradient))
        if before is not None:
            self._model.attach_gradient().copy_(before)
        else:
            self._count += 1
            self._loss += loss or 0.0
        return (loss if self._model.cut.has_head else None), gradient

    def _inputs(self, command: ComputeStage) -> Tensor:
        if self._model.cut.has_embedding:
            return self._read_windows(command.tokens)[:, :-1]
        return self._read_stream(command.activation)

    def _targets(self, command: ComputeStage) -> Tensor:
        return self._read_windows(command.tokens)[:, 1:]

    def _read_windows(self, slot: int | None) -> Tensor:
        """Return tokens (B, T + 1) int64."""
        shape = (self._sequences, self._context + 1)
        return self._read(slot, torch.int32, shape).to(torch.int64)

    def _read_stream(self, slot: int | None) -> Tensor:
        """Return an activation or its gradient (B, T, W) in fp32; nothing is computed from one that is not finite."""
        return _require_finite(self._read(slot, self._dtype, (self._sequences, self._context, self._width)).float())

    def _read(self, slot: int | None, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        if slot is None:
            raise MalformedError("the daemon sent a stage task without one of its inputs")
        return torch.frombuffer(self._memory.slot(slot), dtype=dtype, count=math.prod(shape)).view(shape)

    def _write(self, slot: int, values: Tensor) -> None:
        """Write a tensor's values into a slot."""
        flat = values.contiguous().cpu().flatten()
        torch.frombuffer(self._memory.slot(slot), dtype=flat.dtype, count=flat.numel()).copy_(flat)
