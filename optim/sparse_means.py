"""Means of sparse vectors, computed span by span when they are asked for: no dense vector is made of a message.

All messages lie one after the other, so that one loop sums them; each position is added to in their order, as if they
were summed one by one.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Self

import numpy as np
import numpy.typing as npt

from optim.compiled import compiled
from optim.threads import scratch
from optim.vectors import Floats, Positions, SparseVector, Vector, below

Ends = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stack:
    """Sparse vectors of one length. `ends`: where each ends."""

    positions: Positions
    values: Floats
    ends: Ends
    numel: int

    @classmethod
    def of(cls, vectors: Sequence[SparseVector]) -> Self:
        positions = np.concatenate([vector.positions for vector in vectors])
        values = np.concatenate([vector.values for vector in vectors])
        ends = np.array(list(accumulate(vector.values.size for vector in vectors)), np.int64)
        return cls(positions, values, ends, vectors[0].numel)

    @cached_property
    def presence(self) -> Floats:
        """1 for each value but zero."""
        present: Floats = (self.values != 0).astype(np.float32)
        return present


@dataclass(frozen=True)
class _SparseMean(Vector):
    """sum_i scale_i x_i, divided value by value."""

    stack: Stack
    scales: Floats

    @property
    def numel(self) -> int:  # type: ignore[override]
        return self.stack.numel

    def restore(self, part: slice, out: Floats) -> None:
        _sum(self.stack.positions, self.stack.values, self.stack.ends, self.scales, part.start, out)
        self._divide(part, out)

    @abstractmethod
    def _divide(self, part: slice, total: Floats) -> None: ...


@dataclass(frozen=True)
class MeanVector(_SparseMean):
    """Divided by one number."""

    divisor: np.float32

    def _divide(self, part: slice, total: Floats) -> None:
        total /= self.divisor


@dataclass(frozen=True)
class SenderMeanVector(_SparseMean):
    """Divided by the `weights` of those who sent something for the value."""

    weights: Floats

    def _divide(self, part: slice, total: Floats) -> None:
        senders = scratch("senders", np.float32, total.size)
        _sum(self.stack.positions, self.stack.presence, self.stack.ends, self.weights, part.start, senders)
        divide_where_sent(total, senders)


@compiled
def _sum(positions: Positions, values: Floats, ends: Ends, scales: Floats, start: int, total: Floats) -> None:
    """The span of the sum from `start` on; each product is rounded before it is added."""
    total[:] = 0
    first = 0
    for vector in range(ends.size):
        own = positions[first : ends[vector]]
        for place in range(first + below(own, start), first + below(own, start + total.size)):
            total[positions[place] - start] += values[place] * scales[vector]
        first = ends[vector]


@compiled
def divide_where_sent(total: Floats, senders: Floats) -> None:
    """`senders`: the weight of those who sent each value; what nobody sent stays."""
    for place in range(total.size):
        total[place] /= senders[place] if senders[place] > 0 else np.float32(1)
