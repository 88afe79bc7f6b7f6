"""Messages about microbatches: tasks, answers and outcomes. They are small; activations travel by reference.

The *owner* of a microbatch asks peers of each stage to compute (`Task`). A server answers at once (`Answer`), and sends
an `Outcome` when the result is in its memory. The next server fetches the result from there. A *life* numbers the
processes of a server: it grows with each restart, which voids everything that an earlier life acknowledged.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self, get_args

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import DIGEST_BYTES, Blob
from protocol.errors import LimitError, MalformedError, PeerFault
from protocol.identity import PeerId, public_key
from protocol.manifest.run import RunId
from protocol.membership.record_fields import RANDOM_BITS
from protocol.pipeline.results import MAX_RESULT_BYTES, ResultValue, SignedResult, StageQuestion, open_result
from protocol.signing import MAX_ROUND

Direction = Literal["forward", "backward"]
Input = Literal["activation", "tokens", "gradient"]
AnswerKind = Literal[
    "accepted",  # an outcome will follow; sent for a task in progress, too
    "busy",  # no place in the open step, or no memory
    "other stage",  # this peer does not serve the stage
    "other round",  # this peer's weights are more than eight rounds away
    "other life",  # this peer has restarted
    "sealed",  # this peer is leaving
    "refused",  # inputs of the wrong size or kind
    "no forward",  # a backward of an owner without forwards here
    "known",  # the task is finished, with its outcome
]
OutcomeStatus = Literal[
    "done",
    "missing",  # an input could not be fetched
    "invalid",  # an input has another shape, or a value is not finite
    "void",  # the trainer died before the result was made
    "ended",  # the owner has released the microbatch, or its deadline has passed after its gradient was added
]

MAX_ACTIVATION_BYTES = 1 << 30
MAX_SERIAL = 2**63 - 1
SERIAL_BITS = 20  # serials begin at the milliseconds of the start, so a restarted peer repeats none
MAX_ATTEMPT = 2**20
MAX_LIFE = 2**63 - 1
MAX_DEADLINE_MS = 24 * 3600 * 1000
MAX_RETRY_MS = 60_000
MAX_RATE = 1e6  # microbatches a second
MAX_RELEASED = 4096
MAX_ROUND_DISTANCE = 8  # stages stay within one round of each other, but a trainer in mid-step may be behind its stage


class Key(NamedTuple):
    """The name of a microbatch in a run."""

    owner: PeerId
    serial: int


def first_serial(start: int) -> int:
    """Return the first serial of the process with this start id, which the owner's record names."""
    return start >> RANDOM_BITS << SERIAL_BITS


