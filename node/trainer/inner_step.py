"""The inner optimizer of the method at work on a model's flat vector, with the manifest's learning rate and clipping.

g <- g * min(1, clip / |g|), then what the method's inner part does with it

One inner step's gradient, and the validation loss: what the trainer and the simulator do alike with the model.
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
    """`vectors`: the optimizer's state, flat fp32 on the model's device; it belongs to the trainer's. `began`: local
    steps that the run was old when this trainer joined it; `moments_began`: those that its first moments came from."""

    def __init__(self, model: LanguageModel, train: TrainSection, inner: InnerUpdateRule) -> None:
        self._train = train
        self._inner = inner
        self._model = model
        self._weights = model.flat
        self._layout = model.shapes.layout
        self.age_at_join = self.moments_age_at_join = 0
        sizes = {name: inner.vector_numel(name, self._weights.numel()) for name in inner.vectors}
        self.vectors = {name: self._weights.new_zeros(size) for name, size in sizes.items()}

    def lookahead_weights(self, step: int) -> Tensor | None:
        """Where the gradient of inner step `step` is to be taken; None: at the weights."""
        return self._inner.lookahead_weights(self._weights, self.vectors, self._step_inputs(step))

    def step(self, step: int) -> bool:
        """Apply the model's gradient as inner step `step`; False, and nothing changes, when it is not finite.

        `step` counts the steps applied before, from 0: the moments' bias is corrected by it.
        """
        gradient = self._model.flat_gradient
        if gradient is None:
            raise ValueError("there is no gradient; run backward first")
        norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            return False
        if norm > self._train.clip:
            gradient.mul_(self._train.clip / norm)
        self._inner.step(self._weights, gradient, self.vectors, self._step_inputs(step))
        return True

    def clear_gradient(self) -> None:
        self._model.clear_gradient()

    def _step_inputs(self, count: int) -> InnerStep:
        train = self._train
        rate = train.learning_rate * learning_rate_scale(train, count, self.age_at_join)
        layout, age = self._layout, self.moments_age_at_join + count
        return InnerStep(age, rate, train.beta1, train.beta2, train.weight_decay, layout.matrix_spans, layout.spans)


def accumulate_gradient(
    model: LanguageModel, windows: Tensor, microbatch: int, at_weights: Tensor | None = None
) -> float:
    """Adds the gradient of the mean loss over `windows` (sequences, context + 1) to the model's, a few at a time.

    `place`: weights at which it is taken instead of the model's, which are left as they were. Returns that loss, in
    nats a token.
    """
    if at_weights is not None:
        with _loaded_weights(model, at_weights):
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
    """Mean loss in nats a token of the weights `flat`, and the tokens it was taken over; `model` is left as it was."""
    device = model.flat.device
    total, tokens = 0.0, 0
    with _loaded_weights(model, flat):
        for windows in batches:
            piece = windows.to(device)
            with autocast_context(device):
                loss = model(piece[:, :-1], piece[:, 1:])
            counted = len(piece) * (piece.shape[1] - 1)
            total, tokens = total + float(loss) * counted, tokens + counted
    return total / tokens, tokens


@contextmanager
def _loaded_weights(model: LanguageModel, flat: Tensor) -> Iterator[None]:
    """The model has these weights while inside, and its own again afterwards."""
    own = model.flat.clone()
    model.load_flat(flat)
    try:
        yield
    finally:
        model.load_flat(own)
