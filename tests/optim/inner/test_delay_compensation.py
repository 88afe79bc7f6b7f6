"""Quadratics whose gradients arrive late, as in a pipeline."""

from collections import deque

import pytest
import torch

from optim.inner.base import InnerStep, InnerUpdateRule
from optim.inner.delay_compensation import VELOCITY, AdaptiveBraking, SpikeCompensation, WeightPrediction

PLAIN = AdaptiveBraking(rho=0.0, boost=1.0)


def step_of(rate: float, tensors: tuple[tuple[int, int], ...] = ()) -> InnerStep:
    return InnerStep(0, rate, 0.9, 0.95, 0.0, (), tensors)


def final_distance(inner: InnerUpdateRule, curvatures: torch.Tensor, rate: float, delay: int, steps: int) -> float:
    """Return |theta| on 1/2 sum c theta^2 when each gradient is applied `delay` steps after it was computed."""
    weights, step = torch.ones_like(curvatures), step_of(rate)
    vectors = {VELOCITY: torch.zeros_like(curvatures)}
    late: deque[torch.Tensor] = deque()
    for _ in range(steps):
        ahead = inner.lookahead_weights(weights, vectors, step)
        late.append(curvatures * (weights if ahead is None else ahead))
        if len(late) > delay:
            inner.step(weights, late.popleft(), vectors, step)
    return float(torch.linalg.vector_norm(weights))


ONE, MANY = torch.ones(1), torch.linspace(0.05, 1, 20)


def test_compensation_speeds_up_convergence_with_late_gradients() -> None:
    """One dimension, delay 8, rate 0.01."""
    plain = final_distance(PLAIN, ONE, 0.01, 8, 400)
    spike = final_distance(SpikeCompensation(delay=8, boost=1.0), ONE, 0.01, 8, 400)
    predicted = final_distance(WeightPrediction(delay=8, boost=1.0), ONE, 0.01, 8, 400)
    assert plain > 1e-3 > 1e-5 > spike > predicted


def test_compensation_is_stable_at_larger_rates() -> None:
    rate = 0.016
    assert final_distance(PLAIN, ONE, rate, 8, 2000) > 1
    assert final_distance(SpikeCompensation(delay=8, boost=1.0), ONE, rate, 8, 2000) < 1e-6
    assert final_distance(WeightPrediction(delay=8, boost=1.0), ONE, rate, 8, 2000) < 1e-6


def test_braking_converges_where_plain_momentum_and_its_opposite_diverge() -> None:
    assert final_distance(PLAIN, MANY, 0.02, 8, 3000) > 1
    assert final_distance(AdaptiveBraking(rho=2.0, boost=1.0), MANY, 0.02, 8, 3000) < 1


@pytest.mark.parametrize(
    "inner", [SpikeCompensation(delay=0), WeightPrediction(delay=0), AdaptiveBraking(rho=0.0)], ids=str
)
def test_without_a_delay_it_is_plain_momentum(inner: InnerUpdateRule) -> None:
    theirs = torch.nn.Parameter(torch.ones(20))
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    weights, vectors = torch.ones(20), {VELOCITY: torch.zeros(20)}
    for seed in range(10):
        gradient = torch.randn(20, generator=torch.Generator().manual_seed(seed))
        assert inner.lookahead_weights(weights, vectors, step_of(0.01)) is None
        inner.step(weights, gradient.clone(), vectors, step_of(0.01))
        theirs.grad = gradient
        optimizer.step()
    assert torch.allclose(weights, theirs.detach(), atol=1e-6)


def test_spike_compensation_with_delay_one_is_nesterov() -> None:
    theirs = torch.nn.Parameter(torch.ones(20))
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=True)
    weights, vectors = torch.ones(20), {VELOCITY: torch.zeros(20)}
    for seed in range(10):
        gradient = torch.randn(20, generator=torch.Generator().manual_seed(seed))
        SpikeCompensation(delay=1).step(weights, gradient.clone(), vectors, step_of(0.01))
        theirs.grad = gradient
        optimizer.step()
    assert torch.allclose(weights, theirs.detach(), atol=1e-6)


def test_spike_contributes_as_much_as_the_missed_steps() -> None:
    """A single gradient is followed by D zero gradients that the late one missed."""
    delay, rate = 5, 0.1
    weights, vectors = torch.zeros(1), {VELOCITY: torch.zeros(1)}
    SpikeCompensation(delay=delay, boost=1.0).step(weights, torch.ones(1), vectors, step_of(rate))
    plain, others = torch.zeros(1), {VELOCITY: torch.zeros(1)}
    for gradient in (1.0, *[0.0] * delay):
        PLAIN.step(plain, torch.full((1,), gradient), others, step_of(rate))
    assert torch.allclose(weights, plain, atol=1e-6)


def test_prediction_follows_the_velocity() -> None:
    inner, weights = WeightPrediction(delay=3, boost=2.0), torch.ones(2)
    ahead = inner.lookahead_weights(weights, {VELOCITY: torch.tensor([1.0, -2.0])}, step_of(0.1))
    assert ahead is not None and torch.allclose(ahead, torch.tensor([0.4, 2.2]))
    assert torch.equal(weights, torch.ones(2))


def test_braking_is_by_tensor_and_independent_of_scale() -> None:
    spans = ((0, 3), (3, 6))
    velocity = torch.tensor([1.0, 0, 0, 0, 1.0, 0])
    gradient = torch.tensor([2.0, 0, 0, 0, -5.0, 0])
    for scale in (1.0, 1000.0):
        vectors = {VELOCITY: velocity.clone()}
        AdaptiveBraking(rho=0.5, momentum=0.0).step(torch.zeros(6), gradient * scale, vectors, step_of(0.0, spans))
        expected = torch.tensor([0.5 * 2, 0, 0, 0, 1.5 * -5, 0]) * scale
        assert torch.allclose(vectors[VELOCITY], expected), "along the velocity less, against it more"
    vectors = {VELOCITY: velocity.clone()}
    AdaptiveBraking(rho=0.5, momentum=0.0).step(torch.zeros(6), gradient.clone(), vectors, step_of(0.0))
    assert not torch.allclose(vectors[VELOCITY][:3], torch.tensor([1.0, 0, 0])), "as one tensor the factor differs"


def test_braking_by_one_stops_along_the_velocity() -> None:
    vectors = {VELOCITY: torch.ones(4)}
    AdaptiveBraking(rho=1.0, momentum=0.0).step(torch.zeros(4), torch.ones(4), vectors, step_of(0.1))
    assert torch.allclose(vectors[VELOCITY], torch.zeros(4), atol=1e-6)