@dataclass(frozen=True)
class HeldBlob:
    """A blob in the memory of a peer.

    `result`: the holder's signature under it, which nobody has verified; None for tokens.
    """

    blob: Blob
    holder: PeerId
    result: wire.Signed | None = field(default=None, compare=False)

    def to_wire(self) -> wire.HeldBlob:
        return wire.HeldBlob(blob=self.blob.to_wire(), holder=self.holder, result=self.result)

    @classmethod
    def from_wire(cls, body: wire.HeldBlob) -> Self:
        public_key(body.holder)
        if body.result.ByteSize() > 2 * MAX_RESULT_BYTES:
            raise LimitError("a signed result that is too long")
        return cls(_read_blob(body.blob), body.holder, body.result if body.HasField("result") else None)

    def is_made_by_holder(self, run: RunId, direction: Direction) -> bool:
        """Return whether the holder has signed the blob as its result of a pass at the stage with this id."""
        if self.result is None or self.result.peer != self.holder:
            return False
        try:
            body = open_result(self.result, run).body
        except PeerFault:
            return False
        return (body.question.direction, body.value.blob) == (direction, self.blob)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a pass; which ones exist depends on the stage and the direction."""

    activation: HeldBlob | None = None
    tokens: HeldBlob | None = None
    gradient: HeldBlob | None = None

    def named(self) -> dict[Input, HeldBlob]:
        """Return the existing inputs by name."""
        pairs: tuple[tuple[Input, HeldBlob | None], ...] = (
            ("activation", self.activation),
            ("tokens", self.tokens),
            ("gradient", self.gradient),
        )
        return {name: held for name, held in pairs if held is not None}


@dataclass(frozen=True)
class Task:
    """A request for one pass of a microbatch at one stage.

    Args:
        run: id of the stage.
        attempt: the number of the owner's request for this microbatch; an outcome repeats it.
        life: the addressed server's life; 0 if the owner does not know it.
        loss: of the microbatch, in nats a token, once the last stage has computed it.
        replay: recomputes a lost result. It takes no place in a step and adds no gradient.
        deadline_ms: time after which the server may forget the microbatch.
        number: id of the microbatch in its exact step; None if steps are not exact.
    """

    run: RunId
    owner: PeerId
    serial: int
    direction: Direction
    attempt: int
    life: int
    round: int
    inputs: Inputs
    deadline_ms: int
    replay: bool = False
    loss: float | None = None
    number: int | None = None

    @property
    def key(self) -> Key:
        return Key(self.owner, self.serial)

    def to_wire(self) -> wire.StageTask:
        return wire.StageTask(
            run=bytes.fromhex(self.run),
            serial=self.serial,
            backward=self.direction == "backward",
            attempt=self.attempt,
            life=self.life,
            round=self.round,
            replay=self.replay,
            deadline_ms=self.deadline_ms,
            loss=self.loss,
            number=self.number,
            **{name: held.to_wire() for name, held in self.inputs.named().items()},
        )

    @classmethod
    def from_wire(cls, body: wire.StageTask, caller: PeerId) -> Self:
        """Return the task of an authenticated caller.

        Raises MalformedError or LimitError if a field is out of its bounds.
        """
        _check_ids(body.run, body.serial, body.attempt, body.life)
        check_bound(body.round, MAX_ROUND, "round")
        check_bound(body.deadline_ms, MAX_DEADLINE_MS, "deadline")
        if body.HasField("loss"):
            _check_amount(body.loss, math.inf, "loss")
        inputs = Inputs(
            *(HeldBlob.from_wire(getattr(body, name)) if body.HasField(name) else None for name in get_args(Input))
        )
        return cls(
            run=body.run.hex(),
            owner=caller,
            serial=body.serial,
            direction=_direction(body.backward),
            attempt=body.attempt,
            life=body.life,
            round=body.round,
            inputs=inputs,
            deadline_ms=body.deadline_ms,
            replay=body.replay,
            loss=body.loss if body.HasField("loss") else None,
            number=body.number if body.HasField("number") else None,
        )


def question_of(task: Task, base: bytes, kind: str) -> StageQuestion:
    """Return the question that the result of a task answers, with the weights of a chain on a kind of device."""
    held = task.inputs
    digests = _digest(held.activation), _digest(held.tokens), _digest(held.gradient)
    return StageQuestion(task.round, base, task.direction, digests, kind)


def _digest(held: HeldBlob | None) -> bytes:
    return held.blob.digest if held is not None else b""


@dataclass(frozen=True)
class Outcome:
    """The end of a task, as its server reports it to the owner.

    Args:
        result: output of a forward, or gradient of the input; None at the ends of the pipeline.
        added: the gradient counts in the server's step.
        loss: at the last stage, in nats a token.
        rate: microbatches a second, from compute time only.
        missing: the input that could not be fetched.
        signed: the sender's signature under its result; only outcomes that came over the network must have one.
    """

    run: RunId
    serial: int
    direction: Direction
    attempt: int
    life: int
    status: OutcomeStatus
    result: Blob | None = None
    added: bool = False
    loss: float | None = None
    compute_ms: float = 0.0
    rate: float = 0.0
    missing: Input | None = None
    signed: SignedResult | None = field(default=None, compare=False)

    def to_wire(self) -> wire.StageOutcome:
        return wire.StageOutcome(
            run=bytes.fromhex(self.run),
            serial=self.serial,
            backward=self.direction == "backward",
            attempt=self.attempt,
            life=self.life,
            status=self.status,
            result=None if self.result is None else self.result.to_wire(),
            added=self.added,
            loss=self.loss,
            compute_ms=self.compute_ms,
            rate=self.rate,
            missing=self.missing or "",
            signed=None if self.signed is None else self.signed.signed,
        )

    @classmethod
    def from_wire(cls, body: wire.StageOutcome, sender: PeerId) -> Self:
        """Return the checked outcome of an authenticated sender.

        Raises MalformedError, LimitError or ForgedError if a field is out of its bounds, or the sender has not signed
        the result.
        """
        _check_ids(body.run, body.serial, body.attempt, body.life)
        _check_word(body.status, get_args(OutcomeStatus), "status")
        _check_word(body.missing, ("", *get_args(Input)), "name of an input")
        if (body.status == "missing") != bool(body.missing):
            raise MalformedError("an outcome that names a missing input must have the status of one")
        if body.HasField("loss"):
            _check_amount(body.loss, math.inf, "loss")
        _check_amount(body.compute_ms, MAX_DEADLINE_MS, "compute time")
        _check_amount(body.rate, MAX_RATE, "rate")
        result = _read_blob(body.result) if body.HasField("result") else None
        return cls(
            run=body.run.hex(),
            serial=body.serial,
            direction=_direction(body.backward),
            attempt=body.attempt,
            life=body.life,
            status=body.status,  # type: ignore[arg-type]  # checked above
            result=result,
            added=body.added,
            loss=body.loss if body.HasField("loss") else None,
            compute_ms=body.compute_ms,
            rate=body.rate,
            missing=body.missing or None,  # type: ignore[arg-type]  # checked above
            signed=_open_own_result(body, result, sender) if body.status == "done" else None,
        )


@dataclass(frozen=True)
class Answer:
    """The immediate answer to a task; `round` and `life` are the server's."""

    kind: AnswerKind
    life: int
    round: int
    rate: float = 0.0
    retry_ms: int = 0
    outcome: Outcome | None = None

    def to_wire(self) -> wire.AskReply:
        return wire.AskReply(
            kind=self.kind,
            life=self.life,
            round=self.round,
            rate=self.rate,
            retry_ms=self.retry_ms,
            outcome=None if self.outcome is None else self.outcome.to_wire(),
        )

    @classmethod
    def from_wire(cls, body: wire.AskReply, sender: PeerId) -> Self:
        """Return the checked answer of an authenticated sender; raise as `Outcome.from_wire` does."""
        _check_word(body.kind, get_args(AnswerKind), "answer")
        check_bound(body.life, MAX_LIFE, "life")
        check_bound(body.round, MAX_ROUND, "round")
        check_bound(body.retry_ms, MAX_RETRY_MS, "pause")
        _check_amount(body.rate, MAX_RATE, "rate")
        if (body.kind == "known") != body.HasField("outcome"):
            raise MalformedError("only the answer 'known' has an outcome")
        outcome = Outcome.from_wire(body.outcome, sender) if body.HasField("outcome") else None
        kind: AnswerKind = body.kind  # type: ignore[assignment]  # checked above
        return cls(kind, body.life, body.round, body.rate, body.retry_ms, outcome)


