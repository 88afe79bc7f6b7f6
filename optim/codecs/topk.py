"""The k largest values of each chunk, as position, sign and 0 to 2 bits of magnitude (arXiv 2508.15706, fitted levels).

The vector is cut into chunks; the last may be shorter and keeps the same fraction, rounded up. The kept magnitudes of a
chunk are sent as one, two or four levels that fit them best (levels.py). (The paper's public code has bins of fixed
width over a whole tensor; kept values are far from zero, so only two of its four bins are ever used.)

Payload: header; model of the gaps (0: uniform positions, 1: a table follows); number of words; table of frequencies;
levels (bfloat16, ascending in a chunk); lanes; words; plain bits. The plain bits are all signs (1: negative), all low
and then all high bits of the level numbers, and the low bits of the gaps, in chunk order; the first 16 bits per lane
travel inside the lanes (rans.py).
"""

import struct
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from optim.codecs import topk_format
from optim.codecs.base import Codec, Payload, PayloadReader, as_array
from optim.codecs.bits import gap_coding, rans
from optim.codecs.blocks import read_scales
from optim.codecs.residual_update import NO_UPDATE, ResidualUpdate
from optim.codecs.topk_format import INDEX_SHIFT, Codes, TopKLayout, decode_codes, select_codes
from optim.errors import CodecError
from optim.kernels.buffer_pool import empty_array
from optim.kernels.vectors import Floats, SparseVector
from optim.options import STRICT

UNIFORM, COUNTED = 0, 1  # models of the gaps


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ChunkTopK(Codec):
    kind: ClassVar[str] = "topk"
    number: ClassVar[int] = 4
    version: ClassVar[int] = 2

    k: int = Field(default=64, ge=1, le=65_536, description="values kept of each chunk")
    chunk: int = Field(default=4096, ge=64, le=65_536, description="values per chunk")
    bits: int = Field(default=2, ge=1, le=3, description="bits per kept value, including the sign")

    @model_validator(mode="after")
    def _check_k(self) -> Self:
        if self.k > self.chunk:
            raise ValueError(f"k must be at most {self.chunk}, the values of a chunk")
        return self

    @property
    def alignment(self) -> int:
        return self.chunk

    def max_bytes(self, numel: int) -> int:
        layout = self._layout(numel)
        table = 2 * len(gap_coding.class_table(layout.gap_limit)[0])
        # Per value at most one 16-bit word, 15 low bits, a sign and two magnitude bits: 34 bits.
        return (
            7
            + table
            + 2 * layout.levels * layout.chunks
            + 4 * rans.lane_count(layout.kept_count)
            + 5 * layout.kept_count
        )

    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        return self._encode(values, subtract, NO_UPDATE)

    def encode_updated(self, update: ResidualUpdate, values: torch.Tensor) -> Payload:
        return self._encode(as_array(values), True, update)

    def _encode(self, values: Floats, subtract: bool, update: ResidualUpdate) -> Payload:
        layout = self._layout(values.size)
        codes, halves = select_codes(values, layout, subtract, update)
        return self.header() + _pack(codes, layout, halves.astype("<u2").tobytes())

    def decode_vector(self, payload: Payload, numel: int) -> SparseVector:
        layout = self._layout(numel)
        return _unpack(self.open_payload(payload, numel), layout)

    def _layout(self, numel: int) -> TopKLayout:
        return TopKLayout(numel, self.chunk, self.k, self.bits)


