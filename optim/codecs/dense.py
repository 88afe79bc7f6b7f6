"""Codecs that carry every value as a float: fp32 as it is, bfloat16, and fp16 under one shared power of two."""

from collections.abc import Callable
from dataclasses import dataclass as plain_dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic.dataclasses import dataclass

from optim.codecs.codec import Codec, Draft, Payload
from optim.codecs.exponents import HALF_LIMIT, HIGHEST, TOP, power, read_exponent, shared_exponent
from optim.codecs.packing import Bytes
from optim.compiled import MAGNITUDE, bits_of, compiled, float_of
from optim.errors import CodecError
from optim.parts import STRICT
from optim.threads import each
from optim.vectors import Floats, Vector, slabs

LIMIT = 2.0 ** (HIGHEST + TOP)
LIMIT_BITS = int(np.float32(LIMIT).view(np.uint32))
BRAIN_LIMIT = LIMIT_BITS >> 16
# Of fp32: what its exponents are more than those of fp16, fp16's least normal number, and a half.
HALF_BIAS, LEAST_NORMAL, HALF = np.uint32(112 << 23), np.uint32(113 << 23), np.uint32(126 << 23)
Halves = npt.NDArray[np.uint16]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Uncompressed(Codec):
    """fp32, for tests and baselines. Payload: head, values."""

    kind: ClassVar[str] = "none"
    number: ClassVar[int] = 1
    version: ClassVar[int] = 1

    def max_bytes(self, numel: int) -> int:
        return 2 + 4 * numel

    def write(self, values: Floats, subtract: bool) -> Payload:
        draft = Draft(self.head(), 4 * values.size)
        room: Floats = draft.add("f4", values.size)

        each(lambda part: check_largest(_copy(values[part], room[part])), slabs(values.size))
        if subtract:
            values[:] = 0
        return draft.payload

    def read(self, payload: Payload, numel: int) -> Vector:
        reader = self.open(payload, numel)
        vector = _Sent(numel, reader.take("u1", 4 * numel), 4, np.float32(1), _write_words, _add_words)
        reader.end()
        vector.check(_largest_of_words, LIMIT_BITS - 1)
        return vector


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BrainFloat(Codec):
    """bfloat16: the upper half of an fp32, rounded to nearest, ties to even. Payload: head, values."""

    kind: ClassVar[str] = "bf16"
    number: ClassVar[int] = 5
    version: ClassVar[int] = 1

    def max_bytes(self, numel: int) -> int:
        return 2 + 2 * numel

    def write(self, values: Floats, subtract: bool) -> Payload:
        draft = Draft(self.head(), 2 * values.size)
        halves: Halves = draft.add("u2", values.size)
        each(lambda part: check_largest(_to_brain_floats(values[part], halves[part], subtract)), slabs(values.size))
        return draft.payload

    def read(self, payload: Payload, numel: int) -> Vector:
        reader = self.open(payload, numel)
        codes = reader.take("u1", 2 * numel)
        vector = _Sent(numel, codes, 2, np.float32(1), _write_brain_floats, _add_brain_floats)
        reader.end()
        vector.check(_largest_of_halves, BRAIN_LIMIT)
        return vector


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HalfPrecision(Codec):
    """fp16. Payload: head, exponent (int8), values as fp16 * 2^exponent."""

    kind: ClassVar[str] = "fp16"
    number: ClassVar[int] = 2
    version: ClassVar[int] = 1

    def max_bytes(self, numel: int) -> int:
        return 3 + 2 * numel

    def write(self, values: Floats, subtract: bool) -> Payload:
        exponent = shared_exponent(largest_magnitude(values))
        factor, unit = power(-exponent), power(exponent) if subtract else np.float32(0)
        draft = Draft(self.head() + np.int8(exponent).tobytes(), 2 * values.size)
        halves: Halves = draft.add("u2", values.size)
        each(lambda part: _to_halves(values[part], factor, halves[part], unit), slabs(values.size))
        return draft.payload

    def read(self, payload: Payload, numel: int) -> Vector:
        reader = self.open(payload, numel)
        exponent = read_exponent(reader)
        vector = _Sent(numel, reader.take("u1", 2 * numel), 2, power(exponent), _write_halves, _add_halves)
        reader.end()
        vector.check(_largest_of_halves, int(HALF_LIMIT))
        return vector


@plain_dataclass(frozen=True)
class _Sent(Vector):
    """Numbers of `width` bytes as they stand in the payload, each to be multiplied by `unit`, a power of two, with no
    product below fp32's normal numbers. `write(codes, factor, out)` and `add(codes, factor, total)` decode them."""

    numel: int
    codes: Bytes
    width: int
    unit: np.float32
    write: Callable[[Bytes, np.float32, Floats], None]
    add: Callable[[Bytes, np.float32, Floats], None]

    def check(self, largest: Callable[[Bytes], int], limit: int) -> None:
        """CodecError where a magnitude is above the limit; as integers, magnitudes sort as they do as numbers."""
        each(lambda part: check_largest(largest(self._of(part)), limit), self.pieces())

    def restore(self, part: slice, out: Floats) -> None:
        self.write(self._of(part), self.unit, out)

    def add_to(self, total: Floats, weight: float) -> None:
        # Where the weight is one the product is exact.
        factor = self.unit * np.float32(weight)
        each(lambda part: self.add(self._of(part), factor, total[part]), self.pieces())

    def _of(self, part: slice) -> Bytes:
        return self.codes[self.width * part.start : self.width * part.stop]


