import struct

import numpy as np
import pytest
import torch

from optim.codecs.sign import BlockSign
from optim.errors import CodecError


def decoded(codec: BlockSign, values: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(values), values.numel())


def test_sign_takes_one_bit_per_value_and_two_bytes_per_block() -> None:
    for numel, blocks in ((1, 1), (8, 1), (9, 1), (1024, 1), (1025, 2), (100_000, 98)):
        assert len(BlockSign().encode(torch.ones(numel))) == 2 + 2 * blocks + -(-numel // 8)


@pytest.mark.parametrize("numel", [5, 40, 41, 79, 333])
def test_sign_agrees_with_a_loop(numel: int) -> None:
    values = np.random.default_rng(numel).standard_normal(numel).astype(np.float32)
    payload = BlockSign(block=40).encode(torch.from_numpy(values))
    blocks = -(-numel // 40)
    uppers = struct.unpack_from(f"<{blocks}H", payload, 2)
    scales = [float(np.uint32(upper << 16).view(np.float32)) for upper in uppers]
    bits = int.from_bytes(payload[2 + 2 * blocks :], "little")
    expected = [scales[i // 40] * (-1 if bits >> i & 1 else 1) for i in range(numel)]
    assert BlockSign(block=40).decode(payload, numel).tolist() == expected
    assert [value < 0 for value in expected] == (values < 0).tolist()
    means = [float(np.abs(values[start : start + 40]).mean()) for start in range(0, numel, 40)]
    assert scales == pytest.approx(means, rel=2**-8)


def test_zero_is_decoded_as_positive() -> None:
    assert decoded(BlockSign(), torch.tensor([0.0, -0.0, 2.0, -2.0])).tolist() == [1, 1, 1, -1]


def test_scale_has_the_least_error() -> None:
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(2**18, np.float32))
    result = decoded(BlockSign(), values)
    error = float((result - values).norm() / values.norm())
    assert error == pytest.approx((1 - 2 / np.pi) ** 0.5, abs=0.002)
    for factor in (0.97, 1.03, float(values.norm() / result.norm())):
        assert float((result * factor - values).norm() / values.norm()) > error


@pytest.mark.parametrize("bit", [4, 5, 6, 7])
def test_bits_after_the_last_value_are_refused(bit: int) -> None:
    payload = bytearray(BlockSign().encode(torch.ones(1004)))
    payload[-1] |= 1 << bit
    with pytest.raises(CodecError, match="padding"):
        BlockSign().decode_vector(bytes(payload), 1004)
