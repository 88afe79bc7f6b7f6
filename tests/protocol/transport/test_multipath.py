"""Bulk between real transports: by libp2p, directly once that is verified, and by libp2p again when it breaks."""

import asyncio
import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest

from protocol.blobs.blob import PIECE_BYTES, Blob
from protocol.blobs.download import Downloader
from protocol.blobs.server import BlobService, register_blob_service
from protocol.blobs.store import BlobStore
from protocol.errors import UnreachableError
from protocol.identity import Identity
from protocol.murmur_pb2 import FetchRequest, PiecesReply, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsStub
from protocol.transport.multipath import BulkTransport
from protocol.transport.multipath_policy import BulkPath
from protocol.transport.transport import Transport, caller
from protocol.transport.tunnel import ConnectionLimits
from tests.protocol.conftest import StartPeer, StartTransport
from tests.protocol.transport.sample_peer import SampleBlobs

pytestmark = pytest.mark.slow

DATA = random.Random(3).randbytes(24 * PIECE_BYTES)
BLOB = Blob.of(DATA)
Call = grpc.aio.AioRpcError


async def introduce_peers(client: Transport, callee: Transport) -> None:
    client.introduce(callee.peer_id, await callee.addresses(), callee.direct_port)


async def call_peer(client: Transport, callee: str) -> str:
    """Return the caller's peer id as the servicer sees it."""
    with client.bulk.lease_channel(callee) as lease:
        reply: PiecesReply = await BlobsStub(lease.channel).Pieces(PiecesRequest(), timeout=10)
    return reply.pieces.decode()


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def connect_directly(client: Transport, callee: Transport) -> None:
    """Introduce the peers, and wait until calls take the direct path."""
    await introduce_peers(client, callee)
    await call_peer(client, callee.peer_id)
    await until(lambda: is_direct(client, callee.peer_id))


def is_direct(client: Transport, callee: str) -> bool:
    return client.bulk.describe_paths()[callee].startswith("direct")


class BlobTransferSetup:
    """A peer that holds DATA and one that downloads it."""

    def __init__(self, folder: Path, start_transport: StartTransport) -> None:
        self.here = BlobStore(folder / "here", 1 << 30)
        self.there = BlobStore(folder / "there", 1 << 30)
        self.there.put(DATA)
        self.service = BlobService(self.there, caller)
        self._start = start_transport

    async def open(self) -> None:
        self.source = await self._start(
            "source", [lambda server: register_blob_service(self.service, server)], direct=0
        )
        self.client = await self._start("taker")
        self.fetcher = Downloader(self.here, self.client.bulk, random.Random(0))
        await introduce_peers(self.client, self.source)

    async def fetch(self, deadline: float = 30.0) -> None:
        await self.fetcher.fetch(BLOB, lambda: [self.source.peer_id], deadline)
        assert self.here.read(BLOB.digest) == DATA


@pytest.fixture
async def blobs(tmp_path: Path, start_transport: StartTransport) -> BlobTransferSetup:
    made = BlobTransferSetup(tmp_path, start_transport)
    await made.open()
    return made


async def test_servicer_knows_its_callers_on_either_path(start_transport: StartTransport) -> None:
    callee = await start_transport("callee", [SampleBlobs().add], direct=0)
    clients = [await start_transport(name) for name in ("one", "two")]
    for client in clients:
        await introduce_peers(client, callee)
        with client.bulk.lease_channel(callee.peer_id) as lease:
            assert lease.channel is client.bulk_channel(callee.peer_id), "calls do not wait for the direct path"
        assert await call_peer(client, callee.peer_id) == client.peer_id
        await connect_directly(client, callee)
        assert await call_peer(client, callee.peer_id) == client.peer_id
        assert client.bulk.describe_paths() == {callee.peer_id: "direct, 1 connection"}
    assert not callee.direct_refusals


async def test_fallback_channel_borrows_a_verified_direct_connection(start_transport: StartTransport) -> None:
    """It is not counted in the measurements of the path and opens no connection."""
    callee = await start_transport("callee", [SampleBlobs().add], direct=0)
    client = await start_transport("client")
    await introduce_peers(client, callee)
    with client.fallback_channel(callee.peer_id) as channel:
        assert channel is None, "no direct path is known"
    await connect_directly(client, callee)
    connections = client.bulk._connections_of(callee.peer_id)
    before = connections.path_selector.goodput[BulkPath.DIRECT]
    known = replace(before)
    with client.fallback_channel(callee.peer_id) as channel:
        assert connections.busy_connections == 1, "the connection is not closed during the call"
        reply: PiecesReply = await BlobsStub(channel).Pieces(PiecesRequest(), timeout=10)
    assert reply.pieces.decode() == client.peer_id
    assert (before, connections.busy_connections) == (known, 0)
    client.forget(callee.peer_id)
    with client.fallback_channel(callee.peer_id) as channel:
        assert channel is None


