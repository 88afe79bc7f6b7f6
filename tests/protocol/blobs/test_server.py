"""The blob server's answers, refusals and limits over plain gRPC, and server and downloader together."""

import asyncio
import json
import math
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from protocol.blobs import server
from protocol.blobs.blob import CHUNK_BYTES, PIECE_BYTES, Blob, Bytes, piece_hashes
from protocol.blobs.download import Downloader
from protocol.blobs.server import MAX_COUNTED_CALLERS, BlobService, CallerLimits, register_blob_service
from protocol.blobs.store import BlobStore
from protocol.blobs.wire_format import compress_piece, decompress_piece
from protocol.errors import MalformedError
from protocol.murmur_pb2 import FetchRequest, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsStub
from protocol.transport.transport import Transport, caller

pytestmark = pytest.mark.slow

StartTransport = Callable[..., Awaitable[Transport]]
Serve = Callable[..., Awaitable[tuple[BlobService, BlobsStub]]]
DATA = random.Random(1).randbytes(3 * PIECE_BYTES + 12345)
BLOB = Blob.of(DATA)
NUMBERS = np.random.default_rng(1).normal(0, 0.02, PIECE_BYTES).astype("<f2").tobytes()
PIECE = NUMBERS[:PIECE_BYTES]


def caller_of(context: Any) -> str:
    """Return the caller named in the metadata, in place of the authenticated one."""
    name = dict(context.invocation_metadata()).get("caller")
    if name is None:
        raise MalformedError("nobody")
    return str(name)


def as_caller(name: str) -> tuple[tuple[str, str], ...]:
    return (("caller", name),)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    store = BlobStore(tmp_path / "blobs", 1 << 30)
    store.put(DATA)
    return store


@pytest.fixture
async def serve(store: BlobStore, tmp_path: Path) -> AsyncIterator[Serve]:
    ending: list[Callable[[], Awaitable[object]]] = []

    async def start(limits: CallerLimits | None = None) -> tuple[BlobService, BlobsStub]:
        service, server = BlobService(store, caller_of, limits), grpc.aio.server()
        register_blob_service(service, server)
        server.add_insecure_port(f"unix:{tmp_path}/socket")
        await server.start()
        channel = grpc.aio.insecure_channel(f"unix:{tmp_path}/socket")
        ending.extend([channel.close, lambda: server.stop(None)])
        return service, BlobsStub(channel)

    yield start
    for end in ending:
        await end()


async def fetch(stub: BlobsStub, digest: bytes, offset: int, length: int, caller: str = "one") -> list[bytes]:
    request = FetchRequest(digest=digest, offset=offset, length=length)
    return [chunk.data async for chunk in stub.Fetch(request, timeout=20, metadata=as_caller(caller))]


async def refusal(call: Awaitable[object]) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.details() == "", "a refusal reveals nothing about this machine"
    return caught.value.code()


@pytest.mark.parametrize(
    ("offset", "length", "pays"),
    [
        (0, PIECE_BYTES, True),
        (PIECE_BYTES, 99_999, True),
        (77, 99_999, True),
        (PIECE_BYTES - 9, 99_999, False),
        (0, 1, False),
    ],
)
async def test_numbers_are_compressed_on_request(
    serve: Serve, store: BlobStore, offset: int, length: int, pays: bool
) -> None:
    blob, (service, stub) = store.put(NUMBERS), await serve()
    request = FetchRequest(digest=blob.digest, offset=offset, length=length, squeezed=True)
    chunks = [chunk async for chunk in stub.Fetch(request, timeout=20, metadata=as_caller("one"))]
    received = b"".join(chunk.data for chunk in chunks)
    assert {chunk.squeezed for chunk in chunks} == {len(received) if pays else 0}
    assert (decompress_piece(received, length) if pays else received) == NUMBERS[offset : offset + length]
    assert service.total_bytes_served == len(received) < (0.9 * length if pays else length + 1)
    assert b"".join(await fetch(stub, blob.digest, offset, length)) == NUMBERS[offset : offset + length], (
        "without compression"
    )


