"""What members say between the roster and the decision of a round, each body checked in full.

All kinds of statements about a round, and how to read one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

from google.protobuf.message import Message

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob, check_digest
from protocol.consensus.messages import (
    MAX_CONTRIBUTIONS,
    MAX_HELD_BLOBS,
    MAX_MESSAGE_BYTES,
    Commit,
    Contribution,
    ContributionLimits,
    Digest,
    OpenNested,
    Roster,
    SignedMessage,
    check_ascending,
    check_count,
    check_part_count,
    check_round,
)
from protocol.errors import MalformedError
from protocol.identity import PeerId, public_key
from protocol.manifest import RunId
from protocol.signing import open_signed

MAX_VOTES = 4096


@dataclass(frozen=True)
class Inventory:
    """Which blobs a member holds of a roster; NO_ROSTER: it only tells its view.

    `lock`: the newest proposal that it acknowledged; empty where there is none.
    """

    round: int
    view: int
    roster: Digest
    blobs: tuple[Digest, ...]
    lock: Digest = b""

    def to_wire(self) -> wire.Holding:
        return wire.Holding(round=self.round, view=self.view, roster=self.roster, blobs=self.blobs, lock=self.lock)

    @classmethod
    def from_wire(cls, body: wire.Holding, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.roster)
        check_count(len(body.blobs), MAX_HELD_BLOBS, "blobs")
        for digest in body.blobs:
            check_digest(digest)
        check_ascending(body.blobs, "held blobs")
        if body.lock:
            check_digest(body.lock)
        return cls(body.round, body.view, body.roster, tuple(body.blobs), body.lock)


@dataclass(frozen=True)
class Acknowledgement:
    """The sender holds all that it takes to apply a proposal, and acknowledges nothing older any more."""

    round: int
    view: int
    proposal: Digest

    def to_wire(self) -> wire.Acknowledgement:
        return wire.Acknowledgement(round=self.round, view=self.view, proposal=self.proposal)

    @classmethod
    def from_wire(cls, body: wire.Acknowledgement, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.proposal)
        return cls(body.round, body.view, body.proposal)


@dataclass(frozen=True)
class CommitCertificate:
    """Acknowledgements of one proposal, ascending by sender; those of a majority decide it, whoever passes them on.

    Their bodies are all the same, so only senders and signatures stand in it.
    """

    round: int
    view: int
    proposal: Digest
    acknowledgements: tuple[SignedMessage[Acknowledgement], ...]

    @cached_property
    def by_sender(self) -> dict[PeerId, SignedMessage[Acknowledgement]]:
        return {entry.sender: entry for entry in self.acknowledgements}

    def to_wire(self) -> wire.Decision:
        return wire.Decision(
            round=self.round,
            view=self.view,
            proposal=self.proposal,
            peers=[acknowledgement.sender for acknowledgement in self.acknowledgements],
            signatures=[acknowledgement.signed.signature for acknowledgement in self.acknowledgements],
        )

    @classmethod
    def from_wire(cls, body: wire.Decision, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.proposal)
        check_count(len(body.peers), MAX_VOTES, "acknowledgements")
        if len(body.peers) != len(body.signatures):
            raise MalformedError(f"a decision of {len(body.peers)} peers and {len(body.signatures)} signatures")
        check_ascending(body.peers, "acknowledgements")
        votes = tuple(open_nested(signed) for signed in _acknowledgement_envelopes(body))
        return cls(body.round, body.view, body.proposal, votes)


def _acknowledgement_envelopes(body: wire.Decision) -> list[wire.Signed]:
    """The envelopes of a decision's acknowledgements."""
    said = Acknowledgement(body.round, body.view, body.proposal).to_wire().SerializeToString(deterministic=True)
    return [
        wire.Signed(kind="acknowledgement", peer=peer, body=said, signature=signature)
        for peer, signature in zip(body.peers, body.signatures, strict=True)
    ]


