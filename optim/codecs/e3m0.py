"""E3M0: four bits per value, a sign and a power of two (as arXiv 2501.18512 sends its fragments).

    s = max |x| of a block;  code 0: zero;  codes 1 to 7: s * 2^(code - 7);  bit 3: negative

|x| / s is rounded to the nearest level: up from 1.5 times a level, and to zero below half the smallest. `stochastic`
draws between the two neighbours so that the mean is right; nearest shrinks normally distributed values by 3.5 %, for
which error feedback compensates. On normally distributed values the relative error is 0.19 (stochastic 0.28); 4-bit
integers have less, but heavy tails favour the powers. The scale that is sent is that of the smallest level, s / 64.
"""

from functools import partial
from typing import ClassVar

import numpy as np
from pydantic.dataclasses import dataclass

from optim.codecs.bits.deterministic_random import block_key, mix_bits
from optim.codecs.bits.packing import Integers
from optim.codecs.blocks import ROUND_UP, BlockEncoder, Halves, PeakBlockCodec, block_peak, inverse_or_zero, round_scale
from optim.kernels.jit import MAGNITUDE_MASK, float_to_bits, kernel, subroutine
from optim.kernels.vectors import Floats
from optim.options import STRICT

MAX_CODE = 7
MANTISSA_BITS = 23
ONE = 127  # the exponent field of 1.0
# Bits of fp32: the shift to exponent and first mantissa bit, and their value just below 0.5.
FIELD_SHIFT, BELOW_HALF = np.uint32(MANTISSA_BITS - 1), np.int32(2 * ONE - 3)
MAX_STEPS = np.int32(2 * MAX_CODE + 1)
NONE, SMALLEST, LARGEST = np.int32(0), np.int32(1), np.int32(MAX_CODE)
SIGN_SHIFT, SIGN_BIT = np.uint32(28), np.uint32(8)  # from the sign of an fp32 to that of a code
NOISE_SHIFT = np.uint32(32 - MANTISSA_BITS)  # leaves as many bits of noise as a mantissa has
MANTISSA_UNITS = np.float32(2.0**MANTISSA_BITS)
MAX_MULTIPLE = np.float32(64)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BlockE3M0(PeakBlockCodec):
    kind: ClassVar[str] = "e3m0"
    number: ClassVar[int] = 7
    version: ClassVar[int] = 2
    bits: ClassVar[int] = 4
    levels: ClassVar[int] = int(MAX_MULTIPLE)  # the largest level, in units of the smallest

    def make_encoder(self, values: Floats) -> BlockEncoder:
        if self.rounding == "nearest":
            return partial(_encode_nearest, self.block)
        return partial(_encode_stochastic, self.block, *self.noise_key(values))

    def codes_to_multiples(self, codes: Integers) -> None:
        _codes_to_multiples(codes)


@kernel
def _encode_nearest(block: int, values: Floats, first: int, halves: Halves, codes: Integers, subtract: bool) -> bool:
    """Encode blocks, as described at `blocks.BlockEncoder`.

    From 0.5 on, the level increases at 1.5, 3, 6, ..., where the first bit of the mantissa carries into the exponent.
    """
    for block_index in range(halves.size):
        row, out = (
            values[block_index * block : (block_index + 1) * block],
            codes[block_index * block : (block_index + 1) * block],
        )
        scale = round_scale(block_peak(row) / MAX_MULTIPLE, ROUND_UP, halves, block_index)
        if scale < 0:
            return False
        inverse = inverse_or_zero(scale)
        for i in range(row.size):
            bits = float_to_bits(row[i] * inverse)
            # Steps 1 and 2 end at 0.75 and 1, step 3 at 1.5; above, there are two steps per level.
            steps = np.int32(np.int32((bits & MAGNITUDE_MASK) >> FIELD_SHIFT) - BELOW_HALF)
            steps = min(max(steps, NONE), MAX_STEPS)
            out[i] = _make_code(max(np.int32(steps >> SMALLEST), min(steps, SMALLEST)), bits)
        if subtract:
            _subtract_decoded(out, scale, row)
    return True


@kernel
def _encode_stochastic(
    block: int, low: np.uint32, high: np.uint32,
    values: Floats, first: int, halves: Halves, codes: Integers, subtract: bool,
) -> bool:  # fmt: skip
    """Encode blocks, adding noise in [0, 2^23) to the mantissa: where it overflows, the next level is taken.

    From 1 up, the exponent field is the level's number; below, the range to zero is one linear step. The larger of the
    two is right: below 1 the step to the smallest level is never the later one.
    """
    for block_index in range(halves.size):
        row, out = (
            values[block_index * block : (block_index + 1) * block],
            codes[block_index * block : (block_index + 1) * block],
        )
        scale = round_scale(block_peak(row) / MAX_MULTIPLE, ROUND_UP, halves, block_index)
        if scale < 0:
            return False
        inverse, key = inverse_or_zero(scale), block_key(low, high, first + block_index, np.uint32(halves[block_index]))
        for i in range(row.size):
            quotient = row[i] * inverse
            bits, carry = float_to_bits(quotient), np.int32(mix_bits(np.uint32(key + np.uint32(i))) >> NOISE_SHIFT)
            octave = np.int32(((np.int32(bits & MAGNITUDE_MASK) + carry) >> MANTISSA_BITS) - (ONE - 1))
            below = np.int32(min(abs(quotient), np.float32(1)) * MANTISSA_UNITS)
            lowest = np.int32((below + carry) >> MANTISSA_BITS)
            out[i] = _make_code(min(max(octave, lowest), LARGEST), bits)
        if subtract:
            _subtract_decoded(out, scale, row)
    return True


@subroutine
def _make_code(level: np.int32, bits: np.uint32) -> np.int8:
    """Return the code of a level, with the sign of an fp32 that has these `bits`; zero has no sign."""
    return np.int8(np.uint32(level) | (bits >> SIGN_SHIFT & SIGN_BIT)) if level else np.int8(0)


@subroutine
def _subtract_decoded(codes: Integers, scale: np.float32, row: Floats) -> None:
    for i in range(row.size):
        row[i] -= np.float32(_code_to_multiple(codes[i])) * scale


@kernel
def _codes_to_multiples(codes: Integers) -> None:
    for i in range(codes.size):
        codes[i] = _code_to_multiple(codes[i])


@subroutine
def _code_to_multiple(code: np.int8) -> np.int8:
    magnitude = np.int8((1 << (code & MAX_CODE)) >> 1)
    return np.int8(-magnitude) if code & 8 else magnitude
