"""Where the codes of a blockwise format stand in its bytes (described in blocks.py)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optim.compiled import compiled
from optim.errors import CodecError
from optim.threads import scratch
from optim.vectors import slabs

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Packing(ABC):
    """`parts` are spans of values that fill bytes of their own, together with those that `spans` adds."""

    numel: int
    half: int  # values before the second half, a multiple of the block; all where there is none

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of all codes."""

    def parts(self, slab: int) -> Iterator[slice]:
        return slabs(min(self.numel, self.half), slab)

    def spans(self, part: slice) -> list[slice]:
        return [part]

    def room(self, packed: Bytes, part: slice) -> list[Integers]:
        """For the codes of the part's spans, until they are joined."""
        return [scratch(f"codes {i}", np.int8, span.stop - span.start) for i, span in enumerate(self.spans(part))]

    @abstractmethod
    def join(self, packed: Bytes, part: slice, codes: Sequence[Integers]) -> None:
        """Write the codes of the part's spans, in their room, to their bytes."""

    @abstractmethod
    def split(self, packed: Bytes, span: slice, codes: Integers) -> None:
        """Undo `join` for any span that starts at a multiple of eight."""

    @abstractmethod
    def check_padding(self, packed: Bytes) -> None:
        """CodecError where a bit is set that belongs to no value."""


class Eights(Packing):
    @property
    def size(self) -> int:
        return self.numel

    def room(self, packed: Bytes, part: slice) -> list[Integers]:
        return [packed[part].view(np.int8)]

    def join(self, packed: Bytes, part: slice, codes: Sequence[Integers]) -> None:
        """Their room is their bytes."""

    def split(self, packed: Bytes, span: slice, codes: Integers) -> None:
        codes.view(np.uint8)[:] = packed[span]

    def check_padding(self, packed: Bytes) -> None:
        """Every bit belongs to a value."""


class Nibbles(Packing):
    @property
    def size(self) -> int:
        return min(self.numel, self.half)

    def spans(self, part: slice) -> list[slice]:
        above = slice(part.start + self.half, min(part.stop + self.half, self.numel))
        return [part, above] if above.start < above.stop else [part]

    def join(self, packed: Bytes, part: slice, codes: Sequence[Integers]) -> None:
        _join_nibbles(codes[0], codes[1] if len(codes) > 1 else codes[0][:0], packed[part])

    def split(self, packed: Bytes, span: slice, codes: Integers) -> None:
        below = max(0, min(span.stop, self.half) - span.start)
        _split_nibbles(packed[span.start :], 0, codes[:below])
        _split_nibbles(packed[max(0, span.start - self.half) :], 4, codes[below:])

    def check_padding(self, packed: Bytes) -> None:
        if packed.size and packed[max(0, self.numel - self.half) :].max(initial=0) > 0x0F:
            raise CodecError("padding is not zero")


class Ones(Packing):
    @property
    def size(self) -> int:
        return -(-self.numel // 8)

    def join(self, packed: Bytes, part: slice, codes: Sequence[Integers]) -> None:
        _join_bits(codes[0], packed[part.start // 8 : -(-part.stop // 8)])

    def split(self, packed: Bytes, span: slice, codes: Integers) -> None:
        _split_bits(packed[span.start // 8 :], codes)

    def check_padding(self, packed: Bytes) -> None:
        if int(packed[-1]) >> (self.numel - 1) % 8 + 1:
            raise CodecError("padding is not zero")


def packing(bits: int, numel: int, block: int) -> Packing:
    kinds: dict[int, type[Ones | Nibbles | Eights]] = {1: Ones, 4: Nibbles, 8: Eights}
    blocks = -(-numel // block)
    return kinds[bits](numel, -(-blocks // 2) * block if bits == 4 else blocks * block)


@compiled
def _join_nibbles(low: Integers, high: Integers, packed: Bytes) -> None:
    for i in range(high.size):
        packed[i] = np.uint8(low[i] & 0x0F | high[i] << 4)
    for i in range(high.size, low.size):
        packed[i] = np.uint8(low[i] & 0x0F)


@compiled
def _split_nibbles(packed: Bytes, shift: int, codes: Integers) -> None:
    for i in range(codes.size):
        codes[i] = np.int8(packed[i] >> shift & 0x0F)


@compiled
def _join_bits(codes: Integers, packed: Bytes) -> None:
    whole = codes.size // 8
    for i in range(whole):
        byte = np.uint8(0)
        for j in range(8):
            byte |= np.uint8(codes[8 * i + j] << j)
        packed[i] = byte
    if whole < packed.size:
        packed[whole] = 0
        for i in range(8 * whole, codes.size):
            packed[whole] |= np.uint8(codes[i] << (i - 8 * whole))


@compiled
def _split_bits(packed: Bytes, codes: Integers) -> None:
    whole = codes.size // 8
    for i in range(whole):
        for j in range(8):
            codes[8 * i + j] = np.int8(packed[i] >> j & 1)
    for i in range(8 * whole, codes.size):
        codes[i] = np.int8(packed[whole] >> (i - 8 * whole) & 1)
