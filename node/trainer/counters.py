"""Count the work of a trainer: the part of its state that is not tensors."""

from typing import Self

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt

from node.trainer.ipc.channel import Activity, ContributionHeader, ContributionOutcome
from protocol.audits import MAX_TRACED_ANCHORS, AppliedAnchor, WorkTrace
from protocol.rollout_credits import Credits, add_credits, subtract_credits


class _CounterModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StepTotals(_CounterModel):
    """Totals over a number of inner steps.

    `loss` is the sum of their losses in nats, `credits` those of the makers of rollouts that they learned from.
    """

    tokens: NonNegativeInt = 0
    steps: NonNegativeInt = 0
    loss: NonNegativeFloat = 0.0
    credits: Credits = ()

    def __add__(self, other: Self) -> "StepTotals":
        return StepTotals(
            tokens=self.tokens + other.tokens,
            steps=self.steps + other.steps,
            loss=self.loss + other.loss,
            credits=add_credits(self.credits, other.credits),
        )

    def __sub__(self, other: Self) -> "StepTotals":
        tokens, steps, loss = self.tokens - other.tokens, self.steps - other.steps, self.loss - other.loss
        credited = subtract_credits(self.credits, other.credits)
        return StepTotals(tokens=max(0, tokens), steps=max(0, steps), loss=max(0.0, loss), credits=credited)

    @classmethod
    def from_header(cls, header: ContributionHeader) -> Self:
        """Return the totals that a contribution reports."""
        loss = header.loss * header.steps
        return cls(tokens=header.tokens, steps=header.steps, loss=loss, credits=header.credits)

    @property
    def mean_loss(self) -> float:
        """Return the loss per step in nats per token."""
        return self.loss / max(1, self.steps)


class Outstanding(_CounterModel):
    """A contribution whose outcome is unknown; its parts are in the outbox.

    `work` counts from the last contribution that was included.
    """

    serial: NonNegativeInt = 0
    round: NonNegativeInt
    sizes: tuple[NonNegativeInt, ...]
    work: StepTotals
    trace: WorkTrace = WorkTrace()
    ledger: str = ""  # of an exact step

    def to_header(self) -> ContributionHeader:
        """Return the header that the daemon gets."""
        work = self.work
        return ContributionHeader(
            serial=self.serial,
            round=self.round,
            sizes=self.sizes,
            tokens=work.tokens,
            steps=work.steps,
            loss=work.mean_loss,
            trace=self.trace,
            ledger=self.ledger,
            credits=work.credits,
        )

    @classmethod
    def from_header(cls, header: ContributionHeader) -> Self:
        """Restore it from the header that the daemon has."""
        return cls(
            serial=header.serial,
            round=header.round,
            sizes=header.sizes,
            work=StepTotals.from_header(header),
            trace=header.trace,
            ledger=header.ledger,
        )


class SettledOutcome(_CounterModel):
    """A contribution whose outcome this state has applied."""

    serial: NonNegativeInt
    round: NonNegativeInt
    fate: ContributionOutcome

    @classmethod
    def from_header(cls, header: ContributionHeader, outcome: ContributionOutcome) -> Self:
        """Return the record of an outcome."""
        return cls(serial=header.serial, round=header.round, fate=outcome)


class Counters(_CounterModel):
    """The part of the state that is not tensors: the metadata of a snapshot."""

    step: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    round: NonNegativeInt = 0
    exact_step: NonNegativeInt = 0  # that the round makes, where steps are exact
    began: NonNegativeInt = 0  # age of the run in inner steps when this trainer joined
    position: NonNegativeInt = 0
    since_message: StepTotals = StepTotals()
    learned: tuple[tuple[str, int, int], ...] = ()  # maker, round and serial after its last group, of rollouts
    ledger: str = ""  # microbatches of these steps, at a stage of a pipeline
    contributed: str = ""  # those of the last contribution
    routed: tuple[NonNegativeInt, ...] = ()  # tokens of each expert since it was sent; empty if all are sent
    unreported: StepTotals = StepTotals()  # of excluded contributions
    messages: NonNegativeInt = 0  # contributions made so far
    outstanding: Outstanding | None = None
    settled: tuple[SettledOutcome, ...] = ()  # the last contributions before that
    seconds: dict[Activity, float] = {}
    anchors: tuple[AppliedAnchor, ...] = ()  # applied since the last contribution
    started_at: NonNegativeInt | None = None  # round of the first anchor; None after the first contribution
    obstacle: str = ""  # why nobody else can repeat the steps since then; empty if others can

    @property
    def trace(self) -> WorkTrace:
        """Return how the next contribution came about."""
        steps, start = self.since_message.steps, self.started_at
        return WorkTrace(steps=steps, anchors=self.anchors, start=start, obstacle=self.obstacle)

    def record_anchor(self, round_number: int, outcome: ContributionOutcome) -> "Counters":
        """Return the counters after an anchor was applied."""
        anchor = AppliedAnchor(steps=self.since_message.steps, round=round_number, outcome=outcome)
        if len(self.anchors) == MAX_TRACED_ANCHORS:
            return self.model_copy(update={"round": round_number, "obstacle": "too many anchors"})
        return self.model_copy(update={"round": round_number, "anchors": (*self.anchors, anchor)})
