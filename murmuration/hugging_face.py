"""A callback with which transformers' Trainer takes part in a run; it needs transformers and accelerate."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from murmuration.joining import join
from murmuration.swarm import Swarm


class SwarmCallback(TrainerCallback):  # type: ignore[misc]  # transformers' types are not read
    """Joins the run when training begins, counts each optimizer step, and leaves when training ends.

    Tokens and losses are those of the model's forward passes since the step before. The run's end ends the training.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        folder: str | Path | None = None,
        arguments: Sequence[str] = (),
        log: Sequence[str] = (),
        leave: bool = True,
    ) -> None:
        self.swarm: Swarm | None = None
        self._run = run
        self._folder = folder
        self._arguments = arguments
        self._log = log
        self._leave = leave
        self._passes = ForwardPasses()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Join, with the trainer's model and optimizer."""
        model = objects["model"]
        self._passes.watch(model)
        optimizer = getattr(objects["optimizer"], "optimizer", objects["optimizer"])
        self.swarm = join(self._run, model, optimizer, folder=self._folder, arguments=self._arguments, log=self._log)
        control.should_training_stop = self.swarm.is_over

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Count the step."""
        assert self.swarm is not None, "training begins before its first step ends"
        tokens, loss = self._passes.take()
        if not self.swarm.step(tokens=tokens, loss=loss):
            control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Leave the run."""
        self._passes.stop()
        if self.swarm is not None:
            self.swarm.close(leave=self._leave)


class ForwardPasses:
    """Counts tokens and losses of a model's training passes."""

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None
        self._tokens = 0
        self._losses: list[Tensor] = []

    def watch(self, model: nn.Module) -> None:
        """Count the passes of a model from now on."""
        self._handle = model.register_forward_hook(self._count, with_kwargs=True)

    def stop(self) -> None:
        """Count no more."""
        if self._handle is not None:
            self._handle.remove()

    def take(self) -> tuple[int, float]:
        """Return tokens and mean loss since the last call."""
        tokens, losses = self._tokens, self._losses
        self._tokens, self._losses = 0, []
        return tokens, float(torch.stack(losses).mean()) if losses else 0.0

    def _count(self, model: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        loss = output.get("loss")
        if model.training and loss is not None:
            self._tokens += int(named["input_ids"].numel())
            self._losses.append(loss.detach())
