import struct

import numpy as np
import pytest
import torch

from optim.codecs.int8 import BlockInt8
from optim.errors import CodecError


def test_size_is_one_byte_a_value_and_two_a_block() -> None:
    for numel, blocks in ((1, 1), (256, 1), (257, 2), (10_000, 40)):
        assert len(BlockInt8().encode(torch.ones(numel))) == 3 + numel + 2 * blocks == BlockInt8().max_bytes(numel)


def test_error_is_half_a_step_of_its_block() -> None:
    values = torch.randn(100_001, generator=torch.Generator().manual_seed(0))
    decoded = BlockInt8().decode(BlockInt8().encode(values), values.numel())
    steps = (
        torch.nn.functional.pad(values, (0, 95)).view(-1, 256).abs().amax(1).div(127).repeat_interleave(256)[:100_001]
    )
    assert ((values - decoded).abs() <= 0.5 * steps * 1.1).all()
    assert float((values - decoded).norm() / values.norm()) < 0.0075


def test_blocks_keep_their_own_scale() -> None:
    values = torch.cat([torch.full((256,), 1e-4), torch.full((256,), 1e3), torch.zeros(256)])
    decoded = BlockInt8().decode(BlockInt8().encode(values), 768)
    assert torch.allclose(decoded, values, rtol=1e-3, atol=0)


def test_a_block_that_is_nothing_beside_the_others_becomes_zero() -> None:
    values = torch.cat([torch.full((256,), 1e-12), torch.full((256,), 1e9)])
    rest = values.clone()
    decoded = BlockInt8().decode(BlockInt8().extract(rest), 512)
    assert torch.equal(decoded[:256], torch.zeros(256)) and torch.equal(rest[:256], values[:256])


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, -0.0, 65504.0])
def test_bad_scales_are_refused(scale: float) -> None:
    payload = bytearray(BlockInt8().encode(torch.ones(1000)))
    struct.pack_into("<e", payload, 5, scale)
    with pytest.raises(CodecError, match="scale"):
        BlockInt8().read(bytes(payload), 1000)


def test_an_integer_no_encoder_writes_is_refused() -> None:
    payload = bytearray(BlockInt8().encode(torch.ones(1000)))
    payload[-1] = 0x80
    with pytest.raises(CodecError, match="integer"):
        BlockInt8().read(bytes(payload), 1000)


def test_agrees_with_a_loop() -> None:
    values = np.random.default_rng(5).standard_normal(600).astype(np.float32)
    payload = BlockInt8().encode(torch.from_numpy(values))
    exponent, *halves = struct.unpack_from("<b3e", payload, 2)
    expected = [
        integer * np.float32(halves[i // 256] * 2.0**exponent)
        for i, integer in enumerate(struct.unpack_from("<600b", payload, 9))
    ]
    assert BlockInt8().decode(payload, 600).tolist() == [float(value) for value in expected]
