"""A training method: one part of each kind."""

from collections.abc import Callable
from dataclasses import dataclass, field

from optim.adoption import Adoption
from optim.aggregate import Aggregate
from optim.codecs.codec import Codec
from optim.feedback import Feedback
from optim.inner.inner import Inner
from optim.schedules import Schedule
from optim.signals import Signal
from optim.topologies import Topology
from optim.updates import Update

MEMORY = "aggregate_memory"  # the slot of what the aggregate remembers
USUAL = "usual_weight"  # the slot of what is usually behind a round
NO_VECTORS = (MEMORY, USUAL)  # slots that are not of the model's size


@dataclass(frozen=True)
class Method:
    """A composition, as it is in some round. `paper` names where it comes from."""

    name: str
    paper: str
    inner: Inner
    signal: Signal
    schedule: Schedule
    codec: Codec
    feedback: Feedback
    topology: Topology
    aggregate: Aggregate
    update: Update
    adoption: Adoption
    knots: tuple[int, ...] = (0,)  # rounds between which every option only rises, only falls, or rests
    in_round: Callable[[int], "Method"] | None = field(default=None, compare=False, repr=False)

    def at(self, round_number: int) -> "Method":
        """The same with the options of that round."""
        return self if self.in_round is None else self.in_round(round_number)

    @property
    def slots(self) -> tuple[str, ...]:
        """The vectors beside the anchor that all peers hold alike, in ascending order; each zero at the start."""
        remembered = (MEMORY,) if self.aggregate.memory else ()
        usual = (USUAL,) if self.update.is_shortened else ()
        return tuple(sorted({*self.update.slots, *self.signal.shares[1:], *remembered, *usual}))

    def size_of(self, slot: str, numel: int) -> int:
        """Values of that vector, for a model of `numel` parameters."""
        return {MEMORY: self.aggregate.memory, USUAL: 1}.get(slot, numel)
