"""AdamW's step, compared with its formula and with torch."""

import math

import pytest
import torch

from optim.inner.adamw import AdamW, step_fused
from optim.inner.base import EPSILON, FIRST_MOMENT, SECOND_MOMENT, InnerStep

NUMEL, MATRIX = 24, (4, 20)


def step_of(count: int, rate: float = 1e-2, weight_decay: float = 0.1) -> InnerStep:
    return InnerStep(count, rate, 0.9, 0.95, weight_decay, [MATRIX])


def random_values(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(NUMEL) for name in AdamW.vectors}


def test_first_step_by_hand() -> None:
    weights, vectors, gradient = torch.full((NUMEL,), 2.0), zeros(), torch.full((NUMEL,), 0.5)
    AdamW().step(weights, gradient, vectors, step_of(0))
    # Both corrections undo the zero start: the first step is the rate, whatever the gradient's size.
    moved = 1e-2 * 0.5 / (0.5 + EPSILON)
    expected = torch.full((NUMEL,), 2.0 - moved)
    expected[slice(*MATRIX)] = 2.0 * (1 - 1e-2 * 0.1) - moved
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(vectors[FIRST_MOMENT], torch.full((NUMEL,), 0.05))
    torch.testing.assert_close(vectors[SECOND_MOMENT], torch.full((NUMEL,), 0.0125))


def test_many_steps_agree_with_torch() -> None:
    weights, vectors = random_values(0), zeros()
    rest = [slice(0, MATRIX[0]), slice(MATRIX[1], NUMEL)]
    decayed = torch.nn.Parameter(weights[slice(*MATRIX)].clone())
    others = [torch.nn.Parameter(weights[place].clone()) for place in rest]
    groups = [{"params": [decayed], "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for count in range(30):
        gradient = random_values(1 + count)
        decayed.grad = gradient[slice(*MATRIX)].clone()
        for other, place in zip(others, rest, strict=True):
            other.grad = gradient[place].clone()
        reference.step()
        AdamW().step(weights, gradient, vectors, step_of(count))
    torch.testing.assert_close(weights[slice(*MATRIX)], decayed.detach(), atol=1e-6, rtol=1e-5)
    for other, place in zip(others, rest, strict=True):
        torch.testing.assert_close(weights[place], other.detach(), atol=1e-6, rtol=1e-5)


def test_vectors_and_count_are_the_whole_state() -> None:
    weights, vectors = random_values(0), zeros()
    for count in range(3):
        AdamW().step(weights, random_values(count), vectors, step_of(count))
    again, copied = weights.clone(), {name: vector.clone() for name, vector in vectors.items()}
    AdamW().step(weights, random_values(9), vectors, step_of(3))
    AdamW().step(again, random_values(9), copied, step_of(3))
    assert torch.equal(weights, again)
    # The control: with another count the correction of the zero start differs.
    AdamW().step(weights, random_values(10), vectors, step_of(4))
    AdamW().step(again, random_values(10), copied, step_of(0))
    assert not torch.equal(weights, again)


def test_second_moment_below_zero_after_an_exchange_is_harmless() -> None:
    weights, vectors = random_values(0), zeros()
    vectors[SECOND_MOMENT][3] = -1e-9
    AdamW().step(weights, torch.zeros(NUMEL), vectors, step_of(5))
    assert torch.isfinite(weights).all() and (vectors[SECOND_MOMENT] >= 0).all()
    assert math.isnan(float(torch.tensor(-1e-9).sqrt())), "the control"


def test_gradient_is_computed_at_the_weights() -> None:
    assert AdamW().lookahead_weights(random_values(0), zeros(), step_of(0)) is None


def test_the_kernel_for_cards_makes_the_same_steps() -> None:
    """Control: without its limit at zero, a second moment that an average has made negative gives no number."""
    weights, vectors = random_values(0), zeros()
    again, copied = weights.clone(), zeros()
    for count in range(30):
        if count == 10:
            vectors[SECOND_MOMENT][3] = copied[SECOND_MOMENT][3] = -1e-3
        gradient, step = random_values(1 + count), step_of(count)
        AdamW().step(weights, gradient, vectors, step)
        step.decay_weights(again)
        step_fused(again, gradient, copied[FIRST_MOMENT], copied[SECOND_MOMENT], step)
    torch.testing.assert_close(again, weights, atol=1e-6, rtol=1e-5)
    for name, vector in vectors.items():
        torch.testing.assert_close(copied[name], vector, atol=1e-6, rtol=1e-5)
    copied[SECOND_MOMENT].fill_(-1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "clamp_", lambda vector, **_: vector)
        step_fused(again, random_values(1), copied[FIRST_MOMENT], copied[SECOND_MOMENT], step_of(0))
    assert again.isnan().all()
