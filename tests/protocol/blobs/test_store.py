"""The store never shows an incomplete blob, never exceeds its size limit, and detects rot."""

import errno
import mmap
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from protocol.blobs import blob
from protocol.blobs.blob import PIECE_BYTES, Blob, piece_hashes
from protocol.blobs.store import MAX_PIECES_WITHOUT_FILE, TRUSTED_SECONDS, BlobStore
from protocol.errors import LimitError, MalformedError, MissingFileError, StorageError

ROOM = 64 * PIECE_BYTES
MANY_BYTES = MAX_PIECES_WITHOUT_FILE * PIECE_BYTES + 1


def some_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs", ROOM)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 2 * PIECE_BYTES + 5])
def test_stored_blob_can_be_read(store: BlobStore, size: int) -> None:
    data = some_bytes(size)
    blob = store.put(data)
    assert blob == Blob.of(data)
    assert store.has(blob.digest)
    assert store.blob(blob.digest) == blob
    assert store.read(blob.digest) == data
    assert store.path(blob.digest).read_bytes() == data
    assert store.hashes(blob.digest) == piece_hashes(data)
    assert store.size == size


def test_storing_twice_changes_nothing(store: BlobStore, tmp_path: Path) -> None:
    first = store.put(memoryview(b"murmur"))
    before = files(tmp_path / "blobs")
    assert store.put(b"murmur") == first
    assert files(tmp_path / "blobs") == before
    assert store.size == 6


def test_file_is_stored_like_bytes(store: BlobStore, tmp_path: Path) -> None:
    data = some_bytes(PIECE_BYTES + 9)
    (tmp_path / "source").write_bytes(data)
    assert store.put_file(tmp_path / "source") == Blob.of(data)
    assert store.read(Blob.of(data).digest) == data
    with pytest.raises(MissingFileError, match="nowhere"):
        store.put_file(tmp_path / "nowhere")


def test_pieces_are_read_one_by_one(store: BlobStore) -> None:
    data = some_bytes(PIECE_BYTES + 100)
    digest = store.put(data).digest
    assert store.read_piece(digest, 0) == data[:PIECE_BYTES]
    assert store.read_piece(digest, 1) == data[PIECE_BYTES:]


@pytest.mark.parametrize("sizes", [(0,), (5, 0, 7), (PIECE_BYTES - 1, 2), (PIECE_BYTES, 1), (3, 2 * PIECE_BYTES, 9)])
def test_concatenated_parts_are_one_blob(store: BlobStore, sizes: tuple[int, ...]) -> None:
    parts = [some_bytes(size, seed) for seed, size in enumerate(sizes)]
    whole = b"".join(parts)
    assert piece_hashes(*parts) == piece_hashes(whole)
    assert store.put(*[memoryview(part) for part in parts]) == Blob.of(*parts) == Blob.of(whole)
    assert store.read(Blob.of(whole).digest) == whole


def test_recently_written_blob_is_not_hashed_again(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, hash_count = store.put(some_bytes(2 * PIECE_BYTES)).digest, 0

    def count_hashes(*data: bytes) -> Any:
        nonlocal hash_count
        hash_count += 1
        return blake3(*data)

    monkeypatch.setattr(blob, "blake3", count_hashes)
    store.read(digest), store.read_piece(digest, 1)
    assert hash_count == 0
    later = time.monotonic() + TRUSTED_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: later)
    store.read(digest), store.read_piece(digest, 1)
    assert hash_count, "the control: after a while it is hashed again"


def test_absent_blob_is_named_in_the_error(store: BlobStore) -> None:
    for ask in (store.blob, store.read, store.hashes):
        with pytest.raises(MissingFileError, match="61616161"):
            ask(b"a" * 32)
    for nonsense in (b"", b"../../etc/passwd", b"a" * 31):
        with pytest.raises(MalformedError):
            store.path(nonsense)


def test_new_store_finds_complete_blobs_and_removes_leftovers(store: BlobStore, tmp_path: Path) -> None:
    complete, folder = store.put(b"kept"), tmp_path / "blobs"
    lonely = "ab" * 32
    for name in ("half.new", f"{lonely}.part", f"{'cd' * 32}.pieces", f"{complete.name}.part"):
        (folder / name).write_bytes(b"left over")
    (folder / "somebody's notes").write_bytes(b"not ours")
    again = BlobStore(folder, ROOM)
    assert again.read(complete.digest) == b"kept"
    assert files(folder) == {complete.name, "somebody's notes"}
    assert again.size == 4