def release_to_wire(run: RunId, serials: Iterable[int]) -> wire.ReleaseRequest:
    return wire.ReleaseRequest(run=bytes.fromhex(run), serials=sorted(serials))


def read_release(body: wire.ReleaseRequest) -> tuple[RunId, tuple[int, ...]]:
    """Return the stage and the serials of microbatches that have ended."""
    if len(body.serials) > MAX_RELEASED:
        raise LimitError(f"{len(body.serials)} released microbatches, at most {MAX_RELEASED} are allowed")
    for serial in body.serials:
        check_bound(serial, MAX_SERIAL, "serial")
    check_run(body.run)
    return body.run.hex(), tuple(body.serials)


def invitation_to_wire(run: RunId) -> wire.InviteRequest:
    return wire.InviteRequest(run=bytes.fromhex(run))


def read_invitation(body: wire.InviteRequest) -> RunId:
    """Return the stage that has room for forwards."""
    check_run(body.run)
    return body.run.hex()


def _open_own_result(body: wire.StageOutcome, result: Blob | None, sender: PeerId) -> SignedResult:
    """Return the signed result of an outcome. Raises an error unless its sender has signed that result."""
    signed = open_result(body.signed, body.run.hex())
    value = ResultValue(result, body.loss if body.HasField("loss") else None)
    said = signed.maker, signed.body.question.direction, signed.body.value
    if said != (sender, _direction(body.backward), value):
        raise MalformedError("an outcome that is not what its sender has signed")
    return signed


def _direction(backward: bool) -> Direction:
    return "backward" if backward else "forward"


def _read_blob(reference: wire.BlobRef) -> Blob:
    if not 0 < reference.size <= MAX_ACTIVATION_BYTES:
        raise LimitError(f"an activation of {reference.size} bytes, at most {MAX_ACTIVATION_BYTES} are allowed")
    return Blob.from_wire(reference)


def _check_ids(run: bytes, serial: int, attempt: int, life: int) -> None:
    check_run(run)
    check_bound(serial, MAX_SERIAL, "serial")
    check_bound(attempt, MAX_ATTEMPT, "attempt")
    check_bound(life, MAX_LIFE, "life")


def check_run(run: bytes) -> None:
    if len(run) != DIGEST_BYTES:
        raise MalformedError("the id of a stage has 32 bytes")


def check_bound(value: int, limit: int, name: str) -> None:
    if value > limit:
        raise MalformedError(f"a {name} of {value}, at most {limit} is allowed")


def _check_amount(value: float, limit: float, name: str) -> None:
    if not math.isfinite(value) or not 0 <= value <= limit:
        raise MalformedError(f"a {name} that is negative, not finite or too large")


def _check_word(word: str, words: Iterable[str], name: str) -> None:
    if word not in words:
        raise MalformedError(f"an unknown {name}")
