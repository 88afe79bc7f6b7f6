"""What a payload says once it is decoded: a vector, dense or sparse, that can be summed the same way on every machine.

Sums are made of elementwise operations with one rounding each, in an order fixed here, so neither the number of threads
nor the width of the processor's registers can change a bit.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from optim.kernels.jit import kernel, subroutine
from optim.kernels.parallel import parallel_for, thread_buffer

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
SLAB_SIZE = 1 << 18  # values whose temporaries stay in the cache
NORM_LANES = 1 << 12  # of squares, side by side: they stay in the innermost cache
MAX_SLAB_FACTOR, MIN_SLABS = 2, 16  # so many times as long at most, and where so many are left for threads to share
SPARSE_SLAB_SIZE = 1 << 16  # of a sparse vector's values, in one thread


class Vector(ABC):
    """A decoded message of known length; every value is finite."""

    numel: int

    @abstractmethod
    def decode_into(self, slab: slice, out: Floats) -> None:
        """Write the values from `part.start` to `part.stop`, at most `numel`, to an array of that length."""

    def decode_slab(self, slab: slice) -> Floats:
        """The same in a new array."""
        out = np.empty(slab.stop - slab.start, np.float32)
        self.decode_into(slab, out)
        return out

    @property
    def coefficients(self) -> "Vector":
        """As it was sent, before any transform that the receiver undoes."""
        return self

    def with_coefficients(self, coefficients: "Vector") -> "Vector":
        """What it would be had that been sent."""
        return coefficients

    def decode_slabs(self) -> Iterable[slice]:
        """All spans one after the other, as they are cheapest to restore."""
        return slabs(self.numel)

    def add_to(self, total: Floats, weight: float) -> None:
        """total <- total + weight * self, the product rounded before it is added."""
        self.write_sum(total, weight, total)

    def write_sum(self, before: Floats, weight: float, out: Floats) -> None:
        """out <- before + weight * self, the product rounded before it is added; `out` may be `before`."""
        size, combine = abs(weight), np.add if weight >= 0 else np.subtract

        def write(part: slice) -> None:
            values = thread_buffer("vector", np.float32, part.stop - part.start)
            self.decode_into(part, values)
            if size != 1:
                values *= np.float32(size)
            combine(before[part], values, out[part])

        parallel_for(write, self.decode_slabs())

    def add_nonzero_mask_to(self, total: Floats, weight: float) -> None:
        """Add `weight` wherever this vector is not zero."""

        def add(part: slice) -> None:
            total[part] += (self.decode_slab(part) != 0) * np.float32(weight)

        parallel_for(add, self.decode_slabs())

    def subtract_from(self, values: Floats) -> None:
        """values <- values - self"""
        self.add_to(values, -1.0)  # times minus one is exact

    def to_dense(self) -> Floats:
        """A writable array of the whole length."""
        whole = np.empty(self.numel, np.float32)
        self.write_to(whole)
        return whole

    def write_to(self, whole: Floats) -> None:
        """All values, to an array of the whole length."""
        parallel_for(lambda part: self.decode_into(part, whole[part]), self.decode_slabs())

    def norm(self) -> float:
        """The Euclidean norm, the same on every machine."""
        return norm(map(self.decode_slab, self.decode_slabs()))


@dataclass(frozen=True)
class DenseVector(Vector):
    """`restorer` decodes a span on demand, in any thread: beside the payload no more than slabs are in memory."""

    numel: int
    decoder: Callable[[slice, Floats], None]

    def decode_into(self, slab: slice, out: Floats) -> None:
        self.decoder(slab, out)


@dataclass(frozen=True)
class ArrayVector(Vector):
    """Values as they are."""

    values: Floats

    @property
    def numel(self) -> int:  # type: ignore[override]
        return self.values.size

    def decode_into(self, slab: slice, out: Floats) -> None:
        np.copyto(out, self.values[slab])

    def to_dense(self) -> Floats:
        """Not copied."""
        return self.values


@dataclass(frozen=True)
class ConcatenatedVector(Vector):
    """Vectors one after the other, none of them empty."""

    vectors: tuple[Vector, ...]

    @cached_property
    def numel(self) -> int:  # type: ignore[override]
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(vector.numel for vector in self.vectors))

    def decode_into(self, slab: slice, out: Floats) -> None:
        start = slab.start
        while start < slab.stop:
            place = bisect_right(self._ends, start)
            vector, stop = self.vectors[place], min(self._ends[place], slab.stop)
            first = self._ends[place] - vector.numel
            vector.decode_into(slice(start - first, stop - first), out[start - slab.start : stop - slab.start])
            start = stop


@dataclass(frozen=True)
class SparseVector(Vector):
    """`positions` are strictly increasing and below `numel`."""

    positions: Positions
    values: Floats
    numel: int

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + self.values.nbytes

    def decode_into(self, slab: slice, out: Floats) -> None:
        out.fill(0)
        self.add_slab_to(slab, out, 1.0)

    def add_to(self, total: Floats, weight: float) -> None:
        parallel_for(lambda part: self.add_slab_to(part, total[part], weight), self.decode_slabs())

    def add_slab_to(self, slab: slice, total: Floats, weight: float) -> None:
        """As `add_to`, to a total of that span alone."""
        _scatter_add(self.positions, self.values, slab.start, np.float32(weight), total)

    def add_nonzero_mask_to(self, total: Floats, weight: float) -> None:
        present = (self.values != 0).astype(np.float32)
        _scatter_add(self.positions, present, 0, np.float32(weight), total)

    def norm(self) -> float:
        return norm([self.values])


@kernel
def _scatter_add(positions: Positions, values: Floats, start: int, weight: np.float32, total: Floats) -> None:
    """Of those in the span of `total` from `start` on."""
    for place in range(_lower_bound(positions, start), _lower_bound(positions, start + total.size)):
        total[positions[place] - start] += values[place] * weight


@subroutine
def _lower_bound(positions: Positions, bound: int) -> int:
    """How many there are, by bisection."""
    low, high = 0, positions.size
    while low < high:
        middle = (low + high) // 2
        if positions[middle] < bound:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def _add_squares(values: Floats, sums: npt.NDArray[np.float64]) -> None:
    """Of every so many values to the same sum."""
    for first in range(0, values.size, sums.size):
        row = values[first : first + sums.size]
        for place in range(row.size):
            value = np.float64(row[place])
            sums[place] += value * value


def slabs(numel: int, size: int = SLAB_SIZE) -> Iterator[slice]:
    return (slice(start, min(start + size, numel)) for start in range(0, numel, size))


def wide_slabs(numel: int) -> Iterator[slice]:
    """Of a long vector longer ones: for what goes over memory once, where each call costs more than a cache saves."""
    return slabs(numel, SLAB_SIZE * max(1, min(MAX_SLAB_FACTOR, numel // (MIN_SLABS * SLAB_SIZE))))


def norm(pieces: Iterable[Floats]) -> float:
    """Of the pieces one after the other; where one ends and the next begins matters to the last bits.

    Squares of fp32 are exact in fp64; folding halves sums them in an order that never depends on the machine.
    """
    sums = np.zeros(NORM_LANES, np.float64)
    for piece in pieces:
        _add_squares(piece, sums)
    while sums.size > 1:
        half = sums.size // 2
        sums = sums[:half] + sums[half:]
    return float(np.sqrt(sums[0]))
