"""Audit contributions: auditors repeat drawn ones, and compare every bit. PURE.

*Work records.* The work between two contributions of a peer is a function of its inner state after the first one, of
the anchors that it applied meanwhile, and of its text: the seed, its key and the position decide the order of the text.
A work record names all of these. It is a blob that the contribution names, so a peer cannot change it later. The state
after one contribution is the state before the next one, and the record names the record before it, so a peer cannot
invent an inner state either.

*Draw.* The digest of the chain after a commit decides, so nobody knows the draw while it can still change its
contribution, and every peer on the chain computes the same. Each contribution is drawn with the probability `share`,
and its auditors are ranked.

*Findings.* The first auditor of a contribution repeats it, and publishes nothing if it agrees. If it finds a
difference, it publishes a finding, and the next two auditors repeat the contribution too. Two of the three decide: that
the audited peer lied, which excludes its key, or that the first auditor did, which is a strike against it. Every peer
on the chain knows the auditors, so all come to the same decision.

A peer that serves neither the record nor the state, or whose work nobody can repeat, lies as little as one whose link
is down. It gets a strike once that happens MAX_MISSES times in a row.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Final, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import MAX_BLOB_BYTES, Blob, check_digest
from protocol.consensus.chain import Chain
from protocol.consensus.messages.contributions import MAX_WORK_RECORD_BYTES, Commit, Contribution
from protocol.consensus.messages.signed import Digest, SignedMessage, check_round
from protocol.errors import LimitError, MalformedError, StaleError
from protocol.fault_words import describe_faults
from protocol.identity import Identity, PeerId, public_key
from protocol.manifest.run import RunId
from protocol.manifest.sections import MAX_SOURCES, NUMBER_BITS, PLACE_BITS
from protocol.murmur_pb2 import Signed
from protocol.signing import MAX_ROUND, open_signed, sign

Outcome = Literal["included", "excluded", "lost", "none"]  # of the contribution before, as its trainer learns it
MAX_TRACED_ANCHORS = 8
MAX_STEPS = 2**24
MAX_POSITION = 2 ** (NUMBER_BITS + PLACE_BITS * MAX_SOURCES) - 1
MAX_OBSTACLE_CHARACTERS = 64
MAX_THREADS = 256
HexDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
RoundNumber = Annotated[int, Field(ge=0, le=MAX_ROUND)]
PANEL = 3  # auditors of one contribution, the majority of whom decides
AuditKey = tuple[Digest, PeerId]  # chain and audited peer
FINDING_KIND = "finding"
MAX_FINDING_BYTES = 512
Verdict = Literal["equal", "different", "not served", "not auditable"]
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)
MAJORITY = 2  # of the three auditors of a contribution
KEPT_ROUNDS = 64
HELD_ROUNDS = 16  # for so long an auditor keeps what a repetition needs, and longer once there is a finding
MAX_MISSES = 3
MAX_COUNTED_PEERS = 4096
MAX_EARLY_ROUNDS = 2
MAX_EARLY_FINDINGS = 256
Offence = Literal["audit: lied", "audit: not served", "audit: not auditable", "audit: false finding"]
_MISSES: Final[Mapping[Verdict, Offence]] = MappingProxyType(
    {"not served": "audit: not served", "not auditable": "audit: not auditable"}
)
NOTHING_KNOWN: Final[Mapping[PeerId, Blob | None]] = MappingProxyType({})


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
    """A contribution that is audited, the chain's digest after its commit, and its auditors in their order."""

    contribution: SignedMessage[Contribution]
    chain: Digest
    auditors: tuple[PeerId, ...]

    @property
    def key(self) -> AuditKey:
        return self.chain, self.contribution.sender


