"""EDiT's pseudo-gradient penalty (arXiv 2412.07210): larger norms count less, and outliers not at all.

It is applied to each block of the model separately if contributions travel whole, and to each part if they are reduced
in parts.

The paper compares a norm with the running mean and deviation of the same replica's norms. Here, by default, a norm is
compared with the other members of the round: with the median of their norms and the median distance from it. Members
come and go, and the result of a round then depends on its contributions alone. With `statistics = "running"` it is
compared with the running mean and deviation of all members' norms, three numbers per block that all peers share; the
norm of a member that is left out does not enter them. (The public code's running statistics start at zero without
correction, so that for hundreds of rounds no norm is found too large; here they are plain averages until 1 / rate norms
are known.) The paper takes the softmax of the norms themselves, for which ten times larger norms leave weight only to
the smallest; here it is the softmax of norms over their median.
"""

import math
import statistics
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.aggregation.base import AggregationRule, WeightedPayload, drop_weightless
from optim.kernels.buffer_pool import zeros
from optim.kernels.vectors import Floats, exp, norm
from optim.layout import Span
from optim.options import STRICT

MEDIAN_TO_STANDARD_DEVIATION = 1.4826  # of a normal distribution, over its median distance from the median
MIN_DEVIATION = 0.1  # over the median: among few members that agree closely none is an outlier
MIN_RUNNING_DEVIATION = 0.01  # over the mean of many rounds
MAX_BLOCKS = 1024  # blocks that running statistics are kept for
MAX_NORM_COUNT = 1 << 20  # bounds the running count: the rate of learning is at least a millionth
MIN_KNOWN_NORMS = 20  # before a norm can be called too large


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EditPenalty(AggregationRule):
    """Weights by norm, for each block. With G_i = |x_i|, M = median(G), s = max(1.4826 * median |G - M|, 0.1 * M).

        left out where (G_i - M) / s > limit;  w_i = softmax(-G_i / (temperature * M)) of the others
        x <- sum_i w_i x_i;  x <- x * min(1, clip / |x|)

    With `statistics` = "running", the mean and deviation of past norms replace M and s. Each norm that is kept updates
    them with a = max(rate, 1 / number of known norms):

        mean <- mean + a * (G_i - mean);  variance <- (1 - a) * (variance + a * (G_i - mean before)^2)

    If all members are left out, the block does not move, and their norms update the statistics after all.

    The smallest norm has the largest weight, which favours a member that hardly trains; `both_sides` also leaves out a
    member that is as far below the median. `tokens` = r: w_i <- (1 - r) * w_i + r * tokens_i / sum tokens. (The public
    code has r = 0.5 for members at their own pace, whose norms are then divided by the square root of their tokens.)
    """

    kind: ClassVar[str] = "penalty"

    limit: float = Field(default=3.0, gt=0, description="deviations above the median at which a member is left out")
    both_sides: bool = False
    temperature: float = Field(default=1.0, gt=0)
    tokens: float = Field(default=0.0, ge=0, le=1, description="fraction of the weights that is proportional to tokens")
    clip: float = Field(default=10.0, gt=0, description="largest norm of a block's mean")
    statistics: Literal["round", "running"] = "round"
    rate: float = Field(default=0.02, gt=0, le=1, description="rate of the running statistics, per norm")

    @property
    def state_size(self) -> int:
        return 3 * MAX_BLOCKS if self.statistics == "running" else 0

    @property
    def keeps_block_statistics(self) -> bool:
        return self.state_size > 0

    def combine(self, payloads: Sequence[WeightedPayload], state: Floats | None = None) -> Floats:
        members = drop_weightless(payloads)
        spans = _block_spans(members[0])
        tokens = [member.weight for member in members]
        norms = [_block_norms(member, spans) for member in members]  # one dense vector in memory at a time
        norms_by_block = [[row[block] for row in norms] for block in range(len(spans))]
        running = (
            [None] * len(spans) if state is None or not self.state_size else list(state.reshape(-1, 3)[: len(spans)])
        )
        weights = [
            self._block_weights(sizes, tokens, statistics_before)
            for sizes, statistics_before in zip(norms_by_block, running, strict=True)
        ]
        total = zeros(members[0].numel)
        for index, member in enumerate(members):
            values = member.decode().to_dense()
            for (start, stop), block_weights in zip(spans, weights, strict=True):
                total[start:stop] += values[start:stop] * np.float32(block_weights[index])
        for start, stop in spans:
            size = norm([total[start:stop]])
            if size > self.clip:
                total[start:stop] *= np.float32(self.clip / size)
        return total

    def _block_weights(
        self, norms: Sequence[float], tokens: Sequence[float], running: Floats | None = None
    ) -> list[float]:
        """Return the weight of each member; they sum to 1, or to 0 if all are left out."""
        if self.tokens:
            norms = [size / math.sqrt(count) for size, count in zip(norms, tokens, strict=True)]
        middle = statistics.median(norms)
        if not middle:
            return [1 / len(norms)] * len(norms)
        kept = self._accept_by_round(norms, middle) if running is None else self._accept_by_running(running, norms)
        least = min((size for size, keep in zip(norms, kept, strict=True) if keep), default=0.0)
        steep = self.temperature * middle
        soft = [keep * exp((least - size) / steep) for size, keep in zip(norms, kept, strict=True)]
        counts = [keep * count for count, keep in zip(tokens, kept, strict=True)]
        mixed = zip(_normalize(soft), _normalize(counts), strict=True)
        return [(1 - self.tokens) * by_norm + self.tokens * by_tokens for by_norm, by_tokens in mixed]

    def _accept_by_round(self, norms: Sequence[float], middle: float) -> list[bool]:
        """Return whether each norm is within the limits of this round's own norms."""
        deviation = MEDIAN_TO_STANDARD_DEVIATION * statistics.median(abs(size - middle) for size in norms)
        return self._is_within_limit(norms, middle, max(deviation, MIN_DEVIATION * middle))

    def _accept_by_running(self, running: Floats, norms: Sequence[float]) -> list[bool]:
        """Return whether each norm is within the limits of past rounds, and update `running`: count, mean, variance."""
        count, mean, variance = map(float, running)
        kept = [True] * len(norms)
        if count >= MIN_KNOWN_NORMS:
            kept = self._is_within_limit(norms, mean, max(math.sqrt(variance), MIN_RUNNING_DEVIATION * mean))
        for size, keep in zip(norms, kept, strict=True):
            if keep or not any(kept):
                count += 1
                rate, far = max(self.rate, 1 / count), size - mean
                mean += rate * far
                variance = (1 - rate) * (variance + rate * far * far)
        running[:] = min(count, float(MAX_NORM_COUNT)), mean, variance
        return kept

    def _is_within_limit(self, norms: Sequence[float], middle: float, deviation: float) -> list[bool]:
        far = self.limit * deviation
        return [size - middle <= far and (not self.both_sides or middle - size <= far) for size in norms]


def _normalize(values: Sequence[float]) -> list[float]:
    total = math.fsum(values)
    return [value / total if total else 0.0 for value in values]


def _block_spans(payload: WeightedPayload) -> Sequence[Span]:
    layout = payload.codec.bound_layout(payload.numel)
    return layout.block_spans if layout else ((0, payload.numel),)


def _block_norms(payload: WeightedPayload, spans: Sequence[Span]) -> list[float]:
    values = payload.decode().to_dense()
    return [norm([values[start:stop]]) for start, stop in spans]
