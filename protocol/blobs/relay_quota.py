"""PURE: what is held for others, and how much of it at most, in all and for each who asked.

What one peer asked for costs nothing more when another asks for it, too; what does not come is counted like what does.
All of a round is dropped with the round.
"""

from dataclasses import dataclass

from protocol.blobs.blob import Blob
from protocol.errors import LimitError
from protocol.identity import PeerId


@dataclass(frozen=True)
class _Reservation:
    peer: PeerId
    size: int
    round: int


class RelayQuota:
    """`most`, `most_each`: bytes, of all who ask and of one. `blobs_each`: how many of one, as each costs us work."""

    def __init__(self, max_bytes: int, max_bytes_per_peer: int, max_blobs_per_peer: int) -> None:
        self._max_bytes = max_bytes
        self._max_bytes_per_peer = max_bytes_per_peer
        self._max_blobs_per_peer = max_blobs_per_peer
        self._reservations: dict[bytes, _Reservation] = {}

    @property
    def reserved_bytes(self) -> int:
        """Bytes."""
        return sum(load.size for load in self._reservations.values())

    def reserve(self, peer: PeerId, blob: Blob, round_number: int) -> None:
        """Count a blob of that round. Raises LimitError where it is too much."""
        if blob.digest in self._reservations:
            return
        own = [load.size for load in self._reservations.values() if load.peer == peer]
        if sum(own) + blob.size > self._max_bytes_per_peer or len(own) >= self._max_blobs_per_peer:
            raise LimitError(f"{peer} has {len(own)} blobs of {sum(own)} bytes carried already")
        if self.reserved_bytes + blob.size > self._max_bytes:
            raise LimitError(f"{self.reserved_bytes} bytes are carried for others already")
        self._reservations[blob.digest] = _Reservation(peer, blob.size, round_number)

    def release_before(self, round_number: int) -> None:
        """All of earlier rounds."""
        self._reservations = {digest: load for digest, load in self._reservations.items() if load.round >= round_number}

    def digests(self) -> set[bytes]:
        return set(self._reservations)
