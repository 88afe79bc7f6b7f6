"""A mean without the contributions that disagree with the others, repeat one, or are empty.

Clipping bounds the length of a contribution, but cannot see its direction: a flipped sign passes it. Honest
contributions point to the same side, on equal data as on unequal data, while a flipped one points away from the mean of
the others, and noise across it. How much honest ones agree differs between methods, and falls over a run (from 0.9 to
0.1 in docs/results/liars.md): so the test compares with the median. The rule leaves the mean of the recipe as it is,
over members or senders, so that it suits sparse contributions too, for which rules by coordinate fail.
"""

import statistics
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.aggregation.agreement import cosines_with_others, find_copies
from optim.aggregation.base import LeftOut, Screening, WeightedPayload
from optim.aggregation.mean import Mean, SenderMean, WeightedMean
from optim.aggregation.sparse_mean import SparseBatch
from optim.kernels.vectors import Floats, Vector
from optim.options import STRICT

MIN_MEMBERS = 3  # of two, nobody can tell which one disagrees


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Filtered(WeightedMean):
    """A clipped mean of the members that pass five tests, in this order.

        too large             the norm gate of all rules
        zero                  x_i = 0
        too small             |x_i| / median |x| < size * w_i / median w
        copy                  cos(x_i, x_j) > 0.999 for an earlier j in the order of the round
        against the others    c_i < agreement * median(c), where c_i = cos(x_i, sum_{j != i} s_j x_j)

    w is the weight, and s the weight times the clip. Progress grows with the number of steps, at most in proportion: a
    norm that is too small for its weight shows fewer steps than claimed. The last test is repeated without those that
    fail it, because they pull the sum of the others to their side. Where more than half would fail, none does. `over` =
    "senders": each coordinate is divided by the weight of the members that sent it (`SenderMean`).
    """

    kind: ClassVar[str] = "filtered"

    over: Literal["members", "senders"] = "members"
    clip: bool = True
    agreement: float = Field(
        default=0.25, ge=0, lt=1, description="least cosine with the mean of the others, as a share of the median one"
    )
    size: float = Field(
        default=0.5, ge=0, le=1, description="least norm for a weight, as a share of the median; with weights by tokens"
    )

    def screen(self, payloads: Sequence[WeightedPayload], usual_norm: float = 0.0) -> Screening:
        screening = super().screen(payloads, usual_norm)
        screening = _leave_out(screening, [i for i in _members(screening) if not screening.norms[i]], "zero")
        members = _members(screening)
        if not all(screening.norms[i] for i in members):
            return screening  # all are zero
        screening = _leave_out(screening, self._find_small(screening), "too small")
        members = _members(screening)
        vectors = {i: screening.payloads[i].decode().coefficients for i in members}
        copies = find_copies([vectors[i] for i in members], [screening.norms[i] for i in members])
        screening = _leave_out(screening, [members[copy] for copy in copies], "copy")
        return _leave_out(screening, self._find_against(screening, vectors), "against the others")

    def _find_small(self, screening: Screening) -> list[int]:
        """Return the members whose norm is too small for their weight."""
        members = _members(screening)
        if self.weights != "tokens" or len(members) < MIN_MEMBERS:
            return []
        weights = {i: screening.payloads[i].weight for i in members}
        least = self.size * statistics.median_low(screening.norms[i] for i in members)
        usual = statistics.median_low(weights.values())
        return [i for i in members if screening.norms[i] * usual < least * weights[i]]

    def _find_against(self, screening: Screening, vectors: dict[int, Vector]) -> list[int]:
        """Return the members whose cosine with the mean of the others is too low; none if they are the majority."""
        members = kept = _members(screening)
        for _ in range(2):
            if len(kept) < MIN_MEMBERS:
                break
            norms = [screening.norms[i] for i in members]
            weights = [screening.payloads[i].weight if i in kept else 0.0 for i in members]
            scales = self._clip_scales([vectors[i] for i in members], weights)
            cosines = cosines_with_others([vectors[i] for i in members], norms, scales)
            least = self.agreement * statistics.median_low(
                c for i, c in zip(members, cosines, strict=True) if i in kept
            )
            before, kept = kept, [i for i, c in zip(members, cosines, strict=True) if c >= least]
            if kept == before:
                break
        return [i for i in members if i not in kept] if 2 * len(kept) >= len(members) else []

    def combine(self, payloads: Sequence[WeightedPayload], state: Floats | None = None) -> Floats:
        return self._mean.combine(payloads, state)

    def _lazy_mean(
        self, batch: SparseBatch, scales: Floats, weights: Sequence[float], payloads: Sequence[WeightedPayload]
    ) -> Vector:
        return self._mean._lazy_mean(batch, scales, weights, payloads)

    @property
    def _mean(self) -> WeightedMean:
        rule = SenderMean if self.over == "senders" else Mean
        return rule(weights=self.weights, clip=self.clip, staleness=self.staleness, gate=self.gate)


def _members(screening: Screening) -> list[int]:
    """Return the indices of the payloads that have a weight."""
    return [index for index, payload in enumerate(screening.payloads) if payload.weight]


def _leave_out(screening: Screening, indices: Sequence[int], why: LeftOut) -> Screening:
    """Leave members out, unless none would remain."""
    if len(indices) == len(_members(screening)):
        return screening
    return screening.leave_out(dict.fromkeys(indices, why))
