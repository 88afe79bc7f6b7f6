"""Experts that only some peers send: which ones, in which payload, and the mean over their senders.

A peer counts for each expert the tokens that its router sent there since the peer last sent the expert. It sends an
expert of a layer (a block of the model) with

    tokens > 0  and  tokens >= SHARE * mean tokens of the layer's experts

Adam moves weights by nearly the same length whether a gradient comes from five tokens or from five thousand, so the
length of a movement does not tell how much it is worth. An expert below the threshold goes on counting, so that one
with a twentieth of the usual tokens is sent in about every fourth round instead of never.

Payload: header, one bit for each expert of the part (the first is the lowest bit), zeros up to a multiple of eight
bytes, the payload of the inner codec for the remaining values. If no values remain, that payload is missing.

A rule that divides by the weight of all members has counted zeros for the members that did not send an expert. Its
values are multiplied by

    sum_i w_i / sum_{i sent it} w_i

which is exactly 1 where all members sent it. All sums are in the order of the round, so all peers get the same bits.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from optim.codecs.base import Codec, Payload, PayloadReader
from optim.errors import CodecError
from optim.kernels.vectors import Floats, Vector
from optim.layout import Layout, Span

SHARE: Final = 0.25
Flags = npt.NDArray[np.bool_]
HEADER_BYTES = 2


def add_tokens(before: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of each expert in two counts, of which the first may be empty."""
    return tuple(map(sum, zip(before, more, strict=True))) if before else tuple(more)


def find_trained(tokens: Sequence[int], layout: Layout) -> tuple[bool, ...]:
    """Return for each expert of a layout whether it is to be sent, from the tokens of each."""
    trained = list[bool]()
    for _, numbers in groupby(range(len(tokens)), key=layout.expert_blocks.__getitem__):
        counts = [tokens[number] for number in numbers]
        least = SHARE * sum(counts) / len(counts)
        trained += [count > 0 and count >= least for count in counts]
    return tuple(trained)


@dataclass(frozen=True)
class PartialVector(Vector):
    """A vector that is zero outside `kept`, where it has the values of `vector` one after another.

    `sent` says for each expert whether it is in there; without any values `vector` is None.
    """

    numel: int
    kept: tuple[Span, ...]
    vector: Vector | None
    sent: Flags

    @cached_property
    def _starts(self) -> list[int]:
        """Return where each span begins in `vector`."""
        return [0, *accumulate(stop - start for start, stop in self.kept)]

    @cached_property
    def _stops(self) -> list[int]:
        return [stop for _, stop in self.kept]

    def decode_into(self, slab: slice, out: Floats) -> None:
        out.fill(0)
        for number, first, last in _overlaps(self.kept, self._stops, slab):
            assert self.vector is not None
            source = self._starts[number] + first - self.kept[number][0]
            self.vector.decode_into(slice(source, source + last - first), out[first - slab.start : last - slab.start])


@dataclass(frozen=True)
class ScaledSpans(Vector):
    """A vector of which each of the spans is multiplied by its factor; each product is rounded once."""

    vector: Vector
    spans: tuple[Span, ...]
    factors: Floats

    @property
    def numel(self) -> int:  # type: ignore[override]
        return self.vector.numel

    @cached_property
    def _stops(self) -> list[int]:
        return [stop for _, stop in self.spans]

    def decode_into(self, slab: slice, out: Floats) -> None:
        self.vector.decode_into(slab, out)
        for number, first, last in _overlaps(self.spans, self._stops, slab):
            out[first - slab.start : last - slab.start] *= self.factors[number]


def _overlaps(spans: tuple[Span, ...], stops: list[int], slab: slice) -> Iterator[tuple[int, int, int]]:
    """Yield the numbers of the ascending spans within a slab, with first and last of their values there."""
    number = bisect_right(stops, slab.start)
    while number < len(spans) and spans[number][0] < slab.stop:
        yield number, max(spans[number][0], slab.start), min(stops[number], slab.stop)
        number += 1


