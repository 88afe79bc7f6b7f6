"""Means of the members' contributions.

Payloads are summed in the given order, in fp32, and the sum is divided once, so that every peer gets the same bits.
"""

import math
import statistics
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from optim.aggregation.base import AggregationRule, WeightedPayload, cached_decoders, decode_sparse, drop_weightless
from optim.aggregation.sparse_mean import MeanVector, SenderMeanVector, SparseBatch, divide_where_sent
from optim.kernels.buffer_pool import zeros
from optim.kernels.parallel import parallel_for
from optim.kernels.vectors import ArrayVector, Floats, Vector, power, slabs
from optim.options import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WeightedMean(AggregationRule):
    """A mean by the tokens that each member trained on, or with equal weights.

    `clip` scales each contribution's norm down to the median of all norms (of the part, if contributions are reduced in
    parts). This bounds the influence of one member and leaves the rest of the mean as it is; the rules of
    `optim.aggregation.robust` leave members out instead. `staleness`: a contribution that is `age` rounds late gets (1
    + age)^-staleness of its weight (0.5 in arXiv 2111.04338).
    """

    weights: Literal["tokens", "equal"] = "tokens"
    clip: bool = False
    staleness: float = Field(default=0.0, ge=0, le=10)

    def weigh(self, tokens: int, age: int) -> float:
        return (tokens if self.weights == "tokens" else 1) * power(1 + age, -self.staleness)

    @abstractmethod
    def divisors(self, weights: Sequence[float]) -> Sequence[float]:
        """Return what each member adds to the divisor of the sum, in any unit.

        Nothing, if each value has a divisor of its own.
        """

    def _normalized_weights(self, payloads: Sequence[WeightedPayload]) -> list[float]:
        """Return the weights over the largest one, so that a payload of weight 1 is summed without a multiplication."""
        largest = max(payload.weight for payload in drop_weightless(payloads))
        return [payload.weight / largest for payload in payloads]

    def _clip_scales(self, vectors: Iterable[Vector], weights: Sequence[float]) -> list[float]:
        """Return the factor of each vector: its weight, times the factor that clips its norm to the median.

        Only norms of vectors with a weight count for the median. Without `clip`, `vectors` is not read.
        """
        if not self.clip:
            return list(weights)
        norms = [vector.norm() for vector in vectors]
        median = statistics.median(norm for norm, weight in zip(norms, weights, strict=True) if weight)
        factors = [min(1.0, median / norm) if norm else 1.0 for norm in norms]
        return [weight * factor for weight, factor in zip(weights, factors, strict=True)]

    def combine_lazily(self, payloads: Sequence[WeightedPayload], state: Floats | None = None) -> Vector:
        vectors = decode_sparse(payloads)
        if not vectors:
            return super().combine_lazily(payloads, state)
        weights = self._normalized_weights(payloads)
        scales = np.array(self._clip_scales(vectors, weights), np.float32)
        return self._lazy_mean(SparseBatch.from_vectors(vectors), scales, weights, payloads)

    @abstractmethod
    def _lazy_mean(
        self, batch: SparseBatch, scales: Floats, weights: Sequence[float], payloads: Sequence[WeightedPayload]
    ) -> Vector:
        """Return a mean of sparse vectors that is computed span by span when it is read."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Mean(WeightedMean):
    """The weighted mean over all n members of the round, sum_i w_i x_i / sum_i w_i.

    With `over` = "members" and equal weights it is sum_i w_i x_i / n, so that late contributions also shorten the step
    (arXiv 2106.06639).
    """

    kind: ClassVar[str] = "mean"

    over: Literal["weights", "members"] = "weights"

    @model_validator(mode="after")
    def _check_over(self) -> Self:
        if self.over == "members" and self.weights != "equal":
            raise ValueError("over = 'members' takes weights = 'equal'")
        return self

    def _divisor(self, payloads: Sequence[WeightedPayload], weights: Sequence[float]) -> np.float32:
        """Return the divisor of a sum with these normalized weights."""
        if self.over == "weights":
            return np.float32(math.fsum(weights))
        members = drop_weightless(payloads)
        return np.float32(len(members) / max(member.weight for member in members))

    def divisors(self, weights: Sequence[float]) -> Sequence[float]:
        return weights if self.over == "weights" else [float(weight > 0) for weight in weights]

    def combine(self, payloads: Sequence[WeightedPayload], state: Floats | None = None) -> Floats:
        weights = self._normalized_weights(payloads)
        decoders = cached_decoders(payloads)
        scales, vectors = (
            self._clip_scales((decode() for decode in decoders), weights),
            (decode() for decode in decoders),
        )
        first = next(vectors)
        total = zeros(first.coefficients.numel)
        for vector, scale in zip(chain((first,), vectors), scales, strict=True):
            vector.coefficients.add_to(total, scale)
        total /= self._divisor(payloads, weights)
        # Transforms of codecs are linear, so inverting one once, on the sum, is enough.
        return first.with_coefficients(ArrayVector(total)).to_dense()

    def _lazy_mean(
        self, batch: SparseBatch, scales: Floats, weights: Sequence[float], payloads: Sequence[WeightedPayload]
    ) -> Vector:
        return MeanVector(batch, scales, self._divisor(payloads, weights))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SenderMean(WeightedMean):
    """Like `Mean`, but each coordinate is divided by the weight of the members that sent a value for it.

    The public code of arXiv 2508.15706 does this where its text has the mean over all members. With sparse
    contributions it moves several times farther, so learning rates do not carry over between the two rules. With a
    codec that transforms values, the coordinates are its coefficients (arXiv 2411.19870).
    """

    kind: ClassVar[str] = "sender-mean"

    def divisors(self, weights: Sequence[float]) -> Sequence[float]:
        return ()

    def combine(self, payloads: Sequence[WeightedPayload], state: Floats | None = None) -> Floats:
        weights = self._normalized_weights(payloads)
        decoders = cached_decoders(payloads)
        scales, vectors = (
            self._clip_scales((decode() for decode in decoders), weights),
            (decode() for decode in decoders),
        )
        first = next(vectors)
        total, senders = zeros(first.coefficients.numel), zeros(first.coefficients.numel)
        for vector, weight, scale in zip(chain((first,), vectors), weights, scales, strict=True):
            vector.coefficients.add_to(total, scale)
            vector.coefficients.add_nonzero_mask_to(senders, weight)
        parallel_for(lambda part: divide_where_sent(total[part], senders[part]), slabs(total.size))
        return first.with_coefficients(ArrayVector(total)).to_dense()

    def _lazy_mean(
        self, batch: SparseBatch, scales: Floats, weights: Sequence[float], payloads: Sequence[WeightedPayload]
    ) -> Vector:
        return SenderMeanVector(batch, scales, np.array(weights, np.float32))
