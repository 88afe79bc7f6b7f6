"""Growing batches: the norm test by hand, the switch mode, and AdamW on the gathered gradients."""

import pytest
import torch

from optim.compose import compose
from optim.inner.adamw import AdamW
from optim.inner.base import FIRST_MOMENT, SECOND_MOMENT
from optim.inner.growing_batch import ACCUMULATED, TALLY, GrowingBatch
from optim.layout import Layout
from tests.optim.inner.small_vectors import NUMEL, make_step, random_values, zero_vectors


@pytest.mark.parametrize(("theta", "wanted"), [(1.0, 1), (0.5, 2), (0.25, 8), (0.05, 64)])
def test_norm_test_by_hand(theta: float, wanted: int) -> None:
    """Gradients (1, 0) and (3, 0): the mean is (2, 0), S = (1 + 1) / 1 = 2, and S / |mean|^2 is a half."""
    assert GrowingBatch(theta=theta).noise_batch_size(2, 1.0 + 9.0, 4.0) == wanted


def test_equal_gradients_keep_the_batch_and_pure_noise_asks_for_the_largest() -> None:
    inner, vectors, weights = GrowingBatch(), {}, torch.ones(NUMEL)
    vectors.update(zero_vectors(inner))
    for count in range(20):
        inner.step(weights, torch.full((NUMEL,), 0.5), vectors, make_step(count))
    assert vectors[TALLY].tolist()[2:] == [0, 10]
    assert inner.noise_batch_size(2, 2.0, 0.0) == inner.most
    assert inner.noise_batch_size(4, 0.0, 0.0) == 0


@pytest.mark.parametrize(
    ("wanted", "gathered"), [(0, 2), (3, 3), (8, 8), (9, 8), (16, 8), (17, 24), (24, 24), (25, 32), (999, 64)]
)
def test_switch_mode_rounds_the_batch(wanted: int, gathered: int) -> None:
    assert GrowingBatch(at_once=8, most=64).rounded_batch_size(wanted) == gathered


def test_fixed_batch_is_adamw_on_means() -> None:
    """With it, the recipe is DiLoCo with batches of that size."""
    ours, theirs = GrowingBatch(start=3, most=3), AdamW()
    mine, other = torch.ones(NUMEL), torch.ones(NUMEL)
    vectors, others = zero_vectors(ours), {name: torch.zeros(NUMEL) for name in theirs.vectors}
    for count in range(12):
        before = mine.clone()
        ours.step(mine, random_values(count), vectors, make_step(count))
        if count % 3 < 2:
            assert torch.equal(mine, before)
            continue
        mean = torch.stack([random_values(number) for number in range(count - 2, count + 1)]).mean(0)
        theirs.step(other, mean, others, make_step(count // 3))
    assert torch.allclose(mine, other, atol=1e-6) and not vectors[ACCUMULATED].any()
    for name in (FIRST_MOMENT, SECOND_MOMENT):
        assert torch.allclose(vectors[name], others[name], atol=1e-6)


def batch_sizes(noise: float, steps: int = 200) -> list[int]:
    """Return the local steps between optimizer steps, for a constant gradient with noise."""
    inner = GrowingBatch(theta=0.5)
    weights, vectors, moved = torch.zeros(NUMEL), zero_vectors(inner), [0]
    for count in range(steps):
        before = weights.clone()
        inner.step(weights, torch.ones(NUMEL) + noise * random_values(count), vectors, make_step(count))
        if not torch.equal(weights, before):
            moved.append(count + 1)
    return [later - earlier for earlier, later in zip(moved[:-1], moved[1:], strict=True)]


def test_batches_grow_with_the_noise_and_never_shrink() -> None:
    quiet, loud = batch_sizes(0.1), batch_sizes(1.5)
    assert set(quiet) == {2}
    assert loud == sorted(loud) and loud[0] == 2
    # S = noise^2 * N, |g|^2 = N: noise^2 / theta^2 = 9, of which the switch mode makes 8, or one more step of it.
    assert loud[-1] in (8, 24)


def test_first_batch_above_the_largest_is_refused() -> None:
    with pytest.raises(ValueError, match="start must not be above most"):
        GrowingBatch(start=9, most=8)


def test_adloco_recipe() -> None:
    method = compose("adloco")
    assert method.inner == GrowingBatch() and method.update == compose("diloco").update
    layout = Layout(((1000,),))
    assert method.inner.vector_numel(TALLY, layout) == 4 and method.inner.vector_numel(ACCUMULATED, layout) == 1000
