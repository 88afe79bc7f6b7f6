"""The k largest of each chunk, as position, sign and 0 to 2 bits of magnitude (arXiv 2508.15706, with fitted levels).

The vector is cut into chunks; the last may be shorter and keeps the same share, rounded up. The kept magnitudes of a
chunk are sent as one, two or four levels that fit them best (levels.py). (The paper's public code has bins of fixed
width over a whole tensor; kept values are far from zero, so only two of the four bins are ever used.)

Payload: head; model of the gaps (0: uniform positions, 1: a table follows); number of words; table of frequencies;
levels (exponent, one fp16 each, ascending in a chunk); lanes; words; plain bits. The plain bits are all signs (1:
negative), all low and then all high bits of the levels' numbers and the low bits of the gaps, in chunk order; the first
16 a lane travel inside the lanes (rans.py).
"""

import struct
from dataclasses import dataclass as plain_dataclass
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from optim.codecs import gaps, rans
from optim.codecs.codec import Codec, Payload, Reader
from optim.codecs.levels import fit
from optim.codecs.scales import read_scales, write_scales
from optim.codecs.selection import largest
from optim.errors import CodecError
from optim.parts import STRICT
from optim.threads import each
from optim.vectors import AT_ONCE, SLAB, Floats, SparseVector, slabs

UNIFORM, COUNTED = 0, 1  # models of the gaps
Codes = npt.NDArray[np.uint32]  # index << 3 | negative << 2 | level


@plain_dataclass(frozen=True)
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ChunkTopK(Codec):
    kind: ClassVar[str] = "topk"
    number: ClassVar[int] = 4
    version: ClassVar[int] = 1

    k: int = Field(default=64, ge=1, le=65_536, description="values kept of each chunk")
    chunk: int = Field(default=4096, ge=64, le=65_536, description="values of a chunk")
    bits: int = Field(default=2, ge=1, le=3, description="bits of a kept value, its sign included")

    @model_validator(mode="after")
    def _keeps_no_more_than_there_is(self) -> Self:
        if self.k > self.chunk:
            raise ValueError(f"k must be at most the chunk's {self.chunk} values")
        return self

    @property
    def alignment(self) -> int:
        return self.chunk

    def max_bytes(self, numel: int) -> int:
        layout = self._layout(numel)
        table = 2 * len(gaps.class_table(layout.reach)[0])
        # At most one 16-bit word, 15 low bits, a sign and two magnitude bits a value: 34 bits.
        return 8 + table + 2 * layout.levels * layout.chunks + 4 * rans.lanes_for(layout.kept) + 5 * layout.kept

    def write(self, values: Floats, subtract: bool) -> Payload:
        layout = self._layout(values.size)
        codes, fitted = _select(values, layout)
        wire, levels = write_scales(fitted.ravel())
        payload = self.head() + _pack(codes, layout, wire)
        if subtract:
            negative, level = codes >> np.uint32(2) & np.uint32(1), codes & np.uint32(3)
            kept = _vector(layout, codes >> np.uint32(3), negative, level, levels)
            kept.subtract_from(values)
        return payload

    def read(self, payload: Payload, numel: int) -> SparseVector:
        layout = self._layout(numel)
        return _unpack(self.open(payload, numel), layout)

    def _layout(self, numel: int) -> Layout:
        return Layout(numel, self.chunk, self.k, self.bits)


def _select(values: Floats, layout: Layout) -> tuple[Codes, Floats]:
    """The codes of all kept values in chunk order, ascending by index, and (chunks, levels) levels."""
    whole = layout.full * layout.span
    found = [_encode_chunks(values[:whole].reshape(-1, layout.span), layout.keep, layout.levels)] if whole else []
    if layout.rest:
        found.append(_encode_chunks(values[whole:].reshape(1, -1), layout.rest_keep, layout.levels))
    codes, levels = zip(*found, strict=True)
    return np.concatenate(codes), np.concatenate(levels)


