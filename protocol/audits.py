"""Audit contributions: auditors repeat drawn ones, and compare every bit. PURE.

*Work records.* The work between two contributions of a peer is a function of its inner state after the first one, of
the anchors that it applied meanwhile, and of its text: the seed, its key and the position decide the order of the text.
A work record names all of these. It is a blob that the contribution names, so a peer cannot change it later. The state
after one contribution is the state before the next one, and the record names the record before it, so a peer cannot
invent an inner state either.

*Draw.* Each contribution is drawn with the probability `share`, and its auditors are ranked: first the contributors of
its round that have a vote, then all other voters. A digest of the chain would be a bad lot, because whoever contributes
last could try many contributions of his own. So each contribution seals a secret, which the sender's contribution to
the next round shows, and the secrets that fit their seals draw the audits of the round before. Nobody knows the draw
while its contributions can still change, and nobody can choose what to show; whoever shows nothing is audited. What
remains: a contributor can withhold its next contribution, which then counts for nothing, and the leader of the next
round those of others, which members count and strike (`protocol.conduct`). A leader that leaves out one of n has n
draws to choose from. Where nobody contributed twice in a row, the digest of the chain alone decides.

*Findings.* An auditor that finds a difference signs a finding, and so do those that answer it; `audit_tracker` draws
the consequences.
"""

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal, NamedTuple, Self, get_args

from google.protobuf.message import Message
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import MAX_BLOB_BYTES, Blob, check_digest
from protocol.consensus.chain import Chain
from protocol.consensus.messages.contributions import MAX_WORK_RECORD_BYTES, Commit, Contribution
from protocol.consensus.messages.signed import Digest, SignedMessage, check_round
from protocol.errors import LimitError, MalformedError
from protocol.fault_words import describe_faults
from protocol.identity import Identity, PeerId, public_key
from protocol.manifest.run import RunId
from protocol.manifest.sections import MAX_SOURCES, NUMBER_BITS, PLACE_BITS
from protocol.signing import MAX_ROUND, open_signed, sign

Outcome = Literal["included", "excluded", "lost", "none"]  # of the contribution before, as its trainer learns it
MAX_TRACED_ANCHORS = 8
MAX_STEPS = 2**24
MAX_POSITION = 2 ** (NUMBER_BITS + PLACE_BITS * MAX_SOURCES) - 1
MAX_OBSTACLE_CHARACTERS = 64
MAX_THREADS = 256
HexDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
RoundNumber = Annotated[int, Field(ge=0, le=MAX_ROUND)]
AuditKey = tuple[Digest, PeerId]  # chain and audited peer
FINDING_KIND = "finding"
SECRET_KIND = "secret"  # what is signed so is never sent, so nobody else has the signature
Signer = Callable[[str, Message], wire.Signed]
MAX_FINDING_BYTES = 512
Verdict = Literal["equal", "different", "not served", "not auditable", "similar"]
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AppliedAnchor(_Part):
    """An anchor that the trainer applied `steps` inner steps after its last contribution, with that one's outcome."""

    steps: int = Field(ge=0, le=MAX_STEPS)
    round: RoundNumber
    outcome: Outcome


class WorkTrace(_Part):
    """The steps and anchors between two contributions, in their order.

    `start`: the round whose anchor a new trainer began with; None if it continues from its last contribution.
    `obstacle`: why nobody else can repeat the work; empty if others can.
    """

    steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    anchors: tuple[AppliedAnchor, ...] = Field(default=(), max_length=MAX_TRACED_ANCHORS)
    start: RoundNumber | None = None
    obstacle: str = Field(default="", max_length=MAX_OBSTACLE_CHARACTERS)


