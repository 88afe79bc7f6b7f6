"""Losses of reinforcement learning against slow formulas, and their masks at the bounds."""

import math

import pytest
import torch
from torch import Tensor

from optim.rollouts import (
    LARGEST_MOMENT,
    POLICY_LOSSES,
    PolicyMetrics,
    centre_rewards,
    dppo,
    keep_small_moment,
    m2po,
    mean_entropy,
)

every_loss = pytest.mark.parametrize("name", POLICY_LOSSES)


def logs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities).log()


def slow_dppo(now: list[float], then: list[float], advantages: list[float]) -> float:
    total = 0.0
    for p, b, a in zip(now, then, advantages, strict=True):
        is_kept = not (a > 0 and p - b > 0.2) and not (a < 0 and p - b < -0.2)
        total += 1e-3 * math.log(p / b) ** 2 - is_kept * a * p / b
    return total / len(now)


def test_dppo_is_its_formula() -> None:
    now, then = [0.5, 0.9, 0.3, 0.3, 0.9], [0.4, 0.5, 0.6, 0.6, 0.5]
    advantages = [1.0, 1.0, 1.0, -2.0, -2.0]
    loss, metrics = dppo(logs(*now), logs(*then), torch.tensor(advantages))
    assert float(loss) == pytest.approx(slow_dppo(now, then, advantages), abs=1e-6)
    assert metrics.clipped == pytest.approx(2 / 5) and metrics.tokens == 5


def test_token_that_moved_too_far_in_the_advantages_direction_pulls_no_more() -> None:
    for advantage, now, then, is_free in ((1.0, 0.75, 0.5, False), (1.0, 0.65, 0.5, True), (-1.0, 0.75, 0.5, True)):
        p = logs(now).requires_grad_()
        loss, _ = dppo(p, logs(then), torch.tensor([advantage]))
        (gradient,) = torch.autograd.grad(loss, p)
        expected = 2e-3 * math.log(now / then) - is_free * advantage * now / then
        assert float(gradient) == pytest.approx(expected, abs=1e-6)


def slow_kept(log_ratio: list[float]) -> list[bool]:
    """Drop the largest square until the mean of the others fits."""
    kept = [True] * len(log_ratio)
    while any(kept):
        squares = {place: log_ratio[place] ** 2 for place, is_kept in enumerate(kept) if is_kept}
        if math.fsum(squares.values()) / len(squares) <= LARGEST_MOMENT:
            break
        kept[max(squares, key=squares.__getitem__)] = False
    return kept


def test_m2po_drops_the_fewest_tokens_that_keep_the_second_moment() -> None:
    for seed in range(10):
        log_ratio = torch.randn(40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.1 * seed
        assert keep_small_moment(log_ratio).tolist() == slow_kept(log_ratio.tolist())
    assert keep_small_moment(torch.zeros(3)).all()
    assert not keep_small_moment(torch.full((3,), 5.0)).any()


def test_m2po_is_its_formula() -> None:
    now, then, advantages = logs(0.5, 0.1, 0.52), logs(0.5, 0.9, 0.5), torch.tensor([1.0, 1.0, -1.0])
    loss, metrics = m2po(now, then, advantages)
    assert float(loss) == pytest.approx(-(1 - 0.52 / 0.5) / 3, abs=1e-6)
    assert metrics.clipped == pytest.approx(1 / 3)


@every_loss
def test_gradient_of_the_same_policy_is_the_policy_gradient(name: str) -> None:
    p = logs(0.2, 0.5, 0.7).requires_grad_()
    advantages = torch.tensor([0.5, -0.25, 1.0])
    loss, metrics = POLICY_LOSSES[name](p, p.detach().clone(), advantages)
    (gradient,) = torch.autograd.grad(loss, p)
    assert torch.allclose(gradient, -advantages / 3)
    assert metrics == PolicyMetrics(mismatch_kl=0.0, effective_samples=1.0, clipped=0.0, tokens=3)


@every_loss
def test_metrics_show_a_policy_that_has_moved(name: str) -> None:
    _, near = POLICY_LOSSES[name](logs(0.5, 0.5, 0.5), logs(0.5, 0.49, 0.5), torch.ones(3))
    _, far = POLICY_LOSSES[name](logs(0.9, 0.1, 0.5), logs(0.1, 0.9, 0.5), torch.ones(3))
    assert far.mismatch_kl > near.mismatch_kl >= 0 and far.clipped > near.clipped == 0
    expected = (9 + 1 / 9 + 1) ** 2 / (3 * (81 + 1 / 81 + 1))
    assert far.effective_samples == pytest.approx(expected, rel=1e-5) and near.effective_samples > 0.99


@every_loss
def test_no_trust_region_would_let_an_old_text_explode(name: str) -> None:
    """The control: the plain ratio has a gradient of 90 here."""
    p = logs(0.9).requires_grad_()
    (gradient,) = torch.autograd.grad(POLICY_LOSSES[name](p, logs(0.01), torch.ones(1))[0], p)
    (plain,) = torch.autograd.grad(-(p - logs(0.01)).exp().sum(), p)
    assert abs(float(gradient)) < 0.02 and abs(float(plain)) > 80


def test_rewards_are_centred_in_their_groups_and_flat_groups_counted() -> None:
    found = centre_rewards(torch.tensor([1.0, 0.0, 0.1, 0.1, 0.1, 0.5]), [7, 7, 3, 3, 3, 9])
    assert found.values.tolist() == [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    assert found.skipped_groups == 2


def certainty(weight: float) -> float:
    """Learn which of two tokens is right where nothing shows it, and the first one is in 55 % of all cases."""
    logits = torch.zeros(1, 2, requires_grad=True)
    for _ in range(2000):
        loss = -(torch.tensor([0.55, 0.45]) * torch.softmax(logits, dim=-1)).sum() - weight * mean_entropy(logits, 1.0)
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - 2.0 * gradient).detach().requires_grad_()
    return float(torch.softmax(logits.detach(), dim=-1)[0, 0])


def test_entropy_keeps_the_draws_open_where_scores_hardly_differ() -> None:
    """Scores alone make the policy certain of the better guess, which it could not unlearn."""
    assert certainty(0.0) > 0.98
    assert certainty(0.2) == pytest.approx(1 / (1 + math.exp(-0.1 / 0.2)), abs=1e-3)


def test_mean_entropy_is_that_of_the_tempered_draws() -> None:
    logits = torch.tensor([[0.0, 0.0], [2 * math.log(3), 0.0]])
    expected = (math.log(2) - 0.75 * math.log(0.75) - 0.25 * math.log(0.25)) / 2
    assert float(mean_entropy(logits, 2.0)) == pytest.approx(expected, abs=1e-6)
