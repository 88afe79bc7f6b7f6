"""A summary of a table: eight bytes for each peer, by which another peer finds the records that either lacks.

Each entry is a tag of the peer and the low half of the sequence of its record. A tag is a hash that is keyed with a
fresh salt, so nobody can make keys whose tags collide. Two tags collide by chance in one of two thousand exchanges
among two thousand peers; then one record waits for the next exchange.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from protocol.errors import LimitError, MalformedError
from protocol.identity import PeerId

SALT_BYTES = 8
TAG_BYTES = 4
_ENTRY = struct.Struct(">4sI")
_SEQUENCES = 1 << 32  # the low halves of sequences; they are times in milliseconds, so they repeat after 49 days


@dataclass(frozen=True)
class Summary:
    """The sequences in one table by the tags of the peers, as another peer sends them."""

    salt: bytes
    sequences: Mapping[bytes, int]

    @classmethod
    def of(cls, sequences: Mapping[PeerId, int], salt: bytes) -> "Summary":
        """Summarize a table."""
        return cls(salt, {tag_of(peer, salt): sequence % _SEQUENCES for peer, sequence in sequences.items()})

    @classmethod
    def from_bytes(cls, salt: bytes, entries: bytes, max_entries: int) -> "Summary":
        """Read a summary of another peer. Raises MalformedError or LimitError."""
        if len(salt) != SALT_BYTES or len(entries) % _ENTRY.size:
            raise MalformedError(f"a summary of {len(salt)} and {len(entries)} bytes")
        if len(entries) > max_entries * _ENTRY.size:
            raise LimitError(f"a summary of {len(entries) // _ENTRY.size} peers; at most {max_entries} are allowed")
        return cls(salt, dict(_ENTRY.iter_unpack(entries)))

    def to_bytes(self) -> bytes:
        """Return the entries for the wire; the salt goes with them."""
        return b"".join(_ENTRY.pack(tag, sequence) for tag, sequence in self.sequences.items())

    def compare(self, sequences: Mapping[PeerId, int]) -> "tuple[dict[PeerId, int], Summary]":
        """Compare our table with that of the sender.

        Returns:
            The peers whose record the sender lacks, with the sequence that it has (0: none); and a summary of what we
            have of the peers whose record we lack.
        """
        newer, own_tags, wanted = dict[PeerId, int](), set[bytes](), dict[bytes, int]()
        for peer, sequence in sequences.items():
            tag = tag_of(peer, self.salt)
            own_tags.add(tag)
            theirs = self.sequences.get(tag)
            if theirs is None or _is_above(sequence, theirs):
                newer[peer] = theirs or 0
            elif _is_above(theirs, sequence):
                wanted[tag] = sequence % _SEQUENCES
        wanted.update((tag, 0) for tag in self.sequences if tag not in own_tags)
        return newer, Summary(self.salt, wanted)

    def first(self, count: int) -> "Summary":
        """Return a summary of the first few entries."""
        return Summary(self.salt, dict(islice(self.sequences.items(), count)))

    def known_of(self, peers: Iterable[PeerId]) -> dict[PeerId, int]:
        """Return those of the peers that are in the summary, with their sequences."""
        tags = ((peer, tag_of(peer, self.salt)) for peer in peers)
        return {peer: self.sequences[tag] for peer, tag in tags if tag in self.sequences}


def tag_of(peer: PeerId, salt: bytes) -> bytes:
    """Return the tag of a peer under a salt."""
    return hashlib.blake2b(peer.encode(), digest_size=TAG_BYTES, key=salt).digest()


def is_same_sequence(sequence: int, other: int) -> bool:
    """Return whether two sequences are the same, of which either may be a low half."""
    return (sequence - other) % _SEQUENCES == 0


def _is_above(first: int, second: int) -> bool:
    """Return whether one sequence is above another, by their low halves."""
    return 0 < (first - second) % _SEQUENCES < _SEQUENCES // 2