async def test_idle_channel_borrows_an_open_idle_direct_connection(
    start_transport: StartTransport,
) -> None:
    callee = await start_transport("callee", [SampleBlobs().add], direct=0)
    client = await start_transport("client")
    await introduce_peers(client, callee)
    await connect_directly(client, callee)
    connections = client.bulk._connections_of(callee.peer_id)
    assert await call_peer(client, callee.peer_id) == client.peer_id
    with client.idle_channel(callee.peer_id) as channel:
        reply: PiecesReply = await BlobsStub(channel).Pieces(PiecesRequest(), timeout=10)
        with client.idle_channel(callee.peer_id) as another:
            assert another is None, "the connection is busy now"
    assert reply.pieces.decode() == client.peer_id
    for is_proved in (False, True):
        connections.path_selector.is_direct_verified = is_proved
        with client.idle_channel(callee.peer_id) as channel:
            assert (channel is None) is not is_proved, "only if the direct path is the better one"
    (pooled,) = connections.active
    await pooled.channel.close()
    with client.idle_channel(callee.peer_id) as channel:
        assert channel is None, "no connection is dialled for the call"


async def test_direct_connection_is_opened_for_small_calls(start_transport: StartTransport) -> None:
    callee, other = await start_transport("callee", [SampleBlobs().add], direct=0), await start_transport("other")
    client = await start_transport("client")
    await introduce_peers(client, callee)
    await introduce_peers(client, other)
    for _ in range(2):  # the first time finds out whether the peer takes direct connections
        for peer in (callee.peer_id, other.peer_id):
            client.open_direct(peer)
        await until(lambda: not client.bulk._connections_of(callee.peer_id).is_probing)
    with client.idle_channel(callee.peer_id) as channel:
        reply: PiecesReply = await BlobsStub(channel).Pieces(PiecesRequest(), timeout=10)
    assert reply.pieces.decode() == client.peer_id
    (pooled,) = client.bulk._connections_of(callee.peer_id).active
    client.open_direct(callee.peer_id)
    assert client.bulk._connections_of(callee.peer_id).active == [pooled], "one is enough"
    with client.idle_channel(other.peer_id) as channel:
        assert channel is None, "it takes none"


async def test_blob_is_fetched_directly_and_every_byte_is_counted(blobs: BlobTransferSetup) -> None:
    await blobs.fetch()
    by_path, taker, source = blobs.client.bulk.bytes_received, blobs.client, blobs.source
    assert by_path.total() == blobs.fetcher.bytes_received >= len(DATA)
    assert by_path[BulkPath.DIRECT] > 0.5 * len(DATA)
    assert len(DATA) < taker.bytes_received < 1.05 * len(DATA)
    await until(lambda: source.traffic.by_peer[taker.peer_id].sent == source.bytes_sent >= taker.bytes_received)
    assert taker.traffic.by_peer[source.peer_id].received == taker.bytes_received
    assert blobs.service.bytes_served == {taker.peer_id: blobs.fetcher.bytes_received}


async def test_without_a_direct_port_all_calls_use_libp2p(start_transport: StartTransport) -> None:
    callee, client = await start_transport("callee", [SampleBlobs().add]), await start_transport("client")
    await introduce_peers(client, callee)
    for _ in range(3):
        assert await call_peer(client, callee.peer_id) == client.peer_id
    assert client.bulk.describe_paths() == {callee.peer_id: "libp2p"}


@pytest.mark.parametrize("port", ["closed", "of another peer"])
async def test_wrong_direct_port_does_not_delay_calls(start_transport: StartTransport, port: str) -> None:
    callee, other = await start_transport("callee", [SampleBlobs().add]), await start_transport("other", direct=0)
    client = await start_transport("client")
    client.introduce(callee.peer_id, await callee.addresses(), 1 if port == "closed" else other.direct_port)
    choice = client.bulk._connections_of(callee.peer_id).path_selector
    for _ in range(20):
        assert await asyncio.wait_for(call_peer(client, callee.peer_id), 5) == client.peer_id
    await until(lambda: not choice.should_probe(asyncio.get_running_loop().time()))
    assert client.bulk.describe_paths() == {callee.peer_id: "libp2p"}


