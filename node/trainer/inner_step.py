"""The inner step: gradient, clipping and optimizer; and the validation loss. The simulator uses the same code.

g <- g * min(1, clip / |g|)     then the method's inner update rule with the manifest's learning rate
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from node.from_manifest import learning_rate_scale
from node.model import LanguageModel
from node.trainer.device import autocast_context
from optim.inner.base import InnerStep, InnerUpdateRule
from protocol.manifest import TrainSection


class InnerOptimizer:
    """Applies the method's inner update rule to the flat vector of a model.

    `vectors` is its state, flat fp32 on the model's device, which the trainer saves. `age_at_join` is the run's age in
    inner steps when this trainer joined, `moments_age_at_join` the age of the moments that it began with. `train` may
    change between two steps.
    """

    def __init__(self, model: LanguageModel, train: TrainSection, inner: InnerUpdateRule) -> None:
        self.train = train
        self._inner = inner
        self._model = model
        self._weights = model.flat
        self._layout = model.shapes.layout
        self.age_at_join = self.moments_age_at_join = 0
        sizes = {name: inner.vector_numel(name, self._weights.numel()) for name in inner.vectors}
        self.vectors = {name: self._weights.new_zeros(size) for name, size in sizes.items()}

    def lookahead_weights(self, step: int) -> Tensor | None:
        """Return the weights at which to take the gradient of this step; `None` means the model's own."""
        return self._inner.lookahead_weights(self._weights, self.vectors, self._step_inputs(step))

    def step(self, step: int) -> float | None:
        """Apply the model's gradient and return its norm; None if it is not finite, and then nothing changes.

        `step` is the number of steps applied before; the bias correction of the moments depends on it.
        """
        gradient = self._model.flat_gradient
        if gradient is None:
            raise ValueError("the model has no gradient; run backward first")
        norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            return None
        if norm > self.train.clip:
            gradient.mul_(self.train.clip / norm)
        self._inner.step(self._weights, gradient, self.vectors, self._step_inputs(step))
        return norm

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.train.learning_rate * learning_rate_scale(self.train, step, self.age_at_join)

    def clear_gradient(self) -> None:
        """Drop the model's gradient."""
        self._model.clear_gradient()

    def _step_inputs(self, count: int) -> InnerStep:
        train = self.train
        rate = self.learning_rate(count)
        layout, age = self._layout, self.moments_age_at_join + count
        return InnerStep(age, rate, train.beta1, train.beta2, train.weight_decay, layout.matrix_spans, layout.spans)


def accumulate_gradient(
    model: LanguageModel, windows: Tensor, microbatch: int, at_weights: Tensor | None = None
) -> float:
    """Add the gradient of the mean loss over a batch to the model's; returns the loss in nats per token.

    Args:
        windows: (sequences, context + 1) token ids.
        microbatch: sequences of one forward pass.
        at_weights: take the gradient at these weights; the model keeps its own.
    """
    if at_weights is not None:
        with loaded_weights(model, at_weights):
            return accumulate_gradient(model, windows, microbatch)
    device = model.flat.device
    model.attach_gradient()
    total = torch.zeros((), device=device)
    for piece in torch.split(windows.to(device), microbatch):
        with autocast_context(device):
            loss = model(piece[:, :-1], piece[:, 1:]) * (len(piece) / len(windows))
        loss.backward()
        total += loss.detach()
    return float(total)


@torch.no_grad()
def validation_loss(model: LanguageModel, flat: Tensor, batches: Iterable[Tensor]) -> tuple[float, int]:
    """Return the mean loss of the weights `flat` in nats per token, and the number of tokens.

    The model keeps its own weights.
    """
    device = model.flat.device
    total, tokens = 0.0, 0
    with loaded_weights(model, flat):
        for windows in batches:
            piece = windows.to(device)
            with autocast_context(device):
                loss = model(piece[:, :-1], piece[:, 1:])
            counted = len(piece) * (piece.shape[1] - 1)
            total, tokens = total + float(loss) * counted, tokens + counted
    return total / tokens, tokens


@contextmanager
def loaded_weights(model: LanguageModel, flat: Tensor) -> Iterator[None]:
    """Give the model other weights inside the context, and its own again afterwards."""
    own = model.flat.clone()
    model.load_flat(flat)
    try:
        yield
    finally:
        model.load_flat(own)