def _pack(codes: Codes, layout: TopKLayout, levels: bytes) -> bytes:
    lowest, widths = gap_coding.class_table(layout.gap_limit)
    indices, distances = empty_array(np.uint32, codes.size), empty_array(np.uint16, codes.size)
    classes = empty_array(np.uint8, codes.size)
    counts = np.zeros(len(lowest), np.int64)
    np.right_shift(codes, INDEX_SHIFT, indices)
    gap_coding.compute_gaps(indices, layout.keep, gap_coding.class_lookup(layout.gap_limit), distances, classes, counts)
    model, frequencies, table = _choose_model(counts, layout)
    bits = layout.bits * codes.size + int(counts @ widths)
    packed = np.zeros(max(-(-bits // 8), 2 * rans.lane_count(codes.size)), np.uint8)
    topk_format.write_bit_planes(codes, layout.bits, distances, classes, widths, packed)
    initial_words, rest = np.split(packed, [2 * rans.lane_count(codes.size)])
    lanes, words = rans.encode(classes, frequencies, initial_words.view("<u2"))
    prefix = struct.pack("<BI", model, words.size)
    return b"".join(
        (prefix, table, levels, lanes.astype("<u4").tobytes(), words.astype("<u2").tobytes(), rest.tobytes())
    )


def _unpack(reader: PayloadReader, layout: TopKLayout) -> SparseVector:
    model, word_count = struct.unpack("<BI", reader.read("u1", 5).tobytes())
    if model not in (UNIFORM, COUNTED):
        raise CodecError(f"unknown model {model} of the gaps")
    frequencies = _read_frequencies(reader, layout) if model == COUNTED else layout.frequencies
    levels = read_scales(reader, layout.levels * layout.chunks).reshape(-1, layout.levels)
    if (levels[:, :-1] > levels[:, 1:]).any():
        raise CodecError("a chunk's levels do not ascend")
    lanes = reader.read("u4", rans.lane_count(layout.kept_count))
    words = reader.read("u2", word_count)
    classes, final_words = rans.decode(layout.kept_count, frequencies, lanes, words)
    lowest, widths = gap_coding.class_table(layout.gap_limit)
    packed = _read_bit_planes(
        reader, final_words, layout.bits * layout.kept_count + topk_format.count_low_bits(classes, widths)
    )
    codes = empty_array(np.uint32, layout.kept_count)
    last = topk_format.read_bit_planes(
        packed, layout.bits, classes, lowest, widths, layout.chunk_size, layout.keep, codes
    )
    if not 0 <= last < (layout.tail or layout.chunk_size):
        raise CodecError("an index is beyond its chunk")
    return decode_codes(codes, levels, layout)


def _choose_model(counts: gap_coding.Counts, layout: TopKLayout) -> tuple[int, rans.Frequencies, bytes]:
    """Choose counted frequencies if they save more bits than their table costs.

    Returns:
        The model, its frequencies, and the bytes of the table.
    """
    uniform, counted = layout.frequencies, rans.normalize_counts(counts)
    occurring = counts > 0
    if (uniform[occurring] > 0).all():
        saved = (counts[occurring] * np.log2(counted[occurring] / uniform[occurring])).sum()
        if saved <= 16 * counts.size:
            return UNIFORM, uniform, b""
    return COUNTED, counted, counted.astype("<u2").tobytes()


def _read_frequencies(reader: PayloadReader, layout: TopKLayout) -> rans.Frequencies:
    frequencies = reader.read("u2", len(gap_coding.class_table(layout.gap_limit)[0])).astype(np.uint32)
    gap_coding.check_frequencies(frequencies)
    return frequencies


def _read_bit_planes(reader: PayloadReader, final_words: rans.Words, count: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of `count` plain bits: first those inside the lanes, then the rest of the payload.

    READ_AHEAD_BYTES zeros follow.
    """
    length, first = -(-count // 8), 2 * final_words.size
    packed = np.zeros(max(length, first) + topk_format.READ_AHEAD_BYTES, np.uint8)
    packed[:first] = final_words.astype("<u2").view(np.uint8)
    rest = reader.read("u1", max(0, length - first))
    packed[first : first + rest.size] = rest
    reader.expect_end()
    if packed[length:].any() or packed[length - 1] & (1 << (8 * length - count)) - 1:
        raise CodecError("padding is not zero")
    return packed
