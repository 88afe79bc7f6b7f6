"""What the blockwise codecs share: a scale for each block of values, and a few bits for each value.

    decoded = m * s, m a small integer that stands for the value's code, s the block's scale as a bfloat16

The product is exact in fp32: m has at most 7 bits beside its sign, s has 8. Adding it is then one rounding, whether or
not a processor multiplies and adds in one step, and sums are the same everywhere.

Payload: head, scales (the upper halves of fp32, one a block), the values' codes. Codes of eight bits are bytes. Of four
bits: the vector is cut in two, the first half as long in blocks or longer by one, and byte i has the code of value i
in its low bits and that of value half + i above. Of one bit: eight neighbours a byte, the first lowest. Bits that
belong to no value are zero.
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass as plain_dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.codecs.codec import Codec, Draft, Payload
from optim.codecs.dense import LIMIT
from optim.codecs.noise import Words, words
from optim.codecs.packing import Bytes, Packing, packing
from optim.compiled import MAGNITUDE, compiled
from optim.errors import CodecError
from optim.parts import STRICT
from optim.threads import each, scratch
from optim.vectors import SLAB, Floats, Vector, slabs

LOWEST = 2.0**-118  # a smaller scale is zero: products stay normal numbers
LOWEST_HALF, LIMIT_HALF = (np.float32(value).view(np.uint32) >> np.uint32(16) for value in (LOWEST, LIMIT))
Halves = npt.NDArray[np.uint16]
Integers = npt.NDArray[np.int8]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BlockCodec(Codec):
    bits: ClassVar[int]  # of one value
    round_up: ClassVar[int] = 0xFFFF  # added to an fp32 scale before its lower half is cut off

    block: int = Field(default=256, ge=16, le=65_536, multiple_of=8, description="values that share a scale")

    @property
    def alignment(self) -> int:
        return self.block

    def max_bytes(self, numel: int) -> int:
        return 2 + 2 * self._blocks(numel) + self._packing(numel).size

    def write(self, values: Floats, subtract: bool) -> Payload:
        layout = self._packing(values.size)
        draft = Draft(self.head(), 2 * self._blocks(values.size) + layout.size)
        halves, packed = draft.add("u2", self._blocks(values.size)), draft.add("u1", layout.size)

        def encode(part: slice) -> None:
            spans = layout.spans(part)
            codes = [scratch(f"codes {i}", np.int8, span.stop - span.start) for i, span in enumerate(spans)]
            for span, out in zip(spans, codes, strict=True):
                self._code(values[span], halves, span.start // self.block, out)
            layout.join(packed, part, codes)

        each(encode, layout.parts(self.stretch))
        if subtract:
            self.read(draft.payload, values.size).subtract_from(values)
        return draft.payload

    def read(self, payload: Payload, numel: int) -> "BlockVector":
        reader = self.open(payload, numel)
        halves: Halves = reader.take("u2", self._blocks(numel))
        layout = self._packing(numel)
        packed: Bytes = reader.take("u1", layout.size)
        reader.end()
        # As integers: a sign bit, an infinity and a NaN all lie above every bfloat16 from +0 to the limit.
        if halves.max() > LIMIT_HALF or (halves[halves > 0] < LOWEST_HALF).any():
            raise CodecError("a scale is negative, not finite, too large or too small")
        layout.check_padding(packed)
        return BlockVector(numel, self, layout, packed, _widened(halves))

    @abstractmethod
    def measure(self, values: Floats, scales: Floats) -> None:
        """The scale of each block, to (blocks,); not finite where a value is not. The last block may be short."""

    @abstractmethod
    def quantize(self, values: Floats, scales: Floats, place: int, codes: Integers) -> None:
        """The values' codes, zero where the scale is. `place`: the first block's number."""

    @abstractmethod
    def multiples(self, codes: Integers) -> None:
        """From codes, in place, to what the scale is multiplied with."""

    def _code(self, values: Floats, halves: Halves, place: int, codes: Integers) -> None:
        """Encode whole blocks from number `place` on: scales to `halves`, codes to `codes`."""
        scales = scratch("scales", np.float32, self._blocks(values.size))
        self.measure(values, scales)
        rounded = self._half(scales)
        halves[place : place + scales.size] = rounded
        self.quantize(values, _widened(rounded), place, codes)

    def _half(self, scales: Floats) -> Halves:
        if not (scales < LIMIT).all():
            raise CodecError("a value is not finite or too large")
        halves = (scales.view(np.uint32) + np.uint32(self.round_up) >> np.uint32(16)).astype(np.uint16)
        halves[halves < LOWEST_HALF] = 0
        return halves

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _packing(self, numel: int) -> Packing:
        return packing(self.bits, numel, self.block)

    @property
    def stretch(self) -> int:
        """Whole blocks whose temporaries stay in the cache, in values."""
        return max(1, SLAB // self.block) * self.block


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PeakBlockCodec(BlockCodec):
    """The scale is the largest magnitude over `levels`, and rounding may be drawn."""

    levels: ClassVar[int]

    rounding: Literal["nearest", "stochastic"] = "nearest"

    def measure(self, values: Floats, scales: Floats) -> None:
        largest_of_blocks(values, self.block, scales)
        scales /= np.float32(self.levels)

    def quantize(self, values: Floats, scales: Floats, place: int, codes: Integers) -> None:
        if self.rounding == "nearest":
            self.nearest(values, inverses(scales), codes)
        else:
            self.drawn(values, inverses(scales), words(scales, place, values.size, self.binding), codes)

    @abstractmethod
    def nearest(self, values: Floats, inverses: Floats, codes: Integers) -> None:
        """Codes of values times the inverses of their blocks' scales."""

    @abstractmethod
    def drawn(self, values: Floats, inverses: Floats, noise: Words, codes: Integers) -> None:
        """The same by chance, so that the mean is right; a word of noise a value."""