async def squeezed(stub: BlobsStub, blob: Blob, offset: int, caller: str) -> bytes:
    length = min(PIECE_BYTES, blob.size - offset)
    request = FetchRequest(digest=blob.digest, offset=offset, length=length, squeezed=True)
    chunks = [chunk async for chunk in stub.Fetch(request, timeout=20, metadata=as_caller(caller))]
    received = b"".join(chunk.data for chunk in chunks)
    return bytes(decompress_piece(received, length)) if chunks[0].squeezed else received


async def test_piece_that_many_want_is_compressed_once(
    serve: Serve, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressed: list[int] = []

    def count(data: Bytes) -> bytes | None:
        compressed.append(len(data))
        return compress_piece(data)

    monkeypatch.setattr(server, "compress_piece", count)
    blob, (_, stub) = store.put(PIECE), await serve()
    callers = [f"peer-{number}" for number in range(6)]
    assert set(await asyncio.gather(*(squeezed(stub, blob, 0, name) for name in callers))) == {PIECE}
    assert await squeezed(stub, blob, 0, "late") == PIECE and len(compressed) == 1
    assert {await squeezed(stub, BLOB, 0, name) for name in callers} == {DATA[:PIECE_BYTES]}
    assert len(compressed) == 2, "that it does not pay is found out once as well"


async def test_compressed_pieces_take_bounded_memory(
    serve: Serve, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_PACKED", 2)
    blob, (service, stub) = store.put(PIECE * 3), await serve()
    for piece in (0, 1, 2, 0):
        assert await squeezed(stub, blob, piece * PIECE_BYTES, "one") == PIECE
    assert len(service._packed) == 2


async def test_incompressible_piece_is_sent_unchanged(serve: Serve) -> None:
    _, stub = await serve()
    request = FetchRequest(digest=BLOB.digest, length=PIECE_BYTES, squeezed=True)
    chunks = [chunk async for chunk in stub.Fetch(request, timeout=20, metadata=as_caller("one"))]
    assert not any(chunk.squeezed for chunk in chunks)
    assert b"".join(chunk.data for chunk in chunks) == DATA[:PIECE_BYTES]


async def test_pieces_returns_the_hashes(serve: Serve) -> None:
    service, stub = await serve()
    reply = await stub.Pieces(PiecesRequest(digest=BLOB.digest), timeout=20, metadata=as_caller("one"))
    assert (reply.size, reply.pieces) == (BLOB.size, piece_hashes(DATA))
    assert service.bytes_served == {"one": len(reply.pieces)}


@pytest.mark.parametrize(("upload", "most"), [(math.inf, CHUNK_BYTES), (1e6, 50_000), (1.0, 4096)])
async def test_chunks_are_smaller_with_a_limited_upload(serve: Serve, upload: float, most: int) -> None:
    _, stub = await serve(CallerLimits.at_rate(upload))
    chunks = await fetch(stub, BLOB.digest, 0, CHUNK_BYTES)
    assert len(chunks[0]) == most
    assert b"".join(chunks) == DATA[:CHUNK_BYTES]


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 1), (0, BLOB.size), (PIECE_BYTES, PIECE_BYTES), (PIECE_BYTES - 7, PIECE_BYTES + 14), (BLOB.size - 1, 1)],
)
async def test_any_range_is_sent_in_small_chunks(serve: Serve, offset: int, length: int) -> None:
    service, stub = await serve()
    chunks = await fetch(stub, BLOB.digest, offset, length)
    assert b"".join(chunks) == DATA[offset : offset + length]
    assert max(map(len, chunks)) <= CHUNK_BYTES
    assert service.bytes_served == {"one": length}
    assert service.total_bytes_served == length


