"""Results of microbatches that their servers sign, and proofs of false ones. PURE.

A signed result names its inputs, the server's chain and the kind of its device. Servers of one kind that have the same
weights compute the same bits, so two results of the same question that differ show that one of the two is wrong, and
those of two thirds of the voters show which one. A peer that is downloaded from, or that a task names as a holder, is
to blame for a malformed blob only if it has signed that blob as its result.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import DIGEST_BYTES, Blob
from protocol.errors import LimitError, MalformedError
from protocol.identity import Identity, PeerId
from protocol.manifest.run import RunId
from protocol.signing import MAX_ROUND, open_signed, sign

RESULT_KIND = "stage result"
MAX_RESULT_BYTES = 512
MAX_KIND_CHARACTERS = 112
MAX_RESULTS = 128  # in one contradiction


class StageQuestion(NamedTuple):
    """The question that a result answers: on devices of one kind there is one right answer.

    `base`: digest of the chain whose weights were used. `inputs`: digests of activation, tokens and gradient, b"" for
    those that do not exist.
    """

    round: int
    base: bytes
    direction: Literal["forward", "backward"]
    inputs: tuple[bytes, bytes, bytes]
    kind: str


class ResultValue(NamedTuple):
    """The answer: the blob, if the stage passes one on, and the loss, where the stage computes it."""

    blob: Blob | None
    loss: float | None


@dataclass(frozen=True)
class StageResult:
    """An answer of a server."""

    question: StageQuestion
    value: ResultValue

    @property
    def is_comparable(self) -> bool:
        """Return whether another server can be asked the same."""
        return bool(self.question.base and self.question.kind and self.value.blob)

    def to_wire(self) -> wire.StageResult:
        question, value = self.question, self.value
        activation, tokens, gradient = question.inputs
        return wire.StageResult(
            round=question.round,
            base=question.base,
            backward=question.direction == "backward",
            activation=activation,
            tokens=tokens,
            gradient=gradient,
            result=None if value.blob is None else value.blob.to_wire(),
            loss=value.loss,
            kind=question.kind,
        )

    @classmethod
    def from_wire(cls, body: wire.StageResult) -> Self:
        """Check a result. Raises MalformedError or LimitError."""
        if body.round > MAX_ROUND or len(body.kind) > MAX_KIND_CHARACTERS:
            raise LimitError("a result with a round or a kind of device out of bounds")
        digests = body.base, body.activation, body.tokens, body.gradient
        if any(len(digest) not in (0, DIGEST_BYTES) for digest in digests):
            raise MalformedError("a result whose digests do not have 32 bytes")
        if body.HasField("loss") and not math.isfinite(body.loss):
            raise MalformedError("a result whose loss is not finite")
        direction: Literal["forward", "backward"] = "backward" if body.backward else "forward"
        inputs = body.activation, body.tokens, body.gradient
        return cls(
            StageQuestion(body.round, body.base, direction, inputs, body.kind),
            ResultValue(
                Blob.from_wire(body.result) if body.HasField("result") else None,
                body.loss if body.HasField("loss") else None,
            ),
        )


@dataclass(frozen=True)
class SignedResult:
    """A checked result and its maker; `signed` is its envelope."""

    signed: wire.Signed
    body: StageResult
    maker: PeerId


def sign_result(identity: Identity, run: RunId, result: StageResult) -> SignedResult:
    """Sign a result of the stage with this id."""
    return SignedResult(sign(identity, RESULT_KIND, run, result.to_wire()), result, identity.peer_id)


def open_result(signed: wire.Signed, run: RunId) -> SignedResult:
    """Return the checked result in an envelope. Raises MalformedError, LimitError or ForgedError."""
    body = open_signed(signed, run, RESULT_KIND, wire.StageResult, MAX_RESULT_BYTES)
    return SignedResult(signed, StageResult.from_wire(body), signed.peer)


@dataclass(frozen=True)
class Contradiction:
    """The results of one question; `results[0]` is the one that the others contradict."""

    run: RunId
    results: tuple[SignedResult, ...]

    @property
    def liar(self) -> PeerId:
        """Return the maker of the first result."""
        return self.results[0].maker

    def proves(self, voters: Collection[PeerId]) -> bool:
        """Return whether two thirds of the voters of the stage agree on another value than the first one."""
        false, *others = self.results
        if not voters or not false.body.is_comparable:
            return False
        if any(each.body.question != false.body.question for each in others):
            return False
        values = {each.body.value for each in others}
        honest = {each.maker for each in others} & set(voters) - {self.liar}
        is_one = len(values) == 1 and false.body.value not in values
        return is_one and 3 * len(honest) >= 2 * len(voters)

    def to_wire(self) -> wire.Contradiction:
        return wire.Contradiction(run=bytes.fromhex(self.run), results=[each.signed for each in self.results])

    @classmethod
    def from_wire(cls, body: wire.Contradiction) -> Self:
        """Check the signatures. Raises MalformedError, LimitError or ForgedError."""
        if len(body.run) != DIGEST_BYTES or not 1 < len(body.results) <= MAX_RESULTS:
            raise MalformedError("a contradiction without a stage, or with too many results")
        run = body.run.hex()
        return cls(run, tuple(open_result(signed, run) for signed in body.results))


@dataclass(frozen=True)
class ExcludedMaker:
    """A contradiction, and the voters of the stage by which it has excluded a key."""

    found: Contradiction
    voters: frozenset[PeerId]

    @property
    def is_proved(self) -> bool:
        """Return whether the results prove it."""
        return self.found.proves(self.voters)


def contradictions(run: RunId, results: Sequence[SignedResult]) -> list[Contradiction]:
    """Return for each server that others contradict the most frequent other value of the same question."""
    found = []
    for false in results:
        others: dict[ResultValue, list[SignedResult]] = {}
        for each in results:
            if each.body.question == false.body.question and each.body.value != false.body.value:
                others.setdefault(each.body.value, []).append(each)
        if others:
            most = max(others.values(), key=len)[: MAX_RESULTS - 1]
            found.append(Contradiction(run, (false, *most)))
    return found
