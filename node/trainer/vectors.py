"""Change a trainer's vectors in shared memory so that a kill at any instant leaves a change that can be finished.

Each change has two parts. The first computes a result into the scratch and changes nothing else. Then the new counters
are published together with the change that is pending, and the second part stores the result. Every step of the second
part gives the same result however often it runs, because it reads nothing that it writes. So the next trainer (or the
daemon, if none follows) finishes a change that was begun, and nothing counts twice.

Two changes have no second part: an inner step, and a copy from an accelerator. A trainer that is killed in one leaves
partly written weights. They are replaced by the reference, so the inner steps since then are lost and not counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt
from torch import Tensor

from node.trainer.counters import Counters, StepTotals
from node.trainer.ipc.shared_memory import REFERENCE, RESIDUAL, SharedMemory, locally_trained_names
from optim.codecs.base import Payload
from optim.exchange import ContributionEncoder
from optim.kernels.vectors import SLAB_SIZE, slabs
from optim.layout import Span, clip_spans
from optim.merge_policy import Interpolate, RebaseOnAnchor
from optim.round_plan import RoundPlan, RoundPlanner
from optim.signals import SignalInputs

MAX_ROUNDS_SKIPPED = 64
ADOPTION_STAGES = 5


class Change(BaseModel):
    """A change of the vectors that has begun.

    "overwrite": the weights change in place. "sent": residual and reference after a contribution to `round`.
    "residual": the residual is that in the scratch. "measure": the reference is the anchor of `round`. "adopt": the
    anchor of `round` after that of `before`, from this stage on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["overwrite", "sent", "residual", "measure", "adopt"]
    round: NonNegativeInt = 0
    before: NonNegativeInt = 0
    stage: NonNegativeInt = 0


@dataclass(frozen=True)
class _Slab:
    """A slab of the locally trained vectors: the name, its place in that vector, and in all of them together."""

    name: str
    own: slice
    whole: slice


