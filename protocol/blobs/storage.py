"""Blobs in memory, blob files and partial blobs: reading, writing and hashing by offset, with clear errors of the disk.

A blob that its owner keeps in memory anyway is served from there and never written to disk. A store's folder names its
files by the digests of their blobs (`protocol.blobs.store` lists the kinds). Large partial blobs are on disk, where a
download can resume after a restart; small ones are in memory while there is room.
"""

import contextlib
import errno
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from protocol.blobs.blob import DIGEST_BYTES, PIECE_BYTES, Blob, Bytes, hash_of
from protocol.errors import MalformedError, MissingFileError, StorageError

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


class PartialStore(Protocol):
    """The store that a finished blob becomes part of."""

    def complete_partial(self, blob: Blob) -> None: ...
    def complete_in_memory(self, blob: Blob, hashes: bytes, data: memoryview) -> None: ...
    def close_partial(self, blob: Blob) -> None: ...


class Partial(ABC):
    """A blob that is being fetched; `missing` holds absent and unchecked pieces."""

    def __init__(self, store: PartialStore, blob: Blob, hashes: bytes) -> None:
        self.blob = blob
        self.hashes = hashes
        self.missing = set(range(blob.pieces))
        self._store = store

    @abstractmethod
    def verify_existing(self) -> None:
        """Check the pieces that an earlier download left, and remove them from `missing`."""

    @abstractmethod
    def write(self, piece: int, data: bytes | bytearray) -> None:
        """Check and keep a piece; raise MalformedError if it is not the requested one."""

    @abstractmethod
    def finish(self) -> None:
        """Hand the complete blob to the store."""

    @abstractmethod
    def close(self) -> None:
        """Stop writing, keeping the existing pieces for a later download."""

    def _check(self, piece: int, data: bytes | bytearray) -> None:
        if len(data) != self.blob.piece_length(piece) or hash_of(data) != self._hash_of(piece):
            raise MalformedError("a piece does not match its hash")

    def _require_all(self) -> None:
        if self.missing:
            raise ValueError(f"blob {self.blob.name} lacks {len(self.missing)} pieces")

    def _hash_of(self, piece: int) -> bytes:
        return self.hashes[piece * DIGEST_BYTES : (piece + 1) * DIGEST_BYTES]


class MemoryPartial(Partial):
    """A partial blob in one contiguous buffer.

    It can be decoded repeatedly without a copy.
    """

    def __init__(self, store: PartialStore, blob: Blob, hashes: bytes) -> None:
        super().__init__(store, blob, hashes)
        self._data = np.empty(blob.size, np.uint8).data  # pages are allocated only when written

    def verify_existing(self) -> None:
        """Do nothing, because pieces in memory were checked when they were written."""

    def write(self, piece: int, data: bytes | bytearray) -> None:
        self._check(piece, data)
        start = piece * PIECE_BYTES
        self._data[start : start + len(data)] = data
        self.missing.discard(piece)

    def finish(self) -> None:
        self._require_all()
        self._store.complete_in_memory(self.blob, self.hashes, self._data)

    def close(self) -> None:
        self._store.close_partial(self.blob)


class FilePartial(Partial):
    """A partial blob in a file, with holes for the missing pieces."""

    def __init__(self, store: PartialStore, blob: Blob, hashes: bytes, path: Path) -> None:
        super().__init__(store, blob, hashes)
        self._path = path
        # A thread may still be writing when its task is cancelled; the descriptor must not be closed and reused for
        # another file meanwhile.
        self._lock = threading.Lock()
        with disk_errors(path):
            self._descriptor: int | None = _open_file(path, blob.size)

    def verify_existing(self) -> None:
        """Hash the existing pieces.

        This takes seconds for gigabytes, and stops early when the blob is closed.
        """
        for piece in range(self.blob.pieces):
            with self._lock, disk_errors(self._path):
                if self._descriptor is None:
                    return
                if self._has_piece(self._descriptor, piece):
                    self.missing.discard(piece)

    def write(self, piece: int, data: bytes | bytearray) -> None:
        self._check(piece, data)
        with self._lock, disk_errors(self._path):
            if self._descriptor is not None:
                write_at(self._descriptor, data, piece * PIECE_BYTES)
                self.missing.discard(piece)

    def finish(self) -> None:
        self._require_all()
        self._store.complete_partial(self.blob)

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
                self._store.close_partial(self.blob)

    def _has_piece(self, descriptor: int, piece: int) -> bool:
        start = piece * PIECE_BYTES
        return has_data(descriptor, start) and hash_piece(descriptor, start) == self._hash_of(piece)


def _open_file(path: Path, size: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