def draw_audits(commit: Commit, chain: Digest, share: float, voters: Collection[PeerId]) -> tuple[Audit, ...]:
    """Return the audits of a round.

    Args:
        commit: the decided commit.
        chain: the digest of the chain after it.
        share: the probability with which a contribution is audited.
        voters: the keys with a vote; empty if nobody has one yet. Contributors that are among them audit.
    """
    contributors = [entry.sender for entry in commit.contributions]
    candidates = [peer for peer in contributors if peer in voters] or contributors
    return tuple(
        Audit(entry, chain, _rank_auditors(entry.sender, chain, candidates))
        for entry in commit.contributions
        if share > 0 and is_drawn(entry.sender, chain, share)
    )


def is_drawn(peer: PeerId, chain: Digest, share: float) -> bool:
    """Return whether the contribution of a peer is audited."""
    return _draw(b"audit", chain, peer) < share * 2**64


def _rank_auditors(audited: PeerId, chain: Digest, candidates: Collection[PeerId]) -> tuple[PeerId, ...]:
    others = [peer for peer in candidates if peer != audited]
    return tuple(sorted(others, key=lambda peer: (_draw(b"auditor", chain, audited, peer), peer))[:PANEL])


def _draw(label: bytes, chain: Digest, *peers: PeerId) -> int:
    text = b"\0".join([b"murmur " + label, chain.hex().encode(), *(peer.encode() for peer in peers)])
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


