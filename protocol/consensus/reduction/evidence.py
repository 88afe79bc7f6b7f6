"""The evidence of a commit for its reduced parts: the signatures of the peers that summed them.

Several reducers sum each part, independently, and sign the result together with its inputs. A commit carries their
signatures: so a leader cannot make up a sum, one reducer cannot either, and a wrong sum names its authors for ever.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob, check_digest
from protocol.errors import MalformedError
from protocol.identity import PeerId, public_key

MAX_REDUCERS_PER_PART = 4


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
