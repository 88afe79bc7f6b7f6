import math

import pytest
import torch

from optim.inner.adamw import AdamW, QuasiHyperbolic
from optim.inner.base import EPSILON, FIRST_MOMENT, SECOND_MOMENT, InnerStep, InnerUpdateRule

Vectors = dict[str, torch.Tensor]
NUMEL, STEPS, MATRICES = 50, 12, ((0, 20),)


def step_at(count: int, beta1: float = 0.9, beta2: float = 0.95) -> InnerStep:
    return InnerStep(count, 0.01, beta1, beta2, 0.1, MATRICES)


def gradients(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUMEL, generator=generator) for _ in range(STEPS)]


def train(
    inner: InnerUpdateRule, drawn: list[torch.Tensor], beta1: float = 0.9
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    weights, vectors = torch.ones(NUMEL), {name: torch.zeros(NUMEL) for name in inner.vectors}
    for count, gradient in enumerate(drawn):
        inner.step(weights, gradient.clone(), vectors, step_at(count, beta1))
    return weights, vectors


def test_step_agrees_with_the_formula_value_by_value() -> None:
    beta, fraction = 0.99, 0.7
    weights, _ = train(QuasiHyperbolic(beta=beta, weight=fraction), gradients())
    for i in range(NUMEL):
        weight, slow, second = 1.0, 0.0, 0.0
        for count, gradient in enumerate(gradients(), start=1):
            g = float(gradient[i])
            slow = beta * slow + (1 - beta) * g
            second = 0.95 * second + 0.05 * g * g
            weight *= 1 - 0.01 * 0.1 if i < 20 else 1
            course = (1 - fraction) * g + fraction * slow / (1 - beta**count)
            weight -= 0.01 * course / (math.sqrt(second / (1 - 0.95**count)) + EPSILON)
        assert float(weights[i]) == pytest.approx(weight, abs=1e-5)


def test_all_weight_on_a_fast_momentum_is_adamw() -> None:
    theirs, _ = train(AdamW(), gradients())
    ours, vectors = train(QuasiHyperbolic(beta=0.9, weight=1.0), gradients())
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert set(vectors) == {FIRST_MOMENT, SECOND_MOMENT}, "no memory beyond Adam's"
    slower, _ = train(QuasiHyperbolic(beta=0.999, weight=1.0), gradients())
    assert not torch.allclose(slower, theirs, atol=1e-3)


def test_without_momentum_the_step_is_the_gradient_over_its_spread() -> None:
    ours, _ = train(QuasiHyperbolic(weight=0.0), gradients())
    theirs, _ = train(AdamW(), gradients(), beta1=0.0)
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(("beta", "left"), [(0.9, 0.034), (0.999, 0.968)])
def test_slow_momentum_outlives_the_local_steps(beta: float, left: float) -> None:
    """Checks the remaining fraction of the agreed momentum after 32 local steps without a gradient."""
    inner, weights = QuasiHyperbolic(beta=beta), torch.zeros(1)
    vectors = {FIRST_MOMENT: torch.ones(1), SECOND_MOMENT: torch.ones(1)}
    for count in range(32):
        inner.step(weights, torch.zeros(1), vectors, step_at(count))
    assert float(vectors[FIRST_MOMENT]) == pytest.approx(left, abs=1e-3)


def test_second_moment_below_zero_counts_as_zero() -> None:
    """The mean of peers' moments may be below zero by rounding; its root would be NaN."""
    for inner in (QuasiHyperbolic(), AdamW()):
        weights, vectors = torch.zeros(1), {FIRST_MOMENT: torch.zeros(1), SECOND_MOMENT: torch.full((1,), -1e-9)}
        inner.step(weights, torch.full((1,), 1e-6), vectors, step_at(5))
        assert weights.isfinite().all() and float(vectors[SECOND_MOMENT]) >= 0
