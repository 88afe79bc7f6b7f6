"""A mean without the contributions that disagree with the others, repeat one, or have a size that no work explains.

Clipping bounds the length of a contribution, but cannot see its direction: a flipped sign passes it. Honest
contributions point to the same side, on equal data as on unequal data, while a flipped one points away from the mean of
the others, and noise across it. How much honest ones agree differs between methods, and falls over a run (from 0.9 to
0.1 in docs/results/liars.md): so the test compares with the median. The rule leaves the mean of the recipe as it is,
over members or senders, so that it suits sparse contributions too, for which rules by coordinate fail.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.aggregation.agreement import cosines_with_others, find_copies
from optim.aggregation.base import LeftOut, RoundVerdict, WeightedPayload
from optim.aggregation.contribution_memory import SKETCH_BUCKETS, ContributionMemory, sketch
from optim.aggregation.mean import Mean, SenderMean, WeightedMean
from optim.aggregation.sparse_mean import SparseBatch
from optim.kernels.vectors import Floats, Vector
from optim.options import STRICT

MIN_MEMBERS = 3  # of two, nobody can tell which one disagrees


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Filtered(WeightedMean):
    """A clipped mean of the members that pass six tests, in this order.

        zero                  x_i = 0
        too large             the norm gate of all rules;  |x_i| / median |x| > excess * max(1, w_i / median w)
        too small             |x_i| / median |x| < size * w_i / median w
        copy                  cos(x_i, x_j) > 0.999 for an earlier j in the order of the round
        replay                the same direction as one of the last `memory` contributions of earlier rounds
        against the others    c_i < agreement * median(c), where c_i = cos(x_i, sum_{j != i} s_j x_j)

    w is the weight, and s the weight times the clip. Progress grows with the number of steps, at most in proportion: a
    norm that is too small for its weight shows fewer steps than claimed. One that is too large would be clipped, but
    shows a peer that is far from the others. The last test is repeated without those that fail it, because they pull
    the sum of the others to their side. Where more than half would fail, none does. `over` = "senders": each coordinate
    is divided by the weight of the members that sent it (`SenderMean`).
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
    excess: float = Field(default=3.0, ge=2, le=1e6, description="largest norm for a weight, in medians of the round")
    memory: int = Field(default=0, ge=0, le=65_536, description="contributions that a replay is compared with")

    @property
    def state_size(self) -> int:
        return self.memory * SKETCH_BUCKETS

    @property
    def state_range(self) -> tuple[float, float]:
        return -1.0, 1.0

    def screen(
        self, payloads: Sequence[WeightedPayload], usual_norm: float = 0.0, state: Floats | None = None
    ) -> RoundVerdict:
        screening = super().screen(payloads, usual_norm)
        screening = _leave_out(screening, [i for i in _members(screening) if not screening.norms[i]], "zero")
        if not all(screening.norms[i] for i in _members(screening)):
            return screening  # all are zero
        small, large = self._find_wrong_sizes(screening)
        screening = _leave_out(_leave_out(screening, large, "too large"), small, "too small")
        members = _members(screening)
        vectors = {i: screening.payloads[i].decode().coefficients for i in members}
        screening = self._leave_out_repeated(screening, vectors, state)
        return _leave_out(screening, self._find_against(screening, vectors), "against the others")

    def _find_wrong_sizes(self, screening: RoundVerdict) -> tuple[list[int], list[int]]:
        """Return the members whose norm is too small and too large for their weight."""
        members = _members(screening)
        if len(members) < MIN_MEMBERS:
            return [], []
        middle = statistics.median_low(screening.norms[i] for i in members)
        usual = statistics.median_low(screening.payloads[i].weight for i in members)
        norms = {i: screening.norms[i] / middle for i in members}
        weights = {i: screening.payloads[i].weight / usual for i in members}
        small = [i for i in members if self.weights == "tokens" and norms[i] < self.size * weights[i]]
        return small, [i for i in members if norms[i] > self.excess * max(1.0, weights[i])]

    def _leave_out_repeated(
        self, screening: RoundVerdict, vectors: Mapping[int, Vector], state: Floats | None
    ) -> RoundVerdict:
        """Leave out copies and replays, and remember the others."""
        members = _members(screening)
        sketches = {i: sketch(vectors[i]) for i in members}
        copies = find_copies([vectors[i] for i in members], [screening.norms[i] for i in members], [*sketches.values()])
        screening = _leave_out(screening, [members[copy] for copy in copies], "copy")
        if state is None or not self.memory:
            return screening
        memory, members = ContributionMemory(state), _members(screening)
        replays = memory.find_replays([sketches[i] for i in members])
        screening = _leave_out(screening, [members[replay] for replay in replays], "replay")
        memory.remember([sketches[i] for i in members if i not in screening.left_out])
        return screening

    def _find_against(self, screening: RoundVerdict, vectors: dict[int, Vector]) -> list[int]:
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

    def divisors(self, weights: Sequence[float]) -> Sequence[float]:
        return self._mean.divisors(weights)

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


def _members(screening: RoundVerdict) -> list[int]:
    """Return the indices of the payloads that have a weight."""
    return [index for index, payload in enumerate(screening.payloads) if payload.weight]


def _leave_out(screening: RoundVerdict, indices: Sequence[int], why: LeftOut) -> RoundVerdict:
    """Leave members out, unless none would remain."""
    if len(indices) == len(_members(screening)):
        return screening
    return screening.leave_out(dict.fromkeys(indices, why))
