"""E3M0: four bits a value, sign and a power of two (arXiv 2501.18512 sends its fragments so).

    s = max |x| of a block;  code 0: zero;  codes 1 to 7: s * 2^(code - 7);  bit 3: negative

|x| / s goes to the nearest level: up from 1.5 times a level, and to zero below half the smallest. `stochastic` draws
between the two neighbours so that the mean is right; nearest shrinks normally distributed values by 3.5 %, and error
feedback makes up for that. On normally distributed values the relative error is 0.19 (stochastic 0.28); four-bit
integers have less, but heavy tails favour the powers. The scale that is sent is the smallest level's, s / 64.
"""

from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic.dataclasses import dataclass

from optim.codecs.blocks import BlockCodec, Integers, inverses, largest_of_rows
from optim.codecs.noise import words
from optim.parts import STRICT
from optim.threads import scratch, scratch_like
from optim.vectors import Floats

TOP = 64  # the largest level, in units of the smallest
CODES = 7
MANTISSA_BITS = 23
ONE = 127  # the exponent field of 1.0
HALF = 2 * ONE - 2  # exponent field and first bit of the mantissa of 0.5


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PowersOfTwo(BlockCodec):
    kind: ClassVar[str] = "e3m0"
    number: ClassVar[int] = 7
    version: ClassVar[int] = 2
    bits: ClassVar[int] = 4

    rounding: Literal["nearest", "stochastic"] = "nearest"

    def _scale(self, rows: torch.Tensor, sizes: Floats) -> Floats:
        return largest_of_rows(rows) / np.float32(TOP)

    def _quantize(self, rows: torch.Tensor, scales: Floats, place: int, codes: Integers) -> None:
        quotients = scratch("floats", np.float32, rows.numel()).reshape(rows.shape)
        torch.mul(rows, inverses(scales), out=torch.from_numpy(quotients))
        negative = np.signbit(quotients, out=scratch_like("negative", np.bool_, quotients))
        if self.rounding == "nearest":
            _nearest(quotients, codes)
        else:
            carry = words(scales, place, quotients.shape, self.binding)
            carry >>= np.uint32(32 - MANTISSA_BITS)
            _drawn(np.abs(quotients, out=quotients), carry.view(np.int32), codes)
        negative &= np.greater(codes, 0, out=scratch_like("more than zero", np.bool_, codes))
        signs = negative.view(np.int8)
        signs <<= np.int8(3)
        codes |= signs

    def multiples(self, codes: Integers) -> None:
        signs = np.right_shift(codes, 3, out=scratch_like("signs", np.int8, codes))
        signs &= np.int8(1)
        np.negative(signs, out=signs)
        codes &= np.int8(CODES)
        np.left_shift(np.int8(1), codes, out=codes)
        codes.view(np.uint8)[:] >>= np.uint8(1)  # 2^7 is the sign bit of an int8
        # -m = (m ^ -1) + 1
        codes ^= signs
        codes -= signs


def _nearest(quotients: Floats, codes: Integers) -> None:
    """0 to 7: from 0.5 on one more at 1.5, 3, 6 ..., where the mantissa's first bit carries into the exponent."""
    fields = scratch_like("fields", np.uint32, quotients)
    np.right_shift(quotients.view(np.uint32), MANTISSA_BITS - 1, out=fields)
    narrow = scratch_like("narrow", np.int16, quotients)
    np.copyto(narrow, fields, casting="unsafe")
    narrow &= 0x1FF  # without the sign
    narrow -= HALF - 1
    np.clip(narrow, 0, 2 * CODES + 1, out=narrow)  # 1, 2: below 0.75, below 1; 3: up to 1.5; then two a level
    np.copyto(codes, narrow, casting="unsafe")
    small = np.minimum(codes, 1, out=scratch_like("small", np.int8, codes))
    codes >>= 1
    np.maximum(codes, small, out=codes)


def _drawn(magnitudes: Floats, carry: npt.NDArray[np.int32], codes: Integers) -> None:
    """0 to 7. `carry` in [0, 2^23) is added to the mantissa: what overflows it goes to the next level.

    From 1 up the exponent field is the level's number; below it the way to zero is one linear step. The two agree which
    side is higher: there the step to the smallest level is never the later one.
    """
    octaves = np.add(magnitudes.view(np.int32), carry, out=scratch_like("octaves", np.int32, carry))
    octaves >>= MANTISSA_BITS
    octaves -= ONE - 1
    below = np.minimum(magnitudes, 1, out=magnitudes)
    below *= np.float32(2.0**MANTISSA_BITS)
    lowest = scratch_like("lowest", np.int32, carry)
    np.copyto(lowest, below, casting="unsafe")
    lowest += carry
    lowest >>= MANTISSA_BITS
    np.copyto(codes, np.clip(octaves, lowest, CODES, out=octaves), casting="unsafe")
