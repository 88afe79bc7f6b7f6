"""torch writes and reads the payload of `BlockInt8` on any device."""

import struct

import pytest
import torch
from torch import Tensor

from optim.codecs.int8_on_device import CODEC, decode_int8, encode_int8
from optim.errors import CodecError

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def awkward_values(numel: int) -> Tensor:
    """Return values of all magnitudes, with blocks of zeros and of numbers too small for a scale."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * 10 ** (6 * torch.randn(numel, generator=generator).sign())
    values[256:512] = 0
    values[512:768] *= 1e-36
    halves = torch.arange(256) % 127 + 0.5  # with a scale of 1, so they are rounded to even
    halves[0] = 127
    return torch.cat((values, halves))[-numel:]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 10_001])
def test_bytes_and_values_are_those_of_the_codec(numel: int, device: str) -> None:
    values = awkward_values(numel)
    payload = encode_int8(values.to(device))
    expected = bytes(CODEC.encode(values))
    assert bytes(payload.tolist()) == expected and payload.device.type == device
    assert torch.equal(decode_int8(payload, numel).cpu(), CODEC.decode(expected, numel))


def test_error_of_a_value_is_at_most_half_a_step_of_its_block() -> None:
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 64)[:, None]
    decoded = decode_int8(encode_int8(values), values.numel()).view(64, 256)
    steps = values.abs().amax(1, keepdim=True) / 127 * (1 + 2**-7)  # the scale is a bf16, rounded up
    assert ((values - decoded).abs() <= 0.501 * steps).all()
    assert not ((values - decoded).abs() <= 0.4 * steps).all(), "the control: the bound is tight"
    assert float((values - decoded).norm() / values.norm()) < 0.0075


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e38])
def test_values_that_are_not_finite_or_too_large_are_not_encoded(value: float) -> None:
    values = torch.ones(1000)
    values[700] = value
    with pytest.raises(CodecError, match="not finite or too large"):
        encode_int8(values)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, -0.0, 2.0**48, 2.0**-119])
def test_payloads_that_nobody_encodes_are_refused(scale: float) -> None:
    payload = encode_int8(torch.ones(1000))
    with pytest.raises(CodecError, match="values take"):
        decode_int8(payload[:-1], 1000)
    with pytest.raises(CodecError, match="another codec"):
        decode_int8(payload + 1, 1000)
    payload[4:6] = torch.frombuffer(bytearray(struct.pack("<f", scale)[2:]), dtype=torch.uint8)
    with pytest.raises(CodecError, match="scale"):
        decode_int8(payload, 1000)
