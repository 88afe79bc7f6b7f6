"""The messages with which a round begins and ends: contributions, and the rosters and commits that list them.

Every body is checked in full before any other code sees it. Lists that are sets (contributions by sender, blobs by
digest, included peers) are in ascending order without duplicates: so each content has one encoding.

*Tokens.* The number of tokens is a peer's own claim. It decides the weight in the mean, the length of the chain, the
target and the receipts, so all of them use one number:

    counted = min(claimed, 2 x the lower median of the claims in the commit)

It follows from the commit alone: all peers compute the same, and a certificate of the commit covers it. While most
contributions of a round are honest, the median is an honest claim. A claim of more than twice the plan of a round is
refused when it arrives (`ContributionLimits.max_tokens`), which also bounds a peer that is alone in a commit. No peer
compares a claim with its own clock: a contribution that travelled for long and the next one arrive close together, so
an honest peer behind a bad link would look too fast, and peers that disagree about it could not commit.

*Evidence.* Several reducers sum each part, independently, and sign the result together with its inputs. A commit
carries their signatures: so neither a leader nor one reducer can make up a sum, and a wrong sum names its authors.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median_low
from typing import Final, NamedTuple, Self

from protocol import murmur_pb2 as wire
from protocol.admission import TICKET_KIND, Ticket
from protocol.blobs.blob import DIGEST_BYTES, Blob, check_digest
from protocol.consensus.messages.signed import (
    Digest,
    OpenNested,
    SignedMessage,
    check_ascending,
    check_count,
    check_round,
    check_sizes,
)
from protocol.errors import LimitError, MalformedError
from protocol.identity import PeerId, public_key
from protocol.manifest.run import RunId
from protocol.manifest.sections import MAX_STEP_MICROBATCHES
from protocol.pipeline.ledger import StepLedger
from protocol.rollout_credits import ClaimedCredits, Credits, count_credits, open_credits
from protocol.steering import MAX_REVISIONS, NO_REVISION, REVISION_KIND, Revision

MAX_MULTIPLE: Final = 2  # of the median claim of a round, and of the tokens of a round's plan
MAX_REDUCERS_PER_PART = 4
MAX_CONTRIBUTIONS = 1024
MAX_PARTS = 4096
MAX_HELD_BLOBS = 65_536
MAX_TOKENS = 2**48
MAX_CODEC_CHARACTERS = 64
MAX_AGE = 8  # rounds
MAX_WORK_RECORD_BYTES = 8192
# A roster of 1024 contributions with 4096 parts each would be 180 MB, and no run needs one.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
NO_ROSTER = bytes(32)


@dataclass(frozen=True)
class Adoption:
    """The organiser's revisions that a chain has adopted after a commit: the newest one, and those new in the commit.

    They hold from the next round on, or from their own `from_round` if that is later. So the settings of a round follow
    from the commits before it, and all peers that open it on the same chain have the same ones.
    """

    newest: Digest = NO_REVISION
    added: tuple[SignedMessage[Revision], ...] = ()

    def continues(self, adopted: Digest) -> bool:
        """Return whether the revisions continue the list whose newest one is `adopted`."""
        for revision in self.added:
            if revision.body.previous != adopted:
                return False
            adopted = revision.digest
        return adopted == self.newest


NOTHING_ADOPTED = Adoption()


def open_adoption(body: wire.Commit, open_nested: OpenNested) -> Adoption:
    """Return the revisions that a commit from the wire adopts. Raises MalformedError or LimitError."""
    check_count(len(body.revisions), MAX_REVISIONS, "revisions")
    if any(signed.kind != REVISION_KIND for signed in body.revisions):
        raise MalformedError("a message of another kind among the revisions of a commit")
    if body.revision:
        check_digest(body.revision)
    adoption = Adoption(body.revision, tuple(open_nested(signed) for signed in body.revisions))
    if adoption.added and not adoption.continues(adoption.added[0].body.previous):
        raise MalformedError("revisions of a commit that do not follow one another")
    return adoption


def count_tokens(claims: Sequence[int]) -> list[int]:
    """Return the tokens that each contribution of a commit counts for, given the claims of all of them."""
    limit = MAX_MULTIPLE * median_low(claims)
    return [min(claim, limit) for claim in claims]


def digest_inputs(digests: Iterable[bytes]) -> bytes:
    """Return the digest of the contributions that a sum is made of, in their order."""
    return hashlib.sha256(b"".join(digests)).digest()


@dataclass(frozen=True)
class Evidence:
    """The signed announcements of all reduced parts of one attempt, without the fields that a commit has anyway.

    `peers` and `signatures`: the reducer of each slot (see `View`) and its signature of the announcement.
    """

    view: int
    roster: bytes
    attempt: int
    peers: tuple[PeerId, ...]
    signatures: tuple[bytes, ...]

    def to_wire(self) -> wire.Evidence:
        distinct = sorted(set(self.peers))
        return wire.Evidence(
            view=self.view,
            roster=self.roster,
            attempt=self.attempt,
            peers=distinct,
            slots=[distinct.index(peer) for peer in self.peers],
            signatures=self.signatures,
        )

    @classmethod
    def from_wire(cls, body: wire.Evidence, parts: int) -> Self:
        """Read the evidence of a commit with so many parts; its signatures are not verified yet."""
        check_digest(body.roster)
        slots, distinct = list(body.slots), list(body.peers)
        copies, rest = divmod(len(slots), parts) if parts else (0, 1)
        if rest or not 1 <= copies <= MAX_REDUCERS_PER_PART or len(body.signatures) != len(slots):
            raise MalformedError(f"evidence of {len(slots)} reducers for {parts} parts")
        if distinct != sorted(set(distinct)) or {*slots} != {*range(len(distinct))}:
            raise MalformedError("evidence that does not name each of its reducers once")
        for peer in distinct:
            public_key(peer)
        peers = tuple(distinct[slot] for slot in slots)
        if any(len({*peers[part::parts]}) < copies for part in range(parts)):
            raise MalformedError("evidence in which one peer is two reducers of a part")
        return cls(body.view, body.roster, body.attempt, peers, tuple(body.signatures))

    def announcements(self, number: int, inputs: bytes, parts: Sequence[Blob]) -> list[wire.Signed]:
        """Return the envelopes of the announcements that the reducers signed."""
        bodies = [
            wire.Part(
                round=number,
                view=self.view,
                roster=self.roster,
                attempt=self.attempt,
                part=part,
                blob=blob.to_wire(),
                inputs=inputs,
            ).SerializeToString(deterministic=True)
            for part, blob in enumerate(parts)
        ]
        return [
            wire.Signed(kind="part", peer=peer, body=bodies[slot % len(parts)], signature=signature)
            for slot, (peer, signature) in enumerate(zip(self.peers, self.signatures, strict=True))
        ]


@dataclass(frozen=True)
class ContributionLimits:
    """The limits that every contribution to a run must respect; `parts` is the largest number of them.

    `max_tokens`: the most that a contribution may claim.
    `organiser`: the key whose revisions a commit may adopt; empty if there is none.
    `whole_run`: the run whose revisions and tickets count in a stage of it; empty if that is the run itself.
    `microbatches`: those of an exact step, which a contribution's ledger names; 0 without exact steps, `None` if any
    ledger will do.
    `audited`: whether others repeat a share of the contributions, so that each has a work record and a seal.
    `credited_groups`: of rollouts, that a contribution credits to their makers; 0 in runs without rollouts, `None` if
    any number will do.
    """

    codec: str
    shapes: Digest
    parts: int
    max_tokens: int
    max_blob_bytes: int
    organiser: PeerId = ""
    whole_run: RunId = ""
    microbatches: int | None = 0
    audited: bool = False
    credited_groups: int | None = 0

    def check_ledger(self, ledger: bytes, tokens: int) -> None:
        """Raise MalformedError unless a contribution has a ledger exactly where steps are exact, and its tokens."""
        if self.microbatches is None and 8 * len(ledger) > MAX_STEP_MICROBATCHES:
            raise LimitError(f"a ledger of {len(ledger)} bytes")
        if self.microbatches == 0 and ledger:
            raise MalformedError("a contribution with a ledger, where steps are not exact")
        if self.microbatches:
            count = len(StepLedger.from_bytes(ledger, self.microbatches))
            if tokens > max(1, count * self.max_tokens // self.microbatches):
                raise MalformedError("a contribution with more tokens than its ledger has microbatches")

    def read_blob(self, reference: wire.BlobRef) -> Blob:
        """Return a blob from the wire, if its size is within the limits."""
        if not 0 < reference.size <= self.max_blob_bytes:
            raise LimitError(f"a blob of {reference.size} bytes, at most {self.max_blob_bytes} are allowed")
        return Blob.from_wire(reference)


class PartBlob(NamedTuple):
    """A blob as one part of a contribution or of a sum.

    A peer that holds it has checked its size, and that its bytes are valid as that part; the same bytes may be valid as
    one part and invalid as another.
    """

    blob: Blob
    part: int


@dataclass(frozen=True)
class Contribution:
    """The compressed update of a peer in one round: one blob for each part.

    `age`: the number of rounds since the one that it was made for. The right number of parts may differ from round to
    round, so the round machine checks it. `work` names the record of how it was made (`protocol.audits`).
    `ticket`: that of a sender without a vote, in a run of tickets; the commit that includes it gives the sender one.
    `ledger`: the microbatches of an exact step that it contains (`protocol.pipeline.ledger`); else empty.
    `seal`, `secret`: draw audits (`protocol.audits`); empty in runs without audits.
    `credits`: of the makers of rollouts (`protocol.rollout_credits`).
    """

    round: int
    base: Digest
    codec: str
    shapes: Digest
    tokens: int
    steps: int
    loss: float
    parts: tuple[Blob, ...]
    age: int = 0
    work: Blob | None = None
    ticket: SignedMessage[Ticket] | None = None
    ledger: bytes = b""
    seal: bytes = b""
    secret: bytes = b""
    credits: Credits = ()

    @cached_property
    def part_blobs(self) -> tuple[PartBlob, ...]:
        """Return the blobs with the numbers of their parts."""
        return enumerate_parts(self.parts)

    def to_wire(self) -> wire.Contribution:
        return wire.Contribution(
            round=self.round,
            age=self.age,
            base=self.base,
            codec=self.codec,
            shapes=self.shapes,
            tokens=self.tokens,
            steps=self.steps,
            loss=self.loss,
            parts=[blob.to_wire() for blob in self.parts],
            work=None if self.work is None else self.work.to_wire(),
            ticket=None if self.ticket is None else self.ticket.signed,
            ledger=self.ledger,
            seal=self.seal,
            secret=self.secret,
            credits=[credit.to_wire() for credit in self.credits],
        )

    @classmethod
    def from_wire(cls, body: wire.Contribution, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.base)
        check_digest(body.shapes)
        if len(body.codec) > MAX_CODEC_CHARACTERS or body.codec != limits.codec or body.shapes != limits.shapes:
            raise MalformedError("a contribution for another codec or another model")
        if not 1 <= body.tokens <= min(limits.max_tokens, MAX_TOKENS):
            raise LimitError(f"a contribution of {body.tokens} tokens, at most {limits.max_tokens} are allowed")
        if not math.isfinite(body.loss):
            raise MalformedError("a contribution whose loss is not finite")
        if body.age > MAX_AGE:
            raise MalformedError(f"a contribution {body.age} rounds late, at most {MAX_AGE} are allowed")
        check_part_count(len(body.parts), limits, "a contribution")
        parts = tuple(limits.read_blob(part) for part in body.parts)
        check_sizes(parts)
        work = read_work_name(body.work) if body.HasField("work") else None
        if body.HasField("ticket") and body.ticket.kind != TICKET_KIND:
            raise MalformedError("a message of another kind in the place of a ticket")
        ticket = open_nested(body.ticket) if body.HasField("ticket") else None
        limits.check_ledger(body.ledger, body.tokens)
        check_audited(body, limits)
        counts, digests = (body.tokens, body.steps, body.loss), (body.ledger, body.seal, body.secret)
        credited = open_credits(body, limits.credited_groups)
        place = body.round, body.base, body.codec, body.shapes
        return cls(*place, *counts, parts, body.age, work, ticket, *digests, credited)


def check_audited(body: wire.Contribution, limits: ContributionLimits) -> None:
    """Raise MalformedError unless a contribution can be audited, in a run with audits.

    So no peer passes it on, and no roster lists it.
    """
    if any(digest and len(digest) != DIGEST_BYTES for digest in (body.seal, body.secret)):
        raise MalformedError("a contribution whose seal or secret is no digest")
    if limits.audited and not body.HasField("work"):
        raise MalformedError("a contribution without a work record, in a run with audits")
    if limits.audited and not body.seal:
        raise MalformedError("a contribution without a seal, in a run with audits")


def read_work_name(reference: wire.BlobRef) -> Blob:
    """Return the name of a work record from the wire, if its size is within the limits."""
    if not 0 < reference.size <= MAX_WORK_RECORD_BYTES:
        raise LimitError(f"a work record of {reference.size} bytes, at most {MAX_WORK_RECORD_BYTES} are allowed")
    return Blob.from_wire(reference)


class ContributionList:
    """The lookups that rosters and commits share, computed once."""

    contributions: tuple[SignedMessage[Contribution], ...]

    @cached_property
    def by_sender(self) -> dict[PeerId, SignedMessage[Contribution]]:
        """Map each sender to its contribution."""
        return {entry.sender: entry for entry in self.contributions}

    @cached_property
    def inputs(self) -> Digest:
        """Return the digest of all these contributions as inputs of a sum."""
        return digest_inputs(entry.digest for entry in self.contributions)

    @cached_property
    def part_counts(self) -> frozenset[int]:
        """Return the numbers of parts in the contributions: a single one if they agree."""
        return frozenset(len(entry.body.parts) for entry in self.contributions)


@dataclass(frozen=True)
class Roster(ContributionList):
    """The leader's ordered list of contributions for one view."""

    round: int
    view: int
    base: Digest
    contributions: tuple[SignedMessage[Contribution], ...]

    def to_wire(self) -> wire.Roster:
        return wire.Roster(
            round=self.round,
            view=self.view,
            base=self.base,
            contributions=[contribution.signed for contribution in self.contributions],
        )

    @classmethod
    def from_wire(cls, body: wire.Roster, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.base)
        contributions = _open_contributions(body.contributions, body.round, body.base, open_nested)
        check_sizes(blob for entry in contributions for blob in entry.body.parts)
        return cls(body.round, body.view, body.base, contributions)

    @cached_property
    def part_blobs(self) -> frozenset[PartBlob]:
        """Return the parts of all contributions."""
        return frozenset(part_blob for entry in self.contributions for part_blob in entry.body.part_blobs)

    @cached_property
    def ambiguous_part_blobs(self) -> frozenset[PartBlob]:
        """Return the parts whose blob is another part as well."""
        count = Counter(part_blob.blob.digest for part_blob in self.part_blobs)
        return frozenset(part_blob for part_blob in self.part_blobs if count[part_blob.blob.digest] > 1)