def _encode_chunks(chunks: Floats, keep: int, count: int) -> tuple[Codes, Floats]:
    """(rows * keep,) codes and (rows, count) levels of (rows, span) values."""
    rows, span = chunks.shape
    codes, magnitudes = np.empty((rows, keep), np.uint32), np.empty((rows, keep), np.float32)
    for part in slabs(rows, max(1, SLAB // span)):
        indices, magnitudes[part] = largest(chunks[part], keep)
        places = indices + np.arange(len(indices), dtype=np.uint32)[:, None] * np.uint32(span)
        negative = chunks[part].view(np.uint32).ravel().take(places, mode="clip") >> np.uint32(31)
        codes[part] = indices << np.uint32(3) | negative << np.uint32(2)
    levels = np.empty((rows, count), np.float32)
    for part in slabs(rows, max(1, AT_ONCE // keep)):
        level, levels[part] = fit(magnitudes[part], count)
        codes[part] |= level
    codes.sort(axis=1)
    return codes.ravel(), levels


def _pack(codes: Codes, layout: Layout, levels: bytes) -> bytes:
    distances = _gaps(codes >> np.uint32(3), layout)
    classes = gaps.class_of(distances)
    model, frequencies, table = _choose_model(classes, layout)
    planes = (2, 0, 1)[: layout.bits]  # the sign's, the level's low and the level's high bit
    flags = [(codes >> plane & 1).astype(np.uint8) for plane in planes]
    plain = np.packbits(np.concatenate([*flags, gaps.plain_bits(distances, classes, layout.reach)])).tobytes()
    carried = 2 * rans.lanes_for(layout.kept)
    plain = plain.ljust(carried, b"\0")
    lanes, words = rans.encode(classes, frequencies, np.frombuffer(plain[:carried], "<u2"))
    head = struct.pack("<BI", model, words.size)
    body = (lanes.astype("<u4").tobytes(), words.astype("<u2").tobytes(), plain[carried:])
    return b"".join((head, table, levels, *body))


def _unpack(reader: Reader, layout: Layout) -> SparseVector:
    model, word_count = struct.unpack("<BI", reader.take("u1", 5).tobytes())
    if model not in (UNIFORM, COUNTED):
        raise CodecError(f"model {model} of the gaps is not known")
    frequencies = _read_frequencies(reader, layout) if model == COUNTED else layout.frequencies
    levels = read_scales(reader, layout.levels * layout.chunks).reshape(-1, layout.levels)
    if (levels[:, :-1] > levels[:, 1:]).any():
        raise CodecError("a chunk's levels do not ascend")
    lanes = reader.take("u4", rans.lanes_for(layout.kept))
    words = reader.take("u2", word_count)
    classes, carried = rans.decode(layout.kept, frequencies, lanes, words)
    flag_count = layout.bits * layout.kept
    ends = gaps.plain_ends(classes, layout.reach)
    packed = _read_plain(reader, carried, flag_count + int(ends[-1]))
    indices = _indices(gaps.from_classes(classes, ends, packed, flag_count, layout.reach), layout)
    negative, *planes = np.unpackbits(packed, count=flag_count).reshape(layout.bits, -1)
    level = np.zeros_like(negative)
    for plane, bit in enumerate(planes):
        level |= bit << np.uint8(plane)
    return _vector(layout, indices, negative, level, levels)


def _choose_model(classes: rans.Symbols, layout: Layout) -> tuple[int, rans.Frequencies, bytes]:
    """Counted frequencies where they save more than their table costs."""
    counts = np.bincount(classes, minlength=len(gaps.class_table(layout.reach)[0]))
    uniform, counted = layout.frequencies, rans.normalized(counts)
    occurring = counts > 0
    if (uniform[occurring] > 0).all():
        saved = (counts[occurring] * np.log2(counted[occurring] / uniform[occurring])).sum()
        if saved <= 16 * counts.size:
            return UNIFORM, uniform, b""
    return COUNTED, counted, counted.astype("<u2").tobytes()


def _read_frequencies(reader: Reader, layout: Layout) -> rans.Frequencies:
    frequencies = reader.take("u2", len(gaps.class_table(layout.reach)[0])).astype(np.uint32)
    gaps.check_frequencies(frequencies)
    return frequencies


def _read_plain(reader: Reader, carried: rans.Words, count: int) -> npt.NDArray[np.uint8]:
    """The bytes of `count` plain bits: those in the lanes first, then all that is left of the payload."""
    length = -(-count // 8)
    missing = max(0, length - 2 * carried.size)
    joined = carried.astype("<u2").tobytes() + reader.take("u1", missing).tobytes()
    reader.end()
    packed = np.frombuffer(joined, np.uint8)
    if packed[length:].any() or packed[length - 1] & (1 << (8 * length - count)) - 1:
        raise CodecError("padding is not zero")
    return packed[:length]


def _gaps(indices: npt.NDArray[np.uint32], layout: Layout) -> gaps.Gaps:
    """How many positions lie between each kept value and the one before it in its chunk."""
    distances = np.diff(indices.astype(np.int32), prepend=-1) - 1
    distances[0 :: layout.keep] = indices[0 :: layout.keep]
    return distances.astype(np.uint16)


def _indices(distances: gaps.Gaps, layout: Layout) -> npt.NDArray[np.uint32]:
    """Undo `_gaps`: strictly increasing by construction; CodecError where one leaves its chunk."""
    steps = distances.astype(np.int32) + 1
    whole = layout.full * layout.keep
    rows = steps[:whole].reshape(-1, layout.keep).cumsum(axis=1, dtype=np.int32) - 1
    last = steps[whole:].cumsum(dtype=np.int32) - 1
    if (rows[:, -1] >= layout.span).any() or (last[-1:] >= layout.rest).any():
        raise CodecError("an index is beyond its chunk")
    return np.concatenate([rows.ravel(), last]).view(np.uint32)


def _vector(
    layout: Layout,
    indices: npt.NDArray[np.uint32],
    negative: npt.NDArray[np.unsignedinteger],
    level: npt.NDArray[np.unsignedinteger],
    levels: Floats,
) -> SparseVector:
    positions, values = np.empty(layout.kept, np.int64), np.empty(layout.kept, np.float32)
    flat = levels.ravel()

    def restore(chunks: slice) -> None:
        part, keep = layout.kept_of(chunks)
        chunk = np.arange(chunks.start, chunks.stop)[:, None]
        np.add(indices[part].reshape(-1, keep), chunk * layout.span, out=positions[part].reshape(-1, keep))
        place = level[part].reshape(-1, keep) + chunk * layout.levels
        flat.take(place.ravel(), out=values[part], mode="clip")
        signs = negative[part].astype(np.uint32)
        signs <<= np.uint32(31)
        values[part].view(np.uint32)[:] |= signs

    each(restore, layout.runs())
    return SparseVector(positions, values, layout.numel)
