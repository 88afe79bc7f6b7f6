import numpy as np
import pytest
import torch

from optim.codecs.lloyd_max import BlockLloydMax
from optim.codecs.sign import BlockSign
from optim.errors import CodecError


def relative_error(codec: BlockLloydMax | BlockSign, values: torch.Tensor) -> float:
    return float((codec.decode(codec.encode(values), values.numel()) - values).norm() / values.norm())


def normal(numel: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(numel, np.float32))


def test_two_bits_per_value_and_two_bytes_per_block() -> None:
    for numel, blocks in ((1, 1), (4, 1), (5, 1), (256, 1), (257, 2), (100_000, 391)):
        assert len(BlockLloydMax().encode(torch.ones(numel))) == 2 + 2 * blocks + -(-numel // 4)


def test_error_on_normal_values_is_that_of_lloyd_and_max() -> None:
    values = normal(2**18)
    assert relative_error(BlockLloydMax(block=65_536), values) == pytest.approx(0.3427, abs=0.001)
    assert relative_error(BlockSign(), values) > 0.6, "the control: one bit"


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_other_scales_of_the_same_levels_have_a_larger_error(factor: float) -> None:
    values = normal(2**18)
    result = BlockLloydMax().decode(BlockLloydMax().encode(values), values.numel())
    assert float((result * factor - values).norm()) > float((result - values).norm())


@pytest.mark.parametrize("filled", [1, 2, 8, 32, 64, 128, 200, 255, 256])
def test_residual_of_a_block_is_shorter_however_few_values_are_large(filled: int) -> None:
    values = torch.zeros(256)
    values[:filled] = 1.0
    assert relative_error(BlockLloydMax(), values) < 1


@pytest.mark.parametrize("pair", [1, 2, 3])
def test_bits_after_the_last_value_are_refused(pair: int) -> None:
    payload = bytearray(BlockLloydMax().encode(torch.ones(1001)))
    payload[-1] |= 1 << 2 * pair
    with pytest.raises(CodecError, match="padding"):
        BlockLloydMax().decode_vector(bytes(payload), 1001)
