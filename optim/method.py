"""A training method: one component of each kind."""

from collections.abc import Callable
from dataclasses import dataclass, field

from optim.aggregation.base import AggregationRule
from optim.codecs.base import Codec
from optim.exchange_schedule import Schedule
from optim.feedback import Feedback
from optim.inner.base import InnerUpdateRule
from optim.merge_policy import MergePolicy
from optim.outer import OuterOptimizer
from optim.signals import Signal
from optim.topologies import Topology

AGGREGATION_STATE = "aggregate_memory"  # slot of the aggregation rule's state
REFERENCE_WEIGHT = "usual_weight"  # slot of the weight that rounds usually have
SMALL_SLOTS = (AGGREGATION_STATE, REFERENCE_WEIGHT)  # not of the model's size


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
    topology: Topology
    aggregate: AggregationRule
    update: OuterOptimizer
    adoption: MergePolicy
    breakpoints: tuple[int, ...] = (0,)  # rounds; between two of them every option only rises, only falls, or stays
    build_for_round: Callable[[int], "Method"] | None = field(default=None, compare=False, repr=False)

    def at_round(self, round_number: int) -> "Method":
        """Return this method with the options of that round."""
        return self if self.build_for_round is None else self.build_for_round(round_number)

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the sorted names of the vectors besides the anchor that all peers share.

        Each is zero at the start.
        """
        aggregation = (AGGREGATION_STATE,) if self.aggregate.state_size else ()
        reference = (REFERENCE_WEIGHT,) if self.update.is_scaled_by_weight else ()
        return tuple(sorted({*self.update.slots, *self.signal.shared_names[1:], *aggregation, *reference}))

    def slot_numel(self, slot: str, numel: int) -> int:
        """Return the size of a slot, for a model of `numel` parameters."""
        return {AGGREGATION_STATE: self.aggregate.state_size, REFERENCE_WEIGHT: 1}.get(slot, numel)