@dataclass(frozen=True)
class ReducerAssignment:
    """Whose contributions the reducers shall sum, and who reduces which part."""

    round: int
    view: int
    roster: Digest
    attempt: int
    included: tuple[PeerId, ...]
    reducers: tuple[PeerId, ...]

    def to_wire(self) -> wire.Inclusion:
        return wire.Inclusion(
            round=self.round,
            view=self.view,
            roster=self.roster,
            attempt=self.attempt,
            included=self.included,
            reducers=self.reducers,
        )

    @classmethod
    def from_wire(cls, body: wire.Inclusion, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.roster)
        check_count(len(body.included), MAX_CONTRIBUTIONS, "included peers")
        if not body.included:
            raise MalformedError("an inclusion that names nobody")
        check_part_count(len(body.reducers), limits, "an inclusion")
        for peer in {*body.included, *body.reducers}:
            public_key(peer)
        check_ascending(body.included, "included peers")
        return cls(body.round, body.view, body.roster, body.attempt, tuple(body.included), tuple(body.reducers))


@dataclass(frozen=True)
class ReducedPart:
    """One part has been reduced and encoded."""

    round: int
    view: int
    roster: Digest
    attempt: int
    part: int
    blob: Blob

    def to_wire(self) -> wire.Part:
        return wire.Part(
            round=self.round,
            view=self.view,
            roster=self.roster,
            attempt=self.attempt,
            part=self.part,
            blob=self.blob.to_wire(),
        )

    @classmethod
    def from_wire(cls, body: wire.Part, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.roster)
        if body.part >= limits.parts:
            raise MalformedError(f"part {body.part} where there are at most {limits.parts}")
        return cls(body.round, body.view, body.roster, body.attempt, body.part, limits.read_blob(body.blob))


Body = (
    Contribution | Roster | Inventory | ReducerAssignment | ReducedPart | Commit | Acknowledgement | CommitCertificate
)

KINDS: dict[str, tuple[type[Message], type[Any]]] = {  # the wire type and ours
    "contribution": (wire.Contribution, Contribution),
    "roster": (wire.Roster, Roster),
    "holding": (wire.Holding, Inventory),
    "inclusion": (wire.Inclusion, ReducerAssignment),
    "part": (wire.Part, ReducedPart),
    "commit": (wire.Commit, Commit),
    "acknowledgement": (wire.Acknowledgement, Acknowledgement),
    "decision": (wire.Decision, CommitCertificate),
}
_KIND_BY_TYPE = {body: kind for kind, (_, body) in KINDS.items()}


class NamedBlob(NamedTuple):
    """A blob, and the statement that names it."""

    blob: Blob
    message: SignedMessage[Body]


def kind_of(body: Body) -> str:
    """Return the wire kind of a message body."""
    return _KIND_BY_TYPE[type(body)]


def parse(signed: wire.Signed, run_id: RunId, limits: ContributionLimits) -> SignedMessage[Body]:
    """The checked statement in an envelope. Raises MalformedError, ForgedError or LimitError."""
    if signed.kind not in KINDS:
        raise MalformedError("a statement of a kind that no round knows")
    message, body_type = KINDS[signed.kind]
    body = open_signed(signed, run_id, signed.kind, message, MAX_MESSAGE_BYTES)
    return SignedMessage.of(signed, body_type.from_wire(body, limits, lambda nested: parse(nested, run_id, limits)))


def named_blobs(message: SignedMessage[Body]) -> Iterator[NamedBlob]:
    """Those that a statement, or one inside it, names."""
    body = message.body
    match body:
        case Contribution():
            yield from (NamedBlob(blob, message) for blob in body.parts)
        case Roster():
            yield from (named for nested in body.contributions for named in named_blobs(nested))
        case Commit():
            yield from (NamedBlob(blob, message) for blob in body.parts)
            yield from (named for nested in body.contributions for named in named_blobs(nested))
        case ReducedPart():
            yield NamedBlob(body.blob, message)
