"""Remember the directions of recent contributions, so that a replay of one is recognised.

A count sketch (Charikar, Chen, Farach-Colton 2002) is a short vector. The inner product of the sketches of two unit
vectors estimates their cosine, with a deviation of about (1 - cosine^2) / sqrt(SKETCH_BUCKETS). All peers share the
memory as a part of the state, so that they come to the same verdict, also after a peer has taken over a state.
"""

import statistics
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from optim.kernels.jit import kernel
from optim.kernels.vectors import Floats, Positions, SparseVector, Vector

Doubles = npt.NDArray[np.float64]

SKETCH_BUCKETS: Final = 256
REPLAY_COSINE: Final = 0.95  # of sketches; exact replays have 1
REPLAY_DISTANCE: Final = 0.1  # in usual distances: dense contributions of the first rounds are all nearly parallel


def sketch(vector: Vector) -> Floats:
    """Return a count sketch of the vector's direction, of norm 1; zeros if it has none."""
    buckets = np.zeros(SKETCH_BUCKETS, np.float64)
    if isinstance(vector, SparseVector):
        _add_to_sketch(vector.positions, vector.values, buckets)
    else:
        for part in vector.decode_slabs():
            _add_to_sketch(np.arange(part.start, part.stop, dtype=np.int64), vector.decode_slab(part), buckets)
    size = np.sqrt(_largest_product(buckets, buckets))
    return (buckets / (size if size > 0 else 1.0)).astype(np.float32)


def sketch_cosine(one: Floats, other: Floats) -> float:
    """Return the estimated cosine of two vectors: the same bits on every machine."""
    return float(_largest_product(one.astype(np.float64), other.astype(np.float64)))


class ContributionMemory:
    """Holds the sketches of the newest contributions in a flat vector, newest first; zeros are empty places."""

    def __init__(self, state: Floats) -> None:
        self._sketches = state

    def find_replays(self, sketches: Sequence[Floats]) -> list[int]:
        """Return the indices of sketches that repeat a remembered one.

        They are much nearer to one (1 - cosine) than the sketches of a round usually are.
        """
        known = self._sketches.astype(np.float64)
        distances = [1 - float(_largest_product(known, new.astype(np.float64))) for new in sketches]
        limit = min(1 - REPLAY_COSINE, REPLAY_DISTANCE * statistics.median_high(distances))
        return [index for index, distance in enumerate(distances) if distance < limit]

    def remember(self, sketches: Sequence[Floats]) -> None:
        """Add sketches in place of the oldest ones."""
        added = np.concatenate([*sketches, np.empty(0, np.float32)])[: self._sketches.size]
        self._sketches[added.size :] = self._sketches[: self._sketches.size - added.size].copy()
        self._sketches[: added.size] = added


@kernel
def _largest_product(rows: Doubles, one: Doubles) -> np.float64:
    """Return the largest inner product of `one` with a row; `rows` is flat."""
    largest = np.float64(-1)
    for start in range(0, rows.size, one.size):
        total = np.float64(0)
        for i in range(one.size):
            total += rows[start + i] * one[i]
        largest = max(largest, total)
    return largest


@kernel
def _add_to_sketch(positions: Positions, values: Floats, buckets: Doubles) -> None:
    """Add each value, with a pseudo-random sign, to a pseudo-random bucket (splitmix64 of its position)."""
    for i in range(values.size):
        mixed = np.uint64(positions[i]) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = mixed ^ (mixed >> np.uint64(27))
        bucket = mixed % np.uint64(buckets.size)
        buckets[bucket] += values[i] if mixed >> np.uint64(63) else -values[i]
