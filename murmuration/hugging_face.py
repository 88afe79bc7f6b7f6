"""A callback with which transformers' Trainer takes part in a run; it needs transformers and accelerate."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from murmuration.joining import join
from murmuration.swarm import Swarm
from protocol.errors import UsageError

IGNORED_LABEL: Final = -100
BAR_FORMAT: Final = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}{postfix}"
OWN_LOSS: Final = (
    "the callback reports the loss that the model returns; train without label smoothing and compute_loss_func, or "
    "write a loop of your own with murmuration.join"
)


class SwarmCallback(TrainerCallback):  # type: ignore[misc]  # transformers' types are not read
    """Joins the run when training begins, counts each optimizer step, and leaves when training ends.

    Tokens and losses are those of the model's forward passes since the step before: tokens with a label, and the loss
    that the model returns. The run's end ends the training, and a bar shows how far the run is, unless `bar` is False:
    `max_steps` only has to be larger than the steps that the run needs.

    Raises:
        UsageError: the Trainer computes its loss by itself, by label smoothing or a function of the user.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        folder: str | Path | None = None,
        arguments: Sequence[str] = (),
        log: Sequence[str] = (),
        leave: bool = True,
        bar: bool = True,
    ) -> None:
        self._bar = tqdm(total=100, desc="the run", bar_format=BAR_FORMAT, disable=None if bar else True)
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
        if args.label_smoothing_factor:
            raise UsageError(f"label_smoothing_factor: {OWN_LOSS}")
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
        self._bar.set_postfix_str(f"round {self.swarm.round}, step {self.swarm.steps}", refresh=False)
        self._bar.update(100 * self.swarm.progress - self._bar.n)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Leave the run."""
        self._passes.stop()
        self._bar.close()
        if self.swarm is not None:
            self.swarm.close(leave=self._leave)


class ForwardPasses:
    """Counts tokens and losses of a model's training passes.

    With `num_items_in_batch` the Trainer divides the loss of each pass by the tokens of the whole step, so their sum is
    the mean; without it each pass returns a mean of its own.
    """

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None
        self._tokens = 0
        self._losses: list[Tensor] = []
        self._are_shares = False

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
        if not losses:
            raise UsageError(f"the model returned no loss: {OWN_LOSS}")
        loss = torch.stack(losses)
        return tokens, float(loss.sum() if self._are_shares else loss.mean())

    def _count(self, model: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if model.training and loss is not None:
            self._tokens += _count_tokens(named)
            self._losses.append(loss.detach())
            self._are_shares = named.get("num_items_in_batch") is not None


def _count_tokens(named: Mapping[str, Any]) -> int:
    """Return the tokens of a pass that have a label; without labels those that are not padding."""
    labels, mask = named.get("labels"), named.get("attention_mask")
    if labels is not None:
        return int((labels != IGNORED_LABEL).sum())
    return int(mask.sum()) if mask is not None else int(named["input_ids"].numel())
