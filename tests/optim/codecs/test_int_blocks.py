import dataclasses
import struct

import numpy as np
import pytest
import torch

from optim.codecs.base import Codec
from optim.codecs.blocks import BlockVector
from optim.codecs.e3m0 import BlockE3M0
from optim.codecs.int_blocks import BlockInt4, BlockInt8
from optim.codecs.sign import BlockSign
from optim.errors import CodecError
from optim.layout import Layout


def test_int8_takes_one_byte_per_value_and_two_per_block() -> None:
    for numel, blocks in ((1, 1), (256, 1), (257, 2), (10_000, 40)):
        assert len(BlockInt8().encode(torch.ones(numel))) == 2 + numel + 2 * blocks == BlockInt8().max_bytes(numel)


def test_int8_error_is_at_most_half_a_step_of_its_block() -> None:
    values = torch.randn(100_001, generator=torch.Generator().manual_seed(0))
    decoded = BlockInt8().decode(BlockInt8().encode(values), values.numel())
    steps = (
        torch.nn.functional.pad(values, (0, 95)).view(-1, 256).abs().amax(1).div(126).repeat_interleave(256)[:100_001]
    )
    assert ((values - decoded).abs() <= 0.5 * steps * 1.1).all()
    assert float((values - decoded).norm() / values.norm()) < 0.0075


def test_each_block_has_its_own_scale() -> None:
    values = torch.cat([torch.full((256,), 1e-4), torch.full((256,), 1e3), torch.zeros(256)])
    decoded = BlockInt8().decode(BlockInt8().encode(values), 768)
    assert torch.allclose(decoded, values, rtol=4e-3, atol=0)


def test_block_too_small_for_normal_products_becomes_zero() -> None:
    values = torch.cat([torch.full((256,), 1e-35), torch.full((256,), 1e-30), torch.full((256,), 1e9)])
    rest = values.clone()
    decoded = BlockInt8().decode(BlockInt8().encode_and_subtract(rest), 768)
    assert torch.equal(decoded[:256], torch.zeros(256)) and torch.equal(rest[:256], values[:256])
    assert torch.allclose(decoded[256:], values[256:], rtol=0.004)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, -0.0, 2.0**48, 2.0**-119])
def test_invalid_scales_are_refused(scale: float) -> None:
    payload = bytearray(BlockInt8().encode(torch.ones(1000)))
    payload[4:6] = struct.pack("<f", scale)[2:]
    with pytest.raises(CodecError, match="scale"):
        BlockInt8().decode_vector(bytes(payload), 1000)


@pytest.mark.parametrize("codec", [BlockInt8(), BlockInt4(), BlockE3M0(), BlockSign()], ids=str)
def test_products_are_exact_so_that_fused_steps_give_the_same_sum(codec: Codec) -> None:
    """This makes sums equal on processors with and without fused multiply-add."""
    values = np.random.default_rng(0).standard_normal(2000, np.float32) * np.float32(1e-3)
    vector = codec.decode_vector(codec.encode(torch.from_numpy(values)), 2000)
    assert isinstance(vector, BlockVector)
    scales = np.repeat(vector.scales, vector.codec.block)[:2000]
    multiples = vector.to_dense().astype(np.float64) / scales
    assert np.array_equal(multiples, np.rint(multiples)) and np.abs(multiples).max() <= 127
    total = np.random.default_rng(1).standard_normal(2000, np.float32)
    expected = total + vector.to_dense()
    vector.add_to(total, 1.0)
    assert np.array_equal(total, expected)


def scale_of(upper: int) -> np.float32:
    return np.uint32(upper << 16).view(np.float32)


