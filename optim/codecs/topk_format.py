"""The kept values of a vector's chunks: a code for each value, and the levels that the codes of a chunk refer to.

A code holds the index of a value in its chunk, its sign, and the number of its level. A level is a bfloat16, so that
its bits follow from its chunk alone, and the decoded values can be subtracted while the chunk is in the cache.

The flags of all codes, and the low bits of the gaps between their indices, are sent as plain bits, most significant
bits first: the signs; all low and then all high bits of the level numbers, if these have as many; then the low bits of
each gap, which distinguish the members of its class.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optim.codecs.bits import gap_coding, rans
from optim.codecs.bits.gap_coding import Gaps
from optim.codecs.bits.levels import fit_levels
from optim.codecs.bits.rans import Symbols
from optim.codecs.bits.selection import Bits, select_largest
from optim.codecs.blocks import ROUND_NEAREST, Halves, round_scale
from optim.codecs.residual_update import NO_UPDATE, ResidualUpdate, add_decayed
from optim.errors import CodecError
from optim.kernels.buffer_pool import empty, empty_array
from optim.kernels.jit import bits_to_float, float_to_bits, kernel, subroutine
from optim.kernels.parallel import parallel_for
from optim.kernels.vectors import SPARSE_SLAB_SIZE, Floats, Positions, SparseVector, slabs

Codes = npt.NDArray[np.uint32]  # index << 3 | negative << 2 | level

INDEX_SHIFT, NEGATIVE_SHIFT = np.uint32(3), np.uint32(2)  # the lowest bits of index and sign
LEVEL_MASK = np.uint32(3)  # the bits of the level
FLOAT_SIGN_SHIFT = np.uint32(31)


@dataclass(frozen=True)
class TopKLayout:
    """The number of kept values of each chunk. `chunk_size` and `keep` are of full chunks; `bits` is per kept value."""

    numel: int
    chunk_size: int
    keep: int
    bits: int

    @property
    def levels(self) -> int:
        return 1 << self.bits - 1

    @property
    def full_chunks(self) -> int:
        return self.numel // self.chunk_size

    @property
    def tail(self) -> int:
        """Return the number of values in the short last chunk; 0 if there is none."""
        return self.numel % self.chunk_size

    @property
    def tail_keep(self) -> int:
        return -(-self.keep * self.tail // self.chunk_size)

    @property
    def chunks(self) -> int:
        return self.full_chunks + (self.tail > 0)

    @property
    def kept_count(self) -> int:
        return self.full_chunks * self.keep + self.tail_keep

    @property
    def frequencies(self) -> rans.Frequencies:
        """Return the frequencies of the classes of gaps if positions were uniform."""
        if self.full_chunks:
            return gap_coding.uniform_frequencies(self.chunk_size, self.keep)
        return gap_coding.uniform_frequencies(self.tail, self.tail_keep)

    @property
    def gap_limit(self) -> int:
        """Return a bound that all gaps are below."""
        return self.chunk_size if self.full_chunks else self.tail

    def chunk_runs(self) -> list[slice]:
        """Return runs of a few chunks each that cover all chunks; a short last chunk is a run of its own."""
        return [
            *slabs(self.full_chunks, max(1, SPARSE_SLAB_SIZE // self.keep)),
            *([slice(self.full_chunks, self.chunks)] * (self.tail > 0)),
        ]

    def kept_slice(self, chunks: slice) -> tuple[slice, int]:
        """Return the span of the codes of a run of chunks, and the number of values kept of each."""
        keep = self.keep if chunks.start < self.full_chunks else self.tail_keep
        first = chunks.start * self.keep
        return slice(first, first + (chunks.stop - chunks.start) * keep), keep


def select_codes(
    values: Floats, layout: TopKLayout, subtract: bool = False, update: ResidualUpdate = NO_UPDATE
) -> tuple[Codes, Halves]:
    """Select and encode the values to keep of each chunk.

    `update` is applied to each chunk right before it is encoded; with `subtract`, the decoded values are subtracted
    from it right afterwards.

    Returns:
        The codes in chunk order, ascending by index, and the upper halves of the levels (chunks, levels).

    Raises:
        CodecError: a value is not finite or too large.
    """
    codes, halves = empty_array(np.uint32, layout.kept_count), np.empty((layout.chunks, layout.levels), np.uint16)
    bits = values.view(np.uint32)

    def choose(chunks: slice) -> None:
        part, keep = layout.kept_slice(chunks)
        run, shape = (
            slice(chunks.start * layout.chunk_size, chunks.stop * layout.chunk_size),
            (chunks.stop - chunks.start, -1),
        )
        decay, residual = np.float32(update.decay), update.residual[run].reshape(shape)
        rows = bits[run].reshape(shape), codes[part].reshape(-1, keep), halves[chunks]
        if not _select_rows(decay, residual, *rows, subtract):
            raise CodecError("a value is not finite or too large")

    parallel_for(choose, layout.chunk_runs())
    return codes, halves


@kernel
def _select_rows(
    decay: np.float32, residual: Floats, chunks: Bits, codes: Codes, halves: Halves, subtract: bool
) -> bool:
    """Encode (rows, span) values to (rows, keep) codes and (rows, count) upper halves of levels.

    Updates the values to decay * residual + values before, if there is a `residual`, and subtracts the decoded values
    afterwards, if `subtract`. Returns False if a value is not finite or too large.
    """
    rows, span = chunks.shape
    keep = codes.shape[1]
    positions, magnitudes, level_numbers = (
        np.empty(span, np.uint32),
        np.empty(span, np.uint32),
        np.empty(keep, np.uint32),
    )
    levels = np.empty(halves.shape[1], np.float32)
    for row in range(rows):
        chunk, values = chunks[row], chunks[row].view(np.float32)
        if residual.size:
            add_decayed(values, decay, residual[row])
        if not select_largest(chunk, keep, positions, magnitudes):
            return False
        fit_levels(magnitudes[:keep], level_numbers, levels)
        for level in range(levels.size):
            levels[level] = round_scale(levels[level], ROUND_NEAREST, halves[row], level)
        if levels[-1] < 0:
            return False
        for kept in range(keep):
            position = positions[kept]
            code = position << INDEX_SHIFT | chunk[position] >> FLOAT_SIGN_SHIFT << NEGATIVE_SHIFT | level_numbers[kept]
            codes[row, kept] = code
            if subtract:
                values[position] -= _decode_value(code, levels)
    return True


def decode_codes(codes: Codes, levels: Floats, layout: TopKLayout) -> SparseVector:
    """Decode all codes to a sparse vector."""
    positions, values = empty_array(np.int64, layout.kept_count), empty(layout.kept_count)

    def restore(chunks: slice) -> None:
        part, keep = layout.kept_slice(chunks)
        run = codes[part].reshape(-1, keep)
        _decode_rows(
            run, levels[chunks], chunks.start * layout.chunk_size, layout.chunk_size, positions[part], values[part]
        )

    parallel_for(restore, layout.chunk_runs())
    return SparseVector(positions, values, layout.numel)


@kernel
def _decode_rows(codes: Codes, levels: Floats, first: int, span: int, positions: Positions, values: Floats) -> None:
    """Decode the (rows, keep) codes of chunks that begin at position `first`."""
    rows, keep = codes.shape
    for row in range(rows):
        for kept in range(keep):
            code = codes[row, kept]
            positions[row * keep + kept] = first + row * span + (code >> INDEX_SHIFT)
            values[row * keep + kept] = _decode_value(code, levels[row])


@subroutine
def _decode_value(code: np.uint32, levels: Floats) -> np.float32:
    """Decode a code. The sign bit is inserted without a branch, because a branch could not be predicted."""
    negative = np.uint32(code >> NEGATIVE_SHIFT & np.uint32(1))
    return bits_to_float(np.uint32(float_to_bits(levels[code & LEVEL_MASK]) | negative << FLOAT_SIGN_SHIFT))


Bytes = npt.NDArray[np.uint8]
Widths = npt.NDArray[np.uint8]  # numbers of low bits, per class

ZERO, ONE = np.uint64(0), np.uint64(1)
BYTE_SHIFT, BIT_MASK = np.uint64(3), np.uint64(7)  # a bit's address is its byte << 3 | its number in the byte
READ_AHEAD_BYTES = 2  # low bits, at most 13, are read from three bytes, so up to two after the last one


@kernel
def count_low_bits(classes: Symbols, widths: Widths) -> int:
    """Return the number of low bits of all gaps."""
    bits = 0
    for symbol in classes:
        bits += widths[symbol]
    return bits


@kernel
def write_bit_planes(codes: Codes, bits: int, distances: Gaps, classes: Symbols, widths: Widths, packed: Bytes) -> None:
    """Write the flags of all codes, `bits` per code, and the low bits of the gaps to the front of `packed`."""
    pending, filled, byte = 0, 0, 0
    for flag in range(bits):
        plane = (flag + 2) % 3
        for code in codes:
            pending = pending << 1 | code >> plane & 1
            filled += 1
            if filled == 8:
                packed[byte] = pending
                pending, filled, byte = 0, 0, byte + 1
    for i in range(distances.size):
        width = widths[classes[i]]
        pending = pending << width | distances[i] & (1 << width) - 1
        filled += width
        while filled >= 8:
            filled -= 8
            packed[byte] = pending >> filled
            pending, byte = pending & (1 << filled) - 1, byte + 1
    if filled:
        packed[byte] = pending << 8 - filled


@kernel
def read_bit_planes(
    packed: Bytes, bits: int, classes: Symbols, lowest: Gaps, widths: Widths, span: int, keep: int, codes: Codes
) -> int:
    """Undo `write_bit_planes`, for chunks of `keep` codes each, of which the last may have fewer.

    `READ_AHEAD_BYTES` bytes after the last one are read. Returns the last index of the last chunk, or a negative number
    if an index of another chunk is outside of it.
    """
    size, bit, index = np.uint64(classes.size), np.uint64(bits * classes.size), -1
    for first in range(np.uint64(0), size, np.uint64(keep)):  # unsigned, so that no index is checked for being negative
        if index >= span:
            return -1
        index = -1
        for i in range(first, min(first + np.uint64(keep), size)):
            symbol = classes[i]
            width = np.uint64(widths[symbol])
            index += 1 + int(lowest[symbol]) + int(_low_bits(packed, bit, width))
            bit += width
            code = np.uint64(index)
            for plane in (2, 1, 0):
                flag = 0 if plane == 2 else plane + 1
                code = code << ONE | (_low_bits(packed, np.uint64(flag) * size + i, ONE) if flag < bits else ZERO)
            codes[i] = np.uint32(code)
    return index


@subroutine
def _low_bits(packed: Bytes, bit: np.uint64, width: np.uint64) -> np.uint64:
    """Return `width` bits from bit number `bit` on."""
    byte = bit >> BYTE_SHIFT
    window = np.uint64(packed[byte]) << np.uint64(16) | np.uint64(packed[byte + ONE]) << np.uint64(8)
    window |= np.uint64(packed[byte + ONE + ONE])
    return window >> np.uint64(24) - (bit & BIT_MASK) - width & (ONE << width) - ONE
