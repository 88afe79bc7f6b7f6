"""Statements, and those that a round begins and ends with: contributions, rosters, commits.

Each body is checked in full before anything looks at it.

A `Statement` is a signed envelope, its parsed body and its sender. Its digest covers kind, sender and body, so two
leaders that state the same words still make two different statements. Lists that are sets (contributions by sender,
blobs by digest, included peers) stand in ascending order and nowhere twice: one content has one encoding.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, Self, TypeVar

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob, check_digest
from protocol.errors import LimitError, MalformedError
from protocol.identity import PeerId, public_key
from protocol.signing import MAX_ROUND

Digest = bytes  # 32 bytes, SHA-256
OpenNested = Callable[[wire.Signed], "SignedMessage[Any]"]  # checks a statement inside another, whatever its kind

MAX_CONTRIBUTIONS = 1024
MAX_PARTS = 4096
MAX_HELD_BLOBS = 65_536
MAX_TOKENS = 2**48
MAX_CODEC_CHARACTERS = 64
MAX_AGE = 8  # rounds
# A roster of 1024 contributions of 4096 parts would be 180 MB: nobody needs that, and nobody gets it.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
NO_ROSTER = bytes(32)


@dataclass(frozen=True)
class ContributionLimits:
    """What every contribution to this run must meet. `parts`: the most there may be; sizes in bytes, of one blob."""

    codec: str
    shapes: Digest
    parts: int
    max_tokens: int
    max_blob_bytes: int

    def read_blob(self, reference: wire.BlobRef) -> Blob:
        if not 0 < reference.size <= self.max_blob_bytes:
            raise LimitError(f"a blob of {reference.size} bytes, at most {self.max_blob_bytes} are allowed")
        return Blob.from_wire(reference)


class PartBlob(NamedTuple):
    """A blob as a part of the model, a contribution's or a sum: whoever holds it has checked its size, and its bytes as
    those of that part. The same bytes may be well-formed as one part and not as another."""

    blob: Blob
    part: int


@dataclass(frozen=True)
class Contribution:
    """What a peer offers to one round: one blob for all-gather, one a part for a butterfly.

    `age`: rounds between the one that the message was made for and this one. How many parts a message has may differ
    from round to round; that it is the right number is for the round to check.
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

    @cached_property
    def part_blobs(self) -> tuple[PartBlob, ...]:
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
        return cls(body.round, body.base, body.codec, body.shapes, body.tokens, body.steps, body.loss, parts, body.age)


class ContributionList:
    """What is the same of every list of contributions, worked out once."""

    contributions: tuple["SignedMessage[Contribution]", ...]

    @cached_property
    def by_sender(self) -> dict[PeerId, "SignedMessage[Contribution]"]:
        return {entry.sender: entry for entry in self.contributions}

    @cached_property
    def part_counts(self) -> frozenset[int]:
        """How many parts the contributions have: one number where they agree."""
        return frozenset(len(entry.body.parts) for entry in self.contributions)


@dataclass(frozen=True)
class Roster(ContributionList):
    """The leader's ordered list of contributions for one view."""

    round: int
    view: int
    base: Digest
    contributions: tuple["SignedMessage[Contribution]", ...]

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
        """What all contributions consist of."""
        return frozenset(portion for entry in self.contributions for portion in entry.body.part_blobs)

    @cached_property
    def ambiguous_part_blobs(self) -> frozenset[PartBlob]:
        """Of these, whose blob stands here as another part as well."""
        count = Counter(portion.blob.digest for portion in self.part_blobs)
        return frozenset(portion for portion in self.part_blobs if count[portion.blob.digest] > 1)


