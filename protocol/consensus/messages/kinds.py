"""The messages between the roster and the decision of a round, and the table of all kinds of messages.

Every body is checked in full before any other code sees it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

from google.protobuf.message import Message

from protocol import murmur_pb2 as wire
from protocol.admission import open_ticket, read_ticket
from protocol.blobs.blob import Blob, check_digest
from protocol.conduct import Proof
from protocol.consensus.locks import NO_BOUNDS, Bounds, Vote, newest_confirmed, required_contents
from protocol.consensus.messages.contributions import (
    MAX_CONTRIBUTIONS,
    MAX_HELD_BLOBS,
    MAX_MESSAGE_BYTES,
    MAX_REDUCERS_PER_PART,
    Commit,
    Contribution,
    ContributionLimits,
    Roster,
)
from protocol.consensus.messages.signed import (
    Digest,
    OpenNested,
    SignedMessage,
    check_ascending,
    check_count,
    check_round,
)
from protocol.errors import MalformedError, PeerFault
from protocol.identity import PeerId, public_key
from protocol.manifest.run import RunId
from protocol.signing import MAX_CHAIN_TOKENS, open_signed, read_unverified
from protocol.steering import open_revision, read_revision

MAX_VOTES = 4096


@dataclass(frozen=True)
class Inventory:
    """The blobs of a roster that a member holds; with `NO_ROSTER` it only reports the member's view.

    `lock`: the newest proposal that the member acknowledged, or empty.
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


class Basis(NamedTuple):
    """The state that a round builds on, with its base: every acknowledgement repeats it, so that certificates prove it.

    `state`: the digest of the outer state before the round; empty where peers share none. `voters`: the digest of the
    electorate before the round. `tokens`: those of all rounds before.
    """

    state: Digest = b""
    voters: Digest = b""
    tokens: int = 0

    @classmethod
    def from_wire(cls, body: wire.Acknowledgement | wire.Decision) -> Self:
        for digest in (body.state, body.voters):
            if digest:
                check_digest(digest)
        if body.tokens > MAX_CHAIN_TOKENS:
            raise MalformedError(f"an acknowledgement after {body.tokens} tokens; no run has so many")
        return cls(body.state, body.voters, body.tokens)


NO_BASIS = Basis()


@dataclass(frozen=True)
class Acknowledgement:
    """The vote for a proposal: the sender holds everything that it needs, and acknowledges nothing older.

    `content`: the digest of the proposal's content. `confirms`: the sender says instead that it knows a quorum of
    acknowledgements of the proposal, whether or not its own is among them.
    """

    round: int
    view: int
    proposal: Digest
    basis: Basis = NO_BASIS
    content: Digest = b""
    confirms: bool = False

    @classmethod
    def of(cls, proposal: SignedMessage[Commit], basis: Basis, confirms: bool = False) -> Self:
        """Return the vote for a proposal."""
        body = proposal.body
        return cls(body.round, body.view, proposal.digest, basis, body.content_digest, confirms)

    def is_for(self, proposal: SignedMessage[Commit]) -> bool:
        """Return whether the vote says nothing false about its proposal."""
        said = self.proposal, self.view, self.content
        return said == (proposal.digest, proposal.body.view, proposal.body.content_digest)

    def to_wire(self) -> wire.Acknowledgement:
        return wire.Acknowledgement(
            round=self.round,
            view=self.view,
            proposal=self.proposal,
            state=self.basis.state,
            voters=self.basis.voters,
            tokens=self.basis.tokens,
            content=self.content,
            confirms=self.confirms,
        )

    @classmethod
    def from_wire(cls, body: wire.Acknowledgement, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.proposal)
        _check_content(body.content)
        basis = Basis.from_wire(body)
        return cls(body.round, body.view, body.proposal, basis, body.content, body.confirms)


def _check_content(content: Digest) -> None:
    """Check the digest of a proposal's content, which votes of earlier versions do not name."""
    if content:
        check_digest(content)