async def test_transfer_continues_by_libp2p_when_the_direct_path_dies(blobs: BlobTransferSetup) -> None:
    fetching = asyncio.create_task(blobs.fetch())
    await until(lambda: blobs.client.bulk.bytes_received[BulkPath.DIRECT] > 4 * PIECE_BYTES)
    assert blobs.source.listener
    await blobs.source.listener.close()
    await fetching
    by_path = blobs.client.bulk.bytes_received
    assert by_path[BulkPath.LIBP2P] > PIECE_BYTES
    assert by_path.total() < len(DATA) + 6 * PIECE_BYTES, "only the bytes in flight arrive twice"
    assert blobs.client.bulk.describe_paths() == {blobs.source.peer_id: "libp2p"}


async def test_transfer_fails_without_the_fallback_to_libp2p(
    blobs: BlobTransferSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the test above."""
    monkeypatch.setattr(BulkTransport, "abandon_direct", lambda *_: None)
    monkeypatch.setattr("protocol.transport.multipath_policy.PathSelector.record_failure", lambda *_: None)
    fetching = asyncio.create_task(blobs.fetch(deadline=4.0))
    await until(lambda: blobs.client.bulk.bytes_received[BulkPath.DIRECT] > 4 * PIECE_BYTES)
    assert blobs.source.listener
    await blobs.source.listener.close()
    with pytest.raises(UnreachableError):
        await fetching


async def test_broken_direct_path_is_verified_again(
    start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.transport.multipath_policy.PathSelector._retry_delay", 0.05, raising=False)
    callee, client = await start_transport("callee", [SampleBlobs().add], direct=0), await start_transport("client")
    await connect_directly(client, callee)
    connections = client.bulk._connections_of(callee.peer_id)
    connections.path_selector._retry_delay = 0.05
    with client.bulk.lease_channel(callee.peer_id) as lease:
        lease.report_broken("for once")
    assert not is_direct(client, callee.peer_id)
    async with asyncio.timeout(10):
        while not is_direct(client, callee.peer_id):
            assert await call_peer(client, callee.peer_id) == client.peer_id
            await asyncio.sleep(0.02)


async def test_peer_that_changes_its_port_is_reached_again(start_transport: StartTransport) -> None:
    callee, client = await start_transport("callee", [SampleBlobs().add], direct=0), await start_transport("client")
    await connect_directly(client, callee)
    with client.bulk.lease_channel(callee.peer_id) as lease:
        call = BlobsStub(lease.channel).Fetch(FetchRequest(length=64 << 20), timeout=30)
        await call.read()
        assert callee.listener
        await callee.listener.close()
        callee.listener.port = 0
        callee.listener.listen(["127.0.0.1"], 0)
        await introduce_peers(client, callee)
        assert not is_direct(client, callee.peer_id)
    await connect_directly(client, callee)
    assert await call_peer(client, callee.peer_id) == client.peer_id
    assert client.bulk._connections_of(callee.peer_id).running_calls == 0


async def test_parallel_calls_use_separate_connections(start_transport: StartTransport) -> None:
    callee, client = await start_transport("callee", [SampleBlobs().add], direct=0), await start_transport("client")
    await connect_directly(client, callee)
    connections = client.bulk._connections_of(callee.peer_id)
    connections.count_controller.connections = 4
    assert client.bulk.parallelism(callee.peer_id) == 8
    await call_peer(client, callee.peer_id)
    await until(lambda: len(callee._supervisor._incoming) == 2)  # one per path; the probe's connection has ended
    leases = [client.bulk.lease_channel(callee.peer_id).__enter__() for _ in range(8)]
    await asyncio.gather(*(BlobsStub(lease.channel).Pieces(PiecesRequest(), timeout=10) for lease in leases))
    assert len({id(lease.channel) for lease in leases}) == 4
    assert [pooled.calls for pooled in connections.active] == [2, 2, 2, 2]
    assert len(callee._supervisor._incoming) == 2 + 3
    connections.count_controller.connections = 1
    for lease in leases:
        lease.__exit__(None, None, None)
    await until(lambda: len(connections.active) == 1 and len(callee._supervisor._incoming) == 2)


@pytest.mark.parametrize("kept", [900.0, 0.2])
async def test_one_idle_connection_is_kept_until_the_next_round(
    start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch, kept: float
) -> None:
    monkeypatch.setattr("protocol.transport.multipath.SPARE_IDLE_SECONDS", 0.2)
    monkeypatch.setattr("protocol.transport.multipath.IDLE_SECONDS", kept)
    callee = await start_transport("callee", [SampleBlobs().add], direct=0)
    client = await start_transport("client", limits=ConnectionLimits(check_interval=0.05))
    await connect_directly(client, callee)
    connections = client.bulk._connections_of(callee.peer_id)
    connections.count_controller.connections = 3
    leases = [client.bulk.lease_channel(callee.peer_id).__enter__() for _ in range(3)]
    await asyncio.gather(*(BlobsStub(lease.channel).Pieces(PiecesRequest(), timeout=10) for lease in leases))
    for lease in leases:
        lease.__exit__(None, None, None)
    framed = [pooled.channel._connection for pooled in connections.active]
    await until(lambda: all(connection and connection.has_ended for connection in framed[0 if kept < 1 else 1 :]))
    assert [bool(connection and connection.has_ended) for connection in framed] == [kept < 1, True, True]


async def test_limit_of_incoming_connections_holds_for_direct_ones(
    start_transport: StartTransport, caplog: pytest.LogCaptureFixture
) -> None:
    limits = ConnectionLimits(max_incoming_per_peer=3)
    callee = await start_transport("callee", [SampleBlobs().add], direct=0, limits=limits)
    greedy, honest = await start_transport("greedy"), await start_transport("honest")
    await connect_directly(greedy, callee)
    await connect_directly(honest, callee)
    connections = greedy.bulk._connections_of(callee.peer_id)
    connections.count_controller.connections = 8
    leases = [greedy.bulk.lease_channel(callee.peer_id).__enter__() for _ in range(8)]
    stubs = [BlobsStub(lease.channel) for lease in leases]
    results = await asyncio.gather(
        *(stub.Pieces(PiecesRequest(), timeout=10) for stub in stubs), return_exceptions=True
    )
    assert 4 <= sum(isinstance(result, Call) for result in results) <= 7
    assert f"refusing {greedy.peer_id}: it holds 3 connections" in caplog.text
    assert await call_peer(honest, callee.peer_id) == honest.peer_id


async def test_forgotten_peer_is_cut_and_may_return(start_transport: StartTransport) -> None:
    callee, client = await start_transport("callee", [SampleBlobs().add], direct=0), await start_transport("client")
    await connect_directly(client, callee)
    with client.bulk.lease_channel(callee.peer_id) as lease:
        call = BlobsStub(lease.channel).Fetch(FetchRequest(length=1 << 30), timeout=30)
        await call.read()
        client.forget(callee.peer_id)
        with pytest.raises((Call, asyncio.CancelledError)):
            while await call.read():
                pass
    assert client.bulk.describe_paths() == {}
    await until(lambda: not client.bulk._open_connections)
    await connect_directly(client, callee)
    assert await call_peer(client, callee.peer_id) == client.peer_id


async def test_frozen_peer_does_not_delay_others(start_peer: StartPeer, start_transport: StartTransport) -> None:
    process, about = await start_peer("frozen")
    node = await start_transport("node", limits=ConnectionLimits(stall=1.0, check_interval=0.1))
    other = await start_transport("other", [SampleBlobs().add], direct=0)
    node.introduce(about["peer"], about["addresses"], about["direct"])
    await call_peer(node, about["peer"])
    await until(lambda: is_direct(node, about["peer"]))
    await call_peer(node, about["peer"])
    await connect_directly(node, other)
    process.send_signal(signal.SIGSTOP)
    os.kill(about["p2pd"], signal.SIGSTOP)
    with node.bulk.lease_channel(about["peer"]) as lease:
        stub, request = BlobsStub(lease.channel), PiecesRequest(digest=bytes(1 << 20))
        writing = asyncio.gather(*(stub.Pieces(request, timeout=2) for _ in range(24)), return_exceptions=True)
        for _ in range(20):
            assert await asyncio.wait_for(call_peer(node, other.peer_id), 5) == node.peer_id
        results = await asyncio.wait_for(writing, 20)
    assert all(isinstance(result, Call) for result in results)
    await node.stop()
    os.kill(about["p2pd"], signal.SIGCONT)


async def test_number_of_remembered_peers_is_bounded(
    start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.transport.multipath.MAX_PEERS", 3)
    callee, client = await start_transport("callee", [SampleBlobs().add], direct=0), await start_transport("client")
    await connect_directly(client, callee)
    await call_peer(client, callee.peer_id)
    with client.bulk.lease_channel(callee.peer_id):
        for _ in range(5):
            client.bulk.lease_channel(Identity.create().peer_id)
        assert callee.peer_id in client.bulk.describe_paths(), "a peer with a running call stays"
        assert len(client.bulk.describe_paths()) == 3
    for _ in range(3):
        client.bulk.lease_channel(Identity.create().peer_id)
    assert callee.peer_id not in client.bulk.describe_paths()
    await until(lambda: not client.bulk._open_connections)


async def test_stop_leaves_no_task_and_no_socket(start_transport: StartTransport) -> None:
    callee, client = await start_transport("callee", [SampleBlobs().add], direct=0), await start_transport("client")
    await connect_directly(client, callee)
    await call_peer(client, callee.peer_id)
    for transport in (callee, client):
        await asyncio.wait_for(transport.stop(), 5)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert psutil.Process().net_connections("inet") == []
