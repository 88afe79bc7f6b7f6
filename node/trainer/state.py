"""Hold a trainer's own state, and change it by contributions and anchors.

For the signal "pseudo-gradient":

    delta         = reference - weights             local progress since `reference`; points uphill
    contribution:   x = residual * decay + delta;  send C(x);  residual <- x - D(C(x));  reference <- weights
    new anchor:     residual <- residual + D(contribution)      only if the outstanding contribution was excluded
                    weights <- anchor + (weights - reference);  reference <- anchor     (or see `optim.merge_policy`)

So steps made after the contribution was sent survive the new anchor, and nothing is lost when a contribution misses its
round (arXiv 1901.09847): the applied contributions, the residual and (reference - weights) add up to all progress.
Other signals measure other quantities, and share more vectors than the weights (`optim.signals`).
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from node.ipc.channel import ContributionHeader, ContributionOutcome
from node.ipc.shared_memory import REFERENCE, RESIDUAL, SharedMemory, locally_trained_names
from node.model import LanguageModel
from node.trainer.counters import Counters, Outstanding, SettledOutcome, StepTotals
from node.trainer.inner_step import InnerOptimizer
from optim.codecs.base import Payload
from optim.exchange import ContributionEncoder
from optim.inner.base import WEIGHTS
from optim.layout import Span, clip_spans
from optim.merge_policy import Interpolate, RebaseOnAnchor
from optim.round_plan import RoundPlan, RoundPlanner
from optim.signals import SignalInputs

MAX_ROUNDS_SKIPPED = 64
MAX_SETTLED = 8


class TrainerState:
    """Weights and optimizer vectors on the model's device; `reference` and `residual` are flat fp32 on the CPU.

    `reference` holds the shared vectors that the trainer trains locally, one after the other, the weights first.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: InnerOptimizer,
        program: RoundPlanner,
        sender: ContributionEncoder,
        shared_memory: SharedMemory,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._program = program
        self._signal = program.method.signal
        self._sender = sender
        self._shared_memory = shared_memory
        self._trained_names = locally_trained_names(program.method)
        self.reference = torch.zeros(program.numel * len(self._trained_names))
        self.residual = torch.zeros(program.signal_numel)
        # Kept, because allocating new memory takes longer than the copy into it.
        self._staging = torch.empty_like(self.reference, pin_memory=shared_memory.is_pinned)
        self.counters = Counters()

    def start(self, round_number: int) -> None:
        """Start from the anchor of a round, with no steps made."""
        self._set_reference(round_number)
        self._load_live(self.reference)
        began = self._program.steps_before(round_number)
        self.counters = Counters(round=round_number, began=began, started_at=round_number)
        self._set_optimizer_age()

    def restore(self) -> bool:
        """Load the newest snapshot; returns False if there is none."""
        snapshot = self._shared_memory.read_snapshot()
        if snapshot is None:
            return False
        self.counters = Counters.model_validate(snapshot.meta)
        for name, tensor in self._snapshot_vectors().items():
            tensor.copy_(snapshot.vectors[name])
        self._set_optimizer_age()
        return True

    def _advance_age(self, steps: int) -> None:
        """Advance the learning rate by steps of the plan that this peer did not make.

        So it trains at the same rate as the other peers.
        """
        self.update(began=self.counters.began + max(0, steps))
        self._set_optimizer_age()

    def _set_optimizer_age(self) -> None:
        began = self.counters.began
        self._optimizer.age_at_join, self._optimizer.moments_age_at_join = (
            began,
            began if len(self._trained_names) > 1 else 0,
        )

    def save(self) -> None:
        """Write a snapshot into the shared memory."""
        self._shared_memory.write_snapshot(self._snapshot_vectors(), self.counters.model_dump(mode="json"))

    @property
    def plan(self) -> RoundPlan:
        """Return the plan of the round for which the next contribution is made."""
        return self._program.plan(self.counters.round)

    def make_contribution(self) -> ContributionHeader:
        """Encode the progress since the reference into the outbox; no contribution may be outstanding."""
        counters = self.counters
        if counters.outstanding is not None:
            raise ValueError("the contribution before this one is still outstanding")
        live = self._copy_live()
        delta = self._signal.measure(self._progress(live))
        parts = self._sender.encode(counters.round, delta, self.residual)
        self._write_contribution(parts)
        self._reset_progress(live)
        self._advance_age(self.plan.steps - counters.since_message.steps)
        outstanding = Outstanding(
            serial=counters.messages + 1,
            round=counters.round,
            sizes=tuple(len(part) for part in parts),
            work=counters.unreported + counters.since_message,
            trace=counters.trace,
        )
        self.update(
            messages=outstanding.serial,
            outstanding=outstanding,
            since_message=StepTotals(),
            unreported=StepTotals(),
            anchors=(),
            started_at=None,
            obstacle="",
        )
        return outstanding.to_header()

    def _progress(self, live: Tensor) -> SignalInputs:
        return SignalInputs(
            live=self._by_name(live, self._trained_names),
            reference=self._by_name(self.reference, self._trained_names),
            anchor=self._by_name(self._shared_memory.anchor(self.counters.round), self._signal.shared_names),
            inner_state={name: self._optimizer.vectors[name].cpu() for name in self._signal.consumed_names},
            steps=self.counters.since_message.steps,
        )

    def _by_name(self, vector: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        return dict(zip(names, torch.split(vector, self._program.numel), strict=True))

    def _reset_progress(self, live: Tensor) -> None:
        """Measure progress from the sent weights, and clear the vectors that the signal consumed."""
        for start, stop in clip_spans(self.plan.spans, 0, self.reference.numel()):
            self.reference[start:stop] = live[start:stop]
        for name in self._signal.consumed_names:
            self._optimizer.vectors[name].zero_()

    def apply_anchor(self, round_number: int, outcome: ContributionOutcome) -> None:
        """Move to the anchor of a round and keep the progress since the reference."""
        before, outstanding = self.counters.round, self.counters.outstanding
        if round_number == before and outstanding is None:
            return  # sent twice, around a restart; x + (y - x) would only add rounding errors
        if outstanding is not None and outcome == "excluded":
            self._restore_to_residual(outstanding, round_number)
        self._merge_anchor(round_number, self._exchanged_spans(before, round_number))
        self.counters = self.counters.record_anchor(round_number, outcome)
        if outstanding is not None and outcome != "none":
            self._settle(outstanding.to_header(), outcome)
            self.update(outstanding=None)

    def _settle(self, header: ContributionHeader, outcome: ContributionOutcome) -> None:
        others = (entry for entry in self.counters.settled if entry.serial != header.serial)
        settled = sorted([*others, SettledOutcome.from_header(header, outcome)], key=lambda entry: entry.serial)
        self.update(settled=tuple(settled[-MAX_SETTLED:]))

    def revise_outcome(
        self, header: ContributionHeader, outcome: ContributionOutcome, read_payloads: Callable[[], Sequence[bytes]]
    ) -> bool:
        """Revise the outcome of an earlier contribution after the daemon moved to another chain.

        A contribution that the new chain excludes is added to the residual, one that it includes after all is
        subtracted again. If its payloads are gone, nothing is added, or the whole residual is dropped.

        Returns:
            False if unsent work was dropped.
        """
        known = next((entry.fate for entry in self.counters.settled if entry.serial == header.serial), outcome)
        if known == outcome:
            return True
        self._settle(header, outcome)
        self.update(obstacle="another chain")
        return "excluded" not in (known, outcome) or self._add_to_residual(
            header, read_payloads(), -1 if known == "excluded" else 1
        )

    def _add_to_residual(self, header: ContributionHeader, payloads: Sequence[bytes], sign: int) -> bool:
        unreported, work = self.counters.unreported, StepTotals.from_header(header)
        if payloads:
            self._sender.restore_to_residual(
                header.round, payloads, self.residual, sign * self._remaining_fraction(header)
            )
            self.update(unreported=unreported + work if sign > 0 else unreported - work)
        elif sign < 0:
            self.residual.zero_()
            self.update(unreported=StepTotals())
        return bool(payloads) or sign > 0

    def _remaining_fraction(self, header: ContributionHeader) -> float:
        """Return the fraction of a residual that later contributions of the same values have left."""
        plan, outstanding = self._program.plan, self.counters.outstanding
        later = [plan(entry.round) for entry in self.counters.settled if entry.serial > header.serial]
        later += [] if outstanding is None else [plan(outstanding.round)]
        spans = plan(header.round).spans
        return math.prod(each.method.feedback.decay for each in later if each.spans == spans)

    def _restore_to_residual(self, outstanding: Outstanding, round_number: int) -> None:
        """Add an excluded contribution to the residual, from which a later one sends it.

        Signals that are not deltas (the weights themselves) cannot be sent later. Their progress is kept by measuring
        from the anchor of that round again, if it is still in its buffer.
        """
        self._sender.restore_to_residual(
            outstanding.round, self._shared_memory.contribution_parts(outstanding.sizes), self.residual
        )
        self.update(unreported=self.counters.unreported + outstanding.work)
        before = self.counters.round
        if not self._signal.is_delta and round_number == before + 1:
            self._set_reference(before)

    def _merge_anchor(self, round_number: int, exchanged_spans: Iterable[Span]) -> None:
        """Apply `optim.merge_policy` in place: live vectors become progress, and progress live vectors."""
        policy, live, reference = self._program.method.adoption, self._copy_live(), self.reference
        places = [slice(start, stop) for start, stop in exchanged_spans]
        before = [live[place].clone() for place in places] if isinstance(policy, Interpolate) else []
        progress = live.sub_(reference)
        self._set_reference(round_number)
        if policy.unsent:
            reference.sub_(self.residual, alpha=policy.unsent)
        if isinstance(policy, RebaseOnAnchor) and policy.keep < 1:
            for place in places:
                self.residual[place] -= progress[place]
                reference[place] += policy.keep * progress[place]
                progress[place] = 0
        after = progress.add_(reference)
        if isinstance(policy, Interpolate):
            for place, old in zip(places, before, strict=True):
                after[place] = policy.alpha * old + (1 - policy.alpha) * reference[place]
        self._load_live(after)

    def _exchanged_spans(self, before: int, after: int) -> set[Span]:
        """Return the spans of `reference` that these rounds exchanged; all after many rounds or a change of chain."""
        program, size = self._program, self.reference.numel()
        if not 0 <= after - before <= MAX_ROUNDS_SKIPPED:
            return {(0, size)}
        spans = (span for number in range(before, after) for span in program.plan(number).spans)
        return set(clip_spans(sorted(set(spans)), 0, size))

    def count_step(self, tokens: int, loss: float, position: int) -> None:
        """Count an inner step that was applied."""
        counters = self.counters
        self.update(
            step=counters.step + 1,
            tokens=counters.tokens + tokens,
            position=position,
            since_message=counters.since_message + StepTotals(tokens=tokens, steps=1, loss=loss),
        )

    def update(self, **values: object) -> None:
        """Replace fields of the counters."""
        self.counters = self.counters.model_copy(update=values)

    def _set_reference(self, round_number: int) -> None:
        """Copy the locally trained ones of the shared vectors of a round into the reference."""
        shared = self._by_name(self._shared_memory.anchor(round_number), self._signal.shared_names)
        for name, vector in self._by_name(self.reference, self._trained_names).items():
            vector.copy_(shared[name])

    def _copy_live(self) -> Tensor:
        """Copy the locally trained vectors into the staging buffer, which the next call overwrites."""
        vectors = {WEIGHTS: self._model.flat, **self._optimizer.vectors}
        for name, room in self._by_name(self._staging, self._trained_names).items():
            room.copy_(vectors[name])
        return self._staging

    def _load_live(self, vectors: Tensor) -> None:
        for name, vector in self._by_name(vectors, self._trained_names).items():
            if name == WEIGHTS:
                self._model.load_flat(vector)
            else:
                self._optimizer.vectors[name].copy_(vector)

    def _snapshot_vectors(self) -> dict[str, Tensor]:
        return {
            WEIGHTS: self._model.flat,
            **self._optimizer.vectors,
            RESIDUAL: self.residual,
            REFERENCE: self.reference,
        }

    def _write_contribution(self, parts: Sequence[Payload]) -> None:
        sizes = [len(part) for part in parts]
        if sum(sizes) > self._shared_memory.contribution_bytes:
            raise ValueError(
                f"a contribution of {sum(sizes)} bytes; the outbox holds {self._shared_memory.contribution_bytes}"
            )
        for room, part in zip(self._shared_memory.contribution_parts(sizes), parts, strict=True):
            room[:] = part
