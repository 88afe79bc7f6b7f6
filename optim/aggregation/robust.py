"""Rules that tolerate members who send arbitrary values (arXiv 1703.02757, 1803.01498, 2012.10333).

All members with a weight count equally, because tokens are a member's own claim. Of n members f = ceil(liars * n) may
be byzantine, limited to as many as the rule can tolerate among n.

In a gather, a rule sees whole contributions. In a butterfly, each part is a problem of its own: rules by coordinate
give the same result there, while Krum and the centred clip may judge, and leave out, other members in each part. No
rule protects against the peer that reduces a part: it must be trusted or checked.

Sparse contributions need a mean: where few members send a coordinate its median is zero, and between members that send
different coordinates all distances are large.
"""

import math
import statistics
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.aggregation.base import AggregationRule, WeightedPayload, drop_weightless
from optim.kernels.buffer_pool import empty, zeros
from optim.kernels.vectors import Floats, Vector, norm, slabs
from optim.options import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _CoordinateWise(AggregationRule):
    def combine(self, payloads: Sequence[WeightedPayload], state: Floats | None = None) -> Floats:
        vectors = _decode_all(payloads)
        cut = self._trim_count(len(vectors))
        combined = empty(vectors[0].numel)
        for part in slabs(combined.size):
            kept = _sort_by_coordinate(vectors, part)[cut : len(vectors) - cut]
            total = kept[0]
            for row in kept[1:]:
                total += row
            combined[part] = total / np.float32(len(kept))
        return combined

    @abstractmethod
    def _trim_count(self, members: int) -> int:
        """Return the number of smallest, and of largest, values to leave out."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrimmedMean(_CoordinateWise):
    """The mean of each coordinate without its f largest and f smallest values; for two members or one, their mean."""

    kind: ClassVar[str] = "trimmed-mean"

    liars: float = Field(default=0.25, ge=0, lt=0.5, description="fraction of the members that may be byzantine")

    def _trim_count(self, members: int) -> int:
        return min(math.ceil(self.liars * members), (members - 1) // 2)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CoordinateMedian(_CoordinateWise):
    """The middle value of each coordinate, or the mean of the middle two. Tolerates fewer than half of the members."""

    kind: ClassVar[str] = "median"

    def _trim_count(self, members: int) -> int:
        return (members - 1) // 2


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Krum(AggregationRule):
    """The contribution with the least sum of squared distances to its n - f - 2 nearest ones.

    With `several`, the mean of the n - f - 2 contributions that have the least such sums. The proof needs n >= 2 f + 3:
    below, f shrinks to the largest value that n allows, and among fewer than three members all count. Every pair of
    contributions is compared, in time quadratic in n.
    """

    kind: ClassVar[str] = "krum"

    liars: float = Field(default=0.25, ge=0, lt=0.5, description="fraction of the members that may be byzantine")
    several: bool = False

    def combine(self, payloads: Sequence[WeightedPayload], state: Floats | None = None) -> Floats:
        vectors = _decode_all(payloads)
        chosen = self._select(vectors) if len(vectors) > 2 else vectors
        total = zeros(vectors[0].numel)
        for vector in chosen:
            vector.add_to(total, 1.0)
        total /= np.float32(len(chosen))
        return total

    def _select(self, vectors: Sequence[Vector]) -> list[Vector]:
        members = len(vectors)
        nearest = members - min(math.ceil(self.liars * members), (members - 3) // 2) - 2
        distances = _squared_distances(vectors)
        scores = [sum(sorted(row)[1 : nearest + 1]) for row in distances.tolist()]  # without itself, at distance 0
        best = sorted(range(members), key=lambda member: (scores[member], member))
        return [vectors[member] for member in sorted(best[: nearest if self.several else 1])]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CentredClip(AggregationRule):
    """v <- v + mean_i (x_i - v) min(1, tau / ||x_i - v||) from v = 0 on, with tau = radius * median_i ||x_i - v||.

    One member moves v by at most tau / n per iteration, however large its contribution. The paper sets tau by hand; the
    median follows the size of pseudo-gradients as it falls over a run, and shrinks to the spread of the honest members
    once v is among them.
    """

    kind: ClassVar[str] = "centred-clip"

    radius: float = Field(default=1.0, gt=0, le=100)
    iterations: int = Field(default=5, ge=1, le=50)

    def combine(self, payloads: Sequence[WeightedPayload], state: Floats | None = None) -> Floats:
        vectors = _decode_all(payloads)
        centre = zeros(vectors[0].numel)
        for _ in range(self.iterations):
            distances = [_distance(vector, centre) for vector in vectors]
            limit = self.radius * statistics.median(distances)
            factors = [min(1.0, limit / distance) if distance else 1.0 for distance in distances]
            for part in slabs(centre.size):
                step = np.zeros(part.stop - part.start, np.float32)
                for vector, factor in zip(vectors, factors, strict=True):
                    step += (vector.decode_slab(part) - centre[part]) * np.float32(factor)
                centre[part] += step / np.float32(len(vectors))
        return centre


def _decode_all(payloads: Sequence[WeightedPayload]) -> list[Vector]:
    return [payload.decode() for payload in drop_weightless(payloads)]


def _sort_by_coordinate(vectors: Sequence[Vector], slab: slice) -> list[Floats]:
    """Return arrays of which the k-th has the k-th smallest value of each coordinate.

    This is a sorting network of neighbours, applied to whole slabs.
    """
    # Processors differ in which of +0 and -0 they call smaller; adding zero leaves only +0.
    rows = [vector.decode_slab(slab) + np.float32(0) for vector in vectors]
    for turn in range(len(rows)):
        for first in range(turn % 2, len(rows) - 1, 2):
            low, high = rows[first], rows[first + 1]
            rows[first], rows[first + 1] = np.minimum(low, high), np.maximum(low, high)
    return rows


def _squared_distances(vectors: Sequence[Vector]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    distances = np.zeros((len(vectors), len(vectors)))
    for i, one in enumerate(vectors):
        for j, other in enumerate(vectors[:i]):
            pieces = (one.decode_slab(part) - other.decode_slab(part) for part in slabs(one.numel))
            distances[i, j] = distances[j, i] = norm(pieces) ** 2
    return distances


def _distance(vector: Vector, centre: Floats) -> float:
    return norm(vector.decode_slab(part) - centre[part] for part in slabs(centre.size))
