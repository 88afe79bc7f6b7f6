"""Codecs that carry every value as a float: fp32 unchanged, bfloat16, and fp16 with one shared exponent.

With the shared exponent, neither tiny nor large pseudo-gradients leave the range of fp16:

    value = fp16 * 2^exponent, where the exponent puts the largest value into [2^14, 2^15)

Values down to 2^-29 of the largest are then exact to 2^-11 relative, and smaller ones lose only absolute precision that
is negligible compared with the largest.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass as plain_dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic.dataclasses import dataclass

from optim.codecs.base import Codec, Payload, PayloadReader, PayloadWriter
from optim.codecs.bits.magnitudes import (
    MAGNITUDE_LIMIT,
    MAGNITUDE_LIMIT_BITS,
    MAX_EXPONENT,
    TOP_EXPONENT,
    check_magnitude,
    largest_magnitude,
)
from optim.codecs.bits.packing import Bytes
from optim.errors import CodecError
from optim.kernels.jit import MAGNITUDE_MASK, bits_to_float, float_to_bits, kernel, subroutine
from optim.kernels.parallel import parallel_for
from optim.kernels.vectors import Floats, Vector, slabs
from optim.options import STRICT

MIN_EXPONENT = -100  # decoded values stay out of the subnormal range, and with MAX_EXPONENT below 2^48
FLOAT16_LIMIT = np.float16(2.0**TOP_EXPONENT).view(np.uint16)


def shared_exponent(largest: float) -> int:
    """Return the exponent that fp16 values up to `largest` share.

    Raises:
        CodecError: `largest` is not finite or beyond the format.
    """
    if not largest < MAGNITUDE_LIMIT:
        raise CodecError(f"values up to {largest:.3g} cannot be encoded")
    return max(MIN_EXPONENT, math.frexp(largest)[1] - TOP_EXPONENT) if largest else 0


def read_exponent(reader: PayloadReader) -> int:
    exponent = int(reader.read("i1", 1)[0])
    if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
        raise CodecError(f"exponent {exponent} is out of range")
    return exponent


def power_of_two(exponent: int) -> np.float32:
    """Return 2^exponent; multiplying by it is exact unless the result is below fp32's normal range."""
    return np.float32(2.0**exponent)


