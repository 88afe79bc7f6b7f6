"""Decoded payloads: vectors, dense or sparse, that can be summed to the same bits on every machine.

Sums consist of elementwise operations with one rounding each, in a fixed order, so that neither the number of threads
nor the width of the processor's registers changes a bit.

Powers and exponentials have the same last bit on every machine too; those of `math` depend on the C library.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from optim.kernels.jit import kernel, subroutine
from optim.kernels.parallel import parallel_for, thread_buffer

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
SLAB_SIZE = 1 << 18  # in values: temporaries of this size stay in the cache
NORM_LANES = 1 << 12  # sums of squares side by side; they stay in the innermost cache
MAX_SLAB_FACTOR, MIN_SLABS = 2, 16  # of wide slabs: their length in slabs, and their least number
SPARSE_SLAB_SIZE = 1 << 16  # values of a sparse vector per work item
CONTEXT = Context(prec=24)


class Vector(ABC):
    """A decoded contribution of known length; every value is finite."""

    numel: int

    @abstractmethod
    def decode_into(self, slab: slice, out: Floats) -> None:
        """Write the values of the slab to `out`, which has its length."""

    def decode_slab(self, slab: slice) -> Floats:
        """Return the values of the slab in a new array."""
        out = np.empty(slab.stop - slab.start, np.float32)
        self.decode_into(slab, out)
        return out

    @property
    def coefficients(self) -> "Vector":
        """Return the vector as it was sent, before the receiver inverts any transform."""
        return self

    def with_coefficients(self, coefficients: "Vector") -> "Vector":
        """Return the vector that sending these coefficients would have given."""
        return coefficients

    def decode_slabs(self) -> Iterable[slice]:
        """Return consecutive spans that cover the vector, chosen so that decoding is cheapest."""
        return slabs(self.numel)

    def add_to(self, total: Floats, weight: float) -> None:
        """Add weight * self to `total`; the product is rounded before it is added."""
        self.write_sum(total, weight, total)

    def write_sum(self, before: Floats, weight: float, out: Floats) -> None:
        """Write before + weight * self to `out`; the product is rounded before it is added. `out` may be `before`."""
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
        self.add_to(values, -1.0)  # multiplying by -1 is exact

    def to_dense(self) -> Floats:
        """Return all values as an array; it may be the vector's own memory."""
        whole = np.empty(self.numel, np.float32)
        self.write_to(whole)
        return whole

    def write_to(self, whole: Floats) -> None:
        """Write all values to `whole`."""
        parallel_for(lambda part: self.decode_into(part, whole[part]), self.decode_slabs())

    def norm(self) -> float:
        """Return the Euclidean norm, the same on every machine."""
        return norm(map(self.decode_slab, self.decode_slabs()))


@dataclass(frozen=True)
class DenseVector(Vector):
    """A vector that is decoded on demand, in any thread, so that only its payload and slabs are in memory."""

    numel: int
    decoder: Callable[[slice, Floats], None]

    def decode_into(self, slab: slice, out: Floats) -> None:
        self.decoder(slab, out)


@dataclass(frozen=True)
class ArrayVector(Vector):
    """A vector of values in memory."""

    values: Floats

    @property
    def numel(self) -> int:  # type: ignore[override]
        return self.values.size

    def decode_into(self, slab: slice, out: Floats) -> None:
        np.copyto(out, self.values[slab])

    def to_dense(self) -> Floats:
        """Return the values without a copy."""
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
            index = bisect_right(self._ends, start)
            vector, stop = self.vectors[index], min(self._ends[index], slab.stop)
            first = self._ends[index] - vector.numel
            vector.decode_into(slice(start - first, stop - first), out[start - slab.start : stop - slab.start])
            start = stop


@dataclass(frozen=True)
class ScaledVector(Vector):
    """A vector times a factor; each product is rounded once."""

    vector: Vector
    factor: np.float32

    @property
    def numel(self) -> int:  # type: ignore[override]
        return self.vector.numel

    def decode_into(self, slab: slice, out: Floats) -> None:
        self.vector.decode_into(slab, out)
        out *= self.factor


