import numpy as np
import pytest
import torch

from optim.codecs.e2m1 import BlockE2M1

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the format, whose largest number is 6


def decoded(codec: BlockE2M1, values: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(values), values.numel())


def slow_nearest(values: list[float]) -> list[float]:
    """Return the nearest level of each value of a block; of two equally near levels, the larger."""
    upper = (int(np.float32(np.float32(max(map(abs, values))) / np.float32(12)).view(np.uint32)) + 0xFFFF) >> 16
    scale = 2 * float(np.uint32(upper << 16).view(np.float32))
    levels = [scale * level for level in LEVELS]
    return [float(np.copysign(min(levels, key=lambda level: (abs(abs(x) - level), -level)), x)) for x in values]


def slow_decoder(payload: bytes, numel: int, block: int) -> list[float]:
    """Decode a payload number by number, from sign, exponent and mantissa of each code."""
    blocks = -(-numel // block)
    scales = np.frombuffer(payload[2 : 2 + 2 * blocks], "<u2").astype(np.uint32) << np.uint32(16)
    packed = payload[2 + 2 * blocks :]
    half = -(-blocks // 2) * block
    values = []
    for i in range(numel):
        code = packed[i] & 15 if i < half else packed[i - half] >> 4
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        number = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
        values.append((-1) ** sign * number * 2 * float(scales[i // block].view(np.float32)))
    return values


@pytest.mark.parametrize("seed", range(5))
def test_nearest_is_the_nearest_level(seed: int) -> None:
    values = np.random.default_rng(seed).standard_t(3, 64).astype(np.float32)
    expected = slow_nearest(values.tolist())
    assert decoded(BlockE2M1(block=64), torch.from_numpy(values)).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_payload_has_signs_exponents_and_mantissas(rounding: str) -> None:
    values = torch.from_numpy(np.random.default_rng(1).standard_normal(200, np.float32))
    codec = BlockE2M1(block=32) if rounding == "nearest" else BlockE2M1(block=32, rounding="stochastic")
    payload = codec.encode(values)
    assert codec.decode(payload, 200).tolist() == slow_decoder(bytes(payload), 200, 32)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_levels_are_exact_under_either_rounding(rounding: str) -> None:
    codec = BlockE2M1(block=16) if rounding == "nearest" else BlockE2M1(block=16, rounding="stochastic")
    levels = torch.tensor([sign * level for level in LEVELS for sign in (1, -1)])
    assert torch.equal(decoded(codec, levels), levels)


def test_ties_round_up() -> None:
    values = torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, 0.2499, 0.0, 4.999, 0.5, 1.0, 1.5, 2.0, 3.0])
    expected = torch.tensor([6.0, 6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0, 4.0, 0.5, 1.0, 1.5, 2.0, 3.0])
    assert torch.equal(decoded(BlockE2M1(block=16), values), expected)
    assert torch.equal(decoded(BlockE2M1(block=16), -values), -expected)


def test_errors_on_normal_values_agree_with_the_definition() -> None:
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(2**20, np.float32))
    for codec, error in ((BlockE2M1(), 0.111), (BlockE2M1(rounding="stochastic"), 0.159)):
        result = decoded(codec, values)
        assert float((result - values).norm() / values.norm()) == pytest.approx(error, abs=0.004)
        assert float(result @ values / (values @ values)) == pytest.approx(1.0, abs=0.012)


def test_stochastic_rounding_is_unbiased_unlike_nearest() -> None:
    """65,536 blocks, each with one large value and the same small ones, also below the smallest level."""
    small = torch.tensor([0.9, 0.55, 0.3, 0.21, 0.11, 0.02, -0.75, -0.01])
    rows = torch.cat([torch.ones(65_536, 8), small.expand(65_536, 8)], dim=1).reshape(-1)
    means = decoded(BlockE2M1(block=16, rounding="stochastic"), rows).reshape(-1, 16)[:, 8:].mean(0)
    assert torch.allclose(means, small, rtol=0.01, atol=4e-4)
    control = decoded(BlockE2M1(block=16), rows).reshape(-1, 16)[:, 8:].mean(0)
    assert not torch.allclose(control, small, rtol=0.1, atol=4e-4)