@dataclass(frozen=True)
class CommitCertificate:
    """Acknowledgements of one proposal, in ascending order of senders, or confirmations of it.

    Those of a quorum are a lock, or decide the proposal: see `locks`. Their bodies are all the same, so the wire
    message holds only senders and signatures.
    """

    round: int
    view: int
    proposal: Digest
    acknowledgements: tuple[SignedMessage[Acknowledgement], ...]
    basis: Basis = NO_BASIS
    content: Digest = b""
    confirms: bool = False

    @classmethod
    def of(cls, acknowledgements: Sequence[SignedMessage[Acknowledgement]]) -> Self:
        """Return the certificate that these acknowledgements make, in ascending order of senders."""
        body = acknowledgements[0].body
        target = body.content, body.confirms
        return cls(body.round, body.view, body.proposal, tuple(acknowledgements), body.basis, *target)

    @cached_property
    def by_sender(self) -> dict[PeerId, SignedMessage[Acknowledgement]]:
        return {entry.sender: entry for entry in self.acknowledgements}

    @property
    def signers(self) -> frozenset[PeerId]:
        """Return the peers that acknowledged the proposal."""
        return frozenset(self.by_sender)

    def to_wire(self) -> wire.Decision:
        return wire.Decision(
            round=self.round,
            view=self.view,
            proposal=self.proposal,
            peers=[acknowledgement.sender for acknowledgement in self.acknowledgements],
            signatures=[acknowledgement.signed.signature for acknowledgement in self.acknowledgements],
            state=self.basis.state,
            voters=self.basis.voters,
            tokens=self.basis.tokens,
            content=self.content,
            confirms=self.confirms,
        )

    @classmethod
    def from_wire(cls, body: wire.Decision, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.proposal)
        basis = Basis.from_wire(body)
        check_count(len(body.peers), MAX_VOTES, "acknowledgements")
        if not body.peers:
            raise MalformedError("a certificate without an acknowledgement")
        if len(body.peers) != len(body.signatures):
            raise MalformedError(f"a certificate of {len(body.peers)} peers and {len(body.signatures)} signatures")
        check_ascending(body.peers, "acknowledgements")
        _check_content(body.content)
        target = body.content, body.confirms
        said = Acknowledgement(body.round, body.view, body.proposal, basis, *target)
        votes = tuple(open_nested(signed) for signed in _acknowledgement_envelopes(body, said))
        return cls(body.round, body.view, body.proposal, votes, basis, *target)


def _acknowledgement_envelopes(body: wire.Decision, said: Acknowledgement) -> list[wire.Signed]:
    """Return the envelopes of the acknowledgements in a certificate, which all say the same."""
    text = said.to_wire().SerializeToString(deterministic=True)
    return [
        wire.Signed(kind="acknowledgement", peer=peer, body=text, signature=signature)
        for peer, signature in zip(body.peers, body.signatures, strict=True)
    ]


@dataclass(frozen=True)
class Promise:
    """The promise of a member that joins a view: it acknowledges and confirms nothing older from now on.

    `bounds`: the newest proposals that it has acknowledged and confirmed until then.
    """

    round: int
    view: int
    roster: Digest
    bounds: Bounds = NO_BOUNDS

    def to_wire(self) -> wire.Promise:
        return wire.Promise(
            round=self.round,
            view=self.view,
            roster=self.roster,
            acknowledged=self.bounds.acknowledged.to_wire() if self.bounds.acknowledged else None,
            confirmed=self.bounds.confirmed.to_wire() if self.bounds.confirmed else None,
        )

    @classmethod
    def from_wire(cls, body: wire.Promise, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.roster)
        acknowledged = Vote.from_wire(body.acknowledged) if body.HasField("acknowledged") else None
        confirmed = Vote.from_wire(body.confirmed) if body.HasField("confirmed") else None
        return cls(body.round, body.view, body.roster, Bounds(acknowledged, confirmed))


