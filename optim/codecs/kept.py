"""What is kept of a vector's chunks: a code for each value, and the levels that the codes of a chunk name.

A code holds a value's index in its chunk, whether it is negative, and the number of its level. A level is a bfloat16,
so that its bits follow from its chunk alone: what the codes say is subtracted while the chunk is in the cache.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optim.codecs import gaps, rans
from optim.codecs.accumulation import NOTHING, Accumulation, move_on
from optim.codecs.blocks import NEAREST, Halves, settled
from optim.codecs.levels import fit
from optim.codecs.selection import Bits, largest
from optim.compiled import bits_of, compiled, float_of
from optim.errors import CodecError
from optim.memory import empty, empty_of
from optim.threads import each
from optim.vectors import AT_ONCE, Floats, Positions, SparseVector, slabs

Codes = npt.NDArray[np.uint32]  # index << 3 | negative << 2 | level

INDEX, NEGATIVE = np.uint32(3), np.uint32(2)  # where they begin
LEVEL = np.uint32(3)  # its bits
SIGN = np.uint32(31)


@dataclass(frozen=True)
class Layout:
    """How many values of which chunk are kept. `span`, `keep`: of a full chunk. `bits`: of a kept value."""

    numel: int
    span: int
    keep: int
    bits: int

    @property
    def levels(self) -> int:
        return 1 << self.bits - 1

    @property
    def full(self) -> int:
        return self.numel // self.span

    @property
    def rest(self) -> int:
        """Values in the short last chunk; 0 if there is none."""
        return self.numel % self.span

    @property
    def rest_keep(self) -> int:
        return -(-self.keep * self.rest // self.span)

    @property
    def chunks(self) -> int:
        return self.full + (self.rest > 0)

    @property
    def kept(self) -> int:
        return self.full * self.keep + self.rest_keep

    @property
    def frequencies(self) -> rans.Frequencies:
        """Of the gaps' classes, were positions uniform."""
        if self.full:
            return gaps.uniform_frequencies(self.span, self.keep)
        return gaps.uniform_frequencies(self.rest, self.rest_keep)

    @property
    def reach(self) -> int:
        """All gaps are below it."""
        return self.span if self.full else self.rest

    def runs(self) -> list[slice]:
        """All chunks, a few at a time; a short last one by itself."""
        return [*slabs(self.full, max(1, AT_ONCE // self.keep)), *([slice(self.full, self.chunks)] * (self.rest > 0))]

    def kept_of(self, chunks: slice) -> tuple[slice, int]:
        """The place of what is kept of such a run, and how much of each chunk."""
        keep = self.keep if chunks.start < self.full else self.rest_keep
        first = chunks.start * self.keep
        return slice(first, first + (chunks.stop - chunks.start) * keep), keep


def select(
    values: Floats, layout: Layout, subtract: bool = False, before: Accumulation = NOTHING
) -> tuple[Codes, Halves]:
    """The codes of all kept values in chunk order, ascending by index, and (chunks, levels) levels' upper halves.
    CodecError if a value is not finite or too large. `before`: what the values become, each chunk just before it is
    looked at; `subtract`: and what of them is left just behind that."""
    codes, halves = empty_of(np.uint32, layout.kept), np.empty((layout.chunks, layout.levels), np.uint16)
    bits = values.view(np.uint32)

    def choose(chunks: slice) -> None:
        part, keep = layout.kept_of(chunks)
        run, shape = slice(chunks.start * layout.span, chunks.stop * layout.span), (chunks.stop - chunks.start, -1)
        decay, sent = np.float32(before.decay), before.sent[run].reshape(shape)
        rows = bits[run].reshape(shape), codes[part].reshape(-1, keep), halves[chunks]
        if not _select(decay, sent, *rows, subtract):
            raise CodecError("a value is not finite or too large")

    each(choose, layout.runs())
    return codes, halves


@compiled
def _select(decay: np.float32, sent: Floats, chunks: Bits, codes: Codes, halves: Halves, subtract: bool) -> bool:
    """(rows, span) values, (rows, keep) codes and (rows, count) upper halves of levels; values <- decay * values + sent
    before, where anything is `sent`, and minus what the codes say behind, where that is asked for. False if a value is
    not finite or too large."""
    rows, span = chunks.shape
    keep = codes.shape[1]
    places, magnitudes, numbers = np.empty(span, np.uint32), np.empty(span, np.uint32), np.empty(keep, np.uint32)
    levels = np.empty(halves.shape[1], np.float32)
    for row in range(rows):
        chunk, values = chunks[row], chunks[row].view(np.float32)
        if sent.size:
            move_on(values, decay, sent[row])
        if not largest(chunk, keep, places, magnitudes):
            return False
        fit(magnitudes[:keep], numbers, levels)
        for level in range(levels.size):
            levels[level] = settled(levels[level], NEAREST, halves[row], level)
        if levels[-1] < 0:
            return False
        for kept in range(keep):
            place = places[kept]
            code = place << INDEX | chunk[place] >> SIGN << NEGATIVE | numbers[kept]
            codes[row, kept] = code
            if subtract:
                values[place] -= _value(code, levels)
    return True


def vector(codes: Codes, levels: Floats, layout: Layout) -> SparseVector:
    positions, values = empty_of(np.int64, layout.kept), empty(layout.kept)

    def restore(chunks: slice) -> None:
        part, keep = layout.kept_of(chunks)
        run = codes[part].reshape(-1, keep)
        _restore(run, levels[chunks], chunks.start * layout.span, layout.span, positions[part], values[part])

    each(restore, layout.runs())
    return SparseVector(positions, values, layout.numel)


@compiled
def _restore(codes: Codes, levels: Floats, first: int, span: int, positions: Positions, values: Floats) -> None:
    """(rows, keep) codes of chunks from position `first` on."""
    rows, keep = codes.shape
    for row in range(rows):
        for kept in range(keep):
            code = codes[row, kept]
            positions[row * keep + kept] = first + row * span + (code >> INDEX)
            values[row * keep + kept] = _value(code, levels[row])


@compiled
def _value(code: np.uint32, levels: Floats) -> np.float32:
    """For compiled functions alone. The sign is written where it belongs: a branch could not be foretold."""
    negative = np.uint32(code >> NEGATIVE & np.uint32(1))
    return float_of(np.uint32(bits_of(levels[code & LEVEL]) | negative << SIGN))
