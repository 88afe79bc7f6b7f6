"""The inner optimizer of the method at work on a model's flat vector, with the manifest's learning rate and clipping.

g <- g * min(1, clip / |g|), then what the method's inner part does with it
"""

import math

import torch
from torch import Tensor

from node.model import Llama
from node.program import learning_rate_scale
from optim.inner.inner import InnerUpdateRule, InnerStep
from protocol.manifest import TrainSection


class InnerOptimizer:
    """`vectors`: the optimizer's state, flat fp32 on the model's device; it belongs to the trainer's. `began`: local
    steps that the run was old when this trainer joined it; `moments_began`: those that its first moments came from."""

    def __init__(self, model: Llama, train: TrainSection, inner: InnerUpdateRule) -> None:
        self._train = train
        self._inner = inner
        self._parameter = model.flat
        self._weights = model.flat.detach()
        self._layout = model.shapes.layout
        self.age_at_join = self.moments_age_at_join = 0
        sizes = {name: inner.vector_numel(name, self._weights.numel()) for name in inner.vectors}
        self.vectors = {name: self._weights.new_zeros(size) for name, size in sizes.items()}

    def lookahead_weights(self, step: int) -> Tensor | None:
        """Where the gradient of inner step `step` is to be taken; None: at the weights."""
        return self._inner.lookahead_weights(self._weights, self.vectors, self._step_inputs(step))

    def step(self, step: int) -> bool:
        """Apply the gradient in `flat.grad` as inner step `step`; False, and nothing changes, when it is not finite.

        `step` counts the steps applied before, from 0: the moments' bias is corrected by it.
        """
        gradient = self._parameter.grad
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
        self._parameter.grad = None

    def _step_inputs(self, count: int) -> InnerStep:
        train = self._train
        rate = train.learning_rate * learning_rate_scale(train, count, self.age_at_join)
        layout, age = self._layout, self.moments_age_at_join + count
        return InnerStep(age, rate, train.beta1, train.beta2, train.weight_decay, layout.matrix_spans, layout.spans)
