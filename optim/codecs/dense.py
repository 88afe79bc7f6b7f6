"""Codecs that carry every value as a float: fp32 as it is, bfloat16, and fp16 under one shared power of two."""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic.dataclasses import dataclass

from optim.codecs.codec import Codec, Draft, Payload
from optim.codecs.scales import HALF_LIMIT, HIGHEST, TOP, power, read_exponent, shared_exponent
from optim.errors import CodecError
from optim.parts import STRICT
from optim.threads import each, scratch
from optim.vectors import DenseVector, Floats, slabs

LIMIT = 2.0 ** (HIGHEST + TOP)
SIGN_BIT = 0x8000  # of an fp16 or a bfloat16
Halves = npt.NDArray[np.uint16]
BRAIN_LIMIT = np.float32(LIMIT).view(np.uint32) >> np.uint32(16)


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

        def copy(part: slice) -> None:
            magnitude_of(values[part])
            room[part] = values[part]

        each(copy, slabs(values.size))
        if subtract:
            values[:] = 0
        return draft.payload

    def read(self, payload: Payload, numel: int) -> DenseVector:
        reader = self.open(payload, numel)
        values = reader.take("f4", numel)
        reader.end()
        largest_magnitude(values)
        return DenseVector(numel, lambda part, out: np.copyto(out, values[part]))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BrainFloat(Codec):
    """bfloat16: the upper half of an fp32, rounded to nearest, ties to even. Payload: head, values."""

    kind: ClassVar[str] = "bf16"
    number: ClassVar[int] = 5
    version: ClassVar[int] = 1

    def max_bytes(self, numel: int) -> int:
        return 2 + 2 * numel

    def write(self, values: Floats, subtract: bool) -> Payload:
        if subtract:
            largest_magnitude(values)  # before anything is changed
        draft = Draft(self.head(), 2 * values.size)
        rounded = torch.from_numpy(draft.add("i2", values.size)).view(torch.bfloat16)

        def convert(part: slice) -> None:
            if not subtract:
                magnitude_of(values[part])
            rounded[part].copy_(torch.from_numpy(values[part]))
            if subtract:
                values[part] -= _floats_of(rounded[part])

        each(convert, slabs(values.size))
        return draft.payload

    def read(self, payload: Payload, numel: int) -> DenseVector:
        reader = self.open(payload, numel)
        halves = reader.take("u2", numel)
        reader.end()
        _check(halves, BRAIN_LIMIT)
        return DenseVector(numel, lambda part, out: _restore(halves[part], torch.bfloat16, out))


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
        draft = Draft(self.head() + np.int8(exponent).tobytes(), 2 * values.size)
        rounded = torch.from_numpy(draft.add("f2", values.size))

        def convert(part: slice) -> None:
            scaled = scratch("scaled", np.float32, part.stop - part.start)
            np.multiply(values[part], power(-exponent), out=scaled)
            rounded[part].copy_(torch.from_numpy(scaled))
            if subtract:
                restored = _floats_of(rounded[part])
                restored *= power(exponent)
                values[part] -= restored

        each(convert, slabs(values.size))
        return draft.payload

    def read(self, payload: Payload, numel: int) -> DenseVector:
        reader = self.open(payload, numel)
        exponent = read_exponent(reader)
        halves = reader.take("u2", numel)
        reader.end()
        _check(halves, HALF_LIMIT)
        return DenseVector(numel, lambda part, out: _restore(halves[part], torch.float16, out), power(exponent))


def _check(halves: Halves, limit: np.unsignedinteger[Any]) -> None:
    """CodecError where a magnitude is above the limit; as integers, magnitudes sort as they do as numbers."""
    # Signed, the positive ones are the greatest; unsigned, those with a sign bit.
    highest, lowest = int(limit), int(limit) + SIGN_BIT

    def check(part: slice) -> None:
        if halves[part].view(np.int16).max() > highest or halves[part].max() > lowest:
            raise CodecError("a value is not finite or too large")

    each(check, slabs(halves.size))


def _floats_of(rounded: torch.Tensor) -> Floats:
    widened: Floats = scratch("widened", np.float32, rounded.numel())
    torch.from_numpy(widened).copy_(rounded)
    return widened


def _restore(halves: Halves, dtype: torch.dtype, out: Floats) -> None:
    """From numbers of that 16-bit type. Copied first: torch takes neither read-only memory nor odd addresses."""
    copied = scratch("halves", np.uint16, halves.size)
    copied[:] = halves
    torch.from_numpy(out).copy_(torch.from_numpy(copied).view(dtype))


def largest_magnitude(values: Floats) -> float:
    """max |x|; CodecError where a value is not finite or too large to be summed safely."""
    found: list[float] = []
    each(lambda part: found.append(magnitude_of(values[part])), slabs(values.size))
    return max(found)


def magnitude_of(values: Floats) -> float:
    """The same, in this thread alone."""
    # A NaN makes both extremes NaN, and every comparison with it false.
    low, high = float(values.min()), float(values.max())
    if not (low > -LIMIT and high < LIMIT):
        raise CodecError("a value is not finite or too large")
    return max(-low, high)
