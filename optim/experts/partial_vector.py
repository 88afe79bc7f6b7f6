"""Vectors of which some spans are zero, or multiplied by factors; both are computed when they are read."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from optim.kernels.vectors import Floats, Vector
from optim.layout import Span

Flags = npt.NDArray[np.bool_]


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
