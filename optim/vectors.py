"""What a payload says once it is decoded: a vector, dense or sparse, that can be summed the same way on every machine.

Sums are made of elementwise operations with one rounding each, in an order fixed here, so neither the number of threads
nor the width of the processor's registers can change a bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
SLAB = 1 << 18  # values whose temporaries stay in the cache


class Vector(ABC):
    """A decoded message of known length; every value is finite."""

    numel: int

    @abstractmethod
    def span(self, part: slice) -> Floats:
        """The values from `part.start` to `part.stop`, at most `numel`; to be read, not written."""

    def pieces(self) -> Iterable[slice]:
        """All spans one after the other, as they are cheapest to restore."""
        return slabs(self.numel)

    def add_to(self, total: Floats, weight: float) -> None:
        """total <- total + weight * self, the product rounded before it is added."""
        for part in self.pieces():
            total[part] += self.span(part) * np.float32(weight)

    def add_presence_to(self, total: Floats, weight: float) -> None:
        """Add `weight` wherever this vector is not zero."""
        for part in self.pieces():
            total[part] += (self.span(part) != 0) * np.float32(weight)

    def dense(self) -> Floats:
        """A writable array of the whole length."""
        whole = np.empty(self.numel, np.float32)
        for part in self.pieces():
            whole[part] = self.span(part)
        return whole

    def norm(self) -> float:
        """The Euclidean norm, the same on every machine."""
        return norm(map(self.span, self.pieces()))


@dataclass(frozen=True)
class DenseVector(Vector):
    """`restore` decodes a span on demand: beside the payload there is never more than a slab in memory."""

    numel: int
    restore: Callable[[slice], Floats]

    def span(self, part: slice) -> Floats:
        return self.restore(part)


@dataclass(frozen=True)
class SparseVector(Vector):
    """`positions` are strictly increasing and below `numel`."""

    positions: Positions
    values: Floats
    numel: int

    def span(self, part: slice) -> Floats:
        first, last = np.searchsorted(self.positions, (part.start, part.stop))
        whole = np.zeros(part.stop - part.start, np.float32)
        whole[self.positions[first:last] - part.start] = self.values[first:last]
        return whole

    def add_to(self, total: Floats, weight: float) -> None:
        total[self.positions] += self.values * np.float32(weight)

    def add_presence_to(self, total: Floats, weight: float) -> None:
        total[self.positions] += (self.values != 0) * np.float32(weight)

    def norm(self) -> float:
        return norm([self.values[part] for part in slabs(self.values.size)])


def slabs(numel: int, size: int = SLAB) -> Iterator[slice]:
    return (slice(start, min(start + size, numel)) for start in range(0, numel, size))


def norm(pieces: Iterable[Floats]) -> float:
    """Of the pieces one after the other; where one ends and the next begins matters to the last bits.

    Squares of fp32 are exact in fp64; folding halves sums them in an order that never depends on the machine.
    """
    sums = np.zeros(SLAB, np.float64)
    for piece in pieces:
        for part in slabs(piece.size):
            values = piece[part].astype(np.float64)
            sums[: values.size] += values * values
    while sums.size > 1:
        half = sums.size // 2
        sums = sums[:half] + sums[half:]
    return float(np.sqrt(sums[0]))
