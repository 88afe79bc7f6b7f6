"""What a payload says once it is decoded: a vector, dense or sparse, that can be summed the same way on every machine.

Sums are made of elementwise operations with one rounding each, in an order fixed here, so neither the number of threads
nor the width of the processor's registers can change a bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
SLAB = 1 << 18  # values whose temporaries stay in the cache


class Vector(ABC):
    """A decoded message of known length; every value is finite."""

    @abstractmethod
    def add_to(self, total: Floats, weight: float) -> None:
        """total <- total + weight * self, the product rounded before it is added."""

    @abstractmethod
    def add_presence_to(self, total: Floats, weight: float) -> None:
        """Add `weight` wherever this vector is not zero."""

    @abstractmethod
    def dense(self) -> Floats:
        """A writable array of the whole length."""

    @abstractmethod
    def norm(self) -> float:
        """The Euclidean norm, the same on every machine."""


@dataclass(frozen=True)
class DenseVector(Vector):
    values: Floats

    def add_to(self, total: Floats, weight: float) -> None:
        for part in slabs(total.size):
            total[part] += self.values[part] * np.float32(weight)

    def add_presence_to(self, total: Floats, weight: float) -> None:
        for part in slabs(total.size):
            total[part] += (self.values[part] != 0) * np.float32(weight)

    def dense(self) -> Floats:
        return self.values

    def norm(self) -> float:
        return norm(self.values)


@dataclass(frozen=True)
class SparseVector(Vector):
    """`positions` are strictly increasing and below `numel`."""

    positions: Positions
    values: Floats
    numel: int

    def add_to(self, total: Floats, weight: float) -> None:
        total[self.positions] += self.values * np.float32(weight)

    def add_presence_to(self, total: Floats, weight: float) -> None:
        total[self.positions] += (self.values != 0) * np.float32(weight)

    def dense(self) -> Floats:
        whole = np.zeros(self.numel, np.float32)
        whole[self.positions] = self.values
        return whole

    def norm(self) -> float:
        return norm(self.values)


def slabs(numel: int) -> Iterator[slice]:
    return (slice(start, min(start + SLAB, numel)) for start in range(0, numel, SLAB))


def norm(values: Floats) -> float:
    """Squares of fp32 are exact in fp64; folding halves sums them in an order that never depends on the machine."""
    sums = np.zeros(min(SLAB, 1 << max(0, values.size - 1).bit_length()), np.float64)
    for part in slabs(values.size):
        slab = values[part].astype(np.float64)
        sums[: slab.size] += slab * slab
    while sums.size > 1:
        half = sums.size // 2
        sums = sums[:half] + sums[half:]
    return float(np.sqrt(sums[0]))
