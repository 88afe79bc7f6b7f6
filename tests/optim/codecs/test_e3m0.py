import numpy as np
import pytest
import torch

from optim.codecs.e3m0 import BlockE3M0


def decoded(codec: BlockE3M0, values: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(values), values.numel())


def slow_nearest(values: list[float]) -> list[float]:
    """Return the nearest level of each value of a block; of two equally near levels, the larger."""
    upper = (int(np.float32(max(map(abs, values))).view(np.uint32)) + 0xFFFF) >> 16
    scale = float(np.uint32(upper << 16).view(np.float32))
    levels = [0.0] + [scale * 2.0 ** (code - 7) for code in range(1, 8)]
    return [float(np.copysign(min(levels, key=lambda level: (abs(abs(x) - level), -level)), x)) for x in values]


@pytest.mark.parametrize("seed", range(5))
def test_nearest_is_the_nearest_level(seed: int) -> None:
    values = np.random.default_rng(seed).standard_t(3, 64).astype(np.float32)
    expected = slow_nearest(values.tolist())
    assert decoded(BlockE3M0(block=64), torch.from_numpy(values)).tolist() == pytest.approx(expected, rel=1e-6)


def test_ties_round_up_also_at_half_the_smallest_level() -> None:
    values = torch.tensor([1.0, 0.75, 0.749, 0.375, 2.0**-6, 2.0**-7, 2.0**-7 * 0.99, 0.0] * 2)
    expected = [1.0, 1.0, 0.5, 0.5, 2.0**-6, 2.0**-6, 0.0, 0.0] * 2
    assert decoded(BlockE3M0(block=16), values).tolist() == expected
    assert decoded(BlockE3M0(block=16), -values).tolist() == [-value for value in expected]


def test_levels_are_exact_under_either_rounding() -> None:
    levels = torch.tensor([0.0] + [sign * 2.0**-power for power in range(7) for sign in (1, -1)] + [1.0])
    for codec in (BlockE3M0(block=16), BlockE3M0(block=16, rounding="stochastic")):
        assert torch.equal(decoded(codec, levels), levels)


def test_errors_on_normal_values_agree_with_the_definition() -> None:
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(2**20, np.float32))
    for codec, error, slope in (
        (BlockE3M0(), 0.194, 0.965),
        (BlockE3M0(rounding="stochastic"), 0.282, 1.0),
    ):
        result = decoded(codec, values)
        assert float((result - values).norm() / values.norm()) == pytest.approx(error, abs=0.004)
        assert float(result @ values / (values @ values)) == pytest.approx(slope, abs=0.003)


def test_stochastic_rounding_is_unbiased_unlike_nearest() -> None:
    """65,536 blocks, each with one large value and the same small ones, also below the smallest level."""
    small = torch.tensor([0.6, 0.3, 0.11, 0.02, 0.01, 0.004, -0.7, -0.003])
    rows = torch.cat([torch.ones(65_536, 8), small.expand(65_536, 8)], dim=1).reshape(-1)
    means = decoded(BlockE3M0(block=16, rounding="stochastic"), rows).reshape(-1, 16)[:, 8:].mean(0)
    assert torch.allclose(means, small, rtol=0.01, atol=2e-4)
    control = decoded(BlockE3M0(block=16), rows).reshape(-1, 16)[:, 8:].mean(0)
    assert not torch.allclose(control, small, rtol=0.1, atol=2e-4)


def test_other_values_get_other_noise() -> None:
    codec = BlockE3M0(rounding="stochastic")
    values = torch.full((4096,), 0.7)
    values[::256] = 1.0
    other = values.clone()
    other[0] = 1.25
    one, two = decoded(codec, values), decoded(codec, other)
    assert not torch.equal(one[256:], two[256:])
    assert torch.equal(one, decoded(codec, values))
