import pytest
import torch

from optim.inner.adamw import ACCUMULATED, AccumulatingAdamW, AdamW
from optim.inner.base import FIRST_MOMENT, SECOND_MOMENT
from tests.optim.inner.small_vectors import NUMEL, make_step, random_values, zero_vectors


def test_with_every_step_it_is_adamw() -> None:
    ours, theirs = AccumulatingAdamW(every=1), AdamW()
    mine, other = torch.ones(NUMEL), torch.ones(NUMEL)
    vectors, others = zero_vectors(ours), zero_vectors(theirs)
    for count in range(10):
        ours.step(mine, random_values(count), vectors, make_step(count))
        theirs.step(other, random_values(count), others, make_step(count))
    assert torch.allclose(mine, other, atol=1e-6)
    for name in (FIRST_MOMENT, SECOND_MOMENT):
        assert torch.allclose(vectors[name], others[name], atol=1e-6)


def test_moments_change_by_the_mean_of_a_group_of_gradients() -> None:
    inner, weights = AccumulatingAdamW(every=4), torch.ones(NUMEL)
    vectors = zero_vectors(inner)
    first, second = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for count in range(12):
        before = {name: vector.clone() for name, vector in vectors.items()}
        inner.step(weights, random_values(count), vectors, make_step(count))
        if count % 4 < 3:
            assert torch.equal(vectors[FIRST_MOMENT], before[FIRST_MOMENT])
            assert torch.equal(vectors[SECOND_MOMENT], before[SECOND_MOMENT])
            continue
        mean = torch.stack([random_values(number) for number in range(count - 3, count + 1)]).mean(0)
        first = 0.9 * first + 0.1 * mean
        second = 0.95 * second + 0.05 * mean**2
        assert torch.allclose(vectors[FIRST_MOMENT], first, atol=1e-6)
        assert torch.allclose(vectors[SECOND_MOMENT], second, atol=1e-6)
        assert not vectors[ACCUMULATED].any()


def test_each_step_uses_the_moments_as_they_would_become() -> None:
    """The second step of a group starts from the moments before the group, whatever the first gradient was."""
    moved = []
    for earlier in (1, 2):
        inner, weights = AccumulatingAdamW(every=4), torch.ones(NUMEL)
        vectors = zero_vectors(inner)
        inner.step(weights, random_values(earlier), vectors, make_step(0))
        before = weights.clone()
        inner.step(weights, random_values(3), vectors, make_step(1))
        moved.append(weights - before)
    expected = torch.ones(NUMEL)
    AdamW().step(expected, random_values(3), {name: torch.zeros(NUMEL) for name in AdamW().vectors}, make_step(0))
    assert torch.allclose(moved[0][10:], moved[1][10:], atol=1e-6)
    assert torch.allclose(moved[0][10:], (expected - 1)[10:], atol=1e-6)


def test_noise_of_small_batches_does_not_enlarge_the_second_moment() -> None:
    """Gradient 0.1 with noise 1: the squares of four averaged gradients are a quarter. AdamW sees all of the noise."""
    generator = torch.Generator().manual_seed(7)
    sizes = {}
    for inner in (AccumulatingAdamW(every=4), AdamW()):
        weights, vectors = torch.zeros(4000), {name: torch.zeros(4000) for name in inner.vectors}
        for count in range(400):
            inner.step(weights, 0.1 + torch.randn(4000, generator=generator), vectors, make_step(count))
        sizes[inner.kind] = float(vectors[SECOND_MOMENT].mean())
    assert sizes["adamw"] == pytest.approx(1.01, rel=0.05)
    assert sizes["accumulating-adamw"] == pytest.approx(0.26, rel=0.05)
