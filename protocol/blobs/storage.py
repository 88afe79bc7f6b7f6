"""A blob in memory that its owner needs anyway: served from there, never written to disk.

Files that hold blobs: read and written by place, and what goes wrong with the disk in words.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from protocol.blobs.blob import PIECE_BYTES, Blob, Bytes, hash_of
from protocol.errors import MissingFileError, StorageError


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


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns what the disk says about `path` into a StorageError, or into a MissingFileError."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingFileError(f"{error.filename or path} is not there; name an existing file") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"no space left for {path}; free some on that disk") from error
        raise StorageError(f"cannot use {path}: {error.strerror}; mend the disk or choose another folder") from error


def copy_and_hash(source: IO[bytes], target: IO[bytes], size: int) -> bytes:
    """Copies at most `size` bytes; returns the piece hashes of what was copied."""
    hashes = []
    while size > 0 and (piece := source.read(min(PIECE_BYTES, size))):
        target.write(piece)
        hashes.append(hash_of(piece))
        size -= len(piece)
    return b"".join(hashes)


def read_at(descriptor: int, length: int, offset: int) -> bytearray:
    """Fewer bytes where the file ends; one call of the system reads at most 2 GiB."""
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length and (count := os.preadv(descriptor, [view[done:]], offset + done)):
        done += count
    view.release()
    del data[done:]
    return data


def hash_piece(descriptor: int, start: int) -> bytes:
    return hash_of(os.pread(descriptor, PIECE_BYTES, start))


def has_data(descriptor: int, start: int) -> bool:
    """Whether anything was written into the piece at `start`: a hole need not be hashed."""
    try:
        return os.lseek(descriptor, start, os.SEEK_DATA) < start + PIECE_BYTES
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole up to the end
            return False
        raise


def write_at(descriptor: int, data: bytes | bytearray, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
