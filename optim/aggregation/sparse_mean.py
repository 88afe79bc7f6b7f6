"""Means of sparse vectors, computed span by span when they are asked for: no dense vector is made of a message.

One loop sums all messages, each from where it lies; each position is added to in their order, as if they were summed
one by one. The loop goes over blocks that stay in the innermost cache from the sum to what becomes of it.
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

Offsets = npt.NDArray[np.uint64]  # without a sign: a loop need not ask whether one counts from the end

BLOCK_SIZE: Final = 1 << 11  # values
NEGATIVE_ZERO: Final = np.float32(-0.0)  # added to a number, it leaves its bits as they are; 0 turns -0 to 0


@dataclass(frozen=True)
class SparseBatch:
    """Sparse vectors of one length, as one array in which each lies somewhere: places count from where the first one
    lies, modulo 2^64, over whatever is between. `begins`: of their positions; `shifts`: how many places later in the
    array of values than in that of positions."""

    vectors: tuple[SparseVector, ...]
    position_offsets: Offsets
    value_shifts: Offsets

    @classmethod
    def from_vectors(cls, vectors: Sequence[SparseVector]) -> Self:
        begins = _item_offsets([vector.positions for vector in vectors])
        return cls(tuple(vectors), begins, _item_offsets([vector.values for vector in vectors]) - begins)

    @property
    def numel(self) -> int:
        return self.vectors[0].numel

    def find_offsets(self, slab: slice) -> tuple[Offsets, Offsets]:
        """Where the positions in a part begin and end."""
        found = [np.searchsorted(vector.positions, (slab.start, slab.stop)) for vector in self.vectors]
        first, last = np.array(found, np.uint64).T
        return self.position_offsets + first, self.position_offsets + last


def _item_offsets(arrays: Sequence[npt.NDArray[Any]]) -> Offsets:
    """Where each begins, in items from the first. ValueError for what a loop could not go over."""
    for array in arrays:
        if not array.flags.carray or array.dtype != arrays[0].dtype:
            raise ValueError("arrays of different numbers, or whose values do not lie one after the other")
    addresses = np.array([array.ctypes.data for array in arrays], np.uint64)
    places: Offsets = (addresses - addresses[0]).view(np.int64) // arrays[0].itemsize
    return places.view(np.uint64)


@dataclass(frozen=True)
class SparseMean(Vector):
    """sum_i scale_i x_i, divided value by value."""

    batch: SparseBatch
    scales: Floats

    @property
    def numel(self) -> int:  # type: ignore[override]
        return self.batch.numel

    def decode_into(self, slab: slice, out: Floats) -> None:
        nothing = thread_buffer("nothing", np.float32, out.size)
        nothing.fill(NEGATIVE_ZERO)
        self._add_slab(slab, nothing, 1.0, out)

    def write_sum(self, before: Floats, weight: float, out: Floats) -> None:
        """out <- before + weight * self, the product rounded before it is added, in one pass over whole vectors."""
        parallel_for(lambda part: self._add_slab(part, before[part], weight, out[part]), wide_slabs(self.numel))

    def _add_slab(self, slab: slice, before: Floats, weight: float, out: Floats) -> None:
        stack, first, (divisor, shares) = self.batch, self.batch.vectors[0], self._divisor()
        sums, divisors = thread_buffer("means", np.float32, 2 * BLOCK_SIZE).reshape(2, BLOCK_SIZE)
        _add_means(
            first.positions,
            first.values,
            *stack.find_offsets(slab),
            stack.value_shifts,
            self.scales,
            divisor,
            shares,
            slab.start,
            sums,
            divisors,
            np.float32(weight),
            before,
            out,
        )

    @abstractmethod
    def _divisor(self) -> tuple[np.float32, Floats]:
        """What every value is divided by, and what each vector adds to that wherever it is not zero."""


@dataclass(frozen=True)
class MeanVector(SparseMean):
    """Divided by one number."""

    divisor: np.float32

    def _divisor(self) -> tuple[np.float32, Floats]:
        return self.divisor, np.zeros_like(self.scales)


@dataclass(frozen=True)
class SenderMeanVector(SparseMean):
    """Divided by the `weights` of those who sent something for the value."""

    weights: Floats

    def _divisor(self) -> tuple[np.float32, Floats]:
        return np.float32(0), self.weights


@kernel
def _add_means(
    positions: Positions,
    values: Floats,
    places: Offsets,
    ends: Offsets,
    shifts: Offsets,
    scales: Floats,
    divisor: np.float32,
    shares: Floats,
    start: int,
    sums: Floats,
    divisors: Floats,
    weight: np.float32,
    before: Floats,
    out: Floats,
) -> None:
    """out <- before + weight * sum / divisor: of the span from `start` on. Each product is rounded before it is added.
    Of each vector those between `places`, which move there, and `ends`. `sums` and `divisors` may hold anything; a
    block has their length."""
    for begin in range(0, out.size, sums.size):
        old, block, offset = before[begin : begin + sums.size], out[begin : begin + sums.size], start + begin
        sums[:] = 0
        divisors[:] = divisor
        for vector in range(ends.size):
            scale, share, shift = scales[vector], shares[vector], shifts[vector]
            place, end = places[vector], ends[vector]
            while place != end and positions[place] < offset + block.size:
                spot, value = np.uint64(positions[place] - offset), values[place + shift]
                sums[spot] += value * scale
                divisors[spot] += share if value != 0 else np.float32(0)
                place += np.uint64(1)
            places[vector] = place
        for at in range(block.size):
            mean = sums[at] / (divisors[at] if divisors[at] > 0 else np.float32(1))
            block[at] = old[at] + mean * weight


@kernel
def divide_where_sent(total: Floats, senders: Floats) -> None:
    """`senders`: the weight of those who sent each value; what nobody sent stays."""
    for place in range(total.size):
        total[place] /= senders[place] if senders[place] > 0 else np.float32(1)
