"""A blob in memory that its owner needs anyway: served from there, never written to disk."""

from collections.abc import Iterator
from dataclasses import dataclass

from protocol.blobs.blob import PIECE_BYTES, Blob, Bytes


@dataclass(frozen=True)
class InMemoryBlob:
    """`views`: its bytes, one view after the other; they must not change."""

    blob: Blob
    hashes: bytes
    views: tuple[memoryview, ...]

    def piece(self, piece: int) -> Bytes:
        """Not copied where it lies in one view."""
        start = piece * PIECE_BYTES
        found = list(self._slices(start, start + self.blob.piece_length(piece)))
        return found[0] if len(found) == 1 else b"".join(found)

    def copy_bytes(self) -> bytearray:
        """A copy."""
        return bytearray().join(self.views)

    def _slices(self, start: int, stop: int) -> Iterator[memoryview]:
        for view in self.views:
            if start < len(view) and stop > 0:
                yield view[max(0, start) : stop]
            start, stop = start - len(view), stop - len(view)


def make_in_memory_blob(blob: Blob, hashes: bytes, data: tuple[Bytes, ...]) -> InMemoryBlob:
    return InMemoryBlob(blob, hashes, tuple(memoryview(part).cast("B").toreadonly() for part in data))