@dataclass(frozen=True)
class Finding:
    """The verdict of an auditor on one contribution, which it names by its digest.

    `chain` is the digest of the chain after the commit of `round`, which drew the auditors.
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


@dataclass(frozen=True)
class RepeatWork:
    """We are to repeat a contribution; another auditor found a difference in it if it `is_disputed`.

    `last_work` is the record of the peer's last contribution in the chain, if known.
    """

    audit: Audit
    last_work: Blob | None = None
    is_disputed: bool = False


@dataclass(frozen=True)
class PeerLied:
    """A majority of the auditors found a difference in a contribution of `round`; `findings` is the proof."""

    peer: PeerId
    round: int
    findings: tuple[Signed, ...]


@dataclass(frozen=True)
class PeerStruck:
    """A peer did something that honest peers do rarely."""

    peer: PeerId
    reason: Offence


Consequence = RepeatWork | PeerLied | PeerStruck


@dataclass
class _Case:
    audit: Audit
    round: int
    last_work: Blob | None
    findings: dict[PeerId, SignedFinding] = field(default_factory=dict)
    is_repeating: bool = False
    is_decided: bool = False

    def count(self, verdict: Verdict) -> int:
        return sum(finding.body.verdict == verdict for finding in self.findings.values())


class AuditTracker:
    """The audits that one peer knows of."""

    def __init__(self, peer_id: PeerId) -> None:
        self._peer_id = peer_id
        self._cases: dict[AuditKey, _Case] = {}
        self._misses: Counter[PeerId] = Counter()
        self._round = -1
        self._early: dict[tuple[PeerId, *AuditKey], SignedFinding] = {}  # of rounds that we have not applied yet

    def open_round(self, chain: Chain, share: float) -> list[Consequence]:
        """Draw the audits of the newest commit of our chain; return those that are ours."""
        if not chain.log.commits:
            return []
        *earlier, newest = (commit.body for commit in chain.log.commits)
        audits = draw_audits(newest, chain.digest, share, chain.electorate.voters)
        return self.open(newest.round, audits, last_work_by_peer(earlier))

    def open(
        self, round_number: int, audits: Sequence[Audit], last_work: Mapping[PeerId, Blob | None] = NOTHING_KNOWN
    ) -> list[Consequence]:
        """Take the audits of a decided round; return those that are ours, and what early findings lead to."""
        self._round = round_number
        self._cases = {key: case for key, case in self._cases.items() if case.round > round_number - KEPT_ROUNDS}
        ours: list[Consequence] = []
        for audit in audits:
            peer = audit.contribution.sender
            case = self._cases.setdefault((audit.chain, peer), _Case(audit, round_number, last_work.get(peer)))
            if audit.auditors[:1] == (self._peer_id,) and not case.is_repeating:
                case.is_repeating = True
                ours.append(RepeatWork(audit, case.last_work))
        return [*ours, *self._learn_early()]

    def _learn_early(self) -> list[Consequence]:
        due = [key for key, finding in self._early.items() if finding.body.round <= self._round]
        found = [finding for key in due if self._is_known(finding := self._early.pop(key))]
        return [consequence for finding in found for consequence in self._learn(finding)]

    @property
    def round(self) -> int:
        """Return the newest decided round."""
        return self._round

    @property
    def our_audits(self) -> frozenset[AuditKey]:
        """Return the audits that we may still have to repeat."""
        since = self._round - HELD_ROUNDS
        ours = ((key, case) for key, case in self._cases.items() if self._peer_id in case.audit.auditors)
        return frozenset(key for key, case in ours if case.round > since or (case.findings and not case.is_decided))

    def is_published(self, audit: Audit, verdict: Verdict) -> bool:
        """Return whether our verdict concerns the others: a difference does, and any answer to one."""
        case = self._cases.get((audit.chain, audit.contribution.sender))
        return verdict == "different" or (case is not None and bool(case.findings))

    def note_verdict(self, audit: Audit, verdict: Verdict) -> list[Consequence]:
        """Count what we found ourselves."""
        peer = audit.contribution.sender
        if verdict not in _MISSES:
            self._misses.pop(peer, None)
            return []
        if len(self._misses) >= MAX_COUNTED_PEERS:
            self._misses.clear()
        self._misses[peer] += 1
        if self._misses[peer] < MAX_MISSES:
            return []
        del self._misses[peer]
        return [PeerStruck(peer, _MISSES[verdict])]

    def learn(self, finding: SignedFinding) -> list[Consequence]:
        """Take a finding, our own included. Raises StaleError if its sender does not audit that contribution."""
        body = finding.body
        if self._round < body.round <= self._round + MAX_EARLY_ROUNDS and len(self._early) < MAX_EARLY_FINDINGS:
            self._early.setdefault((finding.auditor, body.chain, body.audited), finding)
            return []
        if not self._is_known(finding):
            raise StaleError(f"{finding.auditor} reports on a contribution that it does not audit")
        return self._learn(finding)

    def _is_known(self, finding: SignedFinding) -> bool:
        """Return whether its auditor was drawn for that contribution."""
        case = self._cases.get((finding.body.chain, finding.body.audited))
        if case is None or finding.auditor not in case.audit.auditors:
            return False
        return finding.body.contribution == case.audit.contribution.digest

    def _learn(self, finding: SignedFinding) -> list[Consequence]:
        case = self._cases[finding.body.chain, finding.body.audited]
        if finding.auditor in case.findings:
            return []
        case.findings[finding.auditor] = finding
        return [*self._confirm(case), *self._decide(case)]

    def _confirm(self, case: _Case) -> list[Consequence]:
        if case.is_repeating or self._peer_id not in case.audit.auditors or not case.count("different"):
            return []
        case.is_repeating = True
        return [RepeatWork(case.audit, case.last_work, is_disputed=True)]

    def _decide(self, case: _Case) -> list[Consequence]:
        if case.is_decided:
            return []
        peer, accusers = case.audit.contribution.sender, case.count("different")
        if accusers >= MAJORITY:
            case.is_decided = True
            return [PeerLied(peer, case.round, self._proof(case))]
        if accusers and case.count("equal") >= MAJORITY:
            case.is_decided = True
            return [PeerStruck(accuser, "audit: false finding") for accuser in self._accusers(case)]
        return []

    def _proof(self, case: _Case) -> tuple[Signed, ...]:
        return tuple(case.findings[accuser].signed for accuser in self._accusers(case))

    def _accusers(self, case: _Case) -> list[PeerId]:
        return sorted(peer for peer, finding in case.findings.items() if finding.body.verdict == "different")


def last_work_by_peer(commits: Sequence[Commit]) -> dict[PeerId, Blob | None]:
    """Return the work record of the last contribution of each peer in these commits."""
    return {entry.sender: entry.body.work for commit in commits for entry in commit.contributions}
