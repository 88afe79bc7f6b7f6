"""The inner optimizer: AdamW (arXiv 1711.05101) over the flat vector, with warm-up, cosine decay and clipping.

g <- g * min(1, clip / |g|)
theta <- theta * (1 - lr * weight_decay)            matrices only: the norms' gains are not decayed
theta <- theta - lr * Adam(g)
"""

import math

import torch

from node.model import Llama, ShapeTable
from protocol.manifest import Train


def learning_rate(train: Train, step: int) -> float:
    """The rate of inner step `step`, counted from 0: linear warm-up times cosine decay to `final_share`."""
    warmup = min(1.0, (step + 1) / (train.warmup_steps + 1))
    if train.decay_steps == 0:
        return train.learning_rate * warmup
    cosine = (1 + math.cos(math.pi * min(1.0, step / train.decay_steps))) / 2
    return train.learning_rate * warmup * (train.final_share + (1 - train.final_share) * cosine)


class InnerOptimizer:
    """AdamW on `model.flat`. The moments are flat fp32 on the model's device and belong to the trainer's state."""

    def __init__(self, model: Llama, train: Train) -> None:
        self._train = train
        self._flat = model.flat
        self._matrices = [model.flat.detach()[start:stop] for start, stop in matrix_runs(model.shapes)]
        self._adam = torch.optim.AdamW(
            [model.flat], lr=train.learning_rate, betas=(train.beta1, train.beta2), weight_decay=0.0, fused=True
        )
        self.first_moment = torch.zeros_like(model.flat.detach())
        self.second_moment = torch.zeros_like(model.flat.detach())
        self.restore(0)

    def restore(self, step: int) -> None:
        """The moments were set from outside, after `step` steps."""
        count = torch.tensor(float(step), device=self._flat.device)
        self._adam.state[self._flat] = {"step": count, "exp_avg": self.first_moment, "exp_avg_sq": self.second_moment}

    def step(self, step: int) -> bool:
        """Apply the gradient in `flat.grad` as inner step `step`; False, and nothing changes, when it is not finite."""
        gradient = self._flat.grad
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
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()
        return True

    def clear_gradient(self) -> None:
        self._adam.zero_grad(set_to_none=True)


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
