"""What is kept of a vector's chunks: a code for each value, and the levels that the codes of a chunk name.

A code holds a value's index in its chunk, whether it is negative, and the number of its level. A level is a bfloat16,
so that its bits follow from its chunk alone: what the codes say is subtracted while the chunk is in the cache.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optim.codecs import gaps, rans
from optim.codecs.accumulation import NO_UPDATE, ResidualUpdate, decay_and_add
from optim.codecs.blocks import ROUND_NEAREST, Halves, round_scale
from optim.codecs.levels import fit_levels
from optim.codecs.selection import Bits, select_largest
from optim.compiled import float_to_bits, jit, bits_to_float
from optim.errors import CodecError
from optim.memory import empty, empty_array
from optim.threads import parallel_for
from optim.vectors import SPARSE_SLAB_SIZE, Floats, Positions, SparseVector, slabs

Codes = npt.NDArray[np.uint32]  # index << 3 | negative << 2 | level

INDEX_SHIFT, NEGATIVE_SHIFT = np.uint32(3), np.uint32(2)  # where they begin
LEVEL_MASK = np.uint32(3)  # its bits
FLOAT_SIGN_SHIFT = np.uint32(31)


@dataclass(frozen=True)
class TopKLayout:
    """How many values of which chunk are kept. `span`, `keep`: of a full chunk. `bits`: of a kept value."""

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
        """Values in the short last chunk; 0 if there is none."""
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
        """Of the gaps' classes, were positions uniform."""
        if self.full_chunks:
            return gaps.uniform_frequencies(self.chunk_size, self.keep)
        return gaps.uniform_frequencies(self.tail, self.tail_keep)

    @property
    def gap_limit(self) -> int:
        """All gaps are below it."""
        return self.chunk_size if self.full_chunks else self.tail

    def chunk_runs(self) -> list[slice]:
        """All chunks, a few at a time; a short last one by itself."""
        return [*slabs(self.full_chunks, max(1, SPARSE_SLAB_SIZE // self.keep)), *([slice(self.full_chunks, self.chunks)] * (self.tail > 0))]

    def kept_slice(self, chunks: slice) -> tuple[slice, int]:
        """The place of what is kept of such a run, and how much of each chunk."""
        keep = self.keep if chunks.start < self.full_chunks else self.tail_keep
        first = chunks.start * self.keep
        return slice(first, first + (chunks.stop - chunks.start) * keep), keep


def select_codes(
    values: Floats, layout: TopKLayout, subtract: bool = False, update: ResidualUpdate = NO_UPDATE
) -> tuple[Codes, Halves]:
    """The codes of all kept values in chunk order, ascending by index, and (chunks, levels) levels' upper halves.
    CodecError if a value is not finite or too large. `before`: what the values become, each chunk just before it is
    looked at; `subtract`: and what of them is left just behind that."""
    codes, halves = empty_array(np.uint32, layout.kept_count), np.empty((layout.chunks, layout.levels), np.uint16)
    bits = values.view(np.uint32)

    def choose(chunks: slice) -> None:
        part, keep = layout.kept_slice(chunks)
        run, shape = slice(chunks.start * layout.chunk_size, chunks.stop * layout.chunk_size), (chunks.stop - chunks.start, -1)
        decay, sent = np.float32(update.decay), update.delta[run].reshape(shape)
        rows = bits[run].reshape(shape), codes[part].reshape(-1, keep), halves[chunks]
        if not _select_rows(decay, sent, *rows, subtract):
            raise CodecError("a value is not finite or too large")

    parallel_for(choose, layout.chunk_runs())
    return codes, halves


@jit
def _select_rows(decay: np.float32, delta: Floats, chunks: Bits, codes: Codes, halves: Halves, subtract: bool) -> bool:
    """(rows, span) values, (rows, keep) codes and (rows, count) upper halves of levels; values <- decay * values + sent
    before, where anything is `sent`, and minus what the codes say behind, where that is asked for. False if a value is
    not finite or too large."""
    rows, span = chunks.shape
    keep = codes.shape[1]
    places, magnitudes, numbers = np.empty(span, np.uint32), np.empty(span, np.uint32), np.empty(keep, np.uint32)
    levels = np.empty(halves.shape[1], np.float32)
    for row in range(rows):
        chunk, values = chunks[row], chunks[row].view(np.float32)
        if delta.size:
            decay_and_add(values, decay, delta[row])
        if not select_largest(chunk, keep, places, magnitudes):
            return False
        fit_levels(magnitudes[:keep], numbers, levels)
        for level in range(levels.size):
            levels[level] = round_scale(levels[level], ROUND_NEAREST, halves[row], level)
        if levels[-1] < 0:
            return False
        for kept in range(keep):
            place = places[kept]
            code = place << INDEX_SHIFT | chunk[place] >> FLOAT_SIGN_SHIFT << NEGATIVE_SHIFT | numbers[kept]
            codes[row, kept] = code
            if subtract:
                values[place] -= _decode_value(code, levels)
    return True


def decode_codes(codes: Codes, levels: Floats, layout: TopKLayout) -> SparseVector:
    positions, values = empty_array(np.int64, layout.kept_count), empty(layout.kept_count)

    def restore(chunks: slice) -> None:
        part, keep = layout.kept_slice(chunks)
        run = codes[part].reshape(-1, keep)
        _decode_rows(run, levels[chunks], chunks.start * layout.chunk_size, layout.chunk_size, positions[part], values[part])

    parallel_for(restore, layout.chunk_runs())
    return SparseVector(positions, values, layout.numel)


@jit
def _decode_rows(codes: Codes, levels: Floats, first: int, span: int, positions: Positions, values: Floats) -> None:
    """(rows, keep) codes of chunks from position `first` on."""
    rows, keep = codes.shape
    for row in range(rows):
        for kept in range(keep):
            code = codes[row, kept]
            positions[row * keep + kept] = first + row * span + (code >> INDEX_SHIFT)
            values[row * keep + kept] = _decode_value(code, levels[row])


@jit
def _decode_value(code: np.uint32, levels: Floats) -> np.float32:
    """For compiled functions alone. The sign is written where it belongs: a branch could not be foretold."""
    negative = np.uint32(code >> NEGATIVE_SHIFT & np.uint32(1))
    return bits_to_float(np.uint32(float_to_bits(levels[code & LEVEL_MASK]) | negative << FLOAT_SIGN_SHIFT))
