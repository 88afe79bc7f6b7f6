"""The payload of `BlockInt8`, written and read by torch on the device of the values.

Activations of a pipeline are encoded where they are computed, so that a fourth of their bytes cross the bus of an
accelerator. The bytes are those of `BlockInt8` with blocks of 256 and rounding to nearest.
"""

from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from optim.codecs.blocks import MIN_SCALE_HALF, ROUND_UP, SCALE_LIMIT, SCALE_LIMIT_HALF
from optim.codecs.int_blocks import BlockInt8
from optim.errors import CodecError

CODEC: Final = BlockInt8()
HEADER: Final = CODEC.header()
LEAST_HALF, LARGEST_HALF = int(MIN_SCALE_HALF), int(SCALE_LIMIT_HALF)


def encode_int8(values: Tensor) -> Tensor:
    """Return the payload (`CODEC.max_bytes(numel)`,) uint8 of all values of a tensor, on its device.

    Raises:
        CodecError: a value is not finite, or too large.
    """
    rows = _to_blocks(values.detach().float().flatten())
    peaks = rows.abs().amax(dim=1) / CODEC.levels
    if not bool((peaks < float(SCALE_LIMIT)).all()):
        raise CodecError("a value is not finite or too large")
    halves = (peaks.view(torch.int32) + int(ROUND_UP)) >> 16
    halves = torch.where(halves >= LEAST_HALF, halves, 0)
    scales = _to_scales(halves)
    inverses = torch.where(scales > 0, 1 / scales, 0)
    codes = torch.round(rows * inverses[:, None]).to(torch.int8).flatten()[: values.numel()]
    header = torch.frombuffer(bytearray(HEADER), dtype=torch.uint8).to(values.device)
    return torch.cat((header, halves.to(torch.int16).view(torch.uint8), codes.view(torch.uint8)))


def decode_int8(payload: Tensor, numel: int) -> Tensor:
    """Return the fp32 values (numel,) of a payload, on its device; all are finite.

    Args:
        payload: (`CODEC.max_bytes(numel)`,) uint8, from anybody.
        numel: number of values, at least one.

    Raises:
        CodecError: the payload has another length or header, or a scale that no encoder writes.
    """
    if payload.shape != (CODEC.max_bytes(numel),):
        raise CodecError(f"payload of {payload.numel()} bytes; {numel} values take {CODEC.max_bytes(numel)}")
    blocks = -(-numel // CODEC.block)
    header, halves, codes = torch.split(payload, [len(HEADER), 2 * blocks, numel])
    if bytes(header.tolist()) != HEADER:
        raise CodecError("another codec or version")
    found = halves.clone().view(torch.int16).to(torch.int32) & 0xFFFF  # a sign bit is above the limit
    if bool(((found > LARGEST_HALF) | ((found > 0) & (found < LEAST_HALF))).any()):
        raise CodecError("a scale is negative, not finite, too large or too small")
    return (_to_blocks(codes.view(torch.int8)).float() * _to_scales(found)[:, None]).flatten()[:numel]


def _to_blocks(flat: Tensor) -> Tensor:
    """Return the values as rows of one block each, filled up with zeros."""
    return F.pad(flat, (0, -flat.numel() % CODEC.block)).view(-1, CODEC.block)


def _to_scales(halves: Tensor) -> Tensor:
    """Return the fp32 numbers of which `halves` (int32) are the upper 16 bits."""
    return (halves << 16).view(torch.float32)
