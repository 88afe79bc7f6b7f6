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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from torch import Tensor

from node.trainer.counters import Counters, Outstanding, SettledOutcome, StepTotals
from node.trainer.inner_step import InnerOptimizer
from node.trainer.ipc.channel import ContributionHeader, ContributionOutcome
from node.trainer.ipc.shared_memory import SharedMemory, locally_trained_names
from node.trainer.live import LiveVectors, OptimizerVectors
from node.trainer.stages.stage_work import ExactStep
from node.trainer.vectors import Change, TrainerVectors
from optim.codecs.base import Payload
from optim.exact import Float64Sum
from optim.exchange import ContributionEncoder
from optim.experts import add_tokens, find_trained
from optim.merge_policy import RebaseOnAnchor
from optim.round_plan import RoundPlan, RoundPlanner
from protocol.pipeline.ledger import Ledger
from protocol.rollout_credits import Credits

MAX_SETTLED = 8
Learned = tuple[tuple[str, int, int], ...]  # maker, round, serial
OVERWRITE = Change(kind="overwrite")


@dataclass(frozen=True)
class _Draft:
    """A contribution that a thread makes of the vectors in the shared memory: their counters, and those after it."""

    counters: Counters
    sent: Future[Counters]


@dataclass(frozen=True)
class _Adoption:
    """An anchor that a thread applies to the vectors in the shared memory."""

    result: Future[tuple[Counters, Tensor]]  # the counters of these vectors then, and by how much the weights moved


class SharedVectorsAlone(LiveVectors):
    """The vectors in the shared memory, as a thread changes them while those on an accelerator are trained."""

    is_shared = True

    def save(self, shared: Mapping[str, Tensor]) -> None:
        pass

    def load(self, shared: Mapping[str, Tensor]) -> None:
        pass

    def clear(self, names: Sequence[str]) -> None:
        pass