BFLOAT16_LIMIT = MAGNITUDE_LIMIT_BITS >> 16
# Bits of fp32: the difference of the exponent biases of fp32 and fp16, fp16's least normal number, and 0.5.
FLOAT16_BIAS, MIN_NORMAL, HALF = np.uint32(112 << 23), np.uint32(113 << 23), np.uint32(126 << 23)
Halves = npt.NDArray[np.uint16]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Uncompressed(Codec):
    """fp32, for tests and baselines. Payload: header, values."""

    kind: ClassVar[str] = "none"
    number: ClassVar[int] = 1
    version: ClassVar[int] = 1

    def max_bytes(self, numel: int) -> int:
        return 2 + 4 * numel

    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        writer = PayloadWriter(self.header(), 4 * values.size)
        out: Floats = writer.reserve("f4", values.size)

        parallel_for(lambda part: check_magnitude(_copy(values[part], out[part])), slabs(values.size))
        if subtract:
            values[:] = 0
        return writer.payload

    def decode_vector(self, payload: Payload, numel: int) -> Vector:
        reader = self.open_payload(payload, numel)
        vector = _FloatVector(numel, reader.read("u1", 4 * numel), 4, np.float32(1), _write_float32, _add_float32)
        reader.expect_end()
        vector.check_limit(_max_magnitude_float32, MAGNITUDE_LIMIT_BITS - 1)
        return vector


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BFloat16(Codec):
    """bfloat16: the upper half of an fp32, rounded to nearest, ties to even. Payload: header, values."""

    kind: ClassVar[str] = "bf16"
    number: ClassVar[int] = 5
    version: ClassVar[int] = 1

    def max_bytes(self, numel: int) -> int:
        return 2 + 2 * numel

    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        writer = PayloadWriter(self.header(), 2 * values.size)
        halves: Halves = writer.reserve("u2", values.size)
        parallel_for(
            lambda part: check_magnitude(_to_bfloat16(values[part], halves[part], subtract)), slabs(values.size)
        )
        return writer.payload

    def decode_vector(self, payload: Payload, numel: int) -> Vector:
        reader = self.open_payload(payload, numel)
        codes = reader.read("u1", 2 * numel)
        vector = _FloatVector(numel, codes, 2, np.float32(1), _write_bfloat16, _add_bfloat16)
        reader.expect_end()
        vector.check_limit(_max_magnitude_halves, BFLOAT16_LIMIT)
        return vector


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Float16(Codec):
    """fp16 with a shared exponent. Payload: header, exponent (int8), values as fp16 * 2^exponent."""

    kind: ClassVar[str] = "fp16"
    number: ClassVar[int] = 2
    version: ClassVar[int] = 1

    def max_bytes(self, numel: int) -> int:
        return 3 + 2 * numel

    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        exponent = shared_exponent(largest_magnitude(values))
        factor, unit = power_of_two(-exponent), power_of_two(exponent) if subtract else np.float32(0)
        writer = PayloadWriter(self.header() + np.int8(exponent).tobytes(), 2 * values.size)
        halves: Halves = writer.reserve("u2", values.size)
        parallel_for(lambda part: _to_float16(values[part], factor, halves[part], unit), slabs(values.size))
        return writer.payload

    def decode_vector(self, payload: Payload, numel: int) -> Vector:
        reader = self.open_payload(payload, numel)
        exponent = read_exponent(reader)
        vector = _FloatVector(
            numel, reader.read("u1", 2 * numel), 2, power_of_two(exponent), _write_float16, _add_float16
        )
        reader.expect_end()
        vector.check_limit(_max_magnitude_halves, int(FLOAT16_LIMIT))
        return vector


@plain_dataclass(frozen=True)
class _FloatVector(Vector):
    """Floats of `width` bytes as they are in the payload, each to be multiplied by `unit`.

    `unit` is a power of two for which no product is below fp32's normal numbers. `write(codes, factor, out)` and
    `add(codes, factor, total)` decode the values.
    """

    numel: int
    codes: Bytes
    width: int
    unit: np.float32
    write: Callable[[Bytes, np.float32, Floats], None]
    add: Callable[[Bytes, np.float32, Floats], None]

    def check_limit(self, largest: Callable[[Bytes], int], limit: int) -> None:
        """Raise CodecError if a magnitude is above the limit; as integers, magnitudes sort as the numbers do."""
        parallel_for(lambda part: check_magnitude(largest(self._codes_in(part)), limit), self.decode_slabs())

    def decode_into(self, slab: slice, out: Floats) -> None:
        self.write(self._codes_in(slab), self.unit, out)

    def add_to(self, total: Floats, weight: float) -> None:
        # With a weight of 1 the product is exact.
        factor = self.unit * np.float32(weight)
        parallel_for(lambda part: self.add(self._codes_in(part), factor, total[part]), self.decode_slabs())

    def _codes_in(self, slab: slice) -> Bytes:
        return self.codes[self.width * slab.start : self.width * slab.stop]


@kernel
def _copy(values: Floats, out: Floats) -> int:
    """Copy the values and return the bits of the largest magnitude, as `max_magnitude_bits` does."""
    bits, out_bits, top = values.view(np.uint32), out.view(np.uint32), np.uint32(0)
    for i in range(bits.size):
        out_bits[i] = bits[i]
        top = max(top, np.uint32(bits[i] & MAGNITUDE_MASK))
    return int(top)


