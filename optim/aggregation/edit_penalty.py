"""EDiT's penalty of pseudo-gradients (arXiv 2412.07210): who moved farther counts less, who moved much too far not at
all. It is applied to each block of the model by itself where messages travel whole, and to each part where they are
reduced in parts.

The paper compares a norm with the running mean and deviation of that replica's own norms. Here a norm is by default
compared with those of the other members of the round, by their median and the median distance from it: members come
and go, and what a round comes to then depends on its messages alone. With `statistics = "running"` it is compared with
the running mean and deviation of all members' norms, which are part of what all peers hold alike, three numbers a
block; a member that was left out teaches them nothing. (The public code's running statistics start at zero without
correction, so that for hundreds of rounds nothing is found too large: here they are plain averages until 1 / rate norms
are known.) The paper's softmax is taken of the norms as they are, and ten times larger norms leave only the smallest a
weight; here it is taken of norms over their median.
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
from optim.kernels.reproducible_math import exp
from optim.kernels.vectors import Floats, norm
from optim.layout import Span
from optim.options import STRICT

MEDIAN_TO_STANDARD_DEVIATION = 1.4826  # of a normal distribution, in units of the median distance from the median
MIN_DEVIATION = 0.1  # in units of the median: among few members that agree closely nobody is far off
MIN_RUNNING_DEVIATION = 0.01  # in units of the mean, of many rounds
MAX_BLOCKS = 1024  # that have a memory
MAX_NORM_COUNT = 1 << 20  # norms; a rate is never below a millionth
MIN_KNOWN_NORMS = 20  # norms, before one is called too large


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EditPenalty(AggregationRule):
    """By block, with G_i = |x_i|, M = median(G), s = max(1.4826 * median |G - M|, 0.1 * M):

    left out where (G_i - M) / s > limit;  w_i = softmax(-G_i / (temperature * M)) of the others
    x <- sum_i w_i x_i;  x <- x * min(1, clip / |x|)

    With `statistics` = "running", mean and deviation of past norms stand for M and s; from each norm that is kept they
    learn with a = max(rate, 1 / norms known):
    mean <- mean + a * (G_i - mean);  variance <- (1 - a) * (variance + a * (G_i - mean before)^2)
    Where all members are left out the block stays as it is, and then their norms are learnt from.

    The smallest norm has the largest weight, so a member that hardly trains is favoured; with `both_sides` one that is
    as far below the median is left out too. `tokens` = r (the public code: 0.5 for members at their own pace, whose
    norms then count over the square root of their tokens): w_i <- (1 - r) * w_i + r * tokens_i / sum tokens.
    """

    kind: ClassVar[str] = "penalty"

    limit: float = Field(default=3.0, gt=0, description="deviations above the median that leave a member out")
    both_sides: bool = False
    temperature: float = Field(default=1.0, gt=0)
    tokens: float = Field(default=0.0, ge=0, le=1, description="share of the weights that goes by tokens")
    clip: float = Field(default=10.0, gt=0, description="largest norm of a block's mean")
    statistics: Literal["round", "running"] = "round"
    rate: float = Field(default=0.02, gt=0, le=1, description="of the running statistics, a norm")

    @property
    def state_size(self) -> int:
        return 3 * MAX_BLOCKS if self.statistics == "running" else 0

    def combine(self, payloads: Sequence[WeightedPayload], state: Floats | None = None) -> Floats:
        members = drop_weightless(payloads)
        spans = _block_spans(members[0])
        tokens = [member.weight for member in members]
        norms = [_block_norms(member, spans) for member in members]  # one dense message at a time
        blocks = [[row[place] for row in norms] for place in range(len(spans))]
        known = (
            [None] * len(spans) if state is None or not self.state_size else list(state.reshape(-1, 3)[: len(spans)])
        )
        weights = [self._block_weights(sizes, tokens, past) for sizes, past in zip(blocks, known, strict=True)]
        total = zeros(members[0].numel)
        for number, member in enumerate(members):
            values = member.decode().to_dense()
            for (start, stop), shares in zip(spans, weights, strict=True):
                total[start:stop] += values[start:stop] * np.float32(shares[number])
        for start, stop in spans:
            size = norm([total[start:stop]])
            if size > self.clip:
                total[start:stop] *= np.float32(self.clip / size)
        return total

    def _block_weights(
        self, norms: Sequence[float], tokens: Sequence[float], running: Floats | None = None
    ) -> list[float]:
        """Of each member, adding up to 1, or to 0 where all are left out."""
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
        """By the round's own norms."""
        deviation = MEDIAN_TO_STANDARD_DEVIATION * statistics.median(abs(size - middle) for size in norms)
        return self._is_within_limit(norms, middle, max(deviation, MIN_DEVIATION * middle))

    def _accept_by_running(self, running: Floats, norms: Sequence[float]) -> list[bool]:
        """By those known from past rounds: how many, their mean and variance."""
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
