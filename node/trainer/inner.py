"""The inner optimizer of the method at work on a model's flat vector, with the manifest's learning rate and clipping.

g <- g * min(1, clip / |g|), then what the method's inner part does with it
"""

import math

import torch
from torch import Tensor

from node.model import Llama
from node.program import rate_share
from optim.inner.inner import Inner, Step
from protocol.manifest import Train


class InnerOptimizer:
    """`vectors`: the optimizer's state, flat fp32 on the model's device; it belongs to the trainer's. `began`: local
    steps that the run was old when this trainer joined it; `moments_began`: those that its first moments came from."""

    def __init__(self, model: Llama, train: Train, inner: Inner) -> None:
        self._train = train
        self._inner = inner
        self._parameter = model.flat
        self._weights = model.flat.detach()
        self._layout = model.shapes.layout
        self.began = self.moments_began = 0
        sizes = {name: inner.size_of(name, self._weights.numel()) for name in inner.vectors}
        self.vectors = {name: self._weights.new_zeros(size) for name, size in sizes.items()}

    def look_ahead(self, step: int) -> Tensor | None:
        """Where the gradient of inner step `step` is to be taken; None: at the weights."""
        return self._inner.look_ahead(self._weights, self.vectors, self._step(step))

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
        self._inner.step(self._weights, gradient, self.vectors, self._step(step))
        return True

    def clear_gradient(self) -> None:
        self._parameter.grad = None

    def _step(self, count: int) -> Step:
        train = self._train
        rate = train.learning_rate * rate_share(train, count, self.began)
        layout, age = self._layout, self.moments_began + count
        return Step(age, rate, train.beta1, train.beta2, train.weight_decay, layout.matrices, layout.spans)
