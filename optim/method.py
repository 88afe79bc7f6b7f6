"""A training method: one component of each kind."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from optim.aggregation.base import AggregationRule
from optim.codecs.base import Codec
from optim.feedback import Feedback
from optim.inner.base import InnerUpdateRule
from optim.merge_policy import MergePolicy
from optim.outer import OuterOptimizer
from optim.schedules.exchange_schedule import Schedule
from optim.signals import Signal
from optim.topologies import TopologyOptions

AGGREGATION_STATE = "aggregate_memory"  # slot of the aggregation rule's state
REFERENCE_WEIGHT = "usual_weight"  # slot of the weight that rounds usually have
USUAL_NORM = "usual_norm"  # slot of the norms that contributions usually have, by the kind of round
STEPS_MADE = "steps_made"  # slot of the number of outer steps, where a round may make none
SMALL_SLOTS = (AGGREGATION_STATE, REFERENCE_WEIGHT, USUAL_NORM, STEPS_MADE)  # not of the model's size
MAX_SLOT_VALUE = 2.0**96  # of momenta and moments; beyond it, a state cannot be an honest one


@dataclass(frozen=True)
class Method:
    """A composition of components with their options of one round. `paper` cites its source."""

    name: str
    paper: str
    inner: InnerUpdateRule
    signal: Signal
    schedule: Schedule
    codec: Codec
    feedback: Feedback
    topology: TopologyOptions
    aggregate: AggregationRule
    update: OuterOptimizer
    adoption: MergePolicy
    breakpoints: tuple[int, ...] = (0,)  # rounds; between two of them every option only rises, only falls, or stays
    build_for_round: Callable[[int], "Method"] | None = field(default=None, compare=False, repr=False)
    has_small_memory: bool = False  # of this peer: vectors that only rounds use are outside of main memory

    def at_round(self, round_number: int) -> "Method":
        """Return this method with the options of that round."""
        return self if self.build_for_round is None else self.build_for_round(round_number)

    def with_parts(self, **parts: object) -> "Method":
        """Return this method with other parts, the same in every round."""
        build = self.build_for_round
        changed = None if build is None else lambda number: replace(build(number), **parts)  # type: ignore[arg-type]
        return replace(self, **parts, build_for_round=changed)  # type: ignore[arg-type]

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the sorted names of the vectors besides the anchor that all peers share.

        Each is zero at the start.
        """
        aggregation = (AGGREGATION_STATE,) if self.aggregate.state_size else ()
        reference = (REFERENCE_WEIGHT,) if self.update.is_scaled_by_weight else ()
        steps = (STEPS_MADE,) if self.signal.counts_steps else ()
        small = (*aggregation, *reference, *steps, USUAL_NORM)
        return tuple(sorted({*self.update.slots, *self.signal.shared_names[1:], *small}))

    @property
    def outer_names(self) -> tuple[str, ...]:
        """Return the slots of the model's size that no trainer has."""
        return tuple(name for name in self.slots if name not in (*SMALL_SLOTS, *self.signal.shared_names))

    @property
    def period(self) -> int:
        """Return the number of rounds after which the same values are sent again."""
        return math.lcm(self.schedule.period, self.signal.period)

    def slot_numel(self, slot: str, numel: int) -> int:
        """Return the size of a slot, for a model of `numel` parameters."""
        small = {
            AGGREGATION_STATE: self.aggregate.state_size,
            REFERENCE_WEIGHT: 1,
            USUAL_NORM: self.period,
            STEPS_MADE: 1,
        }
        return small.get(slot, numel)

    def slot_range(self, slot: str) -> tuple[float, float]:
        """Return the least and the largest value that a slot may have in a state of others."""
        if slot == AGGREGATION_STATE:
            low, high = self.aggregate.state_range
            return low, min(high, MAX_SLOT_VALUE)
        is_positive = slot in (*SMALL_SLOTS, *self.update.positive_slots)
        return 0.0 if is_positive else -MAX_SLOT_VALUE, MAX_SLOT_VALUE