def largest_magnitude(values: Floats) -> float:
    """max |x|; CodecError where a value is not finite or too large to be summed safely."""
    found: list[int] = []
    each(lambda part: found.append(largest_bits(values[part])), slabs(values.size))
    check_largest(max(found))
    return float(np.uint32(max(found)).view(np.float32))


def check_largest(bits: int, limit: int = LIMIT_BITS - 1) -> None:
    """CodecError where the bits of a largest magnitude are above that: it is not finite, or too large."""
    if bits > limit:
        raise CodecError("a value is not finite or too large")


@compiled
def largest_bits(values: Floats) -> int:
    """The bits of the largest magnitude; those of infinities and NaN are above all numbers'."""
    bits, top = values.view(np.uint32), np.uint32(0)
    for i in range(bits.size):
        top = max(top, np.uint32(bits[i] & MAGNITUDE))
    return int(top)


@compiled
def _copy(values: Floats, out: Floats) -> int:
    """And what `largest_bits` says."""
    bits, room, top = values.view(np.uint32), out.view(np.uint32), np.uint32(0)
    for i in range(bits.size):
        room[i] = bits[i]
        top = max(top, np.uint32(bits[i] & MAGNITUDE))
    return int(top)


@compiled
def _to_brain_floats(values: Floats, halves: Halves, subtract: bool) -> int:
    """And what `largest_bits` says, of the values as they came."""
    bits, top = values.view(np.uint32), np.uint32(0)
    for i in range(bits.size):
        odd = np.uint32(bits[i] >> np.uint32(16)) & np.uint32(1)
        half = np.uint32(np.uint32(bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        halves[i] = np.uint16(half)
        top = max(top, np.uint32(bits[i] & MAGNITUDE))
        if subtract:
            values[i] -= _brain_float(half)
    return int(top)


@compiled
def _to_halves(values: Floats, factor: np.float32, halves: Halves, unit: np.float32) -> None:
    """Products below 2^16. Those below fp16's normal numbers are rounded where 0.5 has a last bit of 2^-24. What they
    decode to, times the unit, is subtracted, unless that is zero."""
    for i in range(values.size):
        product = values[i] * factor
        bits = np.uint32(bits_of(product) & MAGNITUDE)
        odd = np.uint32(bits >> np.uint32(13)) & np.uint32(1)
        normal = np.uint32(np.uint32(bits - HALF_BIAS + np.uint32(0xFFF) + odd) >> np.uint32(13))
        below = np.uint32(bits_of(abs(product) + np.float32(0.5)) - HALF)
        sign = np.uint32(bits_of(product) >> np.uint32(16)) & np.uint32(0x8000)
        half = np.uint32((normal if bits >= LEAST_NORMAL else below) | sign)
        halves[i] = np.uint16(half)
        if unit != np.float32(0):
            values[i] -= _half(half) * unit


@compiled
def _word(codes: Bytes, i: int) -> np.float32:
    low = np.uint32(codes[4 * i]) | np.uint32(codes[4 * i + 1]) << np.uint32(8)
    high = np.uint32(codes[4 * i + 2]) | np.uint32(codes[4 * i + 3]) << np.uint32(8)
    return float_of(np.uint32(low | high << np.uint32(16)))


@compiled
def _bits_of_half(codes: Bytes, i: int) -> np.uint32:
    return np.uint32(np.uint32(codes[2 * i]) | np.uint32(codes[2 * i + 1]) << np.uint32(8))


@compiled
def _brain_float(bits: np.uint32) -> np.float32:
    return float_of(np.uint32(bits << np.uint32(16)))


@compiled
def _half(bits: np.uint32) -> np.float32:
    magnitude = np.uint32(bits & np.uint32(0x7FFF))
    normal = float_of(np.uint32(np.uint32(magnitude << np.uint32(13)) + HALF_BIAS))
    below = np.float32(np.int32(magnitude)) * np.float32(2.0**-24)
    value = normal if magnitude >= np.uint32(0x400) else below
    return -value if bits > np.uint32(0x7FFF) else value


@compiled
def _largest_of_words(codes: Bytes) -> int:
    top = np.uint32(0)
    for i in range(codes.size // 4):
        top = max(top, np.uint32(bits_of(_word(codes, i)) & MAGNITUDE))
    return int(top)


@compiled
def _largest_of_halves(codes: Bytes) -> int:
    top = np.uint32(0)
    for i in range(codes.size // 2):
        top = max(top, np.uint32(_bits_of_half(codes, i) & np.uint32(0x7FFF)))
    return int(top)


@compiled
def _write_words(codes: Bytes, factor: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = _word(codes, i) * factor


@compiled
def _add_words(codes: Bytes, factor: np.float32, total: Floats) -> None:
    for i in range(total.size):
        total[i] += _word(codes, i) * factor


@compiled
def _write_brain_floats(codes: Bytes, factor: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = _brain_float(_bits_of_half(codes, i)) * factor


@compiled
def _add_brain_floats(codes: Bytes, factor: np.float32, total: Floats) -> None:
    for i in range(total.size):
        total[i] += _brain_float(_bits_of_half(codes, i)) * factor


@compiled
def _write_halves(codes: Bytes, factor: np.float32, out: Floats) -> None:
    for i in range(out.size):
        out[i] = _half(_bits_of_half(codes, i)) * factor


@compiled
def _add_halves(codes: Bytes, factor: np.float32, total: Floats) -> None:
    for i in range(total.size):
        total[i] += _half(_bits_of_half(codes, i)) * factor