@dataclass(frozen=True)
class Justification:
    """The promises by which the leader of a later view may propose a commit; see `locks`.

    `tolerated`: how many voters may lie. `certificate`: that of the newest confirmed proposal in the promises.
    """

    round: int
    base: Digest
    view: int
    roster: Digest
    proposal: Digest
    tolerated: int
    promises: tuple[SignedMessage[Promise], ...]
    certificate: CommitCertificate | None = None

    @property
    def bounds(self) -> list[Bounds]:
        """Return what each promise says."""
        return [promise.body.bounds for promise in self.promises]

    def allows(self, content: Digest) -> bool:
        """Return whether these promises let their leader propose a content, by its own word of how many may lie."""
        required = required_contents(self.bounds, self.tolerated)
        return required is None or content in required

    @property
    def is_complete(self) -> bool:
        """Return whether the certificate is that of the newest confirmed proposal."""
        lock, shown = newest_confirmed(self.bounds), self.certificate
        if lock is None or shown is None:
            return lock is None and shown is None
        named = shown.proposal, shown.view, shown.content, shown.round, shown.confirms
        return named == (lock.proposal, lock.view, lock.content, self.round, False)

    def to_wire(self) -> wire.Justification:
        return wire.Justification(
            round=self.round,
            base=self.base,
            view=self.view,
            roster=self.roster,
            proposal=self.proposal,
            tolerated=self.tolerated,
            promises=[promise.signed for promise in self.promises],
            certificate=self.certificate.to_wire() if self.certificate else None,
        )

    @classmethod
    def from_wire(cls, body: wire.Justification, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.base)
        for digest in (body.roster, body.proposal):
            check_digest(digest)
        check_count(len(body.promises), MAX_VOTES, "promises")
        check_ascending([signed.peer for signed in body.promises], "promises")
        if any(signed.kind != "promise" for signed in body.promises):
            raise MalformedError("a message of another kind inside a justification")
        promises = tuple(open_nested(signed) for signed in body.promises)
        place = body.round, body.view, body.roster
        if any((entry.body.round, entry.body.view, entry.body.roster) != place for entry in promises):
            raise MalformedError("a justification with a promise to another view")
        has_lock = body.HasField("certificate")
        certificate = CommitCertificate.from_wire(body.certificate, limits, open_nested) if has_lock else None
        head = body.round, body.base, body.view, body.roster, body.proposal, body.tolerated
        justification = cls(*head, promises, certificate)
        if not justification.is_complete:
            raise MalformedError("a justification without the certificate of its newest confirmed proposal")
        return justification


@dataclass(frozen=True)
class ReducerAssignment:
    """The contributions to sum, by their senders, and the reducers: the first one of each part, then the second."""

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
            raise MalformedError("a reducer assignment without a contribution")
        if not 1 <= len(body.reducers) <= MAX_REDUCERS_PER_PART * limits.parts:
            raise MalformedError(f"an assignment of {len(body.reducers)} reducers to at most {limits.parts} parts")
        for peer in {*body.included, *body.reducers}:
            public_key(peer)
        check_ascending(body.included, "included peers")
        return cls(body.round, body.view, body.roster, body.attempt, tuple(body.included), tuple(body.reducers))


@dataclass(frozen=True)
class ReducedPart:
    """The announcement of a reduced and encoded part.

    `inputs`: the digest of the summed contributions.
    """

    round: int
    view: int
    roster: Digest
    attempt: int
    part: int
    blob: Blob
    inputs: Digest

    def to_wire(self) -> wire.Part:
        return wire.Part(
            round=self.round,
            view=self.view,
            roster=self.roster,
            attempt=self.attempt,
            part=self.part,
            blob=self.blob.to_wire(),
            inputs=self.inputs,
        )

    @classmethod
    def from_wire(cls, body: wire.Part, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.roster)
        if body.part >= limits.parts:
            raise MalformedError(f"part {body.part} where there are at most {limits.parts}")
        check_digest(body.inputs)
        blob = limits.read_blob(body.blob)
        return cls(body.round, body.view, body.roster, body.attempt, body.part, blob, body.inputs)


Body = (
    Contribution
    | Roster
    | Inventory
    | ReducerAssignment
    | ReducedPart
    | Commit
    | Acknowledgement
    | CommitCertificate
    | Promise
    | Justification
    | Proof
)

