"""The work of a trainer that serves one stage of a pipeline: passes of microbatches, and steps with their gradients.

Gradients are sums over microbatches; a step divides them by their number, so it is the same whichever peers computed
the other stages. The norm of a whole model's gradient is the root of the sum of the stages' squares: each of S stages
is clipped at clip / sqrt(S).

Letters in comments: B sequences, T tokens, S values of the stream (`model.stream_width`).
"""

import math
import time
from collections import deque
from statistics import median

import torch
from torch import Tensor

from node.data import BatchReader
from node.model import LanguageModel
from node.trainer.ipc.activation_memory import ActivationMemory
from node.trainer.ipc.stage_messages import (
    ComputeStage,
    DrawMicrobatch,
    DropStageSum,
    MicrobatchDrawn,
    StageCommand,
    StageComputed,
    StageFault,
    StageStepped,
    TakeStageStep,
)
from node.trainer.stages.stage_pass import FORMATS, backward_stage, finish_microbatch, forward_stage
from optim.codecs.base import Payload
from optim.errors import CodecError
from optim.exact import Doubles, Float64Sum
from protocol.errors import MalformedError
from protocol.manifest.run import Manifest
from protocol.manifest.sections import TrainSection
from protocol.pipeline.ledger import Ledger, StepLedger
from protocol.pipeline.messages import Input, Key

NORM_MEDIANS = 5.0  # the most that one microbatch may add, as a multiple of the median norm
MIN_NORMS, MAX_NORMS = 8, 64  # of which the median is taken; with fewer there is no limit
EXACT_READER = "exact"  # whose order of the text all trainers read, in place of their own


