"""The messages that a peer has seen lately, by which briefs are made and restored.

All tables have a fixed size and forget the oldest entries first, so a peer that floods them costs others only bytes:
they send the whole message.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from protocol import murmur_pb2 as wire
from protocol.consensus.messages.contributions import MAX_CONTRIBUTIONS
from protocol.consensus.messages.signed import Digest, digest_of
from protocol.identity import PeerId
from protocol.recent import RecentTable

REFERENCE_BYTES = 8
MAX_SEEN_BYTES = 16 * 1024 * 1024  # of contributions
MAX_SEEN_LISTS = 16  # of rosters, and of commits
MAX_SEEN_BLOBS = 4 * MAX_CONTRIBUTIONS  # of reduced parts
Reference = bytes


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