def scaled(vector: Vector, factor: float) -> Vector:
    """Return a vector times a factor."""
    return vector if factor == 1 else ScaledVector(vector, np.float32(factor))


@dataclass(frozen=True)
class SparseVector(Vector):
    """A vector that is zero outside `positions`, which are strictly increasing and below `numel`."""

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
        """Add the values of a slab to `total`, which has the slab's length."""
        _scatter_add(self.positions, self.values, slab.start, np.float32(weight), total)

    def add_nonzero_mask_to(self, total: Floats, weight: float) -> None:
        sent = (self.values != 0).astype(np.float32)
        _scatter_add(self.positions, sent, 0, np.float32(weight), total)

    def norm(self) -> float:
        return norm([self.values])


@kernel
def _scatter_add(positions: Positions, values: Floats, start: int, weight: np.float32, total: Floats) -> None:
    """Add the weighted values at positions within the span of `total`, which begins at `start`."""
    for i in range(_lower_bound(positions, start), _lower_bound(positions, start + total.size)):
        total[positions[i] - start] += values[i] * weight


@subroutine
def _lower_bound(positions: Positions, bound: int) -> int:
    """Return the number of positions below a bound, by bisection."""
    low, high = 0, positions.size
    while low < high:
        middle = (low + high) // 2
        if positions[middle] < bound:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def _add_products(first: Floats, second: Floats, sums: npt.NDArray[np.float64]) -> None:
    """Add the product of the values i to sum i modulo the number of sums."""
    for start in range(0, first.size, sums.size):
        row, other = first[start : start + sums.size], second[start : start + sums.size]
        for i in range(row.size):
            sums[i] += np.float64(row[i]) * np.float64(other[i])


@kernel
def _add_squares(values: Floats, sums: npt.NDArray[np.float64]) -> None:
    """Add the square of value i to sum i modulo the number of sums."""
    for first in range(0, values.size, sums.size):
        row = values[first : first + sums.size]
        for i in range(row.size):
            value = np.float64(row[i])
            sums[i] += value * value


def slabs(numel: int, size: int = SLAB_SIZE) -> Iterator[slice]:
    return (slice(start, min(start + size, numel)) for start in range(0, numel, size))


def wide_slabs(numel: int) -> Iterator[slice]:
    """Return slabs that are wider for long vectors.

    They suit single passes over memory, where the cost of a call matters more than the cache.
    """
    return slabs(numel, SLAB_SIZE * max(1, min(MAX_SLAB_FACTOR, numel // (MIN_SLABS * SLAB_SIZE))))


def norm(pieces: Iterable[Floats]) -> float:
    """Return the norm of the concatenated pieces; the last bits depend on how it is cut.

    Squares of fp32 are exact in fp64, and halves are folded in an order that does not depend on the machine.
    """
    sums = np.zeros(NORM_LANES, np.float64)
    for piece in pieces:
        _add_squares(piece, sums)
    return float(np.sqrt(_fold(sums)))


def dot(pieces: Iterable[tuple[Floats, Floats]]) -> float:
    """Return the inner product of two vectors, given as pairs of pieces; it is as reproducible as `norm`."""
    sums = np.zeros(NORM_LANES, np.float64)
    for first, second in pieces:
        _add_products(first, second, sums)
    return float(_fold(sums))


def _fold(sums: npt.NDArray[np.float64]) -> np.float64:
    """Return the sum of 2^k values, folding halves."""
    while sums.size > 1:
        half = sums.size // 2
        sums = sums[:half] + sums[half:]
    return np.float64(sums[0])


def exp(value: float) -> float:
    return float(CONTEXT.exp(Decimal(value)))


def power(base: float, exponent: float) -> float:
    """Return base^exponent for a base above zero."""
    return float(CONTEXT.power(Decimal(base), Decimal(exponent)))