@dataclass(frozen=True)
class Commit(ContributionList):
    """What the round's update consists of: included contributions in order, and reduced parts (none for all-gather).

    `left_out`: who else stands on the roster, where that tells the groups (see `grouping`).
    """

    round: int
    view: int
    base: Digest
    contributions: tuple["SignedMessage[Contribution]", ...]
    parts: tuple[Blob, ...]
    left_out: tuple[PeerId, ...] = ()

    def to_wire(self) -> wire.Commit:
        return wire.Commit(
            round=self.round,
            view=self.view,
            base=self.base,
            contributions=[contribution.signed for contribution in self.contributions],
            parts=[part.to_wire() for part in self.parts],
            left_out=self.left_out,
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
        return cls(body.round, body.view, body.base, contributions, parts, tuple(body.left_out))

    @property
    def roster_peers(self) -> frozenset[PeerId]:
        """Who was there when the roster was made, as far as it tells."""
        return frozenset([*(entry.sender for entry in self.contributions), *self.left_out])

    @property
    def tokens(self) -> int:
        return sum(contribution.body.tokens for contribution in self.contributions)

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """What it takes to apply it: the reduced parts, or all included messages whole."""
        return self.parts or tuple(contribution.body.parts[0] for contribution in self.contributions)

    @cached_property
    def content_digest(self) -> Digest:
        """Of what is decided, whoever proposed it in whichever view: SHA-256 of the canonical body with view 0."""
        return hashlib.sha256(replace(self, view=0).to_wire().SerializeToString(deterministic=True)).digest()


BodyT_co = TypeVar("BodyT_co", covariant=True)


@dataclass(frozen=True)
class SignedMessage(Generic[BodyT_co]):
    """A checked statement; `signed` is what is sent on, byte for byte."""

    signed: wire.Signed = field(compare=False, repr=False)
    body: BodyT_co
    sender: PeerId
    digest: Digest

    @classmethod
    def of(cls, signed: wire.Signed, body: BodyT_co) -> Self:  # type: ignore[misc]  # the class never changes its body
        content = b"\0".join((signed.kind.encode(), signed.peer.encode(), signed.body))
        return cls(signed, body, signed.peer, hashlib.sha256(content).digest())


def _open_contributions(
    envelopes: Sequence[wire.Signed], number: int, base: Digest, open_nested: OpenNested
) -> tuple[SignedMessage[Contribution], ...]:
    """The contributions inside a roster or a commit: of the same round, ascending, each sender once."""
    if not envelopes:
        raise MalformedError("a roster or commit without a contribution")
    check_count(len(envelopes), MAX_CONTRIBUTIONS, "contributions")
    check_ascending([signed.peer for signed in envelopes], "contributions")
    if any(signed.kind != "contribution" for signed in envelopes):
        raise MalformedError("a statement of another kind inside a roster or commit")
    statements = tuple(open_nested(signed) for signed in envelopes)
    if any((statement.body.round, statement.body.base) != (number, base) for statement in statements):
        raise MalformedError("a contribution of another round inside a roster or commit")
    return statements


def _check_left_out(peers: Sequence[PeerId], contributions: Sequence[SignedMessage[Contribution]]) -> None:
    check_count(len(peers) + len(contributions), MAX_CONTRIBUTIONS, "contributions")
    check_ascending(peers, "those left out")
    for peer in peers:
        public_key(peer)
    if not {entry.sender for entry in contributions}.isdisjoint(peers):
        raise MalformedError("a commit that includes somebody and leaves him out")


def enumerate_parts(parts: Iterable[Blob]) -> tuple[PartBlob, ...]:
    """Of blobs by part."""
    return tuple(PartBlob(blob, part) for part, blob in enumerate(parts))


def part_blobs_of(contributions: Sequence[SignedMessage[Contribution]]) -> list[PartBlob]:
    """Return the parts of all these contributions."""
    return [part_blob for entry in contributions for part_blob in entry.body.part_blobs]


def blobs_of(contributions: Sequence[SignedMessage[Contribution]]) -> list[Blob]:
    """Return the blobs of all these contributions."""
    return [blob for entry in contributions for blob in entry.body.parts]


def check_sizes(blobs: Iterable[Blob]) -> None:
    """Who holds what is said by digests: none may stand for two blobs, of which only one can exist."""
    sizes: dict[Digest, int] = {}
    if any(sizes.setdefault(blob.digest, blob.size) != blob.size for blob in blobs):
        raise MalformedError("a blob that is said to have two sizes")


def check_round(number: int, digest: Digest) -> None:
    if number > MAX_ROUND:
        raise MalformedError(f"round {number} is out of range")
    check_digest(digest)


def check_part_count(count: int, limits: ContributionLimits, what: str) -> None:
    if not 1 <= count <= min(limits.parts, MAX_PARTS):
        raise MalformedError(f"{what} of {count} parts, where there are at most {limits.parts}")


def check_count(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise LimitError(f"{count} {what}, at most {limit} are allowed")


def check_ascending(values: Sequence[bytes] | Sequence[str], what: str) -> None:
    if any(first >= second for first, second in zip(values, values[1:], strict=False)):  # type: ignore[operator]
        raise MalformedError(f"{what} are not in ascending order, or stand twice")
