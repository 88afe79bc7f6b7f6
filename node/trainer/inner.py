"""The inner optimizer: AdamW (arXiv 1711.05101) over the flat vector, with warm-up, cosine decay and clipping.

g <- g * min(1, clip / |g|)
theta <- theta * (1 - lr * weight_decay)            matrices only: the norms' gains are not decayed
theta <- theta - lr * Adam(g)
"""

import math

import torch
from torch import Tensor

from node.model import Llama, ShapeTable
from protocol.manifest import Train

EPSILON = 1e-8


def learning_rate(train: Train, step: int) -> float:
    """The rate of inner step `step`, counted from 0: linear warm-up times cosine decay to `final_share`."""
    warmup = min(1.0, (step + 1) / (train.warmup_steps + 1))
    if train.decay_steps == 0:
        return train.learning_rate * warmup
    cosine = (1 + math.cos(math.pi * min(1.0, step / train.decay_steps))) / 2
    return train.learning_rate * warmup * (train.final_share + (1 - train.final_share) * cosine)


class InnerOptimizer:
    """AdamW on `model.flat`. The moments are flat fp32 on the model's device and belong to the trainer's state.

    Written out here because torch.optim imports the compiler at its first use: a second more at each restart.
    """

    def __init__(self, model: Llama, train: Train) -> None:
        self._train = train
        self._parameter = model.flat
        self._weights = model.flat.detach()
        self._matrices = [self._weights[start:stop] for start, stop in matrix_runs(model.shapes)]
        self.first_moment = torch.zeros_like(self._weights)
        self.second_moment = torch.zeros_like(self._weights)

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
        rate = learning_rate(self._train, step)
        for matrix in self._matrices:
            matrix.mul_(1 - rate * self._train.weight_decay)
        self._adam(gradient, rate, step + 1)
        return True

    def clear_gradient(self) -> None:
        self._parameter.grad = None

    def _adam(self, gradient: Tensor, rate: float, count: int) -> None:
        """theta <- theta - rate * m' / (sqrt(v') + eps), where x' = x / (1 - beta^count) corrects the zero start."""
        beta1, beta2 = self._train.beta1, self._train.beta2
        self.first_moment.lerp_(gradient, 1 - beta1)
        self.second_moment.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        spread = self.second_moment.sqrt().div_(math.sqrt(1 - beta2**count)).add_(EPSILON)
        self._weights.addcdiv_(self.first_moment, spread, value=-rate / (1 - beta1**count))


def matrix_runs(shapes: ShapeTable) -> list[tuple[int, int]]:
    """Where the matrices stand in the flat vector; neighbours are joined."""
    runs: list[tuple[int, int]] = []
    for shape, start, size in zip(shapes.shapes, shapes.offsets, shapes.sizes, strict=True):
        if len(shape) < 2:
            continue
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], start + size)
        else:
            runs.append((start, start + size))
    return runs
