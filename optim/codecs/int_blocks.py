"""Blockwise 8-bit and 4-bit integers: each block is scaled by its largest magnitude (arXiv 2110.02861, linear map).

    scale = max |x| / L, rounded up, L = 127 or 7;  q = round(x / scale);  decoded = q * scale

With blocks of 256 these take 8.06 and 4.06 bits per parameter; on normally distributed values the relative error is
0.007 and 0.126. `stochastic` rounds up with the probability of the fraction, so that the mean is right (arXiv
2302.02390, there with blocks of 1024): q = floor(x / scale + u), u in [0, 1). The error is then sqrt(2) times as large.
"""

from functools import partial
from typing import ClassVar

import numpy as np
from pydantic.dataclasses import dataclass

from optim.codecs.bits.deterministic_random import FRACTION_UNIT, block_key, mix_bits
from optim.codecs.bits.packing import Integers
from optim.codecs.blocks import ROUND_UP, BlockEncoder, Halves, PeakBlockCodec, block_peak, inverse_or_zero, round_scale
from optim.kernels.jit import kernel, subroutine
from optim.kernels.vectors import Floats
from optim.options import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _BlockIntegers(PeakBlockCodec):
    def make_encoder(self, values: Floats) -> BlockEncoder:
        if self.rounding == "nearest":
            return partial(_encode_nearest, self.block, self.levels)
        return partial(_encode_stochastic, self.block, self.levels, *self.noise_key(values))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BlockInt8(_BlockIntegers):
    """One byte per value, in two's complement.

    scale = max |x| / 127 of a block;  decoded = round(x / scale) * scale
    """

    kind: ClassVar[str] = "int8"
    number: ClassVar[int] = 3
    version: ClassVar[int] = 2
    bits: ClassVar[int] = 8
    levels: ClassVar[int] = 127

    def codes_to_multiples(self, codes: Integers) -> None:
        """Do nothing: a code is its own multiple."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BlockInt4(_BlockIntegers):
    """Two values per byte, in two's complement.

    scale = max |x| / 7 of a block;  decoded = round(x / scale) * scale
    """

    kind: ClassVar[str] = "int4"
    number: ClassVar[int] = 6
    version: ClassVar[int] = 2
    bits: ClassVar[int] = 4
    levels: ClassVar[int] = 7

    def codes_to_multiples(self, codes: Integers) -> None:
        _sign_extend(codes)


@kernel
def _encode_nearest(
    block: int, levels: int, values: Floats, first: int, halves: Halves, codes: Integers, subtract: bool
) -> bool:
    """Encode blocks, as described at `blocks.BlockEncoder`."""
    for block_index in range(halves.size):
        row, out = (
            values[block_index * block : (block_index + 1) * block],
            codes[block_index * block : (block_index + 1) * block],
        )
        scale = round_scale(block_peak(row) / np.float32(levels), ROUND_UP, halves, block_index)
        if scale < 0:
            return False
        inverse = inverse_or_zero(scale)
        for i in range(row.size):
            out[i] = np.int8(np.rint(row[i] * inverse))
        if subtract:
            _subtract_decoded(out, scale, row)
    return True


@kernel
def _encode_stochastic(
    block: int, levels: int, low: np.uint32, high: np.uint32,
    values: Floats, first: int, halves: Halves, codes: Integers, subtract: bool,
) -> bool:  # fmt: skip
    """Encode blocks, rounding down after adding a fraction in [0, 1), a multiple of 2^-24."""
    highest = np.float32(levels)
    for block_index in range(halves.size):
        row, out = (
            values[block_index * block : (block_index + 1) * block],
            codes[block_index * block : (block_index + 1) * block],
        )
        scale = round_scale(block_peak(row) / highest, ROUND_UP, halves, block_index)
        if scale < 0:
            return False
        inverse, key = inverse_or_zero(scale), block_key(low, high, first + block_index, np.uint32(halves[block_index]))
        for i in range(row.size):
            fraction = np.float32(mix_bits(np.uint32(key + np.uint32(i))) >> np.uint32(8)) * FRACTION_UNIT
            rounded = np.floor(row[i] * inverse + fraction)
            out[i] = np.int8(min(max(rounded, -highest), highest))
        if subtract:
            _subtract_decoded(out, scale, row)
    return True


@subroutine
def _subtract_decoded(codes: Integers, scale: np.float32, row: Floats) -> None:
    for i in range(row.size):
        row[i] -= np.float32(codes[i]) * scale


@kernel
def _sign_extend(codes: Integers) -> None:
    """Convert the lowest four bits from two's complement."""
    for i in range(codes.size):
        codes[i] = np.int8((codes[i] & 0x0F) ^ 0x08) - np.int8(0x08)
