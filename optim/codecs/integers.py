"""Blockwise 8-bit and 4-bit integers: each block is scaled by its largest magnitude (arXiv 2110.02861, linear map).

    scale = max |x| / L (fp16), L = 127 or 7;  q = round(x / scale);  decoded = q * scale

With blocks of 256 these are 8.06 and 4.06 bits a parameter, and on normally distributed values the relative error is
0.007 and 0.126. `stochastic` rounds up with the probability of the fraction, so that the mean is right (arXiv
2302.02390, there with blocks of 1024): q = floor(x / scale + u), u in [0, 1). The error is then sqrt(2) times as large.
"""

from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic.dataclasses import dataclass

from optim.codecs.blocks import BlockCodec, Bytes, largest_of_rows, ratios
from optim.codecs.noise import noise
from optim.errors import CodecError
from optim.parts import STRICT
from optim.vectors import Floats, slabs

MARGIN = np.float32(1 + 2.0**-10)
NIBBLE = np.uint16(0x0F)
# The two values that a byte of nibbles in two's complement stands for, the low nibble first.
PAIRS = (np.arange(256)[:, None] >> np.array([0, 4]) & 15 ^ 8).astype(np.float32) - 8


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _BlockIntegers(BlockCodec):
    levels: ClassVar[int]

    rounding: Literal["nearest", "stochastic"] = "nearest"

    def _statistic(self, rows: Floats) -> Floats:
        return largest_of_rows(rows)

    def _scale(self, statistic: Floats, sizes: Floats) -> Floats:
        # fp16 may round a scale down by 2^-11. The largest value must not be beyond the last level for the mean.
        return statistic / np.float32(self.levels) * (np.float32(1) if self.rounding == "nearest" else MARGIN)

    def _quantized(self, rows: Floats, scales: Floats) -> npt.NDArray[np.int8]:
        quotients = ratios(rows, scales)
        if self.rounding == "nearest":
            np.rint(quotients, out=quotients)
        else:
            words = noise(scales, rows.shape, self.binding) >> np.uint32(8)
            quotients += words.astype(np.float32) * np.float32(2.0**-24)
            np.floor(quotients, out=quotients)
        np.clip(quotients, -self.levels, self.levels, out=quotients)
        return quotients.astype(np.int8)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BlockInt8(_BlockIntegers):
    """One byte a value."""

    kind: ClassVar[str] = "int8"
    number: ClassVar[int] = 3
    version: ClassVar[int] = 1
    bits: ClassVar[int] = 8
    levels: ClassVar[int] = 127

    def _pack(self, rows: Floats, scales: Floats) -> Bytes:
        return self._quantized(rows, scales).view(np.uint8)

    def _restore(self, packed: Bytes, scales: Floats) -> Floats:
        rows = packed.view(np.int8).astype(np.float32)
        rows *= scales[:, None]
        return rows

    def _check(self, packed: Bytes) -> None:
        if packed.view(np.int8).min() < -self.levels:
            raise CodecError("an integer is out of range")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BlockInt4(_BlockIntegers):
    """Two values a byte."""

    kind: ClassVar[str] = "int4"
    number: ClassVar[int] = 6
    version: ClassVar[int] = 1
    bits: ClassVar[int] = 4
    levels: ClassVar[int] = 7

    def _pack(self, rows: Floats, scales: Floats) -> Bytes:
        return join_nibbles(self._quantized(rows, scales).view(np.uint8))

    def _restore(self, packed: Bytes, scales: Floats) -> Floats:
        return scaled_pairs(PAIRS, packed, scales)

    def _check(self, packed: Bytes) -> None:
        # -8 has no opposite.
        if has_nibble_eight(packed):
            raise CodecError("an integer is out of range")


def join_nibbles(codes: Bytes) -> Bytes:
    """The low nibbles of each two neighbours in one byte, the first of them low."""
    pairs = codes.view("<u2")
    return (pairs & NIBBLE | pairs >> np.uint16(4) & NIBBLE << np.uint16(4)).astype(np.uint8)


def has_nibble_eight(packed: Bytes) -> bool:
    """Whether a nibble is 8, of which no codec makes use."""
    slabs_of_bytes = (packed[part] for part in slabs(packed.size))
    return any(((slab & 0xF0 == 0x80) | (slab & 0x0F == 0x08)).any() for slab in slabs_of_bytes)


def scaled_pairs(table: Floats, packed: Bytes, scales: Floats) -> Floats:
    """Rows of the two values a byte that `table` (256, 2) has for it, times the row's scale."""
    # As one 8-byte number a pair is copied at once.
    pairs = np.empty(packed.shape, np.uint64)
    np.take(table.view(np.uint64).ravel(), packed, out=pairs, mode="clip")
    rows: Floats = pairs.view(np.float32)
    rows *= scales[:, None]
    return rows