@dataclass(frozen=True)
class Commit(ContributionList):
    """The content of a round's update: the included contributions in order, and the reduced parts, if there are any.

    `left_out`: the other peers on the roster, where the topology needs them. `evidence`: the signatures of the
    reducers, which are not part of the content, like a certificate.
    """

    round: int
    view: int
    base: Digest
    contributions: tuple[SignedMessage[Contribution], ...]
    parts: tuple[Blob, ...]
    left_out: tuple[PeerId, ...] = ()
    adoption: Adoption = NOTHING_ADOPTED
    evidence: Evidence | None = None

    def to_wire(self) -> wire.Commit:
        return wire.Commit(
            round=self.round,
            view=self.view,
            base=self.base,
            contributions=[contribution.signed for contribution in self.contributions],
            parts=[part.to_wire() for part in self.parts],
            left_out=self.left_out,
            revision=self.adoption.newest,
            revisions=[revision.signed for revision in self.adoption.added],
            evidence=self.evidence.to_wire() if self.evidence else None,
        )

    @classmethod
    def from_wire(cls, body: wire.Commit, limits: ContributionLimits, open_nested: OpenNested) -> Self:
        check_round(body.round, body.base)
        contributions = _open_contributions(body.contributions, body.round, body.base, open_nested)
        if body.parts:
            check_part_count(len(body.parts), limits, "a commit")
        _check_left_out(body.left_out, contributions)
        parts = tuple(limits.read_blob(part) for part in body.parts)
        check_sizes([*parts, *(blob for entry in contributions for blob in entry.body.parts)])
        adoption = open_adoption(body, open_nested)
        evidence = Evidence.from_wire(body.evidence, len(parts)) if body.HasField("evidence") else None
        commit = cls(body.round, body.view, body.base, contributions, parts, tuple(body.left_out), adoption, evidence)
        for announcement in commit.announcements():
            open_nested(announcement)
        return commit

    def announcements(self) -> list[wire.Signed]:
        """Return the announcements of the reduced parts, as their reducers signed them."""
        return self.evidence.announcements(self.round, self.inputs, self.parts) if self.evidence else []

    @property
    def roster_peers(self) -> frozenset[PeerId]:
        """Return the peers on the roster, as far as the commit names them."""
        return frozenset([*(entry.sender for entry in self.contributions), *self.left_out])

    @cached_property
    def counted_tokens(self) -> dict[PeerId, int]:
        """Map each contributor to the tokens that its contribution counts for (`messages.weights`).

        Ledgers of exact steps bound the claims.
        """
        claims = [entry.body.tokens for entry in self.contributions]
        counts = claims if all(entry.body.ledger for entry in self.contributions) else count_tokens(claims)
        return dict(zip(self.by_sender, counts, strict=True))

    @cached_property
    def counted_credits(self) -> dict[PeerId, Credits]:
        """Map each contributor to its credits for makers of rollouts, as far as they count."""
        claims = [
            ClaimedCredits(entry.body.credits, entry.body.tokens, self.counted_tokens[entry.sender])
            for entry in self.contributions
        ]
        return dict(zip(self.by_sender, count_credits(claims, count_tokens), strict=True))

    @property
    def tokens(self) -> int:
        """Return the counted tokens of all included contributions."""
        return sum(self.counted_tokens.values())

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """Return the blobs of the update: the reduced parts, or all included contributions."""
        return self.parts or tuple(contribution.body.parts[0] for contribution in self.contributions)

    @cached_property
    def content_digest(self) -> Digest:
        """Return the SHA-256 of the canonical body with view 0, which is the same for each leader that proposes it."""
        return hashlib.sha256(
            replace(self, view=0, evidence=None).to_wire().SerializeToString(deterministic=True)
        ).digest()


