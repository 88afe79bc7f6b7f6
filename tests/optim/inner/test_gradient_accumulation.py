"""Gradients are summed, and the weights do not move."""

import torch

from optim.inner.base import GRADIENT_SUM, InnerStep
from optim.inner.gradient_accumulation import GradientAccumulator

STEP = InnerStep(0, 0.5, 0.9, 0.95, 0.1, [(0, 2)])
GRADIENTS = [torch.tensor([1.0, -2.0, 0.0]), torch.tensor([3.0, 1.0, 0.0])]


def zeros(names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(3) for name in names}


def test_gradients_are_summed_and_weights_neither_move_nor_decay() -> None:
    weights, vectors = torch.ones(3), zeros(GradientAccumulator.vectors)
    for gradient in GRADIENTS:
        GradientAccumulator().step(weights, gradient.clone(), vectors, STEP)
    assert vectors[GRADIENT_SUM].tolist() == [4.0, -1.0, 0.0]
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert GradientAccumulator().lookahead_weights(weights, vectors, STEP) is None
