"""A folder of complete and partial blobs with a size limit.

    <hex digest>          a complete blob
    <hex digest>.part     a blob that is being fetched: full length, with holes where pieces are missing
    <hex digest>.pieces   the piece hashes of either; a complete blob of few pieces has no such file, because creating
                          a file takes longer than hashing the blob again after a restart
    *.new                 a file that is being written; removed at the next start

Nothing is fsynced: a blob can be fetched again, and is hashed again before it is trusted. The exception is a blob that
this process hashed and wrote a moment ago: its file carries a timestamp that any later writer changes. A complete blob
appears by a rename, so it is never seen half-written. A blob that its owner keeps in memory for as long as it is needed
can be lent instead of written. Small fetched blobs stay in memory while there is room: they are decoded at once, passed
on for a few rounds, and can be fetched again. Those that a promise depends on are the exception; `persist` writes them
to disk. Every method may be called from any thread.
"""

import contextlib
import logging
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from protocol.blobs.blob import DIGEST_BYTES, PIECE_BYTES, Blob, Bytes, check_digest, hash_data, hash_of
from protocol.blobs.storage import (
    FilePartial,
    InMemoryBlob,
    MemoryPartial,
    Partial,
    copy_and_hash,
    disk_errors,
    hash_piece,
    make_in_memory_blob,
    read_at,
    remove_files,
    scan_folder,
)
from protocol.errors import MissingFileError, PeerFault, StorageError

logger = logging.getLogger(__name__)

DEFAULT_MEMORY_BYTES = 1 << 28  # at most, for all fetched blobs that a node keeps in memory
MAX_IN_MEMORY_BLOB_BYTES = 8 * PIECE_BYTES  # a larger blob is worth resuming after a restart
MAX_PIECES_WITHOUT_FILE = 8
TRUSTED_SECONDS = 60.0  # for this long after writing, a blob's file is trusted without hashing it


