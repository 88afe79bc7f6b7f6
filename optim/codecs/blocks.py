"""What the blockwise codecs share: a scale for each block of values, and a few bits for each value.

Payload: head, scales (exponent, one fp16 a block), the values' codes, packed from the low bits of each byte up. What is
left of the last byte is zero.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.codecs.codec import Codec, Payload
from optim.codecs.scales import read_scales, write_scales
from optim.errors import CodecError
from optim.parts import STRICT
from optim.vectors import SLAB, DenseVector, Floats

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BlockCodec(Codec):
    """All rows below are (blocks, block) values or (blocks, packed) bytes; a last short block is padded with zeros,
    and zeros are packed to zeros."""

    bits: ClassVar[int]  # of one value; 8 or a divisor of it

    block: int = Field(default=256, ge=16, le=65_536, multiple_of=8, description="values that share a scale")

    @property
    def alignment(self) -> int:
        return self.block

    def max_bytes(self, numel: int) -> int:
        return 3 + 2 * self._blocks(numel) + self._packed_bytes(numel)

    def write(self, values: Floats, subtract: bool) -> bytes:
        wire, scales = write_scales(self._scales(values))
        packed = np.empty((scales.size, self.block * self.bits // 8), np.uint8)
        for span, rows in self._slabs(values.size):
            packed[rows] = self._pack(self._rows(values[span]), scales[rows])
            if subtract:
                values[span] -= self._restore(packed[rows], scales[rows]).ravel()[: span.stop - span.start]
        return b"".join((self.head(), wire, packed.ravel()[: self._packed_bytes(values.size)].data))

    def read(self, payload: Payload, numel: int) -> DenseVector:
        reader = self.open(payload, numel)
        scales = read_scales(reader, self._blocks(numel))
        packed: Bytes = reader.take("u1", self._packed_bytes(numel))
        reader.end()
        self._check(packed)
        if int(packed[-1]) >> ((numel - 1) % (8 // self.bits) + 1) * self.bits:
            raise CodecError("padding is not zero")
        return DenseVector(numel, lambda part: self._restored(packed, scales, part))

    @abstractmethod
    def _statistic(self, rows: Floats) -> Floats:
        """Of each row, what its scale is made from. Not finite where a value is not."""

    @abstractmethod
    def _scale(self, statistic: Floats, sizes: Floats) -> Floats:
        """The scales; `sizes`: how many values each block really has."""

    @abstractmethod
    def _pack(self, rows: Floats, scales: Floats) -> Bytes:
        """The rows' codes. A block whose scale fp16 rounds to zero is nothing beside the others: it becomes zero."""

    @abstractmethod
    def _restore(self, packed: Bytes, scales: Floats) -> Floats:
        """The rows as the receiver sees them, in a new array."""

    @abstractmethod
    def _check(self, packed: Bytes) -> None:
        """CodecError where a code is one that no encoder writes."""

    def _scales(self, values: Floats) -> Floats:
        statistic = np.empty(self._blocks(values.size), np.float32)
        sizes = np.full(statistic.size, self.block, np.float32)
        sizes[-1] -= -values.size % self.block
        for span, rows in self._slabs(values.size):
            statistic[rows] = self._statistic(self._rows(values[span]))
        return self._scale(statistic, sizes)

    def _restored(self, packed: Bytes, scales: Floats, part: slice) -> Floats:
        first, last = part.start // self.block, self._blocks(part.stop)
        width = self.block * self.bits // 8
        rows = packed[first * width : last * width]
        missing = (last - first) * width - rows.size
        whole = np.pad(rows, (0, missing)) if missing else rows
        values = self._restore(whole.reshape(-1, width), scales[first:last]).ravel()
        return values[part.start - first * self.block : part.stop - first * self.block]

    def _rows(self, values: Floats) -> Floats:
        missing = -values.size % self.block
        padded = np.pad(values, (0, missing)) if missing else values
        return padded.reshape(-1, self.block)

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _packed_bytes(self, numel: int) -> int:
        return -(-numel * self.bits // 8)

    def _slabs(self, numel: int) -> Iterator[tuple[slice, slice]]:
        """Spans of whole blocks that fit the cache, each as values and as blocks."""
        blocks = max(1, SLAB // self.block)
        for start in range(0, self._blocks(numel), blocks):
            stop = min(start + blocks, self._blocks(numel))
            yield slice(start * self.block, min(stop * self.block, numel)), slice(start, stop)


def largest_of_rows(rows: Floats) -> Floats:
    """max |x| of each row, or a NaN: as integers NaNs are above all numbers, and the maxima twice as fast."""
    largest: npt.NDArray[np.uint32] = (rows.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=1)
    return largest.view(np.float32)


def ratios(rows: Floats, scales: Floats) -> Floats:
    """rows / scales in a new array; zero where the scale is."""
    divisors: Floats = np.where(scales > 0, scales, np.float32(np.inf))
    return rows / divisors[:, None]