class ExactStep:
    """The sum of an open step of `count` microbatches: gradients in fp64, and the ledger of its microbatches.

    A microbatch is added and subtracted by its own gradient, never merged with another one, so the sum does not depend
    on the order. The sum lives in this process only: if the trainer dies, others compute its microbatches again.
    """

    def __init__(self, count: int, numel: int, device: torch.device) -> None:
        self.round = 0
        self.ledger = StepLedger(count)
        self._total = torch.zeros(numel, dtype=torch.float64, device=device)
        self._losses: dict[int, float] = {}

    @property
    def mean_loss(self) -> float:
        """Return the mean loss of the microbatches that count here, as far as it is known."""
        return sum(self._losses.values()) / max(1, len(self._losses))

    @property
    def total(self) -> Doubles:
        """Return the sum, in its own memory on a CPU."""
        return self._total.cpu().numpy()

    def begin(self, round_number: int) -> None:
        """Drop everything, because the weights are others or the step is made again."""
        self.round = round_number
        self.ledger = StepLedger(self.ledger.count)
        self._losses.clear()
        self._total.zero_()

    def add(self, number: int, gradient: Tensor, loss: float | None) -> None:
        """Add the gradient of a microbatch. Raises MalformedError if the sum has it."""
        if number in self.ledger:
            raise MalformedError(f"the daemon adds microbatch {number} of an exact step twice")
        self._total += gradient
        self.ledger |= StepLedger.of(self.ledger.count, (number,))
        self._losses[number] = loss or 0.0

    def take_away(self, number: int, gradient: Tensor) -> None:
        """Subtract the gradient of a microbatch. Raises MalformedError if the sum does not have it."""
        if number not in self.ledger:
            raise MalformedError(f"the daemon takes microbatch {number} out of an exact step that lacks it")
        self._total -= gradient
        self.ledger -= StepLedger.of(self.ledger.count, (number,))
        del self._losses[number]

    def encode(self, codec: Float64Sum) -> Payload:
        """Return the payload of a contribution."""
        return codec.encode_sum(self.total) if len(self.ledger) else codec.encode_nothing()


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
        self._context, self._stream_width = manifest.model.context, manifest.model.stream_width
        self._vocabulary = manifest.model.vocabulary
        self._needs_tokens = manifest.model.needs_tokens
        self._format = FORMATS[manifest.pipeline.activations]
        count = manifest.pipeline.step_microbatches(manifest.train.batch_tokens, self._context)
        is_exact = manifest.pipeline.is_exact
        self.exact = ExactStep(count, model.flat.numel(), model.flat.device) if is_exact else None
        self._count = 0  # gradients in the open step
        self._norms = deque[float](maxlen=MAX_NORMS)  # of the gradients of microbatches lately
        self._is_clipped = False  # the gradient of the last task
        self._reading: Input = "tokens"  # the input of the task that was read last
        self._loss = 0.0
        self.ledger = Ledger()  # of the gradients in the open step
        self.is_step_due = False
        self.start = 0  # the number of this start of the trainer

    @property
    def is_between_steps(self) -> bool:
        """Return whether no gradient was added since the last step; those of an exact step count in its round only."""
        return self._count == 0

    def serve(self, command: StageCommand) -> MicrobatchDrawn | StageComputed | StageStepped | None:
        """Do what the daemon says, and return the answer; ignore what was meant for the trainer before this one."""
        if command.start != self.start:
            return None
        match command:
            case DrawMicrobatch():
                return self.draw(command)
            case ComputeStage():
                return self.compute(command)
            case TakeStageStep():
                self.is_step_due = self.is_in_round(command.round)
                return StageStepped()
            case DropStageSum() if self.is_in_round(command.round):
                self.begin_step(command.round)
        return None

    def draw(self, command: DrawMicrobatch) -> MicrobatchDrawn:
        """Write the next windows of this peer's text, or given ones of the run's, into a slot."""
        if command.window is not None:
            self._batches.seek(command.window)
        self._write(command.slot, self._batches.next_batch(self._sequences).to(torch.int32))
        return MicrobatchDrawn(serial=command.serial)

    def compute(self, command: ComputeStage) -> StageComputed:
        """Run a task. Nothing is computed from a malformed input, and nothing leaves or counts that is not finite."""
        began = time.monotonic()
        if not self.is_in_round(command.round):
            return StageComputed(task=command.task, seconds=0.0, fault="other round")
        loss: float | None = None
        fault: StageFault = ""
        self._is_clipped = False
        try:
            if command.is_backward:
                loss = self._backward(command)
            else:
                self._put_output(command, self._forward(command))
        except CodecError:
            fault = "wrong input"
        except OverflowError:
            fault = "overflow"
        seconds, wrong = time.monotonic() - began, self._reading if fault == "wrong input" else None
        return StageComputed(
            task=command.task, seconds=seconds, loss=loss, fault=fault, wrong=wrong, clipped=self._is_clipped
        )

    def take(self) -> tuple[int, float]:
        """End the open step: divide the gradient by the number of microbatches; return their tokens and mean loss."""
        if self.exact is not None:
            self._model.attach_gradient()
            self.is_step_due = False
            return len(self.exact.ledger) * self._sequences * self._context, self.exact.mean_loss
        gradient, count = self._model.attach_gradient(), max(1, self._count)
        gradient.mul_(1 / count)
        totals = self._count * self._sequences * self._context, self._loss / count
        self._count, self._loss, self.is_step_due = 0, 0.0, False
        return totals

    def take_ledger(self) -> Ledger:
        """Return the microbatches of the step that was ended."""
        taken, self.ledger = self.ledger, Ledger()
        return taken

    def begin_step(self, round_number: int) -> bool:
        """Begin the sum of an exact step, which counts in that round alone; return whether steps are exact."""
        if self.exact is None:
            return False
        self.exact.begin(round_number)
        self.is_step_due = False
        return True

    def is_in_round(self, round_number: int) -> bool:
        """Return whether a command is for the open step."""
        return self.exact is None or self.exact.round == round_number

    @property
    def is_offer_due(self) -> bool:
        """Return whether others wait for the sum of an exact step."""
        return self.exact is not None and self.is_step_due

    def _forward(self, command: ComputeStage) -> Tensor | None:
        """Return the stream after this stage; the last one computes nothing before its backward pass."""
        inputs = self._inputs(command)
        return None if self._model.cut.has_head else forward_stage(self._model, inputs, self._token_ids(command))

    def _put_output(self, command: ComputeStage, output: Tensor | None) -> None:
        """Write an output into its slot. Raises OverflowError if a value is not finite."""
        if output is None or command.output is None:
            return
        try:
            self._write(command.output, self._format.encode(output))
        except CodecError as error:
            raise OverflowError(str(error)) from error

    def _backward(self, command: ComputeStage) -> float | None:
        """Add the gradient, or none if something is not finite; return the loss, where this stage computes it."""
        before = None if self.exact is not None else self._model.attach_gradient().clone()
        try:
            loss, gradient = self._differentiate(command)
            self._put_output(command, gradient)
            if not bool(self._model.attach_gradient().sum().isfinite()) or not math.isfinite(loss or 0.0):
                raise OverflowError("a gradient is not finite")
        except (CodecError, OverflowError):
            self._restore(before)
            raise
        if self.exact is not None:
            self._count_exactly(self.exact, command, loss)
        elif command.adds:
            self._is_clipped = before is not None and self._clip_addition(before)
            self._count += 1
            self._loss += loss or 0.0
            self.ledger.add(Key(command.owner, command.serial))
        else:
            self._restore(before)
        return loss if self._model.cut.has_head else None

    def _clip_addition(self, before: Tensor) -> bool:
        """Scale the gradient of a microbatch down to a few times the median norm; return whether it was larger."""
        gradient = self._model.attach_gradient()
        norm = float((gradient - before).norm())
        limit = NORM_MEDIANS * median(self._norms) if len(self._norms) >= MIN_NORMS else math.inf
        self._norms.append(min(norm, limit))
        if norm <= limit:
            return False
        gradient.sub_(before).mul_(limit / norm).add_(before)
        return True

    def _restore(self, before: Tensor | None) -> None:
        """Set the model's gradient back; an exact step has none between two microbatches."""
        gradient = self._model.attach_gradient()
        gradient.zero_() if before is None else gradient.copy_(before)

    def _differentiate(self, command: ComputeStage) -> tuple[float | None, Tensor | None]:
        """Add the gradient to the model's; return the loss, if it is known, and the gradient of the input."""
        inputs, tokens, loss = self._inputs(command), self._token_ids(command), command.loss
        if self._model.cut.has_head:
            loss, gradient = finish_microbatch(self._model, inputs, self._targets(command), 1.0, tokens)
        else:
            gradient = backward_stage(self._model, inputs, self._read_stream("gradient", command.gradient), tokens)
        return loss, gradient

    def _count_exactly(self, exact: ExactStep, command: ComputeStage, loss: float | None) -> None:
        """Add the gradient of a microbatch to the sum, or take it away; leave none in the model."""
        gradient = self._model.attach_gradient().clone()
        self._model.attach_gradient().zero_()
        if not command.adds and not command.takes_away:
            return
        if command.number is None:
            raise MalformedError("the daemon sent a task of an exact step without its number")
        if command.adds:
            exact.add(command.number, gradient, loss)
        else:
            exact.take_away(command.number, gradient)

    def _inputs(self, command: ComputeStage) -> Tensor:
        if self._model.cut.has_embedding:
            return self._read_windows(command.tokens)[:, :-1]
        return self._read_stream("activation", command.activation)

    def _token_ids(self, command: ComputeStage) -> Tensor | None:
        """Return the token ids (B, T) that a stage of a model with a subspace needs."""
        return self._read_windows(command.tokens)[:, :-1] if self._needs_tokens else None

    def _targets(self, command: ComputeStage) -> Tensor:
        return self._read_windows(command.tokens)[:, 1:]

    def _read_windows(self, slot: int | None) -> Tensor:
        """Return tokens (B, T + 1) int64. Raises CodecError if one is not in the vocabulary."""
        self._reading = "tokens"
        windows = (
            self._read(slot, self._memory.sizes.token_bytes).view(torch.int32).view(self._sequences, self._context + 1)
        )
        if bool(((windows < 0) | (windows >= self._vocabulary)).any()):
            raise CodecError("a token is not in the vocabulary")
        return windows.to(torch.int64)

    def _read_stream(self, name: Input, slot: int | None) -> Tensor:
        """Return an activation or its gradient (B, T, S) in fp32 on the model's device. Raises CodecError."""
        self._reading = name
        payload = self._read(slot, self._memory.sizes.activation_bytes).to(self._model.flat.device)
        return self._format.decode(payload, (self._sequences, self._context, self._stream_width))

    def _read(self, slot: int | None, size: int) -> Tensor:
        """Return the bytes of a slot as uint8. Raises CodecError if a peer's blob of another size is there."""
        if slot is None:
            raise MalformedError("the daemon sent a stage task without one of its inputs")
        content = self._memory.slot(slot)
        if len(content) != size:
            raise CodecError(f"an input of {len(content)} bytes instead of {size}")
        return torch.frombuffer(content, dtype=torch.uint8)

    def _write(self, slot: int, values: Tensor) -> None:
        """Write a tensor's values into a slot."""
        flat = values.contiguous().cpu().flatten()
        torch.frombuffer(self._memory.slot(slot), dtype=flat.dtype, count=flat.numel()).copy_(flat)