@pytest.mark.parametrize(
    ("digest", "offset", "length", "status"),
    [
        (b"d" * 32, 0, 1, grpc.StatusCode.NOT_FOUND),
        (b"", 0, 1, grpc.StatusCode.INVALID_ARGUMENT),
        (b"../" * 11, 0, 1, grpc.StatusCode.INVALID_ARGUMENT),
        (BLOB.digest, 0, 0, grpc.StatusCode.INVALID_ARGUMENT),
        (BLOB.digest, 0, BLOB.size + 1, grpc.StatusCode.OUT_OF_RANGE),
        (BLOB.digest, BLOB.size, 1, grpc.StatusCode.OUT_OF_RANGE),
        (BLOB.digest, 2**64 - 1, 2**64 - 1, grpc.StatusCode.OUT_OF_RANGE),
    ],
)
async def test_invalid_requests_are_refused(
    serve: Serve, digest: bytes, offset: int, length: int, status: grpc.StatusCode
) -> None:
    _, stub = await serve()
    assert await refusal(fetch(stub, digest, offset, length)) == status
    assert await fetch(stub, BLOB.digest, 0, 1) == [DATA[:1]]


async def test_unidentified_caller_gets_nothing(serve: Serve) -> None:
    service, stub = await serve()
    assert await refusal(stub.Pieces(PiecesRequest(digest=BLOB.digest), timeout=20)) == (
        grpc.StatusCode.INVALID_ARGUMENT
    )
    assert service.total_bytes_served == 0


async def test_rotten_blob_is_removed_instead_of_served(serve: Serve, store: BlobStore) -> None:
    service, stub = await serve()
    with store.path(BLOB.digest).open("r+b") as file:
        file.seek(PIECE_BYTES + 1)
        file.write(b"rotten")
    # The control: the other pieces are still good, so only a check by piece finds the damage.
    assert b"".join(await fetch(stub, BLOB.digest, 0, PIECE_BYTES)) == DATA[:PIECE_BYTES]
    assert await refusal(fetch(stub, BLOB.digest, PIECE_BYTES, PIECE_BYTES)) == grpc.StatusCode.NOT_FOUND
    assert service.total_bytes_served == PIECE_BYTES
    assert not store.has(BLOB.digest)
    store.put(DATA)
    assert b"".join(await fetch(stub, BLOB.digest, PIECE_BYTES, 9)) == DATA[PIECE_BYTES : PIECE_BYTES + 9]


async def test_request_for_too_many_bytes_is_refused(serve: Serve) -> None:
    service, stub = await serve(CallerLimits(bytes_asked=PIECE_BYTES))
    status = await refusal(fetch(stub, BLOB.digest, 0, PIECE_BYTES + 1))
    assert status == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert service.refusals == {"limit": 1}
    assert len(await fetch(stub, BLOB.digest, 0, PIECE_BYTES)) == PIECE_BYTES // CHUNK_BYTES


