"""Make briefs of messages, and restore the messages byte for byte.

A peer sends its contribution once; later messages name it by eight bytes. What is signed does not change: a receiver
puts the body together from the messages that it has seen, and verifies the signature over all of it. If it lacks one
of them, its reply reports that, and the sender delivers the whole message.

    roster, commit   a reference for each contribution
    inventory        one bit for each blob of the roster; the first bytes of the digests of reduced parts
    certificate      one bit for each peer that its proposal names; the signers that it does not name in full

All tables of seen messages have a fixed size and forget the oldest entries first, so a peer that floods them costs
others only bytes: they send the whole message.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Literal, TypeVar

from google.protobuf.message import DecodeError

from protocol import murmur_pb2 as wire
from protocol.consensus.messages.contributions import MAX_CONTRIBUTIONS, MAX_HELD_BLOBS, MAX_MESSAGE_BYTES
from protocol.consensus.messages.signed import Digest, digest_of
from protocol.errors import LimitError, MalformedError
from protocol.identity import PeerId
from protocol.recent import RecentTable

REFERENCE_BYTES = 8
MAX_SEEN_BYTES = 16 * 1024 * 1024  # of contributions
MAX_SEEN_LISTS = 16  # of rosters, and of commits
MAX_SEEN_BLOBS = 4 * MAX_CONTRIBUTIONS  # of reduced parts
Reference = bytes
MAX_KEPT_BRIEFS = 64
Name = TypeVar("Name", bytes, str)
Body = wire.Roster | wire.Commit | wire.Holding | wire.Decision
BODY_TYPES: dict[str, type[Body]] = {
    "roster": wire.Roster,
    "commit": wire.Commit,
    "holding": wire.Holding,
    "decision": wire.Decision,
}


class SeenMessages:
    """The contributions, rosters, proposals and parts that one peer has sent or received; owned by a replica."""

    def __init__(self) -> None:
        self._contributions: OrderedDict[Reference, wire.Signed] = OrderedDict()
        self._contribution_bytes = 0
        self._rosters = RecentTable[Digest, tuple[Digest, ...]](MAX_SEEN_LISTS)
        self._proposals = RecentTable[Digest, tuple[PeerId, ...]](MAX_SEEN_LISTS)
        self._part_blobs = RecentTable[Reference, Digest](MAX_SEEN_BLOBS)

    def record(self, signed: wire.Signed) -> None:
        """Record a message of our own or one that was verified, with those inside it."""
        match signed.kind:
            case "contribution":
                self._record_contribution(signed)
            case "roster" if self._rosters.get(digest := digest_of(signed)) is None:
                entries = wire.Roster.FromString(signed.body).contributions
                parts = (part for entry in entries for part in wire.Contribution.FromString(entry.body).parts)
                self._rosters[digest] = tuple(sorted({part.digest for part in parts}))
                self._record_nested(entries)
            case "commit" if self._proposals.get(digest := digest_of(signed)) is None:
                body = wire.Commit.FromString(signed.body)
                peers = {*body.left_out, *(entry.peer for entry in body.contributions)}
                self._proposals[digest] = tuple(sorted(peers))
                self._record_nested(body.contributions)
            case "part":
                blob = wire.Part.FromString(signed.body).blob.digest
                self._part_blobs[blob[:REFERENCE_BYTES]] = blob

    def _record_nested(self, contributions: Iterable[wire.Signed]) -> None:
        for entry in contributions:
            self._record_contribution(entry)

    def _record_contribution(self, signed: wire.Signed) -> None:
        reference = reference_to(signed)
        if reference in self._contributions:
            self._contributions.move_to_end(reference)
            return
        self._contributions[reference] = signed
        self._contribution_bytes += signed.ByteSize()
        while self._contribution_bytes > MAX_SEEN_BYTES:
            _, oldest = self._contributions.popitem(last=False)
            self._contribution_bytes -= oldest.ByteSize()

    def contribution(self, reference: Reference) -> wire.Signed | None:
        """Return the contribution with this reference."""
        return self._contributions.get(reference)

    def roster_blobs(self, roster: Digest) -> Sequence[Digest] | None:
        """Return the blobs of the contributions on a roster, in ascending order."""
        return self._rosters.get(roster)

    def proposal_peers(self, proposal: Digest) -> Sequence[PeerId] | None:
        """Return the peers that a proposed commit includes or leaves out, in ascending order."""
        return self._proposals.get(proposal)

    def part_blob(self, reference: Reference) -> Digest | None:
        """Return the digest of a reduced part by its first bytes."""
        return self._part_blobs.get(reference)


def reference_to(signed: wire.Signed) -> Reference:
    """Return the reference to a signed message, which covers its signature too."""
    content = signed.SerializeToString(deterministic=True)
    return hashlib.blake2b(content, digest_size=REFERENCE_BYTES).digest()


def make_brief(signed: wire.Signed, seen: SeenMessages) -> wire.Brief | None:
    """Return the brief of a message of our own or one that was verified; None if it would not be shorter."""
    if signed.kind not in BODY_TYPES:
        return None
    brief = wire.Brief(kind=signed.kind, peer=signed.peer, signature=signed.signature)
    body = BODY_TYPES[signed.kind].FromString(signed.body)
    match body:
        case wire.Roster() | wire.Commit():
            brief.references = b"".join(reference_to(entry) for entry in body.contributions)
            body.ClearField("contributions")
        case wire.Holding():
            named, bits = _split(body.blobs, seen.roster_blobs(body.roster) or ())
            known = [seen.part_blob(digest[:REFERENCE_BYTES]) == digest for digest in named]
            brief.bits = bits
            brief.references = b"".join(digest[:REFERENCE_BYTES] for digest in compress(named, known))
            body.blobs[:] = compress(named, (not is_known for is_known in known))
        case wire.Decision():
            body.peers[:], brief.bits = _split(body.peers, seen.proposal_peers(body.proposal) or ())
    brief.body = body.SerializeToString(deterministic=True)
    return brief if brief.ByteSize() < signed.ByteSize() else None


class BriefCache:
    """Makes the briefs of the messages that one peer sends, each once for all receivers."""

    def __init__(self, seen: SeenMessages) -> None:
        self.seen = seen
        self._briefs = RecentTable[bytes, wire.Brief | Literal["none"]](MAX_KEPT_BRIEFS)

    def brief_of(self, signed: wire.Signed) -> wire.Brief | None:
        """Return the brief of a message, which this peer has seen from now on; None if it has none."""
        brief = self._briefs.get(signed.signature)
        if brief is None:
            self.seen.record(signed)
            brief = make_brief(signed, self.seen) or "none"
            self._briefs[signed.signature] = brief
        return None if brief == "none" else brief


def restore(brief: wire.Brief, seen: SeenMessages) -> wire.Signed | None:
    """Return the message of a brief; None if it names something that this peer has not seen.

    Its signature is not verified. Raises MalformedError or LimitError if no peer makes such a brief.
    """
    body = _read(brief)
    match body:
        case wire.Roster() | wire.Commit():
            nested = [seen.contribution(reference) for reference in _references(brief, MAX_CONTRIBUTIONS)]
            found = [entry for entry in nested if entry is not None]
            if len(found) < len(nested):
                return None
            body.contributions.extend(found)
        case wire.Holding():
            parts = [seen.part_blob(reference) for reference in _references(brief, MAX_HELD_BLOBS)]
            digests = [digest for digest in parts if digest is not None]
            known = seen.roster_blobs(body.roster) if brief.bits else ()
            if len(digests) < len(parts) or known is None:
                return None
            body.blobs[:] = sorted([*body.blobs, *digests, *_choose(known, brief.bits)])
        case wire.Decision():
            peers = seen.proposal_peers(body.proposal) if brief.bits else ()
            if peers is None:
                return None
            body.peers[:] = sorted([*body.peers, *_choose(peers, brief.bits)])
    if body.ByteSize() > MAX_MESSAGE_BYTES:
        raise LimitError(f"a brief of a {brief.kind} of {body.ByteSize()} bytes")
    restored = body.SerializeToString(deterministic=True)
    return wire.Signed(kind=brief.kind, peer=brief.peer, body=restored, signature=brief.signature)


def _read(brief: wire.Brief) -> Body:
    if brief.kind not in BODY_TYPES:
        raise MalformedError("a brief of a message of an unknown kind")
    try:
        return BODY_TYPES[brief.kind].FromString(brief.body)
    except DecodeError as error:
        raise MalformedError(f"a brief of a {brief.kind} does not parse") from error


def _references(brief: wire.Brief, limit: int) -> Iterable[bytes]:
    if len(brief.references) % REFERENCE_BYTES or len(brief.references) > limit * REFERENCE_BYTES:
        raise MalformedError(f"a brief of a {brief.kind} with {len(brief.references)} bytes of references")
    starts = range(0, len(brief.references), REFERENCE_BYTES)
    return (brief.references[start : start + REFERENCE_BYTES] for start in starts)


def _split(names: Iterable[Name], known: Sequence[Name]) -> tuple[list[Name], bytes]:
    """Return the names that are not known, and one bit for each known one, without zeros at the end."""
    chosen, positions = set(names), {name: place for place, name in enumerate(known)}
    number = sum(1 << positions[name] for name in chosen & positions.keys())
    bits = number.to_bytes((number.bit_length() + 7) // 8, "little")
    return sorted(chosen - positions.keys()), bits


def _choose(known: Sequence[Name], bits: bytes) -> list[Name]:
    """Return the names whose bits are set."""
    if len(bits) > (len(known) + 7) // 8:
        raise MalformedError(f"{len(bits)} bytes of bits for {len(known)} names")
    return [name for place, name in enumerate(known) if place // 8 < len(bits) and bits[place // 8] >> place % 8 & 1]