def test_interrupted_put_leaves_nothing(store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(source: object, target: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        store.put(b"data")
    assert files(tmp_path / "blobs") == set()
    assert store.size == 0
    assert store.read(store.put(b"data").digest) == b"data"


def test_rot_is_detected_anywhere_and_the_blob_removed(store: BlobStore) -> None:
    data = some_bytes(2 * PIECE_BYTES + 77)
    rng = random.Random(5)
    for position in [0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(30))]:
        digest = store.put(data).digest
        with store.path(digest).open("r+b") as file:
            file.seek(position)
            file.write(bytes([data[position] ^ 1 << rng.randrange(8)]))
        # The control: without the check the damaged bytes are returned as if nothing had happened.
        assert store.path(digest).read_bytes() != data
        with pytest.raises(MissingFileError, match="damaged"):
            store.read_piece(digest, position // PIECE_BYTES)
        assert not store.has(digest)
        assert not store.path(digest).exists()


def test_damaged_or_truncated_blob_is_never_read(store: BlobStore, tmp_path: Path) -> None:
    data = some_bytes(PIECE_BYTES + 1)
    digest = store.put(data).digest
    store.path(digest).write_bytes(data[:-1] + b"x")
    with pytest.raises(MissingFileError, match="damaged"):
        store.read(digest)
    digest = store.put(data).digest
    os.truncate(store.path(digest), 10)
    with pytest.raises(MissingFileError, match="damaged"):
        BlobStore(tmp_path / "blobs", ROOM).hashes(digest)


def test_view_of_a_large_blob_is_its_file_and_survives_its_removal(store: BlobStore) -> None:
    data = some_bytes(2 * PIECE_BYTES)
    digest = store.put(data).digest
    view = memoryview(store.view(digest))
    assert isinstance(view.obj, mmap.mmap) and not isinstance(
        memoryview(store.view(store.put(b"x").digest)).obj, mmap.mmap
    )
    store.discard(digest)
    assert view == data and not store.has(digest)


@pytest.mark.parametrize("size", [PIECE_BYTES - 1, 2 * PIECE_BYTES])
def test_view_of_a_damaged_or_truncated_blob_is_refused(tmp_path: Path, size: int) -> None:
    data = some_bytes(size)
    for damaged in (data[:-1] + b"x", data[:-1], b""):
        store = BlobStore(tmp_path / "blobs", ROOM)
        digest = store.put(data).digest
        assert bytes(store.view(digest)) == data, "the control"
        store.path(digest).write_bytes(damaged)
        with pytest.raises(MissingFileError, match="damaged"):
            store.view(digest)
        assert not store.has(digest)


@pytest.mark.parametrize("damage", [b"", b"x" * 64, b"x" * 1000, None])
def test_lost_or_damaged_hashes_are_recomputed(store: BlobStore, tmp_path: Path, damage: bytes | None) -> None:
    data = some_bytes(MANY_BYTES)
    blob = store.put(data)
    path = tmp_path / "blobs" / f"{blob.name}.pieces"
    path.unlink() if damage is None else path.write_bytes(damage)
    assert store.hashes(blob.digest) == piece_hashes(data)
    assert path.read_bytes() == piece_hashes(data)


@pytest.mark.parametrize("size", [1, MANY_BYTES - 1])
def test_blob_of_few_pieces_has_no_hash_file(store: BlobStore, tmp_path: Path, size: int) -> None:
    data = some_bytes(size)
    blob = store.put(data)
    again = BlobStore(tmp_path / "blobs", ROOM)
    assert store.hashes(blob.digest) == again.hashes(blob.digest) == piece_hashes(data)
    assert files(tmp_path / "blobs") == {blob.name}
    store.discard(blob.digest)
    assert not store._hashes, "the hashes of discarded blobs must not fill the memory"


def test_removed_file_is_reported_as_missing(store: BlobStore) -> None:
    digest = store.put(b"data").digest
    store.path(digest).unlink()
    with pytest.raises(MissingFileError):
        store.read(digest)
    assert not store.has(digest)


def test_discard_and_retain(store: BlobStore, tmp_path: Path) -> None:
    first, second, third = (store.put(data) for data in (b"one", b"two", b"three"))
    store.discard(first.digest)
    store.discard(first.digest)
    store.retain([second.digest, b"z" * 32])
    assert [store.has(blob.digest) for blob in (first, second, third)] == [False, True, False]
    assert files(tmp_path / "blobs") == {second.name}
    assert store.size == 3


def test_size_limit_holds_for_complete_and_partial_blobs(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 100)
    store.put(bytes(60))
    large = some_bytes(41)
    for attempt in (lambda: store.put(large), lambda: store.open_partial(Blob.of(large), piece_hashes(large))):
        with pytest.raises(StorageError, match="remove it and start again"):
            attempt()
    small = some_bytes(40)
    partial = store.open_partial(Blob.of(small), piece_hashes(small))
    assert store.size == 100
    with pytest.raises(StorageError):
        store.put(b"x")
    partial.close()
    store.discard(Blob.of(small).digest)
    store.put(large[:40])


@pytest.mark.parametrize(
    ("error_number", "text"),
    [(errno.ENOSPC, "no space left"), (errno.EDQUOT, "no space left"), (errno.EIO, "repair the disk")],
)
def test_disk_error_is_one_line(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_number: int, text: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(error_number, os.strerror(error_number))

    data = some_bytes(10)
    partial = store.open_partial(Blob.of(data), piece_hashes(data))
    monkeypatch.setattr(os, "replace", fail)
    monkeypatch.setattr(os, "pwrite", fail)
    for attempt in (lambda: store.put(b"x"), lambda: partial.write(0, data)):
        with pytest.raises(StorageError, match=text) as caught:
            attempt()
        assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert partial.missing == {0}
    partial.write(0, data)
    partial.finish()
    partial.close()
    assert store.read(Blob.of(data).digest) == data
    assert not [name for name in files(tmp_path / "blobs") if name.endswith(".new")]


def test_only_matching_pieces_are_accepted_in_any_order(store: BlobStore) -> None:
    data = some_bytes(3 * PIECE_BYTES + 10)
    blob = Blob.of(data)
    partial = store.open_partial(blob, piece_hashes(data))
    for piece in (3, 0, 2):
        partial.write(piece, data[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES])
    for wrong in (data[:PIECE_BYTES], bytes(PIECE_BYTES), data[PIECE_BYTES : 2 * PIECE_BYTES - 1], b""):
        with pytest.raises(MalformedError):
            partial.write(1, wrong)
    assert partial.missing == {1}
    assert not store.has(blob.digest)
    with pytest.raises(ValueError, match="lacks 1"):
        partial.finish()
    partial.write(1, data[PIECE_BYTES : 2 * PIECE_BYTES])
    partial.finish()
    partial.close()
    assert store.read(blob.digest) == data
    assert store.size == len(data)


def test_resumed_download_verifies_existing_pieces(store: BlobStore, tmp_path: Path) -> None:
    data = some_bytes(4 * PIECE_BYTES)
    blob, hashes = Blob.of(data), piece_hashes(data)
    partial = store.open_partial(blob, hashes)
    for piece in (0, 1, 3):
        partial.write(piece, data[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES])
    partial.close()
    with (tmp_path / "blobs" / f"{blob.name}.part").open("r+b") as file:
        file.seek(PIECE_BYTES + 5)
        file.write(bytes(3))  # rot of a piece in the meantime
    again = BlobStore(tmp_path / "blobs", ROOM)
    assert again.size == blob.size
    assert again.partial_hashes(blob) == hashes
    partial = again.open_partial(blob, hashes)
    assert partial.missing == {0, 1, 2, 3}
    partial.verify_existing()
    assert partial.missing == {1, 2}
    partial.close()


def test_open_partial_blob_has_one_owner_and_is_not_removed(store: BlobStore) -> None:
    data = some_bytes(10)
    blob, hashes = Blob.of(data), piece_hashes(data)
    partial = store.open_partial(blob, hashes)
    with pytest.raises(ValueError, match="already"):
        store.open_partial(blob, hashes)
    store.retain([])
    partial.write(0, data)
    partial.finish()
    partial.close()
    assert store.read(blob.digest) == data


def test_no_download_begins_with_wrong_hashes(store: BlobStore, tmp_path: Path) -> None:
    blob = Blob(b"d" * 32, PIECE_BYTES)
    for hashes, fault in ((bytes(32), MalformedError), (bytes(64), LimitError)):
        with pytest.raises(fault):
            store.open_partial(blob, hashes)
    assert files(tmp_path / "blobs") == set()


def test_write_after_close_touches_no_other_file(store: BlobStore, tmp_path: Path) -> None:
    data = some_bytes(10)
    partial = store.open_partial(Blob.of(data), piece_hashes(data))
    partial.close()
    with (tmp_path / "other").open("w+b") as other:  # likely gets the same descriptor
        partial.write(0, data)
        partial.verify_existing()
        assert other.read() == b""
    assert partial.missing == {0}


def test_threads_may_put_and_discard_concurrently(store: BlobStore) -> None:
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(30):
                blob = store.put(bytes([rng.randrange(4)]) * 1000)
                if rng.random() < 0.5:
                    store.discard(blob.digest)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert faults == []
    assert store.size == 1000 * sum(store.has(Blob.of(bytes([value]) * 1000).digest) for value in range(4))
    store.retain([])
    assert store.size == 0
