"""Generalized primal averaging, compared with its formula on three sequences, and with AdamW."""

import pytest
import torch

from optim.component_checks import check_component
from optim.inner.adamw import LEAD, AdamW, PrimalAveraging
from optim.inner.base import EPSILON
from tests.optim.inner.small_vectors import NUMEL, make_step, random_values, zero_vectors

GOAL = random_values(99)


def gradient_at(place: torch.Tensor, count: int) -> torch.Tensor:
    return place - GOAL + 0.1 * random_values(count)


def train(inner: PrimalAveraging | AdamW, steps: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    weights, vectors = torch.ones(NUMEL), zero_vectors(inner)
    for count in range(steps):
        ahead = inner.lookahead_weights(weights, vectors, make_step(count))
        inner.step(weights, gradient_at(weights if ahead is None else ahead, count), vectors, make_step(count))
    return weights, vectors


def written_out(mu_x: float, mu_y: float, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and z of the paper's three sequences; the first ten values are a matrix and decay."""
    x, z = torch.ones(NUMEL).double(), torch.ones(NUMEL).double()
    first, second = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    for count in range(steps):
        gradient = gradient_at((mu_y * x + (1 - mu_y) * z).float(), count).double()
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        z[:10] *= 1 - 0.01 * 0.1
        spread = (second / (1 - 0.95 ** (count + 1))).sqrt() + EPSILON
        z = z - 0.01 * first / (1 - 0.9 ** (count + 1)) / spread
        x = mu_x * x + (1 - mu_x) * z
    return x.float(), z.float()


@pytest.mark.parametrize(("mu_x", "mu_y"), [(0.9967, 0.7), (0.9, 0.0), (0.5, 1.0), (0.97, 0.3)])
def test_follows_the_three_sequences_of_the_paper(mu_x: float, mu_y: float) -> None:
    weights, vectors = train(PrimalAveraging(mu_x=mu_x, mu_y=mu_y), 60)
    x, z = written_out(mu_x, mu_y, 60)
    torch.testing.assert_close(weights, x, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(weights + vectors[LEAD], z, atol=2e-5, rtol=1e-4)


def test_without_a_mean_it_is_adamw() -> None:
    ours, _ = train(PrimalAveraging(mu_x=0.0), 40)
    theirs, _ = train(AdamW(), 40)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    other, _ = train(PrimalAveraging(mu_x=0.9), 40)
    assert not torch.allclose(ours, other, atol=1e-2), "the control: the mean lags"


def test_gradient_is_taken_between_the_mean_and_the_lead() -> None:
    inner = PrimalAveraging(mu_y=0.7)
    vectors = zero_vectors(inner) | {LEAD: random_values(3)}
    ahead = inner.lookahead_weights(torch.ones(NUMEL), vectors, make_step(0))
    assert ahead is not None
    torch.testing.assert_close(ahead, 1 + 0.3 * random_values(3))
    assert PrimalAveraging(mu_y=1.0).lookahead_weights(torch.ones(NUMEL), vectors, make_step(0)) is None


def test_lead_goes_along_where_an_anchor_moves_the_weights() -> None:
    """After a round the weights are elsewhere, and the next step starts from z at the same distance."""
    inner, lead = PrimalAveraging(), random_values(3)
    moved = []
    for place in (0.0, 5.0):
        weights, vectors = torch.full((NUMEL,), place), zero_vectors(inner) | {LEAD: lead.clone()}
        inner.step(weights, random_values(4), vectors, make_step(7))
        moved.append(weights - place)
    torch.testing.assert_close(moved[0][10:], moved[1][10:], atol=1e-5, rtol=1e-4)


def test_keeps_the_promises_of_a_component() -> None:
    assert check_component(PrimalAveraging) == []
