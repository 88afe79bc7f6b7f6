"""Which tensors a flat vector is made of: for what has to know rows from columns, or one layer from the next."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

Shape = tuple[int, ...]
Span = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class Layout:
    """Shapes of tensors that follow one another without a gap, row by row."""

    shapes: tuple[Shape, ...]

    @cached_property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Where each tensor stands."""
        stops = list(accumulate(math.prod(shape) for shape in self.shapes))
        return tuple(zip([0, *stops[:-1]], stops, strict=True))

    def tensors(self) -> Iterator[tuple[Shape, Span]]:
        return zip(self.shapes, self.spans, strict=True)

    def repeated(self, times: int) -> "Layout":
        """Several vectors of this layout one after the other."""
        return Layout(self.shapes * times)
