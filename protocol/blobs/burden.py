"""PURE: what is held for others, and how much of it at most, in all and for each who asked.

What one peer asked for costs nothing more when another asks for it, too; what does not come is counted like what does.
All of a round is dropped with the round.
"""

from dataclasses import dataclass

from protocol.blobs.blob import Blob
from protocol.errors import LimitError
from protocol.identity import PeerId


@dataclass(frozen=True)
class _Load:
    asker: PeerId
    size: int
    round: int


class Burden:
    """`most`, `most_each`: bytes, of all who ask and of one. `blobs_each`: how many of one, as each costs us work."""

    def __init__(self, most: int, most_each: int, blobs_each: int) -> None:
        self._most = most
        self._most_each = most_each
        self._blobs_each = blobs_each
        self._loads: dict[bytes, _Load] = {}

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(load.size for load in self._loads.values())

    def take(self, asker: PeerId, blob: Blob, number: int) -> None:
        """Count a blob of that round. Raises LimitError where it is too much."""
        if blob.digest in self._loads:
            return
        own = [load.size for load in self._loads.values() if load.asker == asker]
        if sum(own) + blob.size > self._most_each or len(own) >= self._blobs_each:
            raise LimitError(f"{asker} has {len(own)} blobs of {sum(own)} bytes carried already")
        if self.size + blob.size > self._most:
            raise LimitError(f"{self.size} bytes are carried for others already")
        self._loads[blob.digest] = _Load(asker, blob.size, number)

    def drop_before(self, number: int) -> None:
        """All of earlier rounds."""
        self._loads = {digest: load for digest, load in self._loads.items() if load.round >= number}

    def digests(self) -> set[bytes]:
        return set(self._loads)
