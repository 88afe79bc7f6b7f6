"""E3M0: four bits a value, sign and a power of two (arXiv 2501.18512 sends its fragments so).

    s = max |x| of a block;  code 0: zero;  codes 1 to 7: s * 2^(code - 7);  bit 3: negative

|x| / s goes to the nearest level: up from 1.5 times a level, and to zero below half the smallest. `stochastic` draws
between the two neighbours so that the mean is right; nearest shrinks normally distributed values by 3.5 %, and error
feedback makes up for that. On normally distributed values the relative error is 0.19 (stochastic 0.28); four-bit
integers have less, but heavy tails favour the powers. The scale that is sent is the smallest level's, s / 64.
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
# Of fp32: exponent field and first bit of the mantissa; what they are just below 0.5.
FIELD_SHIFT, BELOW_HALF = np.uint32(MANTISSA_BITS - 1), np.int32(2 * ONE - 3)
MAX_STEPS = np.int32(2 * MAX_CODE + 1)
NONE, SMALLEST, LARGEST = np.int32(0), np.int32(1), np.int32(MAX_CODE)
SIGN_SHIFT, SIGN_BIT = np.uint32(28), np.uint32(8)  # from the sign of an fp32 to that of a code
NOISE_SHIFT = np.uint32(32 - MANTISSA_BITS)  # bits of a word of noise
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
    """As blocks.Coder says, as does the next one. From 0.5 on one more at 1.5, 3, 6 ..., where the mantissa's first bit
    carries into the exponent."""
    for place in range(halves.size):
        row, out = values[place * block : (place + 1) * block], codes[place * block : (place + 1) * block]
        scale = round_scale(block_peak(row) / MAX_MULTIPLE, ROUND_UP, halves, place)
        if scale < 0:
            return False
        inverse = inverse_or_zero(scale)
        for i in range(row.size):
            bits = float_to_bits(row[i] * inverse)
            # 1, 2: below 0.75, below 1; 3: up to 1.5; then two a level.
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
    """Noise in [0, 2^23) is added to the mantissa: what overflows it goes to the next level.

    From 1 up the exponent field is the level's number; below it the way to zero is one linear step. The two agree which
    side is higher: there the step to the smallest level is never the later one.
    """
    for place in range(halves.size):
        row, out = values[place * block : (place + 1) * block], codes[place * block : (place + 1) * block]
        scale = round_scale(block_peak(row) / MAX_MULTIPLE, ROUND_UP, halves, place)
        if scale < 0:
            return False
        inverse, key = inverse_or_zero(scale), block_key(low, high, first + place, np.uint32(halves[place]))
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
    """With the sign of an fp32 with these `bits`; zero has none."""
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