@kernel
def _to_bfloat16(values: Floats, halves: Halves, subtract: bool) -> int:
    """Convert the values and return the bits of the largest magnitude before the conversion."""
    bits, top = values.view(np.uint32), np.uint32(0)
    for i in range(bits.size):
        odd = np.uint32(bits[i] >> np.uint32(16)) & np.uint32(1)
        half = np.uint32(np.uint32(bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        halves[i] = np.uint16(half)
        top = max(top, np.uint32(bits[i] & MAGNITUDE_MASK))
        if subtract:
            values[i] -= _from_bfloat16(half)
    return int(top)


@kernel
def _to_float16(values: Floats, factor: np.float32, halves: Halves, unit: np.float32) -> None:
    """Convert values * factor, whose magnitudes are below 2^16; subtract the decoded values unless `unit` is 0.

    Products below fp16's normal numbers are rounded by adding 0.5, whose last bit is 2^-24.
    """
    for i in range(values.size):
        product = values[i] * factor
        bits = np.uint32(float_to_bits(product) & MAGNITUDE_MASK)
        odd = np.uint32(bits >> np.uint32(13)) & np.uint32(1)
        normal = np.uint32(np.uint32(bits - FLOAT16_BIAS + np.uint32(0xFFF) + odd) >> np.uint32(13))
        below = np.uint32(float_to_bits(abs(product) + np.float32(0.5)) - HALF)
        sign = np.uint32(float_to_bits(product) >> np.uint32(16)) & np.uint32(0x8000)
        half = np.uint32((normal if bits >= MIN_NORMAL else below) | sign)
        halves[i] = np.uint16(half)
        if unit != np.float32(0):
            values[i] -= _from_float16(half) * unit


@subroutine
def _float32_at(codes: Bytes, i: int) -> np.float32:
    low = np.uint32(codes[4 * i]) | np.uint32(codes[4 * i + 1]) << np.uint32(8)
    high = np.uint32(codes[4 * i + 2]) | np.uint32(codes[4 * i + 3]) << np.uint32(8)
    return bits_to_float(np.uint32(low | high << np.uint32(16)))


@subroutine
def _half_bits(codes: Bytes, i: int) -> np.uint32:
    return np.uint32(np.uint32(codes[2 * i]) | np.uint32(codes[2 * i + 1]) << np.uint32(8))


@subroutine
def _from_bfloat16(bits: np.uint32) -> np.float32:
    return bits_to_float(np.uint32(bits << np.uint32(16)))


@subroutine
def _from_float16(bits: np.uint32) -> np.float32:
    magnitude = np.uint32(bits & np.uint32(0x7FFF))
    normal = bits_to_float(np.uint32(np.uint32(magnitude << np.uint32(13)) + FLOAT16_BIAS))
    below = np.float32(np.int32(magnitude)) * np.float32(2.0**-24)
    value = normal if magnitude >= np.uint32(0x400) else below
    return -value if bits > np.uint32(0x7FFF) else value


@kernel
def _max_magnitude_float32(codes: Bytes) -> int:
    top = np.uint32(0)
    for i in range(codes.size // 4):
        top = max(top, np.uint32(float_to_bits(_float32_at(codes, i)) & MAGNITUDE_MASK))
    return int(top)


@kernel
def _max_magnitude_halves(codes: Bytes) -> int:
    top = np.uint32(0)
    for i in range(codes.size // 2):
        top = max(top, np.uint32(_half_bits(codes, i) & np.uint32(0x7FFF)))
    return int(top)


@kernel
def _write_float32(codes: Bytes, factor: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = _float32_at(codes, i) * factor


@kernel
def _add_float32(codes: Bytes, factor: np.float32, total: Floats) -> None:
    for i in range(total.size):
        total[i] += _float32_at(codes, i) * factor


@kernel
def _write_bfloat16(codes: Bytes, factor: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = _from_bfloat16(_half_bits(codes, i)) * factor


@kernel
def _add_bfloat16(codes: Bytes, factor: np.float32, total: Floats) -> None:
    for i in range(total.size):
        total[i] += _from_bfloat16(_half_bits(codes, i)) * factor


@kernel
def _write_float16(codes: Bytes, factor: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = _from_float16(_half_bits(codes, i)) * factor


@kernel
def _add_float16(codes: Bytes, factor: np.float32, total: Floats) -> None:
    for i in range(total.size):
        total[i] += _from_float16(_half_bits(codes, i)) * factor
