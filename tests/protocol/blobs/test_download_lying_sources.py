"""Downloads from sources that lie about bytes, hashes, sizes or encoding, over plain gRPC on Unix sockets."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.blobs.blob import PIECE_BYTES, Blob, piece_hashes
from protocol.blobs.storage import FilePartial
from protocol.errors import MalformedError, UnreachableError
from tests.protocol.blobs.fake_sources import (
    BLOB,
    DATA,
    SHORT_TIMEOUTS,
    SMALL,
    ScriptedSource,
    SourcePool,
    flip_last_bit,
)
from tests.protocol.garbled_server import garbled_channel


def write_unchecked(partial: FilePartial, piece: int, data: bytes) -> None:
    """Store a piece like a naive `Partial.write` that checks only the length."""
    assert len(data) == partial.blob.piece_length(piece)
    assert partial._descriptor is not None
    os.pwrite(partial._descriptor, data, piece * PIECE_BYTES)
    partial.missing.discard(piece)


@pytest.mark.parametrize("data", [SMALL, DATA], ids=["one piece", "many pieces"])
async def test_lying_source_is_detected_by_piece_and_banned(swarm: SourcePool, data: bytes) -> None:
    liar, blob = ScriptedSource(data), Blob.of(data)
    liar.tamper = flip_last_bit
    await swarm.add_source("liar", liar)
    with pytest.raises(UnreachableError, match="liar: a piece does not match its hash"):
        await swarm.fetch(blob, deadline=1.0)
    # One call per piece that it was given at once, and one more where the hash list had to show who lied.
    assert liar.calls <= 1 + SHORT_TIMEOUTS.pieces_per_source
    assert {peer for peer, _ in swarm.faults} == {"liar"}
    assert not swarm.store.has(blob.digest)
    await swarm.add_honest("honest", data)
    await swarm.fetch(blob)
    assert swarm.store.read(blob.digest) == data


async def test_source_with_unparsable_answers_is_banned(swarm: SourcePool, tmp_path: Path) -> None:
    async with garbled_channel(tmp_path / "garbled") as channel:
        swarm._channels["liar"] = channel
        for blob in (BLOB, Blob.of(SMALL)):
            with pytest.raises(UnreachableError, match="liar: an answer that does not parse"):
                await swarm.fetcher.fetch(blob, lambda: ["liar"], 1.0)
    assert {peer for peer, _ in swarm.faults} == {"liar"}


async def test_check_of_lengths_alone_accepts_a_lie(swarm: SourcePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test above: the same fetch without the comparison of hashes."""
    liar = ScriptedSource(DATA)
    liar.tamper = flip_last_bit
    await swarm.add_source("liar", liar)
    with monkeypatch.context() as patch:
        patch.setattr(FilePartial, "write", write_unchecked)
        await swarm.fetch()
    assert swarm.store.has(BLOB.digest)
    assert swarm.faults == []
    assert Blob.of(swarm.store.path(BLOB.digest).read_bytes()) != BLOB


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (lambda data: data + b"x", "more bytes than were asked for"),
        (lambda data: data * 100, "more bytes than were asked for"),
        (lambda data: data[:-1], "fewer bytes than were asked for"),
        (lambda data: b"", "fewer bytes than were asked for"),
    ],
    ids=["one more", "far more", "one fewer", "none"],
)
async def test_wrong_number_of_bytes_is_a_fault(
    swarm: SourcePool, tamper: Callable[[bytes], bytes], reason: str
) -> None:
    source = ScriptedSource(DATA)
    source.tamper = tamper
    await swarm.add_source("source", source)
    await swarm.add_honest("honest", DATA)
    await swarm.fetch()
    assert swarm.store.read(BLOB.digest) == DATA
    assert set(swarm.faults) == {("source", reason)}
    assert swarm.fetcher.bytes_received < len(DATA) + 3 * PIECE_BYTES


@pytest.mark.parametrize(
    ("hashes", "reason"),
    [
        (piece_hashes(DATA) + bytes(32), "more piece hashes"),
        (bytes(1 << 20), "more piece hashes"),
        (piece_hashes(DATA)[:-32], "do not match the digest"),
        (bytes(len(piece_hashes(DATA))), "do not match the digest"),
        (b"", "do not match the digest"),
    ],
    ids=["one more", "far more", "one fewer", "others", "none"],
)
async def test_wrong_list_of_hashes_is_a_fault(swarm: SourcePool, hashes: bytes, reason: str) -> None:
    source = ScriptedSource(DATA, hashes=hashes)
    await swarm.add_source("source", source)
    with pytest.raises(UnreachableError, match=reason):
        await swarm.fetch(deadline=0.6)
    assert source.calls == 0
    assert [peer for peer, _ in swarm.faults] == ["source"]
    await swarm.add_honest("honest", DATA)
    await swarm.fetch()
    assert swarm.store.read(BLOB.digest) == DATA


@pytest.mark.parametrize("claim", [len(DATA) - 1, len(DATA) + 1, 2 * len(DATA), 5 * PIECE_BYTES])
async def test_wrong_size_is_not_blamed_on_the_source(swarm: SourcePool, claim: int) -> None:
    await swarm.add_honest("honest", DATA)
    with pytest.raises(MalformedError, match=f"has {len(DATA)} bytes, not {claim}"):
        await swarm.fetch(Blob(BLOB.digest, claim))
    assert swarm.faults == []
    await swarm.fetch()


@pytest.mark.parametrize("claim", [0, len(SMALL) - 1, len(SMALL) + 1, 2 * PIECE_BYTES])
async def test_wrong_size_of_a_small_blob_is_not_blamed_on_the_source(swarm: SourcePool, claim: int) -> None:
    blob = Blob.of(SMALL)
    await swarm.add_honest("honest", SMALL)
    with pytest.raises((MalformedError, UnreachableError)):
        await swarm.fetch(Blob(blob.digest, claim), deadline=1.0)
    assert swarm.faults == []
    await swarm.fetch(blob)


async def test_lie_about_the_size_has_no_effect(swarm: SourcePool) -> None:
    await swarm.add_source("liar", ScriptedSource(DATA, size=len(DATA) + 1))
    await swarm.fetch()
    assert swarm.store.read(BLOB.digest) == DATA