@plain_dataclass(frozen=True)
class BlockVector(Vector):
    numel: int
    codec: BlockCodec
    packing: Packing
    packed: Bytes
    scales: Floats

    def pieces(self) -> Iterable[slice]:
        return slabs(self.numel, self.codec.stretch)

    def restore(self, part: slice, out: Floats) -> None:
        block = self.codec.block
        first = part.start // block
        whole = slice(first * block, min(-(-part.stop // block) * block, self.numel))
        values = out if whole == part else scratch("floats", np.float32, whole.stop - whole.start)
        _write_products(self._multiples(whole), self.scales[first:], block, values)
        if whole != part:
            out[:] = values[part.start - whole.start : part.stop - whole.start]

    def add_to(self, total: Floats, weight: float) -> None:
        """total <- total + m * (weight * s), rounded at each step; with weight 1 only the sum is."""
        block, factors = self.codec.block, self.scales * np.float32(weight)

        def add(part: slice) -> None:
            _add_products(self._multiples(part), factors[part.start // block :], block, total[part])

        each(add, self.pieces())

    def _multiples(self, span: slice) -> Integers:
        """Of a span of whole blocks."""
        multiples: Integers = scratch("multiples", np.int8, span.stop - span.start)
        self.packing.split(self.packed, span, multiples)
        self.codec.multiples(multiples)
        return multiples


@compiled
def _add_products(multiples: Integers, scales: Floats, block: int, total: Floats) -> None:
    for place in range(-(-total.size // block)):
        row, scale = multiples[place * block : (place + 1) * block], scales[place]
        out = total[place * block : (place + 1) * block]
        for i in range(row.size):
            out[i] += np.float32(row[i]) * scale


@compiled
def _write_products(multiples: Integers, scales: Floats, block: int, values: Floats) -> None:
    for place in range(-(-values.size // block)):
        row, scale = multiples[place * block : (place + 1) * block], scales[place]
        out = values[place * block : (place + 1) * block]
        for i in range(row.size):
            out[i] = np.float32(row[i]) * scale


@compiled
def largest_of_blocks(values: Floats, block: int, largest: Floats) -> None:
    """max |x| of each block, to (blocks,); a NaN or an infinity where there is one."""
    bits, tops = values.view(np.uint32), largest.view(np.uint32)
    for place in range(tops.size):
        row, top = bits[place * block : (place + 1) * block], np.uint32(0)
        for i in range(row.size):
            top = max(top, np.uint32(row[i] & MAGNITUDE))  # integers: machines compare several at once
        tops[place] = top


def inverses(scales: Floats) -> Floats:
    """1 / scale; zero where the scale is."""
    return np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)


def _widened(halves: Halves) -> Floats:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