def test_int8_agrees_with_a_loop() -> None:
    values = np.random.default_rng(5).standard_normal(600).astype(np.float32)
    payload = BlockInt8().encode(torch.from_numpy(values))
    scales = [scale_of(upper) for upper in struct.unpack_from("<3H", payload, 2)]
    expected = [integer * scales[i // 256] for i, integer in enumerate(struct.unpack_from("<600b", payload, 8))]
    assert BlockInt8().decode(payload, 600).tolist() == [float(value) for value in expected]


def test_int4_takes_half_a_byte_per_value_and_two_bytes_per_block() -> None:
    for numel, blocks, packed in ((1, 1, 1), (2, 1, 2), (256, 1, 256), (257, 2, 256), (10_001, 40, 5120)):
        size = 2 + packed + 2 * blocks
        assert len(BlockInt4().encode(torch.ones(numel))) == size == BlockInt4().max_bytes(numel)


def test_int4_error_is_an_eighth() -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    decoded = BlockInt4().decode(BlockInt4().encode(values), values.numel())
    assert float((values - decoded).norm() / values.norm()) == pytest.approx(0.126, abs=0.004)


@pytest.mark.parametrize("numel", [1, 24, 25, 63, 600, 601])
def test_int4_agrees_with_a_loop(numel: int) -> None:
    values = np.random.default_rng(numel).standard_normal(numel).astype(np.float32)
    codec = BlockInt4(block=24)
    payload = codec.encode(torch.from_numpy(values))
    blocks = -(-numel // 24)
    scales = [scale_of(upper) for upper in struct.unpack_from(f"<{blocks}H", payload, 2)]
    half, packed = -(-blocks // 2) * 24, payload[2 + 2 * blocks :]
    nibbles = [packed[i] & 15 if i < half else packed[i - half] >> 4 for i in range(numel)]
    expected = [(nibble - 16 * (nibble > 7)) * scales[i // 24] for i, nibble in enumerate(nibbles)]
    assert codec.decode(payload, numel).tolist() == [float(value) for value in expected]
    assert all(abs(x - y) <= 0.51 * scales[i // 24] for i, (x, y) in enumerate(zip(values, expected, strict=True)))
    vector = codec.decode_vector(payload, numel)
    for part in (slice(0, 1), slice(numel // 3, numel // 2 + 1), slice(numel - 1, numel)):
        assert vector.decode_slab(part).tolist() == [float(value) for value in expected[part]]


def test_int4_padding_must_be_zero() -> None:
    payload = bytearray(BlockInt4().encode(torch.ones(1001)))
    payload[-1] |= 0x10
    with pytest.raises(CodecError, match="padding"):
        BlockInt4().decode_vector(bytes(payload), 1001)


@pytest.mark.parametrize("codec", [BlockInt8(rounding="stochastic"), BlockInt4(rounding="stochastic")], ids=str)
def test_stochastic_rounding_is_unbiased_unlike_nearest(codec: BlockInt8 | BlockInt4) -> None:
    """4,096 blocks, each with one value of 1 and otherwise the same small ones, far below a step even of eight bits."""
    small = torch.tensor([0.0005, 0.001, -0.003, 0.05, -0.06, 0.3, 0.71])
    rows = torch.cat([torch.ones(4096, 1), small.repeat(4096, 73)[:, :511]], dim=1).reshape(-1)
    codec = dataclasses.replace(codec, block=512)
    decoded = codec.decode(codec.encode(rows), rows.numel()).reshape(4096, 512)
    step = 1 / codec.levels
    deviation = (decoded - rows.reshape(4096, 512)).mean(0)
    # The mean of 4096 draws between two neighbours deviates by at most step / 2 / 64; five times that never occurs.
    assert deviation.abs().max() < 5 * step / 128
    control = dataclasses.replace(codec, rounding="nearest")
    nearest = control.decode(control.encode(rows), rows.numel()).reshape(4096, 512)
    assert (nearest - rows.reshape(4096, 512)).mean(0).abs().max() > 0.3 * step


def test_scale_is_rounded_up_so_that_the_largest_value_is_not_clipped() -> None:
    values = torch.from_numpy(np.random.default_rng(0).uniform(0.5, 1, 100_000).astype(np.float32))
    values = values.repeat_interleave(16)
    codec = BlockInt8(block=16, rounding="stochastic")
    deviation = float((codec.decode(codec.encode(values), values.numel()) - values).mean())
    assert abs(deviation) < 1e-5


def test_stochastic_error_agrees_with_the_definition() -> None:
    """Between two steps, stochastic rounding has a variance of a sixth of a squared step, nearest a twelfth."""
    values = torch.randn(2**18, generator=torch.Generator().manual_seed(0))
    nearest, stochastic = BlockInt8(block=1024), BlockInt8(block=1024, rounding="stochastic")
    errors = [float((codec.decode(codec.encode(values), 2**18) - values).norm()) for codec in (nearest, stochastic)]
    assert errors[1] / errors[0] == pytest.approx(2**0.5, rel=0.01)


def test_same_values_get_other_noise_in_another_round() -> None:
    values = torch.full((4096,), 0.7)
    values[::256] = 1.0
    codec, layout = BlockInt4(rounding="stochastic"), Layout(((4096,),))
    payloads = [codec.bind(layout, number).encode(values) for number in (1, 1, 2)]
    assert payloads[0] == payloads[1] != payloads[2]
    values[0] = 1.25
    assert codec.bind(layout, 1).encode(values)[-1000:] != payloads[0][-1000:]
