"""Means of sparse vectors, computed span by span when they are read, so that no contribution is made dense.

One loop sums all vectors from wherever they are in memory. It adds to each position in the order of the vectors, as if
they were summed one by one. It goes over blocks that stay in the innermost cache from the sum to the result.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from optim.kernels.jit import kernel
from optim.kernels.parallel import parallel_for, thread_buffer
from optim.kernels.vectors import Floats, Positions, SparseVector, Vector, wide_slabs

Offsets = npt.NDArray[np.uint64]  # unsigned: a loop need not check for negative indices

BLOCK_SIZE: Final = 1 << 11  # values
NEGATIVE_ZERO: Final = np.float32(-0.0)  # adding it leaves all bits as they are; adding 0 turns -0 to 0


@dataclass(frozen=True)
class SparseBatch:
    """Sparse vectors of one length, addressed as if they were one array.

    Offsets are counted in items from the first vector, modulo 2^64, over whatever memory is in between.
    `position_offsets` locates the positions of each vector; adding `value_shifts` to an offset locates the value.
    """

    vectors: tuple[SparseVector, ...]
    position_offsets: Offsets
    value_shifts: Offsets

    @classmethod
    def from_vectors(cls, vectors: Sequence[SparseVector]) -> Self:
        offsets = _item_offsets([vector.positions for vector in vectors])
        return cls(tuple(vectors), offsets, _item_offsets([vector.values for vector in vectors]) - offsets)

    @property
    def numel(self) -> int:
        return self.vectors[0].numel

    def find_offsets(self, slab: slice) -> tuple[Offsets, Offsets]:
        """Return the offsets at which the positions within a slab begin and end, for each vector."""
        found = [np.searchsorted(vector.positions, (slab.start, slab.stop)) for vector in self.vectors]
        first, last = np.array(found, np.uint64).T
        return self.position_offsets + first, self.position_offsets + last


def _item_offsets(arrays: Sequence[npt.NDArray[Any]]) -> Offsets:
    """Return the offset of each array in items from the first.

    Raises:
        ValueError: the arrays differ in type, or one is not contiguous.
    """
    for array in arrays:
        if not array.flags.carray or array.dtype != arrays[0].dtype:
            raise ValueError("arrays of different types, or that are not contiguous")
    addresses = np.array([array.ctypes.data for array in arrays], np.uint64)
    offsets: Offsets = (addresses - addresses[0]).view(np.int64) // arrays[0].itemsize
    return offsets.view(np.uint64)


@dataclass(frozen=True)
class SparseMean(Vector):
    """sum_i scale_i x_i, each value divided by its own divisor."""

    batch: SparseBatch
    scales: Floats

    @property
    def numel(self) -> int:  # type: ignore[override]
        return self.batch.numel

    def decode_into(self, slab: slice, out: Floats) -> None:
        zeros = thread_buffer("zeros", np.float32, out.size)
        zeros.fill(NEGATIVE_ZERO)
        self._add_slab(slab, zeros, 1.0, out)

    def write_sum(self, before: Floats, weight: float, out: Floats) -> None:
        """Write before + weight * self to `out` in one pass; the product is rounded before it is added."""
        parallel_for(lambda part: self._add_slab(part, before[part], weight, out[part]), wide_slabs(self.numel))

    def _add_slab(self, slab: slice, before: Floats, weight: float, out: Floats) -> None:
        batch, first, (divisor, sender_weights) = self.batch, self.batch.vectors[0], self._divisor()
        sums, divisors = thread_buffer("means", np.float32, 2 * BLOCK_SIZE).reshape(2, BLOCK_SIZE)
        _add_means(
            first.positions,
            first.values,
            *batch.find_offsets(slab),
            batch.value_shifts,
            self.scales,
            divisor,
            sender_weights,
            slab.start,
            sums,
            divisors,
            np.float32(weight),
            before,
            out,
        )

    @abstractmethod
    def _divisor(self) -> tuple[np.float32, Floats]:
        """Return the divisor of all values, and the weight that each vector adds to it wherever it is not zero."""


@dataclass(frozen=True)
class MeanVector(SparseMean):
    """A mean with one divisor for all values."""

    divisor: np.float32

    def _divisor(self) -> tuple[np.float32, Floats]:
        return self.divisor, np.zeros_like(self.scales)


@dataclass(frozen=True)
class SenderMeanVector(SparseMean):
    """A mean in which each value is divided by the `weights` of the members that sent it."""

    weights: Floats

    def _divisor(self) -> tuple[np.float32, Floats]:
        return np.float32(0), self.weights


@kernel
def _add_means(
    positions: Positions,
    values: Floats,
    offsets: Offsets,
    ends: Offsets,
    shifts: Offsets,
    scales: Floats,
    divisor: np.float32,
    sender_weights: Floats,
    start: int,
    sums: Floats,
    divisors: Floats,
    weight: np.float32,
    before: Floats,
    out: Floats,
) -> None:
    """Write before + weight * sum / divisor to `out`, for the span from `start` on.

    Each product is rounded before it is added. Reads each vector from its offset in `offsets`, which moves along, up to
    `ends`. `sums` and `divisors` are scratch space whose length is that of a block.
    """
    for begin in range(0, out.size, sums.size):
        old, block, first = before[begin : begin + sums.size], out[begin : begin + sums.size], start + begin
        sums[:] = 0
        divisors[:] = divisor
        for vector in range(ends.size):
            scale, sender_weight, shift = scales[vector], sender_weights[vector], shifts[vector]
            item, end = offsets[vector], ends[vector]
            while item != end and positions[item] < first + block.size:
                target, value = np.uint64(positions[item] - first), values[item + shift]
                sums[target] += value * scale
                divisors[target] += sender_weight if value != 0 else np.float32(0)
                item += np.uint64(1)
            offsets[vector] = item
        for i in range(block.size):
            mean = sums[i] / (divisors[i] if divisors[i] > 0 else np.float32(1))
            block[i] = old[i] + mean * weight


@kernel
def divide_where_sent(total: Floats, senders: Floats) -> None:
    """Divide each value by the weight of its senders; values that nobody sent stay as they are."""
    for i in range(total.size):
        total[i] /= senders[i] if senders[i] > 0 else np.float32(1)