@dataclass(frozen=True)
class TrainedExpertsCodec(Codec):
    """Sends a part of a contribution by another codec, without the experts whose values are all zero.

    `inner` is bound to the part's tensors and the round; `experts` are the spans of experts in the part, ascending.
    """

    kind: ClassVar[str] = "trained-experts"
    number: ClassVar[int] = 14
    version: ClassVar[int] = 1

    inner: Codec
    layout: Layout
    experts: tuple[Span, ...]

    @property
    def alignment(self) -> int:
        return self.inner.alignment

    @property
    def depends_on_round(self) -> bool:
        return self.inner.depends_on_round

    def max_bytes(self, numel: int) -> int:
        return HEADER_BYTES + self._mask_bytes + self.inner.max_bytes(numel)

    def bits_per_parameter(self, numel: int) -> float:
        return self.inner.bits_per_parameter(numel)

    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        sent = np.array([values[start:stop].any() for start, stop in self.experts], np.bool_)
        mask = np.packbits(sent, bitorder="little").tobytes().ljust(self._mask_bytes, b"\0")
        if sent.all():
            return b"".join((self.header(), mask, self.inner.encode_array(values, subtract)))
        kept = self._kept(sent)
        if not kept:
            return self.header() + mask
        left = np.concatenate([values[start:stop] for start, stop in kept])
        payload = self._codec_for(kept).encode_array(left, subtract)
        if subtract:
            position = 0
            for start, stop in kept:
                values[start:stop] = left[position : position + stop - start]
                position += stop - start
        return b"".join((self.header(), mask, payload))

    def decode_vector(self, payload: Payload, numel: int) -> PartialVector:
        reader = self.open_payload(payload, numel)
        sent = self._read_mask(reader)
        kept, rest = self._kept(sent), reader.read_rest()
        if not kept:
            if len(rest):
                raise CodecError(f"{len(rest)} bytes of values where no expert was sent")
            return PartialVector(numel, kept, None, sent)
        size = sum(stop - start for start, stop in kept)
        return PartialVector(numel, kept, self._codec_for(kept).decode_vector(rest, size), sent)

    def read_sent(self, payload: Payload) -> Flags:
        """Return for each expert whether a payload contains it; the rest of the payload is not looked at."""
        return self._read_mask(self.open_payload(payload, self.layout.numel))

    def _read_mask(self, reader: PayloadReader) -> Flags:
        bits = np.unpackbits(reader.read("u1", self._mask_bytes), bitorder="little")
        if bits[len(self.experts) :].any():
            raise CodecError(f"bits for more experts than the {len(self.experts)} of this part")
        return bits[: len(self.experts)].astype(np.bool_)

    @property
    def _mask_bytes(self) -> int:
        """Return the bytes of the mask; the inner payload begins at a multiple of 8, as if it were alone."""
        return -(-(HEADER_BYTES + -(-len(self.experts) // 8)) // 8) * 8 - HEADER_BYTES

    def _kept(self, sent: Flags) -> tuple[Span, ...]:
        """Return the spans that are sent."""
        edges = [0]
        for start, stop in (span for span, is_sent in zip(self.experts, sent, strict=True) if not is_sent):
            if start == edges[-1]:
                edges[-1] = stop
            else:
                edges += (start, stop)
        edges.append(self.layout.numel)
        return tuple(span for span in zip(edges[::2], edges[1::2], strict=True) if span[0] < span[1])

    def _codec_for(self, kept: Sequence[Span]) -> Codec:
        """Return the inner codec for these spans of the part."""
        if kept == ((0, self.layout.numel),):
            return self.inner
        binding = self.inner.binding
        assert binding is not None
        if len(self.layout.shapes) == 1:  # a part of a butterfly, which knows no tensors
            size = sum(stop - start for start, stop in kept)
            return self.inner.bind(Layout(((size,),)), binding.round_number)
        starts = [start for start, _ in kept]
        places = [max(0, bisect_right(starts, start) - 1) for start in self._tensor_starts]
        is_kept = [
            kept[place][0] <= start < kept[place][1] for start, place in zip(self._tensor_starts, places, strict=True)
        ]
        tensors = zip(self.layout.shapes, self.layout.block_numbers, is_kept, strict=True)
        shapes, blocks = zip(*((shape, block) for shape, block, stays in tensors if stays), strict=True)
        return self.inner.bind(Layout(shapes, blocks), binding.round_number)

    @cached_property
    def _tensor_starts(self) -> list[int]:
        return [start for start, _ in self.layout.spans]


@dataclass(frozen=True)
class Senders:
    """The senders of each expert of a part: `sent` has a row of flags for each member, `weights` are the members'."""

    experts: tuple[Span, ...]
    sent: Sequence[Flags]
    weights: Sequence[float]  # 0 for members that do not count

    @property
    def unsent(self) -> tuple[Span, ...]:
        """Return the spans of the experts that no member sent."""
        sums, _ = _sum_weights(self.sent, self.weights)
        return tuple(span for span, weight in zip(self.experts, sums.tolist(), strict=True) if not weight)

    def rescale(self, combined: Vector, divisors: Sequence[float]) -> Vector:
        """Return a combined vector with each expert's mean over its senders.

        Args:
            combined: of the whole part.
            divisors: what each member adds to the divisor of the rule; nothing if it divides by senders anyway.
        """
        if not divisors:
            return combined
        sums, total = _sum_weights(self.sent, divisors)
        factors: Floats = (total / np.where(sums > 0, sums, total)).astype(np.float32)
        is_changed = factors != 1
        if not is_changed.any():
            return combined
        spans = tuple(span for span, changes in zip(self.experts, is_changed, strict=True) if changes)
        return ScaledSpans(combined, spans, factors[is_changed])


def _sum_weights(
    sent: Sequence[Flags], weights: Sequence[float]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], np.float64]:
    """Return the sum of the senders' weights for each expert, and that of all members."""
    sums = np.zeros(len(sent[0]) + 1)
    for flags, weight in zip(sent, weights, strict=True):
        sums += np.append(flags, True) * np.float64(weight)
    return sums[:-1], sums[-1]