class Conditions(_Part):
    """Everything but the state and the anchors on which the last bit of an inner step depends.

    `device` names the kind of device and the version of torch, `text` the text that the peer trains on.
    """

    device: str = Field(default="", max_length=96)
    text: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    threads: int = Field(default=1, ge=1, le=MAX_THREADS)
    microbatch: int = Field(default=1, ge=1, le=2**20)

    @property
    def kind(self) -> str:
        """Name the kind of device that decides the last bits of a pass of a stage; empty if that is unknown."""
        return f"{self.device} {self.threads} threads" if self.device else ""


class BlobName(_Part):
    """The name of a blob."""

    digest: HexDigest
    size: int = Field(ge=1, le=MAX_BLOB_BYTES)

    @classmethod
    def of(cls, blob: Blob) -> Self:
        """Return the name of a blob."""
        return cls(digest=blob.name, size=blob.size)

    @property
    def blob(self) -> Blob:
        return Blob(bytes.fromhex(self.digest), self.size)


class WorkRecord(_Part):
    """The work that went into one contribution.

    `before` is the state after the contribution that `previous` describes; both are absent for the first one.
    """

    round: RoundNumber = Field(description="the round that the contribution was made for")
    position: int = Field(ge=0, le=MAX_POSITION, description="in the peer's order of the text, before the first step")
    before: BlobName | None
    after: BlobName | None
    previous: BlobName | None
    trace: WorkTrace
    conditions: Conditions

    def to_bytes(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, raw: bytes | bytearray | memoryview) -> Self:
        """Parse a record. Raises MalformedError or LimitError."""
        if len(raw) > MAX_WORK_RECORD_BYTES:
            raise LimitError(f"a work record has at most {MAX_WORK_RECORD_BYTES} bytes")
        try:
            record = cls.model_validate_json(bytes(raw), strict=True)
        except ValidationError as error:
            raise MalformedError(f"not a work record: {describe_faults(error)}") from error
        return record

    def find_obstacle(self) -> str:
        """Return why this work cannot be repeated; empty if it can."""
        if self.trace.obstacle:
            return self.trace.obstacle
        if self.after is None:
            return "no state after it"
        if self.before is None and self.trace.start is None:
            return "no state before it"
        return ""

    @property
    def anchor_rounds(self) -> tuple[int, ...]:
        """Return the rounds whose anchors the work needs."""
        start = () if self.trace.start is None or self.before is not None else (self.trace.start,)
        return tuple(dict.fromkeys([*start, *(anchor.round for anchor in self.trace.anchors)]))


class Audit(NamedTuple):
    """A contribution that is audited, the chain's digest after its commit, and its auditors in their order.

    `voters`: the keys with a vote, of which two thirds convict; empty if nobody has one yet.
    """

    contribution: SignedMessage[Contribution]
    chain: Digest
    auditors: tuple[PeerId, ...]
    voters: frozenset[PeerId]

    @property
    def key(self) -> AuditKey:
        return self.chain, self.contribution.sender


def seal_contribution(body: Contribution, chain: Chain, peer: PeerId, sign: Signer) -> Contribution:
    """Return our contribution with the seal of its secret, and with the secret of the last one if it was included."""
    last = chain.log.commits[-1].body if chain.log.commits else None
    is_due = last is not None and peer in last.by_sender
    return replace(
        body,
        seal=hashlib.sha256(_secret_of(body, sign)).digest(),
        secret=_secret_of(last, sign) if last is not None and is_due else b"",
    )


def _secret_of(place: Contribution | Commit, sign: Signer) -> bytes:
    """Return our secret of a round: always the same one, which only our key can compute."""
    named = wire.Contribution(round=place.round, base=place.base)
    return hashlib.sha256(sign(SECRET_KIND, named).signature).digest()