class BlobStore:
    """A node's blobs on disk and in memory.

    `max_bytes` bounds the complete and partial blobs on disk together, `memory_bytes` the fetched blobs that stay in
    memory.
    """

    def __init__(self, folder: Path, max_bytes: int, memory_bytes: int = 0) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._hashes: dict[bytes, bytes] = {}  # of complete blobs of few pieces
        self._in_memory: dict[bytes, InMemoryBlob] = {}
        self._memory_partials: dict[bytes, MemoryPartial] = {}
        self._memory_sizes: dict[bytes, int] = {}  # of complete and partial blobs in memory that are not lent
        self._open_partials: set[bytes] = set()
        self._written_files: dict[bytes, tuple[int, float]] = {}  # file timestamp (ns) and time of writing
        self._bytes_being_written = 0
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._complete, self._partial = scan_folder(folder)

    def __len__(self) -> int:
        """Return the number of complete blobs, including lent ones."""
        return len(self._complete.keys() | self._in_memory.keys())

    @property
    def size(self) -> int:
        """Return the bytes on disk, including those being written."""
        with self._lock:
            return self._total_bytes()

    def path(self, digest: bytes) -> Path:
        """Return the path of a complete blob, whether or not it exists."""
        check_digest(digest)
        return self._folder / digest.hex()

    def has(self, digest: bytes) -> bool:
        return digest in self._complete or digest in self._in_memory

    def blob(self, digest: bytes) -> Blob:
        """Return the name of a complete blob; raise MissingFileError if it is absent."""
        check_digest(digest)
        if held := self._in_memory.get(digest):
            return held.blob
        size = self._complete.get(digest)
        if size is None:
            raise MissingFileError(f"no blob {digest.hex()} in {self._folder}; fetch it first")
        return Blob(digest, size)

    def put_in_memory(self, data: Bytes) -> Blob:
        """Store data that must not change in memory if there is room for it, else on disk."""
        blob, hashes = hash_data(data)
        with self._lock:
            if not self.has(blob.digest) and self._has_room(blob):
                self._memory_sizes[blob.digest] = blob.size
                self._in_memory[blob.digest] = make_in_memory_blob(blob, hashes, (data,))
        if not self.has(blob.digest):
            self._write(blob, hashes, data)
        return blob

    def put(self, *data: Bytes) -> Blob:
        """Store the concatenation of all `data` on disk as one blob."""
        blob, hashes = hash_data(*data)
        if not self.has(blob.digest):
            self._write(blob, hashes, *data)
        return blob

    def lend(self, *data: Bytes) -> Blob:
        """Serve data from memory that must not change until the blob is discarded.

        A piece that is read is a copy, because it may be sent long after that.
        """
        blob, hashes = hash_data(*data)
        if not self.has(blob.digest):
            self._in_memory[blob.digest] = make_in_memory_blob(blob, hashes, data)
        return blob

    def is_lent(self, digest: bytes) -> bool:
        """Return whether a blob is served from memory of its owner."""
        return digest in self._in_memory and digest not in self._memory_sizes

    def persist(self, digest: bytes) -> None:
        """Write a blob that is in memory to disk as well, so that it survives a kill."""
        if digest not in self._complete and (held := self._in_memory.get(digest)):
            self._write(held.blob, held.hashes, *held.views)

    def move_to_disk(self, digest: bytes) -> None:
        """Write a blob that is in memory to disk and release its memory."""
        self.persist(digest)
        with self._lock:
            self._in_memory.pop(digest, None)
            self._memory_sizes.pop(digest, None)

    def put_file(self, path: Path) -> Blob:
        """Copy a file of any size into the store."""
        with disk_errors(path), path.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            with self._new_file(size) as file:
                hashes = copy_and_hash(source, file, size)
                blob = Blob.from_hashes(hashes, file.tell())
                self._commit_file(file, blob, hashes)
        return blob

    def read(self, digest: bytes) -> bytearray:
        """Read a whole blob and check it.

        Raises MissingFileError if it is absent, or was damaged and removed.
        """
        if held := self._in_memory.get(digest):
            return held.copy_bytes()
        blob = self.blob(digest)
        with self._open_blob(digest) as descriptor:
            data = read_at(descriptor, blob.size, 0)
            is_trusted = self._is_trusted(digest, descriptor)
        if len(data) != blob.size or not is_trusted and Blob.of(data) != blob:
            raise self._discard_damaged(digest)
        return data

    def view(self, digest: bytes) -> Bytes:
        """Return a view, uncopied if contiguous; raise as `read` does.

        A large blob on disk is mapped: the system drops its pages from memory when it needs room.
        """
        held = self._in_memory.get(digest)
        if held is None and self.blob(digest).size >= PIECE_BYTES:
            return self._map(digest)
        return held.views[0] if held and len(held.views) == 1 else self.read(digest)

    def _map(self, digest: bytes) -> memoryview:
        """Map the file of a blob and check it. A change of the map, which is private, does not change the file."""
        blob = self.blob(digest)
        with self._open_blob(digest) as descriptor:
            if os.fstat(descriptor).st_size < blob.size:
                raise self._discard_damaged(digest)
            data = memoryview(mmap.mmap(descriptor, blob.size, access=mmap.ACCESS_COPY))
            is_trusted = self._is_trusted(digest, descriptor)
        if not is_trusted and Blob.of(data) != blob:
            raise self._discard_damaged(digest)
        return data

    def read_piece(self, digest: bytes, piece: int) -> Bytes:
        """Read one piece and check it; raise MissingFileError as `read` does."""
        if held := self._in_memory.get(digest):
            return bytes(held.piece(piece)) if self.is_lent(digest) else held.piece(piece)
        length = self.blob(digest).piece_length(piece)
        with self._open_blob(digest) as descriptor:
            data = read_at(descriptor, length, piece * PIECE_BYTES)
            if len(data) == length and self._is_trusted(digest, descriptor):
                return data
        if hash_of(data) != self.hashes(digest)[piece * DIGEST_BYTES : (piece + 1) * DIGEST_BYTES]:
            raise self._discard_damaged(digest)
        return data

    def hashes(self, digest: bytes) -> bytes:
        """Return the piece hashes of a complete blob.

        They are recomputed if their file is lost or damaged.
        """
        if held := self._in_memory.get(digest):
            return held.hashes
        blob = self.blob(digest)
        known = self._hashes.get(digest) or self._read_hashes(blob)
        if known is not None:
            return known
        with self._open_blob(digest) as descriptor:
            computed = b"".join(hash_piece(descriptor, piece * PIECE_BYTES) for piece in range(blob.pieces))
        if Blob.from_hashes(computed, blob.size) != blob:
            raise self._discard_damaged(digest)
        self._keep_hashes(blob, computed)
        return computed

    def discard(self, digest: bytes) -> None:
        """Remove a blob if it exists; a partial blob that is being fetched stays."""
        check_digest(digest)
        with self._lock:
            if digest not in self._open_partials:
                self._complete.pop(digest, None)
                for index in (self._in_memory, self._memory_sizes, self._memory_partials, self._hashes):
                    index.pop(digest, None)
                self._partial.pop(digest, None)
                self._written_files.pop(digest, None)
                remove_files(self._folder, digest, "", ".part", ".pieces")

    def retain(self, digests: Collection[bytes]) -> None:
        """Remove every blob that is neither in `digests` nor being fetched."""
        keep = set(digests)
        for digest in [*self._complete, *self._partial, *self._in_memory, *self._memory_partials]:
            if digest not in keep:
                self.discard(digest)

    def partial_hashes(self, blob: Blob) -> bytes | None:
        """Return the piece hashes of a download that was begun, or None."""
        if partial := self._memory_partials.get(blob.digest):
            return partial.hashes
        return self._read_hashes(blob) if blob.digest in self._partial else None

    def open_partial(self, blob: Blob, hashes: bytes) -> Partial:
        """Begin or resume a download, one at a time per blob.

        `verify_existing` finds the pieces already there.
        """
        blob.check_hashes(hashes)
        with self._lock:
            if blob.digest in self._open_partials:
                raise ValueError(f"blob {blob.name} is being fetched already")
            partial = self._memory_partial(blob, hashes)
            if partial is None:
                self._make_room(blob.size - self._partial.get(blob.digest, 0))
                self._partial[blob.digest] = blob.size
            self._open_partials.add(blob.digest)
        if partial is not None:
            return partial
        try:
            self._write_hashes(blob, hashes)
            return FilePartial(self, blob, hashes, self._folder / f"{blob.name}.part")
        except BaseException:
            self.close_partial(blob)
            raise

    def close_partial(self, blob: Blob) -> None:
        """Release a partial blob; called by Partial."""
        with self._lock:
            self._open_partials.discard(blob.digest)

    def complete_in_memory(self, blob: Blob, hashes: bytes, data: memoryview) -> None:
        """Adopt a partial blob in memory whose pieces are all checked; called by Partial."""
        with self._lock:
            self._in_memory[blob.digest] = make_in_memory_blob(blob, hashes, (data,))
            self._memory_partials.pop(blob.digest, None)

    def _memory_partial(self, blob: Blob, hashes: bytes) -> MemoryPartial | None:
        """Return the partial blob in memory, or None if it belongs on disk."""
        partial = self._memory_partials.get(blob.digest)
        if partial is None and blob.digest not in self._partial and self._has_room(blob):
            partial = self._memory_partials[blob.digest] = MemoryPartial(self, blob, hashes)
            self._memory_sizes[blob.digest] = blob.size
        return partial

    def _has_room(self, blob: Blob) -> bool:
        return blob.size <= min(MAX_IN_MEMORY_BLOB_BYTES, self._memory_bytes - sum(self._memory_sizes.values()))

    def complete_partial(self, blob: Blob) -> None:
        """Adopt a partial blob on disk whose pieces are all checked; called by Partial."""
        with disk_errors(self._folder), self._lock:
            self._publish_file(self._folder / f"{blob.name}.part", blob)
            self._partial.pop(blob.digest, None)

    def _total_bytes(self) -> int:
        return sum(self._complete.values()) + sum(self._partial.values()) + self._bytes_being_written

    def _make_room(self, size: int) -> None:
        if self._total_bytes() + size > self._max_bytes:
            raise StorageError(
                f"{self._folder} may hold {self._max_bytes} bytes and is full; stop the node, remove it and start again"
            )

    def _write(self, blob: Blob, hashes: bytes, *data: Bytes) -> None:
        with self._new_file(blob.size) as file:
            file.writelines(data)
            self._commit_file(file, blob, hashes)

    @contextlib.contextmanager
    def _new_file(self, size: int) -> Iterator[IO[bytes]]:
        """Create a file for `size` bytes that disappears unless it is committed."""
        with self._lock:
            self._make_room(size)
            self._bytes_being_written += size
        try:
            with disk_errors(self._folder), self._temporary() as file:
                yield file
        finally:
            with self._lock:
                self._bytes_being_written -= size

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[IO[bytes]]:
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".new", delete=False) as file:
            try:
                yield file
            finally:
                Path(file.name).unlink(missing_ok=True)

    def _commit_file(self, file: IO[bytes], blob: Blob, hashes: bytes) -> None:
        self._keep_hashes(blob, hashes)
        file.flush()
        with self._lock:
            self._publish_file(Path(file.name), blob)
            if blob.digest in self._partial and blob.digest not in self._open_partials:
                del self._partial[blob.digest]
                remove_files(self._folder, blob.digest, ".part")

    def _publish_file(self, path: Path, blob: Blob) -> None:
        """Rename a file to its digest, and mark it with a unique timestamp.

        No later writer will leave that timestamp there.
        """
        timestamp = time.time_ns() - 10**9
        os.utime(path, ns=(timestamp, timestamp))
        os.replace(path, self.path(blob.digest))
        self._complete[blob.digest] = blob.size
        self._written_files[blob.digest] = os.stat(self.path(blob.digest)).st_mtime_ns, time.monotonic()

    def _is_trusted(self, digest: bytes, descriptor: int) -> bool:
        timestamp, written = self._written_files.get(digest, (0, -TRUSTED_SECONDS))
        return time.monotonic() - written < TRUSTED_SECONDS and os.fstat(descriptor).st_mtime_ns == timestamp

    def _keep_hashes(self, blob: Blob, hashes: bytes) -> None:
        if blob.pieces > MAX_PIECES_WITHOUT_FILE:
            self._write_hashes(blob, hashes)
        else:
            self._hashes[blob.digest] = hashes

    def _write_hashes(self, blob: Blob, hashes: bytes) -> None:
        with disk_errors(self._folder), self._temporary() as file:
            file.write(hashes)
            file.flush()
            os.replace(file.name, self._folder / f"{blob.name}.pieces")

    def _read_hashes(self, blob: Blob) -> bytes | None:
        try:
            with disk_errors(self._folder), (self._folder / f"{blob.name}.pieces").open("rb") as file:
                hashes = file.read(blob.pieces * DIGEST_BYTES + 1)
            blob.check_hashes(hashes)
        except (MissingFileError, PeerFault):
            return None
        return hashes

    @contextlib.contextmanager
    def _open_blob(self, digest: bytes) -> Iterator[int]:
        path = self.path(digest)
        with disk_errors(path):
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError as error:
                self.discard(digest)
                raise MissingFileError(f"no blob {digest.hex()} in {self._folder}; fetch it first") from error
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def _discard_damaged(self, digest: bytes) -> MissingFileError:
        logger.warning("removing blob %s in %s: it is damaged", digest.hex(), self._folder)
        self.discard(digest)
        return MissingFileError(f"blob {digest.hex()} in {self._folder} was damaged and is removed; fetch it again")
