"""Codecs that carry every value: fp32 as it is, and fp16 under one shared power of two."""

from typing import ClassVar

import numpy as np
from pydantic.dataclasses import dataclass

from optim.codecs.codec import Codec, Payload
from optim.codecs.scales import HALF_LIMIT, HIGHEST, TOP, power, read_exponent, shared_exponent
from optim.errors import CodecError
from optim.parts import STRICT
from optim.vectors import DenseVector, Floats, slabs

LIMIT = 2.0 ** (HIGHEST + TOP)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Uncompressed(Codec):
    """fp32, for tests and baselines. Payload: head, values."""

    kind: ClassVar[str] = "none"
    number: ClassVar[int] = 1
    version: ClassVar[int] = 1

    def max_bytes(self, numel: int) -> int:
        return 2 + 4 * numel

    def write(self, values: Floats, subtract: bool) -> bytes:
        largest_magnitude(values)
        payload = self.head() + values.astype("<f4", copy=False).tobytes()
        if subtract:
            values[:] = 0
        return payload

    def read(self, payload: Payload, numel: int) -> DenseVector:
        reader = self.open(payload, numel)
        values = reader.take("f4", numel).astype(np.float32)
        reader.end()
        largest_magnitude(values)
        return DenseVector(values)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HalfPrecision(Codec):
    """fp16. Payload: head, exponent (int8), values as fp16 * 2^exponent."""

    kind: ClassVar[str] = "fp16"
    number: ClassVar[int] = 2
    version: ClassVar[int] = 1

    def max_bytes(self, numel: int) -> int:
        return 3 + 2 * numel

    def write(self, values: Floats, subtract: bool) -> bytes:
        exponent = shared_exponent(largest_magnitude(values))
        halves = np.empty(values.size, "<f2")
        for part in slabs(values.size):
            halves[part] = values[part] * power(-exponent)
            if subtract:
                values[part] -= halves[part].astype(np.float32) * power(exponent)
        return self.head() + np.int8(exponent).tobytes() + halves.tobytes()

    def read(self, payload: Payload, numel: int) -> DenseVector:
        reader = self.open(payload, numel)
        exponent = read_exponent(reader)
        halves = reader.take("f2", numel)
        reader.end()
        if (halves.view("<u2") & np.uint16(0x7FFF)).max() > HALF_LIMIT:
            raise CodecError("a value is not finite or too large")
        return DenseVector(halves.astype(np.float32) * power(exponent))


def largest_magnitude(values: Floats) -> float:
    """max |x|; CodecError where a value is not finite or too large to be summed safely."""
    # A NaN makes both extremes NaN, and every comparison with it false.
    low, high = float(values.min()), float(values.max())
    if not (low > -LIMIT and high < LIMIT):
        raise CodecError("a value is not finite or too large")
    return max(-low, high)
