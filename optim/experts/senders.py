"""Means of experts over those who sent them.

A rule that divides by the weight of all members has counted zeros for the members that did not send an expert. Its
values are multiplied by

    sum_i w_i / sum_{i sent it} w_i

which is exactly 1 where all members sent it. All sums are in the order of the round, so all peers get the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optim.experts.partial_vector import Flags, ScaledSpans
from optim.kernels.vectors import Floats, Vector
from optim.layout import Span


@dataclass(frozen=True)
class Senders:
    """The senders of each expert of a part: `sent` has a row of flags for each member, `weights` are the members'."""

    experts: tuple[Span, ...]
    sent: Sequence[Flags]
    weights: Sequence[float]  # 0 for members that do not count

    @property
    def unsent(self) -> tuple[Span, ...]:
        """Return the spans of the experts that no member sent."""
        sums, _ = _sum_weights(self.sent, self.weights)
        return tuple(span for span, weight in zip(self.experts, sums.tolist(), strict=True) if not weight)

    def rescale(self, combined: Vector, divisors: Sequence[float]) -> Vector:
        """Return a combined vector with each expert's mean over its senders.

        Args:
            combined: of the whole part.
            divisors: what each member adds to the divisor of the rule; nothing if it divides by senders anyway.
        """
        if not divisors:
            return combined
        sums, total = _sum_weights(self.sent, divisors)
        factors: Floats = (total / np.where(sums > 0, sums, total)).astype(np.float32)
        is_changed = factors != 1
        if not is_changed.any():
            return combined
        spans = tuple(span for span, changes in zip(self.experts, is_changed, strict=True) if changes)
        return ScaledSpans(combined, spans, factors[is_changed])


def _sum_weights(
    sent: Sequence[Flags], weights: Sequence[float]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], np.float64]:
    """Return the sum of the senders' weights for each expert, and that of all members."""
    sums = np.zeros(len(sent[0]) + 1)
    for flags, weight in zip(sent, weights, strict=True):
        sums += np.append(flags, True) * np.float64(weight)
    return sums[:-1], sums[-1]