async def test_caller_that_does_not_read_blocks_only_itself_for_a_while(
    serve: Serve, store: BlobStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    large = store.put(bytes(32 * PIECE_BYTES))  # more than all buffers on the path hold
    service, stub = await serve(CallerLimits(calls=1, chunk_seconds=0.5))
    request = FetchRequest(digest=large.digest, length=large.size)
    lazy = stub.Fetch(request, timeout=60, metadata=as_caller("lazy"))
    await asyncio.wait_for(lazy.read(), 20)
    # The control: while its call runs, the limit of one call applies to the lazy caller and to nobody else.
    assert await refusal(fetch(stub, BLOB.digest, 0, 1, "lazy")) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert b"".join(await fetch(stub, BLOB.digest, 0, BLOB.size, "eager")) == DATA
    async with asyncio.timeout(20):
        while True:
            try:
                assert await fetch(stub, BLOB.digest, 0, 1, "lazy") == [DATA[:1]]
                break
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert service.bytes_served["lazy"] < large.size / 2
    assert "lazy refused: DEADLINE_EXCEEDED: the caller does not read" in caplog.text
    lazy.cancel()


async def test_calls_of_all_callers_together_are_limited(serve: Serve, store: BlobStore) -> None:
    """Each call holds a piece in memory for as long as its caller does not read."""
    large = store.put(bytes(32 * PIECE_BYTES))
    service, stub = await serve(CallerLimits(all_calls=2))
    request = FetchRequest(digest=large.digest, length=large.size)
    lazy = [stub.Fetch(request, timeout=60, metadata=as_caller(name)) for name in ("one", "two")]
    for call in lazy:
        await asyncio.wait_for(call.read(), 20)
    assert await refusal(fetch(stub, BLOB.digest, 0, 1, "three")) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert service.refusals == {"limit": 1}
    for call in lazy:
        call.cancel()


async def test_cancelled_call_frees_its_slot(serve: Serve) -> None:
    _, stub = await serve(CallerLimits(calls=1))
    for _ in range(5):
        call = stub.Fetch(FetchRequest(digest=BLOB.digest, length=BLOB.size), metadata=as_caller("one"))
        await asyncio.wait_for(call.read(), 20)
        call.cancel()
        async with asyncio.timeout(20):
            while True:
                try:
                    await fetch(stub, BLOB.digest, 0, 1)
                    break
                except grpc.aio.AioRpcError as error:
                    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_number_of_counted_callers_is_bounded(serve: Serve) -> None:
    service, stub = await serve()
    for index in range(MAX_COUNTED_CALLERS):
        service.bytes_served[f"old {index}"] = 1
    await fetch(stub, BLOB.digest, 0, 1, "new")
    assert len(service.bytes_served) == MAX_COUNTED_CALLERS
    assert service.bytes_served["new"] == 1
    assert "old 0" not in service.bytes_served


MEASURE = """
import asyncio, json, random, sys
from pathlib import Path
import grpc
from protocol.blobs.download import Downloader
from protocol.blobs.server import BlobService, register_blob_service
from protocol.blobs.storage import FilePartial
from protocol.blobs.store import BlobStore
from tests.protocol.blobs.direct_channels import DirectChannels
from tests.protocol.local_server import serve_locally

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

async def main(folder, size):
    with (folder / "source").open("wb") as file:
        for seed in range(size >> 20):
            file.write(random.Random(seed).randbytes(1 << 20))
    store, target = BlobStore(folder / "from", 1 << 30), BlobStore(folder / "to", 1 << 30)
    blob = store.put_file(folder / "source")
    service = BlobService(store, lambda context: "fetcher")
    async with serve_locally(folder / "socket", lambda server: register_blob_service(service, server)) as channel:
        fetcher = Downloader(target, DirectChannels(lambda peer: channel), random.Random(0))
        before = peak()
        await fetcher.fetch(blob, lambda: ["a", "b", "c", "d"], 60.0)
        fetched = peak()
    assert len(target.read(blob.digest)) == size
    print(json.dumps({"fetching": fetched - before, "reading": peak() - before}))

asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
"""


def test_memory_does_not_grow_with_the_blob_size(tmp_path: Path) -> None:
    size = 160 << 20
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(size)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=90, check=True, cwd=Path(__file__).parents[3]
    )
    grown = json.loads(result.stdout)
    print(grown)
    # Server and client in one process, including gRPC's own buffers.
    assert grown["fetching"] < 64 << 20
    # The control: the same measure sees that the same blob is read whole.
    assert grown["reading"] > size


async def test_blob_is_fetched_over_a_real_transport(start_transport: StartTransport, tmp_path: Path) -> None:
    here, there = BlobStore(tmp_path / "here", 1 << 30), BlobStore(tmp_path / "there", 1 << 30)
    there.put(DATA)
    service = BlobService(there, caller)
    source = await start_transport("source", [lambda server: register_blob_service(service, server)])
    client = await start_transport("taker")
    client.introduce(source.peer_id, await source.addresses())
    fetcher = Downloader(here, client.bulk, random.Random(0))
    await fetcher.fetch(BLOB, lambda: [source.peer_id], 30.0)
    assert here.read(BLOB.digest) == DATA
    assert service.bytes_served == {client.peer_id: len(DATA) + len(piece_hashes(DATA))}
