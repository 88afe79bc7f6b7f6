"""Codecs that carry every value as a float: fp32 as it is, bfloat16, and fp16 under one shared power of two."""

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic.dataclasses import dataclass

from optim.codecs.codec import Codec, Payload
from optim.codecs.scales import HALF_LIMIT, HIGHEST, TOP, power, read_exponent, shared_exponent
from optim.errors import CodecError
from optim.parts import STRICT
from optim.vectors import DenseVector, Floats, slabs

# So few values torch converts in this thread. With more it wakes others and waits for them at the end of each call,
# which where other work has the processors takes a hundred times as long as the conversion.
ALONE = 1 << 14
LIMIT = 2.0 ** (HIGHEST + TOP)
MAGNITUDE = np.uint16(0x7FFF)  # of an fp16 or a bfloat16; as integers, magnitudes sort as they do as numbers
BRAIN_LIMIT = np.float32(LIMIT).view(np.uint32) >> np.uint32(16)


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
        payload = b"".join((self.head(), values.astype("<f4", copy=False).data))
        if subtract:
            values[:] = 0
        return payload

    def read(self, payload: Payload, numel: int) -> DenseVector:
        reader = self.open(payload, numel)
        values = reader.take("f4", numel)
        reader.end()
        largest_magnitude(values)
        return DenseVector(numel, lambda part: values[part].astype(np.float32, copy=False))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BrainFloat(Codec):
    """bfloat16: the upper half of an fp32, rounded to nearest, ties to even. Payload: head, values."""

    kind: ClassVar[str] = "bf16"
    number: ClassVar[int] = 5
    version: ClassVar[int] = 1

    def max_bytes(self, numel: int) -> int:
        return 2 + 2 * numel

    def write(self, values: Floats, subtract: bool) -> bytes:
        largest_magnitude(values)
        halves = np.empty(values.size, "<u2")
        for part in slabs(values.size, ALONE):
            halves[part] = torch.from_numpy(values[part]).bfloat16().view(torch.uint16).numpy()
            if subtract:
                values[part] -= _widened(halves[part])
        return b"".join((self.head(), halves.data))

    def read(self, payload: Payload, numel: int) -> DenseVector:
        reader = self.open(payload, numel)
        halves = reader.take("u2", numel)
        reader.end()
        if max((halves[part] & MAGNITUDE).max() for part in slabs(numel)) > BRAIN_LIMIT:
            raise CodecError("a value is not finite or too large")
        return DenseVector(numel, lambda part: _widened(halves[part]))


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
        for part in slabs(values.size, ALONE):
            rounded = torch.from_numpy(values[part] * power(-exponent)).half()
            halves[part] = rounded.numpy()
            if subtract:
                values[part] -= rounded.float().numpy() * power(exponent)
        return b"".join((self.head(), np.int8(exponent).tobytes(), halves.data))

    def read(self, payload: Payload, numel: int) -> DenseVector:
        reader = self.open(payload, numel)
        exponent = read_exponent(reader)
        halves = reader.take("f2", numel)
        reader.end()
        if max((halves[part].view("<u2") & MAGNITUDE).max() for part in slabs(numel)) > HALF_LIMIT:
            raise CodecError("a value is not finite or too large")
        return DenseVector(numel, lambda part: halves[part].astype(np.float32) * power(exponent))


def _widened(halves: npt.NDArray[np.uint16]) -> Floats:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def largest_magnitude(values: Floats) -> float:
    """max |x|; CodecError where a value is not finite or too large to be summed safely."""
    # A NaN makes both extremes NaN, and every comparison with it false.
    low, high = float(values.min()), float(values.max())
    if not (low > -LIMIT and high < LIMIT):
        raise CodecError("a value is not finite or too large")
    return max(-low, high)
