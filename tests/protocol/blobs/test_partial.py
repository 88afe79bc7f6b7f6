"""Small fetched blobs stay in memory while there is room, and are read, served, resumed and dropped as on disk."""

import errno
import os
import random
from pathlib import Path

import pytest

from protocol.blobs.blob import PIECE_BYTES, Blob, piece_hashes
from protocol.blobs.storage import FilePartial, MemoryPartial, Partial
from protocol.blobs.store import MAX_IN_MEMORY_BLOB_BYTES, BlobStore
from protocol.errors import MalformedError, StorageError

ROOM = 4 * PIECE_BYTES
SIZES = [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 77]


def some_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def piece_of(data: bytes, piece: int) -> bytes:
    return data[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]


def open_partial(store: BlobStore, data: bytes) -> Partial:
    return store.open_partial(Blob.of(data), piece_hashes(data))


def fetch_blob(store: BlobStore, data: bytes) -> Blob:
    partial = open_partial(store, data)
    for piece in sorted(partial.missing, reverse=True):
        partial.write(piece, piece_of(data, piece))
    partial.finish()
    partial.close()
    return partial.blob


def count_files(folder: Path) -> int:
    return len(list(folder.iterdir()))


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, 1 << 30, ROOM)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("origin", ["pieces", "whole"])
def test_blob_in_memory_behaves_as_any_other_without_a_file(
    store: BlobStore, tmp_path: Path, size: int, origin: str
) -> None:
    data = some_bytes(size)
    blob = fetch_blob(store, data) if origin == "pieces" else store.put_in_memory(data)
    assert blob == Blob.of(data) == store.blob(blob.digest) and store.has(blob.digest)
    assert store.read(blob.digest) == data and store.hashes(blob.digest) == piece_hashes(data)
    assert b"".join(store.read_piece(blob.digest, piece) for piece in range(blob.pieces)) == data
    assert store.put_in_memory(data) == store.put(data) == blob and len(store) == 1
    assert store.size == 0 and count_files(tmp_path) == 0


@pytest.mark.parametrize("kind", [MemoryPartial, FilePartial])
def test_only_matching_pieces_are_accepted(tmp_path: Path, kind: type[Partial]) -> None:
    store = BlobStore(tmp_path, 1 << 30, ROOM if kind is MemoryPartial else 0)
    data = some_bytes(2 * PIECE_BYTES + 10)
    partial = open_partial(store, data)
    assert isinstance(partial, kind)
    for wrong in (piece_of(data, 0), bytes(PIECE_BYTES), piece_of(data, 1)[:-1], b""):
        with pytest.raises(MalformedError):
            partial.write(1, wrong)
    for piece in (2, 0):
        partial.write(piece, piece_of(data, piece))
    assert partial.missing == {1} and not store.has(partial.blob.digest)
    with pytest.raises(ValueError, match="lacks 1"):
        partial.finish()
    with pytest.raises(ValueError, match="already"):
        open_partial(store, data)
    partial.close()


def test_abandoned_fetch_is_resumed(store: BlobStore) -> None:
    data = some_bytes(3 * PIECE_BYTES)
    partial = open_partial(store, data)
    partial.write(1, piece_of(data, 1))
    partial.close()
    assert store.partial_hashes(partial.blob) == piece_hashes(data)
    again = open_partial(store, data)
    again.verify_existing()
    assert again.missing == {0, 2}
    again.close()
    store.retain(())
    assert store.partial_hashes(partial.blob) is None, "unless no digest is retained"
    assert open_partial(store, data).missing == {0, 1, 2}


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 2 * PIECE_BYTES + 5])
def test_contiguous_blob_is_viewed_without_a_copy(store: BlobStore, size: int) -> None:
    data = some_bytes(size)
    blob = fetch_blob(store, data)
    view = store.view(blob.digest)
    assert isinstance(view, memoryview) and view.readonly and view == data
    assert store.read(blob.digest) == data and store.read(blob.digest) is not store.view(blob.digest)


def test_blob_without_room_in_memory_goes_to_disk(store: BlobStore, tmp_path: Path) -> None:
    first, second, third = (some_bytes(3 * PIECE_BYTES, seed) for seed in range(3))
    kept = fetch_blob(store, first)
    assert store.size == 0
    assert isinstance(open_partial(store, second), FilePartial), "the first blob takes three of four pieces"
    assert store.put_in_memory(some_bytes(2 * PIECE_BYTES)) and store.size == 5 * PIECE_BYTES
    small = store.put_in_memory(some_bytes(PIECE_BYTES, 9))
    assert store.size == 5 * PIECE_BYTES
    store.retain({small.digest})
    assert not store.has(kept.digest) and store.has(small.digest)
    assert isinstance(open_partial(store, third), MemoryPartial), "a discarded blob frees its room"


def test_partial_blob_reserves_its_whole_size(store: BlobStore) -> None:
    partial = open_partial(store, some_bytes(3 * PIECE_BYTES))
    assert isinstance(partial, MemoryPartial)
    assert isinstance(open_partial(store, some_bytes(2 * PIECE_BYTES, 1)), FilePartial)


def test_large_blob_goes_to_disk_however_much_room_there_is(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 1 << 30, 1 << 30)
    assert isinstance(open_partial(store, bytes(MAX_IN_MEMORY_BLOB_BYTES)), MemoryPartial)
    assert isinstance(open_partial(store, bytes(MAX_IN_MEMORY_BLOB_BYTES + 1)), FilePartial)


def test_blob_moved_to_disk_survives_and_frees_its_memory(store: BlobStore, tmp_path: Path) -> None:
    data = some_bytes(ROOM)
    blob = fetch_blob(store, data)
    store.move_to_disk(blob.digest)
    assert BlobStore(tmp_path, 1 << 30).read(blob.digest) == data
    assert isinstance(open_partial(store, some_bytes(ROOM, 1)), MemoryPartial)


def test_file_that_cannot_be_extended_leaves_no_open_descriptor(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, size: int) -> None:
        raise OSError(errno.EFBIG, "too large")

    before = os.listdir("/proc/self/fd")
    data = some_bytes(MAX_IN_MEMORY_BLOB_BYTES + 1)
    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(os, "ftruncate", full)
        open_partial(store, data)
    assert os.listdir("/proc/self/fd") == before
    open_partial(store, data).close()
