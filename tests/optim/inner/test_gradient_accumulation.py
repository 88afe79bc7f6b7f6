"""Gradients are summed, and the weights stand still."""

import torch

from optim.inner.base import GRADIENT_SUM, InnerStep
from optim.inner.gradient_accumulation import GradientAccumulator

STEP = InnerStep(0, 0.5, 0.9, 0.95, 0.1, [(0, 2)])
GRADIENTS = [torch.tensor([1.0, -2.0, 0.0]), torch.tensor([3.0, 1.0, 0.0])]


def zeros(names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(3) for name in names}


def test_the_sum_grows_and_the_weights_stay_even_where_they_would_decay() -> None:
    weights, vectors = torch.ones(3), zeros(GradientAccumulator.vectors)
    for gradient in GRADIENTS:
        GradientAccumulator().step(weights, gradient.clone(), vectors, STEP)
    assert vectors[GRADIENT_SUM].tolist() == [4.0, -1.0, 0.0]
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert GradientAccumulator().lookahead_weights(weights, vectors, STEP) is None
