"""Blobs in memory and blob files: reading, writing and hashing by offset, with clear errors of the disk.

A blob that its owner keeps in memory anyway is served from there and never written to disk. A store's folder names its
files by the digests of their blobs (`protocol.blobs.store` lists the kinds).
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from protocol.blobs.blob import PIECE_BYTES, Blob, Bytes, hash_of
from protocol.errors import MissingFileError, StorageError

_FILE_NAME = re.compile(r"([0-9a-f]{64})(\.part|\.pieces)?")


@dataclass(frozen=True)
class InMemoryBlob:
    """A blob in memory: the concatenation of `views`, which must not change."""

    blob: Blob
    hashes: bytes
    views: tuple[memoryview, ...]

    def piece(self, piece: int) -> Bytes:
        """Return a piece, without a copy if it lies within one view."""
        start = piece * PIECE_BYTES
        slices = list(self._slices(start, start + self.blob.piece_length(piece)))
        return slices[0] if len(slices) == 1 else b"".join(slices)

    def copy_bytes(self) -> bytearray:
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
    """Turn an OSError about `path` into a StorageError, or into a MissingFileError."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingFileError(f"{error.filename or path} does not exist; name an existing file") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"no space left for {path}; free some on that disk") from error
        raise StorageError(f"cannot use {path}: {error.strerror}; repair the disk or choose another folder") from error


def copy_and_hash(source: IO[bytes], target: IO[bytes], size: int) -> bytes:
    """Copy at most `size` bytes and return the piece hashes of the copied bytes."""
    hashes = []
    while size > 0 and (piece := source.read(min(PIECE_BYTES, size))):
        target.write(piece)
        hashes.append(hash_of(piece))
        size -= len(piece)
    return b"".join(hashes)


def read_at(descriptor: int, length: int, offset: int) -> bytearray:
    """Read `length` bytes, or fewer if the file ends.

    One system call reads at most 2 GiB.
    """
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
    """Return whether the piece at `start` contains data; a hole need not be hashed."""
    try:
        return os.lseek(descriptor, start, os.SEEK_DATA) < start + PIECE_BYTES
    except OSError as error:
        if error.errno == errno.ENXIO:  # only a hole up to the end
            return False
        raise


def write_at(descriptor: int, data: bytes | bytearray, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def scan_folder(folder: Path) -> tuple[dict[bytes, int], dict[bytes, int]]:
    """Return the sizes of the complete and of the partial blobs; remove the files that are of no use.

    A partial blob without its piece hashes cannot be resumed.
    """
    complete, partial = dict[bytes, int](), dict[bytes, int]()
    with_hashes: set[bytes] = set()
    for entry in folder.iterdir():
        match = _FILE_NAME.fullmatch(entry.name)
        if match is None:
            if entry.suffix == ".new":
                entry.unlink()
            continue
        digest = bytes.fromhex(match[1])
        if match[2] == ".pieces":
            with_hashes.add(digest)
        else:
            (partial if match[2] else complete)[digest] = entry.stat().st_size
    resumable = {digest: size for digest, size in partial.items() if digest in with_hashes and digest not in complete}
    for digest in partial.keys() - resumable.keys():
        remove_files(folder, digest, ".part")
    for digest in with_hashes - resumable.keys() - complete.keys():
        remove_files(folder, digest, ".pieces")
    return complete, resumable


def remove_files(folder: Path, digest: bytes, *suffixes: str) -> None:
    """Remove the files of a blob with these suffixes, if they exist. Raises StorageError."""
    with disk_errors(folder):
        for suffix in suffixes:
            (folder / f"{digest.hex()}{suffix}").unlink(missing_ok=True)
