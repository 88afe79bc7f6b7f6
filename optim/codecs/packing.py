"""Where the codes of a blockwise format stand in its bytes (described in blocks.py)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optim.errors import CodecError
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

    @abstractmethod
    def join(self, packed: Bytes, part: slice, codes: Sequence[Integers]) -> None:
        """Write the codes of the part's spans, which are used up, to their bytes."""

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

    def join(self, packed: Bytes, part: slice, codes: Sequence[Integers]) -> None:
        packed[part] = codes[0].view(np.uint8)

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
        np.bitwise_and(codes[0].view(np.uint8), 0x0F, out=packed[part])
        for above in codes[1:]:
            high = above.view(np.uint8)
            high <<= np.uint8(4)
            packed[part.start : part.start + above.size] |= high

    def split(self, packed: Bytes, span: slice, codes: Integers) -> None:
        out = codes.view(np.uint8)
        below = max(0, min(span.stop, self.half) - span.start)
        np.bitwise_and(packed[span.start : span.start + below], 0x0F, out=out[:below])
        if below < out.size:
            first = span.start + below - self.half
            np.right_shift(packed[first : first + out.size - below], 4, out=out[below:])

    def check_padding(self, packed: Bytes) -> None:
        if packed.size and packed[max(0, self.numel - self.half) :].max(initial=0) > 0x0F:
            raise CodecError("padding is not zero")


class Ones(Packing):
    @property
    def size(self) -> int:
        return -(-self.numel // 8)

    def join(self, packed: Bytes, part: slice, codes: Sequence[Integers]) -> None:
        packed[part.start // 8 : -(-part.stop // 8)] = np.packbits(codes[0].view(np.uint8), bitorder="little")

    def split(self, packed: Bytes, span: slice, codes: Integers) -> None:
        whole = packed[span.start // 8 : -(-span.stop // 8)]
        codes.view(np.uint8)[:] = np.unpackbits(whole, count=codes.size, bitorder="little")

    def check_padding(self, packed: Bytes) -> None:
        if int(packed[-1]) >> (self.numel - 1) % 8 + 1:
            raise CodecError("padding is not zero")


def packing(bits: int, numel: int, block: int) -> Packing:
    kinds: dict[int, type[Ones | Nibbles | Eights]] = {1: Ones, 4: Nibbles, 8: Eights}
    blocks = -(-numel // block)
    return kinds[bits](numel, -(-blocks // 2) * block if bits == 4 else blocks * block)
