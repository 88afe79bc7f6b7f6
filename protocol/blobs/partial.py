"""Blobs that are being fetched, piece by piece.

Large ones are kept on disk, where a download can resume after a restart; small ones are kept in memory while there is
room.
"""

import os
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

import numpy as np

from protocol.blobs.blob import DIGEST_BYTES, PIECE_BYTES, Blob, hash_of
from protocol.blobs.storage import disk_errors, has_data, hash_piece, write_at
from protocol.errors import MalformedError


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
