"""A lent blob is served from its owner's memory, without file or copy, until it is discarded."""

import random
from pathlib import Path

import numpy as np
import pytest

from protocol.blobs.blob import PIECE_BYTES, Blob, piece_hashes
from protocol.blobs.store import BlobStore
from protocol.errors import MissingFileError, StorageError

SIZES = [(0,), (5, 0, 7), (PIECE_BYTES,), (PIECE_BYTES - 1, 2 * PIECE_BYTES, 3), (3, 2 * PIECE_BYTES, 9)]


def parts_of(sizes: tuple[int, ...]) -> list[bytes]:
    return [random.Random(seed).randbytes(size) for seed, size in enumerate(sizes)]


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs", 8 * PIECE_BYTES)


@pytest.mark.parametrize("sizes", SIZES)
def test_lent_blob_is_read_like_a_stored_one(store: BlobStore, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    parts = parts_of(sizes)
    whole = b"".join(parts)
    blob = store.lend(*parts)
    assert blob == Blob.of(whole) == store.blob(blob.digest)
    assert store.has(blob.digest) and len(store) == 1
    assert store.read(blob.digest) == whole
    assert b"".join(store.read_piece(blob.digest, piece) for piece in range(blob.pieces)) == whole
    assert store.hashes(blob.digest) == piece_hashes(whole)
    assert store.size == 0 and not list((tmp_path / "blobs").iterdir())


def test_piece_of_a_lent_blob_is_a_copy(store: BlobStore) -> None:
    """Its lender may change the memory while the piece is on its way."""
    memory = np.arange(PIECE_BYTES, dtype=np.float32)
    piece = store.read_piece(store.lend(memory.data).digest, 1)
    assert not np.shares_memory(np.frombuffer(piece, np.uint8), memory)
    assert bytes(piece) == memory.tobytes()[PIECE_BYTES : 2 * PIECE_BYTES]


def test_read_returns_a_copy(store: BlobStore) -> None:
    memory = bytearray(b"murmur")
    digest = store.lend(memory).digest
    store.read(digest)[:] = b"noises"
    assert memory == b"murmur"


def test_view_of_a_contiguous_blob_is_read_only_and_not_copied(store: BlobStore) -> None:
    memory, parts = np.arange(PIECE_BYTES, dtype=np.float32), (b"mur", b"mur")
    view, joined = store.view(store.lend(memory.data).digest), store.view(store.lend(*parts).digest)
    assert isinstance(view, memoryview) and view.readonly and joined == b"murmur"
    assert np.shares_memory(np.frombuffer(view, np.uint8), memory)
    assert store.view(store.put(b"on disk").digest) == b"on disk"
    with pytest.raises(MissingFileError):
        store.view(bytes(32))


def test_lent_blob_is_removed_by_discard_and_retain(store: BlobStore) -> None:
    first, second = store.lend(b"first"), store.lend(b"second")
    store.discard(first.digest)
    assert not store.has(first.digest) and store.has(second.digest)
    store.retain({second.digest})
    assert store.has(second.digest)
    store.retain(())
    with pytest.raises(MissingFileError):
        store.read_piece(second.digest, 0)


def test_lent_blob_is_moved_to_disk(store: BlobStore) -> None:
    parts = parts_of((3, PIECE_BYTES, 9))
    digest = store.lend(*parts).digest
    store.move_to_disk(digest)
    assert store.path(digest).read_bytes() == b"".join(parts) == store.read(digest)
    assert store.size == len(b"".join(parts)) and len(store) == 1
    store.move_to_disk(digest)  # repeated, and an absent one: nothing happens
    store.move_to_disk(bytes(32))
    assert len(store) == 1


def test_persisted_blob_stays_in_memory(store: BlobStore, tmp_path: Path) -> None:
    parts = parts_of((3, PIECE_BYTES, 9))
    digest = store.lend(*parts).digest
    for _ in range(2):
        store.persist(digest)
    store.persist(bytes(32))  # an absent one: nothing happens
    assert store.path(digest).read_bytes() == b"".join(parts) and len(store) == 1
    store.path(digest).write_bytes(b"")
    assert store.read(digest) == b"".join(parts), "from memory"
    store.discard(digest)
    assert not store.has(digest) and not store.path(digest).exists()


def test_lent_blob_that_does_not_fit_on_disk_stays_lent(store: BlobStore) -> None:
    digest = store.lend(bytes(9 * PIECE_BYTES)).digest
    with pytest.raises(StorageError, match="is full"):
        store.move_to_disk(digest)
    assert store.has(digest) and store.size == 0


def test_blob_on_disk_is_not_lent_as_well(store: BlobStore) -> None:
    blob = store.put(b"murmur")
    assert store.lend(b"murmur") == blob
    assert len(store) == 1 and store.path(blob.digest).exists()
