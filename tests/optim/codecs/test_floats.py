import struct

import pytest
import torch

from optim.codecs.floats import BFloat16, Float16, Uncompressed
from optim.errors import CodecError


def test_fp32_is_exact() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-20
    assert torch.equal(Uncompressed().decode(Uncompressed().encode(values), 1000), values)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
def test_fp16_is_exact_to_eleven_bits_at_any_scale(scale: float) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).mul(scale)
    decoded = Float16().decode(Float16().encode(values), 1000)
    assert torch.allclose(decoded, values, rtol=2**-11, atol=scale * 1e-8)
    # The control: plain fp16 loses small values and turns large ones into infinity.
    plain = values.half().float()
    assert scale == 1.0 or not torch.allclose(plain, values, rtol=2**-11, atol=scale * 1e-8)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38, -1e38])
def test_received_fp32_must_be_finite_and_bounded(value: float) -> None:
    payload = bytearray(Uncompressed().encode(torch.ones(10)))
    struct.pack_into("<f", payload, 18, value)
    with pytest.raises(CodecError):
        Uncompressed().decode_vector(bytes(payload), 10)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_received_fp16_must_be_finite(value: float) -> None:
    payload = bytearray(Float16().encode(torch.ones(10)))
    struct.pack_into("<e", payload, 9, value)
    with pytest.raises(CodecError):
        Float16().decode_vector(bytes(payload), 10)


@pytest.mark.parametrize("exponent", [-128, -101, 33, 127])
def test_received_fp16_exponent_must_be_in_range(exponent: int) -> None:
    payload = bytearray(Float16().encode(torch.ones(10)))
    struct.pack_into("<b", payload, 2, exponent)
    with pytest.raises(CodecError):
        Float16().decode_vector(bytes(payload), 10)


def test_bfloat16_agrees_with_torch_at_any_scale() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for scale in (1e-30, 1e-9, 1.0, 1e12):
        decoded = BFloat16().decode(BFloat16().encode(values * scale), 1000)
        assert torch.equal(decoded, (values * scale).bfloat16().float())
        assert torch.allclose(decoded, values * scale, rtol=2**-8, atol=0)


def test_bfloat16_rounds_ties_to_even() -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])
    assert BFloat16().decode(BFloat16().encode(ties), 3).tolist() == [1, 1 + 2**-6, -1]


@pytest.mark.parametrize("pattern", [0x7FC0, 0x7F80, 0xFF80, 0x5800, 0xD780, 0x5701, 0xD701])
@pytest.mark.parametrize("others", [1.0, -1.0, 0.0])
def test_received_bfloat16_must_be_finite_and_bounded(pattern: int, others: float) -> None:
    payload = bytearray(BFloat16().encode(torch.full((10,), others)))
    struct.pack_into("<H", payload, 9 * 2, pattern)
    with pytest.raises(CodecError):
        BFloat16().decode_vector(bytes(payload), 10)


@pytest.mark.parametrize("pattern", [0x5700, 0xD700, 0x0000, 0x8000])
@pytest.mark.parametrize("others", [1.0, -1.0])
def test_received_bfloat16_up_to_the_bound_is_accepted(pattern: int, others: float) -> None:
    payload = bytearray(BFloat16().encode(torch.full((10,), others)))
    struct.pack_into("<H", payload, 9 * 2, pattern)
    assert abs(float(BFloat16().decode(bytes(payload), 10)[8])) in (0.0, 2.0**47)
