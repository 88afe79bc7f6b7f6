"""The inner step: gradient, clipping and optimizer; and the validation loss. The simulator uses the same code.

g <- g * min(1, clip / |g|)     then the method's inner update rule with the manifest's learning rate
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from node.data import HeldOut
from node.data.batches import count_targets, inputs_and_targets
from node.from_manifest import learning_rate_scale
from node.model import LanguageModel
from node.trainer.devices.device import autocast_context
from optim.inner.base import InnerStep, InnerUpdateRule
from optim.kernels.vectors import SLAB_SIZE
from protocol.manifest.sections import TrainSection

SLAB_SIZES = {
    "cpu": SLAB_SIZE,
    "cuda": 1 << 24,
    "mps": 1 << 24,
}  # values of a slab, for all of which an operation is one launch


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
        self._layout = model.shapes.layout
        self._layer_matrices = model.layer_matrices
        self.age_at_join = self.moments_age_at_join = 0
        self._vectors: Mapping[str, Tensor] | None = None

    @property
    def vectors(self) -> Mapping[str, Tensor]:
        """Return the state vectors by name; at the first call they are made of zeros, unless others are in use."""
        if self._vectors is None:
            weights, inner = self._model.flat, self._inner
            self._vectors = {
                name: weights.new_zeros(inner.vector_numel(name, self._layout), dtype=inner.vector_dtype(name))
                for name in inner.vectors
            }
        return self._vectors

    def use_vectors(self, vectors: Mapping[str, Tensor]) -> None:
        """Keep the state in these vectors from now on."""
        self._vectors = {name: vectors[name] for name in self._inner.vectors}

    def lookahead_weights(self, step: int) -> Tensor | None:
        """Return the weights at which to take the gradient of this step; `None` means the model's own."""
        return self._inner.lookahead_weights(self._model.flat, self.vectors, self._step_inputs(step))

    def gradient_norm(self) -> float:
        """Return the norm of the model's gradient, which may not be finite."""
        return float(torch.linalg.vector_norm(self._gradient(), dtype=torch.float32))

    def step(self, step: int) -> float | None:
        """Apply the model's gradient and return its norm; None if it is not finite, and then nothing changes."""
        norm = self.gradient_norm()
        if not math.isfinite(norm):
            return None
        self.apply(step, norm)
        return norm

    def apply(self, step: int, norm: float) -> None:
        """Apply the model's gradient, whose norm this is.

        `step` is the number of steps applied before; the bias correction of the moments depends on it. An elementwise
        rule goes from slab to slab, so that its temporaries are small and stay in the cache; so does each rule for
        weights in bf16, which are in fp32 for the step.
        """
        weights, gradient, inputs = self._model.flat, self._gradient(), self._step_inputs(step)
        if not self._inner.is_elementwise and self._model.rounding is None:
            self._apply_part(slice(0, weights.numel()), weights, gradient, inputs, norm)
            return
        for part in self._inner.parts(weights.numel(), inputs, SLAB_SIZES[weights.device.type]):
            self._apply_part(part, weights, gradient, inputs, norm)

    def _apply_part(self, part: slice, weights: Tensor, gradient: Tensor, step: InnerStep, norm: float) -> None:
        values, fresh = weights[part], gradient[part]
        if norm > self.train.clip:
            fresh.mul_(self.train.clip / norm)
        vectors, within = self._inner.part_of(part, self.vectors, step)
        if self._model.rounding is None:
            self._inner.step(values, fresh, vectors, within)
        else:
            exact = values.float()
            self._inner.step(exact, fresh.float(), vectors, within)
            self._model.rounding.copy(exact, values)

    def _gradient(self) -> Tensor:
        gradient = self._model.flat_gradient
        if gradient is None:
            raise ValueError("the model has no gradient; run backward first")
        return gradient

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.train.learning_rate * learning_rate_scale(self.train, step, self.age_at_join)

    def take_routed_tokens(self) -> tuple[int, ...]:
        """Return for each expert of the model the tokens that it was trained on since the last call."""
        return self._model.take_routed_tokens()

    def clear_gradient(self) -> None:
        """Drop the model's gradient."""
        self._model.clear_gradient()

    def _step_inputs(self, count: int) -> InnerStep:
        train = self.train
        rate = self.learning_rate(count)
        layout, age = self._layout, self.moments_age_at_join + count
        return InnerStep(
            age,
            rate,
            train.beta1,
            train.beta2,
            train.weight_decay,
            layout.matrix_spans,
            layout.spans,
            self._layer_matrices,
        )


def accumulate_gradient(
    model: LanguageModel, windows: Tensor, microbatch: int, at_weights: Tensor | None = None
) -> float:
    """Add the gradient of the mean loss over a batch to the model's; returns the loss in nats per counted token.

    Args:
        windows: (sequences, context + 1) token ids, those that are not learned with the bit `UNCOUNTED`.
        microbatch: sequences of one forward pass.
        at_weights: take the gradient at these weights; the model keeps its own.
    """
    if at_weights is not None:
        with loaded_weights(model, at_weights):
            return accumulate_gradient(model, windows, microbatch)
    device = model.flat.device
    model.attach_gradient()
    total = torch.zeros((), device=device)
    counts = [count_targets(piece) for piece in torch.split(windows, microbatch)]
    for piece, count in zip(torch.split(windows.to(device), microbatch), counts, strict=True):
        if not count:
            continue
        with autocast_context(device):
            loss = model(*inputs_and_targets(piece)) * (count / sum(counts))
        loss.backward()
        total += loss.detach()
    return float(total)


@torch.no_grad()
def validation_loss(model: LanguageModel, flat: Tensor, batches: Iterable[Tensor]) -> tuple[float, int]:
    """Return the mean loss of the weights `flat` in nats per counted token, and the number of these.

    The model keeps its own weights.
    """
    device = model.flat.device
    total, tokens = 0.0, 0
    with loaded_weights(model, flat):
        for windows in batches:
            counted = count_targets(windows)
            if not counted:
                continue
            with autocast_context(device):
                loss = model(*inputs_and_targets(windows.to(device)))
            total, tokens = total + float(loss) * counted, tokens + counted
    return total / max(1, tokens), tokens


@contextmanager
def loaded_weights(model: LanguageModel, flat: Tensor) -> Iterator[None]:
    """Give the model other weights inside the context, and its own again afterwards."""
    own = model.flat
    model.use_memory(flat.to(own.device), model.gradient_memory)
    try:
        yield
    finally:
        model.use_memory(own, model.gradient_memory)


@dataclass(frozen=True)
class ValidationLoss:
    """A mean loss in nats per token, the number of tokens, and the losses of the sources of a mixture by name."""

    loss: float
    tokens: int
    by_source: Mapping[str, float] = field(default_factory=dict)


def validate(model: LanguageModel, flat: Tensor, held_out: Sequence[HeldOut]) -> ValidationLoss:
    """Measure the weights `flat` (numel,) on each source."""
    return combine_sources(held_out, [validation_loss(model, flat, held.batches) for held in held_out])


def combine_sources(held_out: Sequence[HeldOut], measured: Sequence[tuple[float, int]]) -> ValidationLoss:
    """Return the result of losses and tokens by source; the loss of a mixture is their mean by weights."""
    pairs = [(held, loss) for held, (loss, _) in zip(held_out, measured, strict=True)]
    return ValidationLoss(
        loss=sum(held.weight * loss for held, loss in pairs) / sum(held.weight for held in held_out),
        tokens=sum(tokens for _, tokens in measured),
        by_source={held.name: loss for held, loss in pairs} if len(pairs) > 1 else {},
    )