class TrainerVectors:
    """The vectors of a trainer in the shared memory, without the model that is trained with them."""

    def __init__(self, shared_memory: SharedMemory, planner: RoundPlanner) -> None:
        self._shared_memory = shared_memory
        self._planner = planner
        self._signal = planner.method.signal
        self._trained_names = locally_trained_names(planner.method)
        self.by_name = shared_memory.vectors
        self.residual, self.reference = self.by_name[RESIDUAL], self.by_name[REFERENCE]
        self.scratch = shared_memory.scratch

    def publish(self, counters: Counters, change: Change | None = None) -> None:
        """Publish the counters, or those after a change that begins now."""
        pending = None if change is None else change.model_dump(exclude_defaults=True)
        self._shared_memory.publish(counters.model_dump(mode="json"), pending)

    def read(self) -> Counters | None:
        """Finish a change that was begun, and return the counters of these vectors; `None` if they have none."""
        snapshot = self._shared_memory.read_snapshot()
        if snapshot is None:
            return None
        counters = Counters.model_validate(snapshot.meta)
        if snapshot.pending is None:
            return counters
        counters = self._finish(Change.model_validate(snapshot.pending), counters)
        self.publish(counters)
        return counters

    def store(self, counters: Counters, change: Change) -> None:
        """Begin a change whose result is in the scratch, and finish it."""
        self.publish(counters, change)
        self._finish(change, counters)
        self.publish(counters)

    def _finish(self, change: Change, counters: Counters) -> Counters:
        match change.kind:
            case "overwrite":
                return self._drop_progress(counters)
            case "sent":
                self._store_sent(self._planner.plan(change.round))
            case "residual":
                self.residual.copy_(self.scratch[: self.residual.numel()])
            case "measure":
                self.measure_from(change.round)
            case "adopt":
                self._adopt(change, counters)
        return counters

    def _drop_progress(self, counters: Counters) -> Counters:
        """Replace partly written weights by the reference; partly written moments stay."""
        for piece in self._pieces():
            self.by_name[piece.name][piece.own] = self.reference[piece.whole]
        lost = {"since_message": StepTotals(), "ledger": "", "obstacle": "killed in the middle of a step"}
        return counters.model_copy(update=lost)

    def _pieces(self) -> Iterator[_Slab]:
        for number, name in enumerate(self._trained_names):
            first = number * self._planner.numel
            for own in slabs(self._planner.numel, SLAB_SIZE):
                yield _Slab(name, own, slice(first + own.start, first + own.stop))

    def _anchor_vectors(self, round_number: int) -> dict[str, Tensor]:
        names, anchor = self._signal.shared_names, self._shared_memory.anchor(round_number)
        return dict(zip(names, anchor.view(len(names), -1), strict=True))

    def measure_from(self, round_number: int) -> None:
        """Copy the locally trained ones of the shared vectors of a round into the reference."""
        shared = self._anchor_vectors(round_number)
        for piece in self._pieces():
            self.reference[piece.whole] = shared[piece.name][piece.own]

    def encode_progress(
        self, counters: Counters, encoder: ContributionEncoder, trained: Sequence[bool] = ()
    ) -> list[Payload]:
        """Encode the progress since the reference; leave in the scratch what it does not carry.

        `trained`: the experts to send, by default all.
        """
        delta = self.scratch[: self._planner.signal_numel]
        rows = delta.view(self._signal.vector_count, -1)
        anchor = self._anchor_vectors(counters.round)
        reference = self.reference.view(len(self._trained_names), -1)
        for slab in slabs(self._planner.numel, SLAB_SIZE):
            measured = self._signal.measure(
                SignalInputs(
                    live={name: self.by_name[name][slab] for name in self._trained_names},
                    reference=dict(zip(self._trained_names, reference[:, slab], strict=True)),
                    anchor={name: vector[slab] for name, vector in anchor.items()},
                    inner_state={name: self.by_name[name][slab] for name in self._signal.consumed_names},
                    steps=counters.since_message.steps,
                )
            )
            rows[:, slab] = measured.view(len(rows), -1)
        return encoder.encode(counters.round, delta, self.residual, trained)

    def _store_sent(self, plan: RoundPlan) -> None:
        """Store the residual, measure progress from the sent weights, and clear the vectors that were consumed."""
        ContributionEncoder(self._planner).keep_remainder(plan.round, self.scratch, self.residual)
        for piece in self._pieces():
            for start, stop in _within(plan.spans, piece):
                self.reference[piece.whole][start:stop] = self.by_name[piece.name][piece.own][start:stop]
        for name in self._signal.consumed_names:
            self.by_name[name].zero_()

    def restore_payloads(
        self, round_number: int, payloads: Sequence[Payload], encoder: ContributionEncoder, weight: float = 1.0
    ) -> None:
        """Compute the residual with a contribution added to it, times `weight`, in the scratch."""
        total = self.scratch[: self.residual.numel()].copy_(self.residual)
        encoder.restore_to_residual(round_number, payloads, total, weight)

    def prepare_adoption(self, before: int, after: int) -> None:
        """Compute the progress since the reference in the scratch; of values that `Interpolate` mixes, their share."""
        policy, spans = self._planner.method.adoption, self._exchanged_spans(before, after)
        for piece in self._pieces():
            live, progress = self.by_name[piece.name][piece.own], self.scratch[piece.whole]
            progress.copy_(live).sub_(self.reference[piece.whole])
            if isinstance(policy, Interpolate):
                for start, stop in _within(spans, piece):
                    progress[start:stop] = policy.alpha * live[start:stop]

    def _adopt(self, change: Change, counters: Counters) -> None:
        """Apply `optim.merge_policy`: stage by stage, each published, because each overwrites what the others read."""
        policy, spans = self._planner.method.adoption, self._exchanged_spans(change.before, change.round)
        keeps_all = not isinstance(policy, RebaseOnAnchor) or policy.keep == 1
        shared = self._anchor_vectors(change.round)
        for stage in range(change.stage, ADOPTION_STAGES):
            if keeps_all and stage in (1, 2, 4):
                continue
            if stage > change.stage:
                self.publish(counters, change.model_copy(update={"stage": stage}))
            for piece in self._pieces():
                self._adopt_piece(stage, piece, shared[piece.name][piece.own], _within(spans, piece))

    def _adopt_piece(self, stage: int, piece: _Slab, anchor: Tensor, exchanged: Sequence[Span]) -> None:
        policy, live, reference = self._planner.method.adoption, self.by_name[piece.name][piece.own], self.reference
        base, progress = reference[piece.whole], self.scratch[piece.whole]
        keep = policy.keep if isinstance(policy, RebaseOnAnchor) else 1.0
        residual = self.residual[piece.whole]
        match stage:
            case 0:
                base.copy_(anchor)
                if policy.unsent:
                    base.sub_(residual, alpha=policy.unsent)
            case 1:  # the new residual, in the place of the weights
                for start, stop in exchanged:
                    live[start:stop] = residual[start:stop] - progress[start:stop]
            case 2:
                for start, stop in exchanged:
                    residual[start:stop] = live[start:stop]
            case 3:
                live.copy_(progress).add_(base)
                for start, stop in exchanged:
                    self._mix(live[start:stop], progress[start:stop], base[start:stop], keep)
            case 4:
                for start, stop in exchanged:
                    base[start:stop] = live[start:stop]

    def _mix(self, live: Tensor, progress: Tensor, base: Tensor, keep: float) -> None:
        policy = self._planner.method.adoption
        if isinstance(policy, Interpolate):
            live.copy_(progress + (1 - policy.alpha) * base)
        elif keep < 1:
            live.copy_(base + keep * progress)

    def _exchanged_spans(self, before: int, after: int) -> tuple[Span, ...]:
        """Return the spans of the reference that these rounds exchanged; all after many rounds or a change of chain."""
        program, size = self._planner, self.reference.numel()
        if not 0 <= after - before <= MAX_ROUNDS_SKIPPED:
            return ((0, size),)
        spans = (span for number in range(before, after) for span in program.plan(number).spans)
        return clip_spans(sorted(set(spans)), 0, size)


def _within(spans: Sequence[Span], piece: _Slab) -> Sequence[Span]:
    """Return the parts of these spans within a piece, relative to it."""
    return clip_spans(spans, piece.whole.start, piece.whole.stop)
