"""Muon: momentum whose matrices are made orthogonal, and AdamW for everything else.

The steps of a matrix along its few strong directions are as long as those along its many weak ones. Peers that train
with it agree better on where to go: at 115 thousand to 15 billion parameters, pseudo-gradients of Muon lose less under
compression, long rounds and many peers than AdamW's do (MuLoCo, arXiv 2505.23725).

A matrix is one of a layer; the embedding, the output matrix, norms and biases follow AdamW. Several experts in one
tensor (experts, rows, columns) are matrices of their own.
"""

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from optim.inner.base import FIRST_MOMENT, SECOND_MOMENT, InnerStep, InnerUpdateRule, update_second_moment
from optim.layout import Shape
from optim.options import STRICT

ITERATION: Final = (3.4445, -4.7750, 2.0315)  # a, b, c of a quintic that lifts small singular values fastest
ITERATIONS: Final = 5
TINY: Final = 1e-7
ADAM_SIZE: Final = 0.2  # the usual root mean square of an element of AdamW's step, in units of the rate (2502.16982)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Muon(InnerUpdateRule):
    """Orthogonal momentum for the matrices of layers, AdamW for the rest (Muon; arXiv 2502.16982, 2505.23725).

        m <- mu * m + (1 - mu) * g;  u = mu * m + (1 - mu) * g if nesterov, else m
        theta <- theta * (1 - rate * weight_decay)                matrices only
        theta <- theta - rate * factor * size(rows, columns) * orthogonal(u)

    where orthogonal(u) has about the singular vectors of u with singular values near 1, and size is
    0.2 * sqrt(max(rows, columns)) for "adam", which makes a step as large as AdamW's, so that one learning rate serves
    both, and sqrt(max(1, rows / columns)) for "spectral", which wants a rate of its own (`factor`).
    """

    kind: ClassVar[str] = "muon"
    is_per_tensor: ClassVar[bool] = True
    vectors: ClassVar[tuple[str, ...]] = (FIRST_MOMENT, SECOND_MOMENT)

    momentum: float = Field(default=0.95, ge=0, lt=1)
    nesterov: bool = Field(default=True, description="look one step of the momentum ahead")
    scaling: Literal["adam", "spectral"] = Field(default="adam", description="size of a matrix's step")
    factor: float = Field(default=1.0, gt=0, le=1000, description="on the learning rate of matrices")

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        first, second = vectors[FIRST_MOMENT], vectors[SECOND_MOMENT]
        step.decay_weights(weights)
        stop = 0
        for (start, end), shape in step.layer_matrices:
            self._step_rest(weights[stop:start], gradient[stop:start], first[stop:start], second[stop:start], step)
            momentum, fresh = first[start:end], gradient[start:end]
            momentum.lerp_(fresh, 1 - self.momentum)
            course = fresh.lerp_(momentum, self.momentum) if self.nesterov else momentum
            size = step.rate * self.factor * self.step_size(shape)
            weights[start:end].sub_(orthogonalize(course.view(shape)).flatten(), alpha=size)
            stop = end
        self._step_rest(weights[stop:], gradient[stop:], first[stop:], second[stop:], step)

    def needs_whole(self, tensor: InnerStep) -> bool:
        return bool(tensor.layer_matrices)

    def step_size(self, shape: Shape) -> float:
        """Return the factor on the orthogonal matrix of this shape (..., rows, columns)."""
        rows, columns = shape[-2:]
        if self.scaling == "adam":
            return float(ADAM_SIZE * max(rows, columns) ** 0.5)
        return float(max(1.0, rows / columns) ** 0.5)

    @staticmethod
    def _step_rest(weights: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: InnerStep) -> None:
        """Apply AdamW to what lies between two matrices."""
        if not weights.numel():
            return
        first.lerp_(gradient, 1 - step.beta1)
        spread = update_second_moment(second, gradient, step)
        weights.addcdiv_(first, spread, value=-step.rate / (1 - step.beta1 ** (step.count + 1)))


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return U V^T for a matrix U S V^T, approximately: singular values end between about 0.7 and 1.2.

        x <- matrix / |matrix|;  five times: A = x x^T, x <- a * x + (b * A + c * A^2) x

    Args:
        matrix: (..., rows, columns), fp32; computed in bf16 on an accelerator. A matrix of zeros stays one.
    """
    x: Tensor = matrix if matrix.device.type == "cpu" else matrix.bfloat16()
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + TINY)
    a, b, c = ITERATION
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if is_tall else x).float()
