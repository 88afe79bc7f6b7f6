"""Quota of blobs that we hold for others: a byte limit in total and limits for each requesting peer.

A blob that several peers ask for is counted once. Blobs count even if they never arrive. A round's reservations are
released together with the round. No I/O.
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
    """Counts the reserved bytes in total, and the bytes and blobs of each peer.

    The number of blobs is limited because every blob costs us work.
    """

    def __init__(self, max_bytes: int, max_bytes_per_peer: int, max_blobs_per_peer: int) -> None:
        self._max_bytes = max_bytes
        self._max_bytes_per_peer = max_bytes_per_peer
        self._max_blobs_per_peer = max_blobs_per_peer
        self._reservations: dict[bytes, _Reservation] = {}

    @property
    def reserved_bytes(self) -> int:
        return sum(reservation.size for reservation in self._reservations.values())

    def reserve(self, peer: PeerId, blob: Blob, round_number: int) -> None:
        """Reserve space for a blob of that round; raise LimitError if it exceeds a quota."""
        if blob.digest in self._reservations:
            return
        own = [reservation.size for reservation in self._reservations.values() if reservation.peer == peer]
        if sum(own) + blob.size > self._max_bytes_per_peer or len(own) >= self._max_blobs_per_peer:
            raise LimitError(f"{peer} has {len(own)} blobs of {sum(own)} bytes carried already")
        if self.reserved_bytes + blob.size > self._max_bytes:
            raise LimitError(f"{self.reserved_bytes} bytes are carried for others already")
        self._reservations[blob.digest] = _Reservation(peer, blob.size, round_number)

    def release_before(self, round_number: int) -> None:
        """Release the reservations of earlier rounds."""
        self._reservations = {
            digest: reservation
            for digest, reservation in self._reservations.items()
            if reservation.round >= round_number
        }

    def digests(self) -> set[bytes]:
        return set(self._reservations)
