"""Make briefs of messages, and restore the messages byte for byte.

A peer says its contribution once; later messages name it by eight bytes. What is signed does not change: a receiver
puts the body together from the messages that it has seen, and verifies the signature over all of it. If it lacks one
of them, it says so in its reply, and the sender delivers the whole message.

    roster, commit   a reference for each contribution
    inventory        one bit for each blob of the roster; the first bytes of the digests of reduced parts
    certificate      one bit for each peer that its proposal names; the signers that it does not name in full
"""

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Literal, TypeVar

from google.protobuf.message import DecodeError

from protocol import murmur_pb2 as wire
from protocol.consensus.messages.briefs.seen import REFERENCE_BYTES, SeenMessages, reference_to
from protocol.consensus.messages.contributions import MAX_CONTRIBUTIONS, MAX_HELD_BLOBS, MAX_MESSAGE_BYTES
from protocol.errors import LimitError, MalformedError
from protocol.recent import RecentTable

MAX_KEPT_BRIEFS = 64
Name = TypeVar("Name", bytes, str)
Body = wire.Roster | wire.Commit | wire.Holding | wire.Decision
BODY_TYPES: dict[str, type[Body]] = {
    "roster": wire.Roster,
    "commit": wire.Commit,
    "holding": wire.Holding,
    "decision": wire.Decision,
}


def abridge(signed: wire.Signed, seen: SeenMessages) -> wire.Brief | None:
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


class Abridger:
    """Makes the briefs of the messages that one peer sends, each once for all receivers."""

    def __init__(self, seen: SeenMessages) -> None:
        self.seen = seen
        self._briefs = RecentTable[bytes, wire.Brief | Literal["none"]](MAX_KEPT_BRIEFS)

    def brief_of(self, signed: wire.Signed) -> wire.Brief | None:
        """Return the brief of a message, which this peer has seen from now on; None if it has none."""
        brief = self._briefs.get(signed.signature)
        if brief is None:
            self.seen.record(signed)
            brief = abridge(signed, self.seen) or "none"
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
