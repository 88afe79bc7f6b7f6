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
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.codecs.codec import Codec, Draft, Payload
from optim.codecs.dense import LIMIT, largest_magnitude
from optim.codecs.packing import Bytes, Packing, packing
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
    """`rows` below are (blocks, block) values, a last short block filled up with zeros."""

    bits: ClassVar[int]  # of one value
    round_up: ClassVar[int] = 0xFFFF  # added to an fp32 scale before its lower half is cut off

    block: int = Field(default=256, ge=16, le=65_536, multiple_of=8, description="values that share a scale")

    @property
    def alignment(self) -> int:
        return self.block

    def max_bytes(self, numel: int) -> int:
        return 2 + 2 * self._blocks(numel) + self._packing(numel).size

    def write(self, values: Floats, subtract: bool) -> Payload:
        if subtract:
            largest_magnitude(values)  # before anything is changed
        layout = self._packing(values.size)
        draft = Draft(self.head(), 2 * self._blocks(values.size) + layout.size)
        halves, packed = draft.add("u2", self._blocks(values.size)), draft.add("u1", layout.size)

        def encode(part: slice) -> None:
            spans = layout.spans(part)
            codes = [scratch(f"codes {i}", np.int8, self._padded(span)) for i, span in enumerate(spans)]
            for span, out in zip(spans, codes, strict=True):
                self._code(values, halves, span, out, subtract)
            layout.join(packed, part, [out[: span.stop - span.start] for span, out in zip(spans, codes, strict=True)])

        each(encode, layout.parts(self.stretch))
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
    def _scale(self, rows: torch.Tensor, sizes: Floats) -> Floats:
        """Of each row; not finite where a value is not. `sizes`: how many values a row really has."""

    @abstractmethod
    def _quantize(self, rows: torch.Tensor, scales: Floats, place: int, codes: Integers) -> None:
        """The values' codes, zero where the scale is, to (blocks, block) codes. `place`: the first block's number."""

    @abstractmethod
    def multiples(self, codes: Integers) -> None:
        """From codes, in place, to what the scale is multiplied with."""

    def _code(self, values: Floats, halves: Halves, span: slice, codes: Integers, subtract: bool) -> None:
        """Encode a span of whole blocks: scales to `halves`, codes to `codes`."""
        size, padded = span.stop - span.start, codes.size
        rows = torch.from_numpy(_padded(values[span], padded)).view(-1, self.block)
        sizes = np.full(len(rows), self.block, np.float32)
        sizes[-1] -= padded - size
        first = span.start // self.block
        halves[first : first + len(rows)] = self._half(self._scale(rows, sizes))
        scales = _widened(halves[first : first + len(rows)])
        self._quantize(rows, scales, first, codes.reshape(-1, self.block))
        if subtract:
            multiples = scratch("multiples", np.int8, padded)
            multiples[:] = codes
            self.multiples(multiples)
            restored = scratch("floats", np.float32, padded)
            _multiply(multiples, scales, restored)
            values[span] -= restored[:size]

    def _half(self, scales: Floats) -> Halves:
        if not (scales < LIMIT).all():
            raise CodecError("a value is not finite or too large")
        halves = (scales.view(np.uint32) + np.uint32(self.round_up) >> np.uint32(16)).astype(np.uint16)
        halves[halves < LOWEST_HALF] = 0
        return halves

    def _padded(self, span: slice) -> int:
        return self._blocks(span.stop - span.start) * self.block

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _packing(self, numel: int) -> Packing:
        return packing(self.bits, numel, self.block)

    @property
    def stretch(self) -> int:
        """Whole blocks whose temporaries stay in the cache, in values."""
        return max(1, SLAB // self.block) * self.block


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
        self._restore(part, self.scales, out)

    def _restore(self, part: slice, scales: Floats, out: Floats) -> None:
        block = self.codec.block
        start, stop = part.start // block * block, -(-part.stop // block) * block
        multiples = scratch("multiples", np.int8, stop - start)
        self._multiples(slice(start, min(stop, self.numel)), multiples)
        exact = start == part.start and stop == part.stop
        values = out if exact else scratch("floats", np.float32, stop - start)
        _multiply(multiples, scales[start // block : stop // block], values)
        if not exact:
            out[:] = values[part.start - start : part.stop - start]

    def add_to(self, total: Floats, weight: float) -> None:
        """total <- total + m * (weight * s), rounded at each step; with weight 1 only the sum is."""
        block, scales = self.codec.block, self.scales * np.float32(weight)

        def add(part: slice) -> None:
            whole = part.start + (part.stop - part.start) // block * block
            multiples = scratch("multiples", np.int8, whole - part.start)
            self._multiples(slice(part.start, whole), multiples)
            floats = torch.from_numpy(scratch("floats", np.float32, multiples.size))
            floats.copy_(torch.from_numpy(multiples))
            factors = torch.from_numpy(scales[part.start // block : whole // block, None])
            torch.from_numpy(total[part.start : whole]).view(-1, block).addcmul_(floats.view(-1, block), factors)
            if whole < part.stop:
                total[whole : part.stop] += self.span(slice(whole, part.stop))

        def add_rounded(part: slice) -> None:
            values = scratch("vector", np.float32, part.stop - part.start)
            self._restore(part, scales, values)
            total[part] += values

        each(add if weight == 1 else add_rounded, self.pieces())

    def _multiples(self, span: slice, out: Integers) -> None:
        """Of a span of whole blocks; what of `out` is beyond it becomes zero."""
        size = span.stop - span.start
        self.packing.split(self.packed, span, out[:size])
        self.codec.multiples(out[:size])
        out[size:] = 0


def _multiply(multiples: Integers, scales: Floats, out: Floats) -> None:
    floats = torch.from_numpy(out)
    floats.copy_(torch.from_numpy(multiples))
    rows = floats.view(scales.size, -1)
    rows *= torch.from_numpy(scales)[:, None]


def inverses(scales: Floats) -> torch.Tensor:
    """1 / scale in a column; zero where the scale is."""
    return torch.from_numpy(np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0))[:, None]


def largest_of_rows(rows: torch.Tensor) -> Floats:
    """max |x| of each row, or a NaN."""
    largest: Floats = torch.maximum(torch.amax(rows, 1).abs_(), torch.amin(rows, 1).abs_()).numpy()
    return largest


def _padded(values: Floats, size: int) -> Floats:
    return np.pad(values, (0, size - values.size)) if values.size < size else values


def _widened(halves: Halves) -> Floats:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