class TrainerState:
    """A model in training, the state of its optimizer, and what of their progress was sent.

    All vectors are in the shared memory (`node.trainer.vectors`). `live` are those in training, which `save` copies
    there unless they are the same.
    """

    def __init__(
        self,
        live: LiveVectors,
        optimizer: OptimizerVectors,
        program: RoundPlanner,
        sender: ContributionEncoder,
        shared_memory: SharedMemory,
    ) -> None:
        self._live = live
        self._optimizer = optimizer
        self._program = program
        self._signal = program.method.signal
        self._sender = sender
        self._shared_memory = shared_memory
        self._trained_names = locally_trained_names(program.method)
        self.vectors = TrainerVectors(shared_memory, program)
        live.attach(self.vectors.by_name, self.vectors.scratch[: program.numel])
        self.counters = Counters()
        self._draft: _Draft | None = None
        self._adoption: _Adoption | None = None
        self._is_copied = False  # whether the shared memory has the newest live vectors
        self.ledger, self.contributed = Ledger(), Ledger()  # microbatches of a stage, as in the counters

    @property
    def reference(self) -> Tensor:
        return self.vectors.reference

    @property
    def residual(self) -> Tensor:
        return self.vectors.residual

    def start(self, round_number: int, exact_step: int = 0) -> None:
        """Start from the anchor of a round, which makes `exact_step`, with no steps made."""
        for vector in self.vectors.by_name.values():
            vector.zero_()
        self.vectors.measure_from(round_number)
        for name, reference in zip(self._trained_names, self._split(self.reference), strict=True):
            self.vectors.by_name[name].copy_(reference)
        began = self._program.steps_before(round_number)
        self.counters = Counters(round=round_number, began=began, started_at=round_number, exact_step=exact_step)
        self._load_live()
        self._set_optimizer_age()
        self.vectors.publish(self.counters)

    def restore(self) -> bool:
        """Load the newest snapshot; returns False if there is none."""
        counters = self.vectors.read()
        if counters is None:
            return False
        self.counters = counters
        self.ledger = Ledger.from_text(counters.ledger)
        self.contributed = Ledger.from_text(counters.contributed)
        self._load_live()
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
        """Publish the state, with a copy of the vectors that are on an accelerator."""
        self._copy_live()
        self.vectors.publish(self.counters)

    def take_step(
        self,
        tokens: int,
        loss: float,
        position: int,
        ledger: Ledger | None = None,
        learned: Learned | None = None,
        credited: Credits = (),
    ) -> float | None:
        """Apply the model's gradient, count the step and return the gradient's norm.

        None if the norm is not finite, and then nothing changes. `ledger`: the microbatches of the step, at a stage.
        `learned`: the places after the groups of rollouts that it has learned. `credited`: for these, to their makers.
        """
        if not isinstance(self._optimizer, InnerOptimizer):
            raise TypeError("a user's own loop makes its steps itself")
        norm = self._optimizer.gradient_norm()
        if not math.isfinite(norm):
            return None
        self._is_copied = False
        if self._live.is_shared:
            self.vectors.publish(self.counters, OVERWRITE)
        self._optimizer.apply(self.counters.step, norm)
        self._count_routed_tokens(self._optimizer.take_routed_tokens())
        self.count_step(tokens, loss, position, ledger, learned, credited)
        if self._live.is_shared:
            self.vectors.publish(self.counters)
        return norm

    @property
    def plan(self) -> RoundPlan:
        """Return the plan of the round for which the next contribution is made."""
        return self._program.plan(self.counters.round)

    @property
    def can_draft(self) -> bool:
        """Return whether steps may go on while a thread encodes a contribution: they change other memory than it reads.

        Vectors that a contribution consumes, and tokens of experts, are of one moment.
        """
        schedule = self.plan.method.schedule
        is_of_one_moment = self._signal.consumed_names or schedule.experts == "trained"
        return schedule.ahead > 0 and not (self._live.is_shared or is_of_one_moment)

    @property
    def draft_steps(self) -> int | None:
        """Return the number of steps made since a contribution was drafted; `None` if there is no draft."""
        draft = self._draft
        return None if draft is None else self.counters.step - draft.counters.step

    @property
    def is_draft_encoded(self) -> bool:
        return self._draft is not None and self._draft.sent.done()

    def draft_contribution(self, thread: Executor) -> None:
        """Let a thread make a contribution of the progress so far, which `make_contribution` returns.

        Until then the vectors in the shared memory are the thread's, and steps change those on the accelerator.
        """
        self._require_none_outstanding()
        self._copy_live()
        self._advance_age(self.plan.steps - self.counters.since_message.steps)
        self._draft = _Draft(self.counters, thread.submit(self._encode_and_send, self.counters))

    def make_contribution(self, exact: ExactStep | None = None) -> ContributionHeader:
        """Encode the progress since the reference into the outbox; no contribution may be outstanding.

        `exact`: the sum of an exact step, which is all that a contribution to it contains.
        """
        self._require_none_outstanding()
        if self._draft is not None:
            return self._finish_draft(self._draft)
        self._copy_live()
        trained = self._find_trained_experts()
        parts = (
            self._encode_exact(exact) if exact else self.vectors.encode_progress(self.counters, self._sender, trained)
        )
        self._advance_age(self.plan.steps - self.counters.since_message.steps)
        self.contributed, self.ledger = self.ledger, Ledger()
        self.counters = self._send(self.counters, parts, trained, exact)
        self._live.clear(self._signal.consumed_names)
        return self._header()

    def _require_none_outstanding(self) -> None:
        if self.counters.outstanding is not None:
            raise ValueError("the contribution before this one is still outstanding")

    def _header(self) -> ContributionHeader:
        assert self.counters.outstanding is not None
        return self.counters.outstanding.to_header()

    def _encode_and_send(self, counters: Counters) -> Counters:
        return self._send(counters, self.vectors.encode_progress(counters, self._sender))

    def _finish_draft(self, draft: _Draft) -> ContributionHeader:
        """Continue from the counters of a draft with the steps that were made since it began."""
        sent, newest = draft.sent.result(), self.counters
        self._draft = None
        self.counters = sent.model_copy(
            update={
                "step": newest.step,
                "tokens": newest.tokens,
                "position": newest.position,
                "since_message": newest.since_message - draft.counters.since_message,
                "obstacle": "" if newest.obstacle == draft.counters.obstacle else newest.obstacle,
            }
        )
        return self._header()

    def _send(
        self, counters: Counters, parts: Sequence[Payload], trained: Sequence[bool] = (), exact: ExactStep | None = None
    ) -> Counters:
        """Write a contribution into the outbox and store what it does not carry; return the counters after it."""
        self._write_contribution(parts)
        outstanding = Outstanding(
            serial=counters.messages + 1,
            round=counters.round,
            sizes=tuple(len(part) for part in parts),
            work=counters.unreported + counters.since_message,
            trace=counters.trace,
            ledger="" if exact is None else exact.ledger.to_bytes().hex(),
        )
        sent = counters.model_copy(
            update={
                "messages": outstanding.serial,
                "outstanding": outstanding,
                "since_message": StepTotals(),
                "unreported": StepTotals(),
                "anchors": (),
                "started_at": None,
                "obstacle": "",
                "ledger": self.ledger.to_text(),
                "contributed": self.contributed.to_text(),
                "routed": self._count_from_zero(trained),
            }
        )
        self.vectors.store(sent, Change(kind="sent", round=outstanding.round))
        return sent

    def _find_trained_experts(self) -> tuple[bool, ...]:
        """Return for each expert whether to send it; nothing if all that moved are sent, as where nobody counts."""
        leaves_out = self._program.method.schedule.experts == "trained" and self.counters.routed
        return find_trained(self.counters.routed, self._program.layout) if leaves_out else ()

    def _count_from_zero(self, trained: Sequence[bool]) -> tuple[int, ...]:
        """Return the tokens of the experts without those of the ones that the round sends."""
        sent = {number for number, _ in self.plan.experts if trained and trained[number]}
        return tuple(0 if number in sent else count for number, count in enumerate(self.counters.routed))

    def _encode_exact(self, exact: ExactStep) -> list[Payload]:
        """Encode an exact step; the residual stays."""
        self.vectors.scratch[: self.residual.numel()].copy_(self.residual)
        codec = self.plan.codecs[0]
        assert isinstance(codec, Float64Sum)
        return [exact.encode(codec)]

    def _split(self, vector: Tensor) -> Sequence[Tensor]:
        return vector.view(-1, self._program.numel).unbind()

    def apply_anchor(
        self,
        round_number: int,
        outcome: ContributionOutcome,
        exact_step: int = 0,
        *,
        is_other_chain: bool = False,
    ) -> None:
        """Move to the anchor of a round, which makes `exact_step`, and keep the progress since the reference."""
        before, outstanding = self.counters.round, self.counters.outstanding
        if round_number == before and outstanding is None and not is_other_chain:
            return  # sent twice, around a restart; x + (y - x) would only add rounding errors
        self._copy_live()
        if outstanding is not None and outcome == "excluded":
            self._restore_to_residual(outstanding, round_number)
        self.vectors.prepare_adoption(before, round_number)
        self.counters = self.counters.record_anchor(round_number, outcome)
        self.update(exact_step=exact_step)
        if outstanding is not None and outcome != "none":
            self._settle(outstanding.to_header(), outcome)
            self.update(outstanding=None)
        self.vectors.store(self.counters, Change(kind="adopt", round=round_number, before=before))
        self._load_live()

    @property
    def can_adopt_beside(self) -> bool:
        """Return whether steps may go on while a thread applies an anchor.

        The anchor must move the weights by the same vector wherever they are, and an accelerator must have them alone.
        """
        policy = self._program.method.adoption
        keeps_all = isinstance(policy, RebaseOnAnchor) and policy.keep == 1
        return keeps_all and len(self._trained_names) == 1 and self._live.can_shift

    @property
    def is_adopting(self) -> bool:
        return self._adoption is not None

    @property
    def is_adopted(self) -> bool:
        return self._adoption is not None and self._adoption.result.done()

    def begin_adoption(self, thread: Executor, round_number: int, outcome: ContributionOutcome) -> None:
        """Let a thread apply an anchor to the vectors in the shared memory; `finish_adoption` moves the weights.

        The vectors there stay as they were at the last copy, moved to the anchor, with the counters of that time: if
        this process dies, the steps since then are lost, and nothing else.
        """
        result = thread.submit(self._adopt_aside, round_number, outcome)
        self._adoption = _Adoption(result)

    def _adopt_aside(self, round_number: int, outcome: ContributionOutcome) -> tuple[Counters, Tensor]:
        aside = TrainerState(SharedVectorsAlone(), self._optimizer, self._program, self._sender, self._shared_memory)
        counters = aside.vectors.read()
        assert counters is not None
        aside.counters = counters
        moved = self.reference.neg()
        aside.apply_anchor(round_number, outcome)
        return aside.counters, moved.add_(self.reference)

    def finish_adoption(self) -> None:
        """Move the weights as far as the anchor says, and keep the steps that were made meanwhile."""
        assert self._adoption is not None
        (adopted, moved), newest = self._adoption.result.result(), self.counters
        self._adoption = None
        self._live.shift(moved)
        self._is_copied = False
        steps, anchors = newest.since_message, adopted.anchors
        if len(anchors) > len(newest.anchors):
            anchors = (*anchors[:-1], anchors[-1].model_copy(update={"steps": steps.steps}))
        self.counters = adopted.model_copy(
            update={
                "step": newest.step,
                "tokens": newest.tokens,
                "position": newest.position,
                "since_message": steps,
                "anchors": anchors,
                "obstacle": newest.obstacle or adopted.obstacle,
            }
        )

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
            weight = sign * self._remaining_fraction(header)
            self.vectors.restore_payloads(header.round, payloads, self._sender, weight)
            self.update(unreported=unreported + work if sign > 0 else unreported - work)
        elif sign < 0:
            self.vectors.scratch.zero_()
            self.update(unreported=StepTotals())
        else:
            return True
        self.vectors.store(self.counters, Change(kind="residual"))
        return bool(payloads)

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
        before = self.counters.round
        if not self._signal.is_delta and round_number == before + 1:
            self.vectors.store(self.counters, Change(kind="measure", round=before))
        parts = self._shared_memory.contribution_parts(outstanding.sizes)
        self.vectors.restore_payloads(outstanding.round, parts, self._sender)
        self.update(unreported=self.counters.unreported + outstanding.work, outstanding=None)
        self._settle(outstanding.to_header(), "excluded")
        # If nothing but this is done before a kill, the trace of the work lacks the outcome.
        interrupted = self.counters.model_copy(update={"obstacle": "killed at an anchor"})
        self.vectors.store(interrupted, Change(kind="residual"))

    def count_step(
        self,
        tokens: int,
        loss: float,
        position: int,
        ledger: Ledger | None = None,
        learned: Learned | None = None,
        credited: Credits = (),
    ) -> None:
        """Count an inner step that was applied; see `take_step`."""
        counters = self.counters
        self._is_copied = False
        self.ledger |= ledger or Ledger()
        self.update(
            step=counters.step + 1,
            tokens=counters.tokens + tokens,
            position=position,
            since_message=counters.since_message + StepTotals(tokens=tokens, steps=1, loss=loss, credits=credited),
            ledger=self.ledger.to_text(),
            learned=counters.learned if learned is None else learned,
        )

    def _count_routed_tokens(self, tokens: Sequence[int]) -> None:
        if self._program.method.schedule.experts == "trained":
            self.update(routed=add_tokens(self.counters.routed, tokens))

    def update(self, **values: object) -> None:
        """Replace fields of the counters."""
        self.counters = self.counters.model_copy(update=values)

    def _copy_live(self) -> None:
        """Copy what is on an accelerator into the shared memory; a kill meanwhile loses the newest steps."""
        if self._live.is_shared or self._is_copied:
            return
        self.vectors.publish(self.counters, OVERWRITE)
        self._live.save(self.vectors.by_name)
        self.vectors.publish(self.counters)
        self._is_copied = True

    def _load_live(self) -> None:
        """Copy the weights and the optimizer's vectors to an accelerator."""
        self._live.load(self.vectors.by_name)
        self._is_copied = True

    def _write_contribution(self, parts: Sequence[Payload]) -> None:
        sizes = [len(part) for part in parts]
        if sum(sizes) > self._shared_memory.contribution_bytes:
            raise ValueError(
                f"a contribution of {sum(sizes)} bytes; the outbox holds {self._shared_memory.contribution_bytes}"
            )
        for room, part in zip(self._shared_memory.contribution_parts(sizes), parts, strict=True):
            room[:] = part