def _open_contributions(
    envelopes: Sequence[wire.Signed], number: int, base: Digest, open_nested: OpenNested
) -> tuple[SignedMessage[Contribution], ...]:
    """Return the contributions inside a roster or commit: of one round, in ascending order of senders."""
    if not envelopes:
        raise MalformedError("a roster or commit without a contribution")
    check_count(len(envelopes), MAX_CONTRIBUTIONS, "contributions")
    check_ascending([signed.peer for signed in envelopes], "contributions")
    if any(signed.kind != "contribution" for signed in envelopes):
        raise MalformedError("a message of another kind inside a roster or commit")
    messages = tuple(open_nested(signed) for signed in envelopes)
    if any((message.body.round, message.body.base) != (number, base) for message in messages):
        raise MalformedError("a contribution of another round inside a roster or commit")
    return messages


def _check_left_out(peers: Sequence[PeerId], contributions: Sequence[SignedMessage[Contribution]]) -> None:
    check_count(len(peers) + len(contributions), MAX_CONTRIBUTIONS, "contributions")
    check_ascending(peers, "peers that are left out")
    for peer in peers:
        public_key(peer)
    if not {entry.sender for entry in contributions}.isdisjoint(peers):
        raise MalformedError("a commit that includes a peer and leaves it out")


