"""The layout of the codes of a blockwise format in its bytes (described in blocks.py)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optim.errors import CodecError
from optim.kernels.jit import kernel
from optim.kernels.parallel import thread_buffer
from optim.kernels.vectors import slabs

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Packing(ABC):
    """The packed codes of `numel` values.

    A slab, together with the span that `spans` adds, fills bytes of its own.
    """

    numel: int
    first_half: int  # values before the second half, a multiple of the block; otherwise all values

    @property
    @abstractmethod
    def size(self) -> int:
        """Return the size of all codes in bytes."""

    def slabs(self, slab_size: int) -> Iterator[slice]:
        """Return slabs that cover the packed bytes."""
        return slabs(min(self.numel, self.first_half), slab_size)

    def spans(self, slab: slice) -> list[slice]:
        """Return the spans of values that are packed with this slab."""
        return [slab]

    def code_buffers(self, packed: Bytes, slab: slice) -> list[Integers]:
        """Return buffers for the codes of the slab's spans until they are packed."""
        return [thread_buffer(f"codes {i}", np.int8, span.stop - span.start) for i, span in enumerate(self.spans(slab))]

    @abstractmethod
    def pack(self, packed: Bytes, slab: slice, codes: Sequence[Integers]) -> None:
        """Pack the codes of the slab's spans, which are in its buffers."""

    @abstractmethod
    def unpack(self, packed: Bytes, span: slice, codes: Integers) -> None:
        """Undo `pack` for any span that starts at a multiple of eight."""

    @abstractmethod
    def check_padding(self, packed: Bytes) -> None:
        """Raise CodecError if a bit that belongs to no value is set."""


class Bits8(Packing):
    """One code per byte."""

    @property
    def size(self) -> int:
        return self.numel

    def code_buffers(self, packed: Bytes, slab: slice) -> list[Integers]:
        return [packed[slab].view(np.int8)]

    def pack(self, packed: Bytes, slab: slice, codes: Sequence[Integers]) -> None:
        """Do nothing: the buffers are the packed bytes."""

    def unpack(self, packed: Bytes, span: slice, codes: Integers) -> None:
        codes.view(np.uint8)[:] = packed[span]

    def check_padding(self, packed: Bytes) -> None:
        """Do nothing: every bit belongs to a value."""


class Bits4(Packing):
    """Two codes per byte: value i of the first half, and value i of the second half in the high bits."""

    @property
    def size(self) -> int:
        return min(self.numel, self.first_half)

    def spans(self, slab: slice) -> list[slice]:
        above = slice(slab.start + self.first_half, min(slab.stop + self.first_half, self.numel))
        return [slab, above] if above.start < above.stop else [slab]

    def pack(self, packed: Bytes, slab: slice, codes: Sequence[Integers]) -> None:
        _pack_nibbles(codes[0], codes[1] if len(codes) > 1 else codes[0][:0], packed[slab])

    def unpack(self, packed: Bytes, span: slice, codes: Integers) -> None:
        below = max(0, min(span.stop, self.first_half) - span.start)
        _unpack_nibbles(packed[span.start :], 0, codes[:below])
        _unpack_nibbles(packed[max(0, span.start - self.first_half) :], 4, codes[below:])

    def check_padding(self, packed: Bytes) -> None:
        if packed.size and packed[max(0, self.numel - self.first_half) :].max(initial=0) > 0x0F:
            raise CodecError("padding is not zero")


class Bits2(Packing):
    """Four codes per byte."""

    @property
    def size(self) -> int:
        return -(-self.numel // 4)

    def pack(self, packed: Bytes, slab: slice, codes: Sequence[Integers]) -> None:
        _pack_pairs(codes[0], packed[slab.start // 4 : -(-slab.stop // 4)])

    def unpack(self, packed: Bytes, span: slice, codes: Integers) -> None:
        _unpack_pairs(packed[span.start // 4 :], codes)

    def check_padding(self, packed: Bytes) -> None:
        if int(packed[-1]) >> 2 * ((self.numel - 1) % 4 + 1):
            raise CodecError("padding is not zero")


class Bits1(Packing):
    """Eight codes per byte."""

    @property
    def size(self) -> int:
        return -(-self.numel // 8)

    def pack(self, packed: Bytes, slab: slice, codes: Sequence[Integers]) -> None:
        _pack_bits(codes[0], packed[slab.start // 8 : -(-slab.stop // 8)])

    def unpack(self, packed: Bytes, span: slice, codes: Integers) -> None:
        _unpack_bits(packed[span.start // 8 :], codes)

    def check_padding(self, packed: Bytes) -> None:
        if int(packed[-1]) >> (self.numel - 1) % 8 + 1:
            raise CodecError("padding is not zero")


def make_packing(bits: int, numel: int, block: int) -> Packing:
    kinds: dict[int, type[Bits1 | Bits2 | Bits4 | Bits8]] = {1: Bits1, 2: Bits2, 4: Bits4, 8: Bits8}
    blocks = -(-numel // block)
    return kinds[bits](numel, -(-blocks // 2) * block if bits == 4 else blocks * block)


@kernel
def _pack_nibbles(low: Integers, high: Integers, packed: Bytes) -> None:
    for i in range(high.size):
        packed[i] = np.uint8(low[i] & 0x0F | high[i] << 4)
    for i in range(high.size, low.size):
        packed[i] = np.uint8(low[i] & 0x0F)


@kernel
def _unpack_nibbles(packed: Bytes, shift: int, codes: Integers) -> None:
    for i in range(codes.size):
        codes[i] = np.int8(packed[i] >> shift & 0x0F)


@kernel
def _pack_pairs(codes: Integers, packed: Bytes) -> None:
    whole = codes.size // 4
    for i in range(whole):
        low, high = codes[4 * i] | codes[4 * i + 1] << 2, codes[4 * i + 2] | codes[4 * i + 3] << 2
        packed[i] = np.uint8(low | high << 4)
    if whole < packed.size:
        packed[whole] = 0
        for i in range(4 * whole, codes.size):
            packed[whole] |= np.uint8(codes[i] << 2 * (i - 4 * whole))


@kernel
def _unpack_pairs(packed: Bytes, codes: Integers) -> None:
    for i in range(codes.size):
        codes[i] = np.int8(packed[i >> 2] >> 2 * (i & 3) & 3)


@kernel
def _pack_bits(codes: Integers, packed: Bytes) -> None:
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


@kernel
def _unpack_bits(packed: Bytes, codes: Integers) -> None:
    whole = codes.size // 8
    for i in range(whole):
        for j in range(8):
            codes[8 * i + j] = np.int8(packed[i] >> j & 1)
    for i in range(8 * whole, codes.size):
        codes[i] = np.int8(packed[whole] >> (i - 8 * whole) & 1)
