"""The tensors of a flat vector, for code that must tell rows from columns or one layer from the next."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

Shape = tuple[int, ...]
Span = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class Layout:
    """The shapes of tensors that follow one another without a gap, in row-major order.

    `blocks` gives the block of the model (a layer, the embedding) that each tensor belongs to, ascending from 0; by
    default each tensor is a block. `experts` gives the number of the expert that each tensor belongs to, -1 for none;
    it is empty for a model without experts.
    """

    shapes: tuple[Shape, ...]
    blocks: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()

    @cached_property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Return the span of each tensor."""
        stops = list(accumulate(math.prod(shape) for shape in self.shapes))
        return tuple(zip([0, *stops[:-1]], stops, strict=True))

    @cached_property
    def block_numbers(self) -> tuple[int, ...]:
        """Return the block of each tensor, ascending from 0."""
        return self.blocks or tuple(range(len(self.shapes)))

    @cached_property
    def block_spans(self) -> tuple[Span, ...]:
        """Return the span of each block."""
        spans: dict[int, Span] = {}
        for block, (start, stop) in zip(self.block_numbers, self.spans, strict=True):
            spans[block] = (spans[block][0] if block in spans else start, stop)
        return tuple(spans.values())

    @cached_property
    def expert_spans(self) -> tuple[Span, ...]:
        """Return the span of each expert of each block; its tensors follow one another."""
        return tuple(self._experts.values())

    @cached_property
    def expert_blocks(self) -> tuple[int, ...]:
        """Return the block of each of these experts."""
        return tuple(block for block, _ in self._experts)

    @cached_property
    def _experts(self) -> dict[tuple[int, int], Span]:
        spans: dict[tuple[int, int], Span] = {}
        if not self.experts:
            return spans
        for block, expert, (start, stop) in zip(self.block_numbers, self.experts, self.spans, strict=True):
            if expert >= 0:
                key = block, expert
                spans[key] = (spans[key][0] if key in spans else start, stop)
        return spans

    @cached_property
    def matrix_spans(self) -> tuple[Span, ...]:
        """Return the spans of all tensors of at least two dimensions, with adjacent ones merged."""
        return merge_adjacent([span for shape, span in self.iter_tensors() if len(shape) > 1])

    def select(self, spans: Sequence[Span]) -> "Layout":
        """Return the layout of the tensors within these spans, which start and stop at tensors."""
        selected = [
            (shape, block)
            for shape, block, (start, stop) in zip(self.shapes, self.block_numbers, self.spans, strict=True)
            if any(first <= start and stop <= last for first, last in spans)
        ]
        return Layout(tuple(shape for shape, _ in selected), tuple(block for _, block in selected))

    def iter_tensors(self) -> Iterator[tuple[Shape, Span]]:
        return zip(self.shapes, self.spans, strict=True)

    def repeat(self, times: int) -> "Layout":
        """Return the layout of several such vectors one after the other."""
        return self if times == 1 else Layout(self.shapes * times)


def merge_adjacent(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Merge those of the ascending spans that touch."""
    found: list[Span] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return tuple(found)


def clip_spans(spans: Sequence[Span], start: int, stop: int) -> tuple[Span, ...]:
    """Return the parts of these spans within [start, stop), relative to `start`."""
    cut = ((max(first, start) - start, min(last, stop) - start) for first, last in spans)
    return tuple((first, last) for first, last in cut if first < last)