def enumerate_parts(parts: Iterable[Blob]) -> tuple[PartBlob, ...]:
    """Return blobs with the numbers of their parts."""
    return tuple(PartBlob(blob, part) for part, blob in enumerate(parts))


def part_blobs_of(contributions: Sequence[SignedMessage[Contribution]]) -> list[PartBlob]:
    """Return the parts of all these contributions."""
    return [part_blob for entry in contributions for part_blob in entry.body.part_blobs]


def blobs_of(contributions: Sequence[SignedMessage[Contribution]]) -> list[Blob]:
    """Return the blobs of all these contributions."""
    return [blob for entry in contributions for blob in entry.body.parts]


@dataclass(frozen=True)
class AppliedContributions:
    """The contributions that went into a peer's state, for the log, the counters and the simulation.

    Those may be fewer than a commit names: in groups, other groups apply the rest, and a dead partner's contribution
    may be lost. `part_count` and `total_bytes`: of all their parts together.
    """

    peers: tuple[PeerId, ...]
    part_count: int
    total_bytes: int

    @classmethod
    def of(cls, contributions: Sequence[SignedMessage[Contribution]]) -> Self:
        """Sum up the contributions that were applied."""
        blobs = blobs_of(contributions)
        return cls(tuple(entry.sender for entry in contributions), len(blobs), sum(blob.size for blob in blobs))


def check_part_count(count: int, limits: ContributionLimits, name: str) -> None:
    """Check the number of parts of a contribution or commit."""
    if not 1 <= count <= min(limits.parts, MAX_PARTS):
        raise MalformedError(f"{name} of {count} parts, where there are at most {limits.parts}")
