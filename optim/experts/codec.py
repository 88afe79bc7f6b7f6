"""A codec that leaves out the experts which its maker did not train.

Payload: header, one bit for each expert of the part (the first is the lowest bit), zeros up to a multiple of eight
bytes, the payload of the inner codec for the values that are left. Without any values that is missing.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from optim.codecs.base import Codec, Payload, PayloadReader
from optim.errors import CodecError
from optim.experts.partial_vector import Flags, PartialVector
from optim.kernels.vectors import Floats
from optim.layout import Layout, Span

HEADER_BYTES = 2


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