class AuditDraw(NamedTuple):
    """The seed of the audits of a commit, and the peers that are audited in any case."""

    seed: Digest
    suspects: Collection[PeerId] = ()

    @classmethod
    def of(cls, commit: Commit, following: Commit) -> Self:
        """Draw the audits of a commit by the secrets that the next commit shows."""
        shown, sealed = list[bytes](), commit.by_sender
        both = [entry for entry in following.contributions if entry.sender in sealed]
        suspects = list[PeerId]()
        for entry in both:
            if hashlib.sha256(entry.body.secret).digest() == sealed[entry.sender].body.seal:
                shown.append(entry.body.secret)
            else:
                suspects.append(entry.sender)
        return cls(hashlib.sha256(b"".join([b"murmur draw", following.base, *shown])).digest(), suspects)


def draw_audits(
    commit: Commit, chain: Digest, draw: AuditDraw, share: float, voters: Collection[PeerId]
) -> tuple[Audit, ...]:
    """Return the audits of a round.

    Args:
        commit: the decided commit.
        chain: the digest of the chain after it.
        draw: that of the next commit.
        share: the probability with which a contribution is audited.
        voters: the keys with a vote, which audit; empty if nobody has one yet. Then all contributors do.
    """
    contributors, voters = commit.by_sender.keys(), frozenset(voters)
    return tuple(
        Audit(entry, chain, _rank_auditors(entry.sender, draw.seed, voters or contributors, contributors), voters)
        for entry in commit.contributions
        if share > 0 and (entry.sender in draw.suspects or is_drawn(entry.sender, draw.seed, share))
    )


def is_drawn(peer: PeerId, seed: Digest, share: float) -> bool:
    """Return whether the contribution of a peer is audited."""
    return _draw(b"audit", seed, peer) < share * 2**64


def _rank_auditors(
    audited: PeerId, seed: Digest, candidates: Collection[PeerId], present: Collection[PeerId]
) -> tuple[PeerId, ...]:
    """Order the auditors by the draw; those that contributed to the round are there, and come first."""
    drawn = {peer: _draw(b"auditor", seed, audited, peer) for peer in candidates if peer != audited}
    return tuple(sorted(drawn, key=lambda peer: (peer not in present, drawn[peer], peer)))


def _draw(label: bytes, seed: Digest, *peers: PeerId) -> int:
    text = b"\0".join([b"murmur " + label, seed.hex().encode(), *(peer.encode() for peer in peers)])
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


@dataclass(frozen=True)
class Finding:
    """The verdict of an auditor on one contribution, which it names by its digest.

    `chain` is the digest of the chain after the commit of `round`.
    """

    round: int
    chain: Digest
    audited: PeerId
    contribution: Digest
    verdict: Verdict

    def to_wire(self) -> wire.Finding:
        return wire.Finding(
            round=self.round,
            chain=self.chain,
            audited=self.audited,
            contribution=self.contribution,
            verdict=VERDICTS.index(self.verdict),
        )

    @classmethod
    def from_wire(cls, body: wire.Finding) -> Self:
        """Check a finding. Raises MalformedError."""
        check_round(body.round, body.chain)
        public_key(body.audited)
        check_digest(body.contribution)
        if body.verdict >= len(VERDICTS):
            raise MalformedError(f"a finding with verdict {body.verdict}")
        return cls(body.round, body.chain, body.audited, body.contribution, VERDICTS[body.verdict])


@dataclass(frozen=True)
class SignedFinding:
    """A checked finding and its auditor; `signed` is its envelope."""

    signed: wire.Signed
    body: Finding
    auditor: PeerId


def sign_finding(identity: Identity, run_id: RunId, finding: Finding) -> SignedFinding:
    """Sign a finding."""
    signed = sign(identity, FINDING_KIND, run_id, finding.to_wire())
    return SignedFinding(signed, finding, identity.peer_id)


def open_finding(signed: wire.Signed, run_id: RunId) -> SignedFinding:
    """Return the checked finding in an envelope. Raises MalformedError or ForgedError."""
    body = open_signed(signed, run_id, FINDING_KIND, wire.Finding, MAX_FINDING_BYTES)
    return SignedFinding(signed, Finding.from_wire(body), signed.peer)
