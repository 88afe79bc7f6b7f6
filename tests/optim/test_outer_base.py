"""Outer optimizers without files of their own."""

import pytest
import torch

from optim.kernels.vectors import SLAB_SIZE
from optim.outer import HeavyBall, Nesterov, OuterOptimizer, OuterStep, Sgd, Sign


def test_nesterov_by_hand() -> None:
    """eta 0.7, mu 0.9, delta 1 in every round, phi 0 at the start."""
    anchor, slots = torch.zeros(3), {"momentum": torch.zeros(3)}
    path = []
    for _ in range(3):
        Nesterov(learning_rate=0.7, momentum=0.9).apply(anchor, slots, torch.ones(3), OuterStep())
        path.append(float(anchor[0]))
    assert path == pytest.approx([-1.33, -3.227, -5.6343], abs=1e-6)


@pytest.mark.parametrize("update", [Nesterov(), HeavyBall()], ids=str)
def test_momentum_agrees_with_torch(update: Nesterov | HeavyBall) -> None:
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randn(1000, generator=generator)
    theirs = torch.nn.Parameter(anchor.clone())
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=isinstance(update, Nesterov))
    slots = {"momentum": torch.zeros(1000)}
    for _ in range(10):
        delta = torch.randn(1000, generator=generator)
        update.apply(anchor, slots, delta, OuterStep())
        theirs.grad = delta
        optimizer.step()
    assert torch.allclose(anchor, theirs.detach(), rtol=1e-5, atol=1e-5)


def test_sgd_with_rate_one_lands_on_the_mean() -> None:
    anchor = torch.tensor([1.0, 2.0])
    weights = [torch.tensor([3.0, 4.0]), torch.tensor([5.0, 0.0])]
    delta = sum((anchor - weight for weight in weights), torch.zeros(2)) / 2
    Sgd().apply(anchor, {}, delta, OuterStep())
    assert torch.equal(anchor, torch.tensor([4.0, 2.0]))


def test_heavy_ball_by_hand() -> None:
    """eta 0.7, mu 0.9, delta 1 in every round: without look-ahead the first step equals plain SGD's."""
    anchor, slots = torch.zeros(3), {"momentum": torch.zeros(3)}
    path = []
    for _ in range(3):
        HeavyBall().apply(anchor, slots, torch.ones(3), OuterStep())
        path.append(float(anchor[0]))
    assert path == pytest.approx([-0.7, -2.03, -3.927], abs=1e-6)


def test_sign_moves_all_weights_equally_and_zeros_not_at_all() -> None:
    anchor = torch.ones(4)
    Sign(learning_rate=0.25).apply(anchor, {}, torch.tensor([1e-30, -7.0, 0.0, -0.0]), OuterStep())
    assert anchor.tolist() == [0.75, 1.25, 1.0, 1.0]


UPDATES: list[OuterOptimizer] = [Sgd(learning_rate=0.65), Nesterov(), HeavyBall(), Sign(learning_rate=0.3)]


@pytest.mark.parametrize("update", UPDATES, ids=str)
def test_threads_and_position_in_the_vector_change_no_bit(update: OuterOptimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    numel = 2 * SLAB_SIZE + 13
    start, delta, momentum = torch.randn(3, numel, generator=generator)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        anchor, slots = start.clone(), {"momentum": momentum.clone()}
        update.apply(anchor, slots, delta, OuterStep())
        results.append(anchor)
    torch.set_num_threads(threads)
    one_by_one = start[-20:].clone()
    for i in range(20):
        value = slice(numel - 20 + i, numel - 19 + i)
        update.apply(one_by_one[i : i + 1], {"momentum": momentum[value].clone()}, delta[value], OuterStep())
    assert all(torch.equal(results[0], result) for result in results)
    assert torch.equal(results[0][-20:], one_by_one)


def test_slots_are_named() -> None:
    assert Nesterov.slots == HeavyBall.slots == ("momentum",) and Sgd.slots == Sign.slots == ()