KINDS: dict[str, tuple[type[Message], type[Any]]] = {  # the type on the wire and that of the body
    "contribution": (wire.Contribution, Contribution),
    "roster": (wire.Roster, Roster),
    "holding": (wire.Holding, Inventory),
    "inclusion": (wire.Inclusion, ReducerAssignment),
    "part": (wire.Part, ReducedPart),
    "commit": (wire.Commit, Commit),
    "acknowledgement": (wire.Acknowledgement, Acknowledgement),
    "decision": (wire.Decision, CommitCertificate),
    "promise": (wire.Promise, Promise),
    "justification": (wire.Justification, Justification),
    "proof": (wire.Proof, Proof),
}
_KIND_BY_TYPE = {body: kind for kind, (_, body) in KINDS.items()}


class NamedBlob(NamedTuple):
    """A blob, and the message that names it."""

    blob: Blob
    message: SignedMessage[Body]


def kind_of(body: Body) -> str:
    """Return the wire kind of a message body."""
    return _KIND_BY_TYPE[type(body)]


def parse(signed: wire.Signed, run_id: RunId, limits: ContributionLimits) -> SignedMessage[Body]:
    """Return the checked message in an envelope.

    Raises:
        MalformedError, ForgedError, LimitError: the message is malformed, forged or too large.
    """
    if signed.kind not in KINDS:
        raise MalformedError("a message of an unknown kind")
    wire_type, body_type = KINDS[signed.kind]
    body = open_signed(signed, run_id, signed.kind, wire_type, MAX_MESSAGE_BYTES)
    return SignedMessage.of(signed, body_type.from_wire(body, limits, nested_parser(run_id, limits)))


def signed_round(signed: wire.Signed, run_id: RunId) -> int | None:
    """Return the round of a statement that the named peer has really signed, whatever the statement says; else none."""
    if signed.kind not in KINDS:
        return None
    try:
        body: Any = open_signed(signed, run_id, signed.kind, KINDS[signed.kind][0], MAX_MESSAGE_BYTES)
    except PeerFault:
        return None
    return int(body.round) if "round" in body.DESCRIPTOR.fields_by_name else None


def nested_parser(run_id: RunId, limits: ContributionLimits) -> OpenNested:
    """Return the function that checks a message inside another: its body and its signature.

    The organiser signs for the whole run, also if `run_id` is that of a stage.
    """
    whole_run = limits.whole_run or run_id

    def open_nested(nested: wire.Signed) -> SignedMessage[Any]:
        match nested.kind:
            case "revision":
                return open_revision(nested, whole_run, limits.organiser)
            case "ticket":
                return SignedMessage.of(nested, open_ticket(nested, whole_run, limits.organiser))
        return parse(nested, run_id, limits)

    return open_nested


def parse_unverified(signed: wire.Signed, limits: ContributionLimits) -> SignedMessage[Body]:
    """Return the message in an envelope that this program verified before it stored it; checks no signature.

    Raises:
        MalformedError, LimitError: the message is malformed or too large.
    """
    if signed.kind not in KINDS:
        raise MalformedError("a message of an unknown kind")
    wire_type, body_type = KINDS[signed.kind]
    body = read_unverified(signed, signed.kind, wire_type, MAX_MESSAGE_BYTES)
    return SignedMessage.of(signed, body_type.from_wire(body, limits, nested_reader(limits)))


def nested_reader(limits: ContributionLimits) -> OpenNested:
    """Return the function that checks the body of a message inside one that this program verified before."""

    def open_nested(nested: wire.Signed) -> SignedMessage[Any]:
        match nested.kind:
            case "revision":
                return read_revision(nested)
            case "ticket":
                return SignedMessage.of(nested, read_ticket(nested))
        return parse_unverified(nested, limits)

    return open_nested


def named_blobs(message: SignedMessage[Body]) -> Iterator[NamedBlob]:
    """Yield the blobs that a message, or one inside it, names."""
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
