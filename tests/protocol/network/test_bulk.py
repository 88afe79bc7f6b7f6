"""Bulk between real transports: by libp2p, directly once that is proved, and by libp2p again when it breaks."""

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
from protocol.blobs.fetch import Fetcher
from protocol.blobs.service import BlobService, add_blobs
from protocol.blobs.store import BlobStore
from protocol.errors import UnreachableError
from protocol.identity import Identity
from protocol.murmur_pb2 import FetchRequest, PiecesReply, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsStub
from protocol.network.bulk import Bulk
from protocol.network.paths import Path as Way
from protocol.network.transport import Transport, caller
from protocol.network.tunnel import TunnelLimits
from tests.protocol.conftest import StartPeer, StartTransport
from tests.protocol.network.sample_peer import SampleBlobs

DATA = random.Random(3).randbytes(24 * PIECE_BYTES)
BLOB = Blob.of(DATA)
Call = grpc.aio.AioRpcError


async def meet(client: Transport, callee: Transport) -> None:
    client.introduce(callee.peer_id, await callee.addresses(), callee.direct_port)


async def ask(client: Transport, callee: str) -> str:
    """Who the servicer says has called."""
    with client.bulk.lease(callee) as lease:
        reply: PiecesReply = await BlobsStub(lease.channel).Pieces(PiecesRequest(), timeout=10)
    return reply.pieces.decode()


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def directly(client: Transport, callee: Transport) -> None:
    """Meet, and wait until the direct path is taken."""
    await meet(client, callee)
    await ask(client, callee.peer_id)
    await until(lambda: is_direct(client, callee.peer_id))


def is_direct(client: Transport, callee: str) -> bool:
    return client.bulk.paths()[callee].startswith("direct")


class Library:
    """A peer that holds DATA, one that fetches it, and what passes between them."""

    def __init__(self, folder: Path, start_transport: StartTransport) -> None:
        self.here = BlobStore(folder / "here", 1 << 30)
        self.there = BlobStore(folder / "there", 1 << 30)
        self.there.put(DATA)
        self.service = BlobService(self.there, caller)
        self._start = start_transport

    async def open(self) -> None:
        self.source = await self._start(
            "source", [lambda server: add_blobs(self.service, server)], direct=0
        )
        self.taker = await self._start("taker")
        self.fetcher = Fetcher(self.here, self.taker.bulk, lambda *fault: None, random.Random(0))
        await meet(self.taker, self.source)

    async def fetch(self, deadline: float = 30.0) -> None:
        await self.fetcher.fetch(BLOB, lambda: [self.source.peer_id], deadline)
        assert self.here.read(BLOB.digest) == DATA


@pytest.fixture
async def library(tmp_path: Path, start_transport: StartTransport) -> Library:
    made = Library(tmp_path, start_transport)
    await made.open()
    return made


async def test_the_servicer_knows_its_callers_on_either_path(start_transport: StartTransport) -> None:
    callee = await start_transport("callee", [SampleBlobs().add], direct=0)
    clients = [await start_transport(name) for name in ("one", "two")]
    for client in clients:
        await meet(client, callee)
        with client.bulk.lease(callee.peer_id) as lease:
            assert lease.channel is client.bulk_channel(callee.peer_id), "nobody waits for the direct path"
        assert await ask(client, callee.peer_id) == client.peer_id
        await directly(client, callee)
        assert await ask(client, callee.peer_id) == client.peer_id
        assert client.bulk.paths() == {callee.peer_id: "direct, 1 connection"}
    assert not callee.direct_refusals


async def test_a_small_call_takes_a_direct_connection_where_one_stands(start_transport: StartTransport) -> None:
    """And tells nothing of how fast a path is, and opens none."""
    callee = await start_transport("callee", [SampleBlobs().add], direct=0)
    client = await start_transport("client")
    await meet(client, callee)
    with client.spare(callee.peer_id) as channel:
        assert channel is None, "nothing is known of a direct path"
    await directly(client, callee)
    link = client.bulk._link(callee.peer_id)
    before = link.choice.goodput[Way.DIRECT]
    known = replace(before)
    with client.spare(callee.peer_id) as channel:
        assert link.busy == 1, "it is not closed under the call"
        reply: PiecesReply = await BlobsStub(channel).Pieces(PiecesRequest(), timeout=10)
    assert reply.pieces.decode() == client.peer_id
    assert (before, link.busy) == (known, 0)
    client.forget(callee.peer_id)
    with client.spare(callee.peer_id) as channel:
        assert channel is None


async def test_a_quick_call_takes_a_direct_connection_that_is_open_and_without_work(
    start_transport: StartTransport,
) -> None:
    callee = await start_transport("callee", [SampleBlobs().add], direct=0)
    client = await start_transport("client")
    await meet(client, callee)
    await directly(client, callee)
    link = client.bulk._link(callee.peer_id)
    assert await ask(client, callee.peer_id) == client.peer_id
    with client.quick(callee.peer_id) as channel:
        reply: PiecesReply = await BlobsStub(channel).Pieces(PiecesRequest(), timeout=10)
        with client.quick(callee.peer_id) as another:
            assert another is None, "it has work now"
    assert reply.pieces.decode() == client.peer_id
    for is_proved in (False, True):
        link.choice.is_proved = is_proved
        with client.quick(callee.peer_id) as channel:
            assert (channel is None) is not is_proved, "only where the path is the better one"
    (lane,) = link.open
    await lane.channel.close()
    with client.quick(callee.peer_id) as channel:
        assert channel is None, "nothing is dialled for it"


async def test_a_blob_comes_directly_and_every_byte_is_counted(library: Library) -> None:
    await library.fetch()
    ways, taker, source = library.taker.bulk.bytes_received, library.taker, library.source
    assert ways.total() == library.fetcher.bytes_received >= len(DATA)
    assert ways[Way.DIRECT] > 0.5 * len(DATA)
    assert len(DATA) < taker.bytes_received < 1.05 * len(DATA)
    await until(lambda: source.bytes_by_peer[taker.peer_id].sent == source.bytes_sent >= taker.bytes_received)
    assert taker.bytes_by_peer[source.peer_id].received == taker.bytes_received
    assert library.service.bytes_served == {taker.peer_id: library.fetcher.bytes_received}


async def test_without_a_direct_port_all_goes_by_libp2p(start_transport: StartTransport) -> None:
    callee, client = await start_transport("callee", [SampleBlobs().add]), await start_transport("client")
    await meet(client, callee)
    for _ in range(3):
        assert await ask(client, callee.peer_id) == client.peer_id
    assert client.bulk.paths() == {callee.peer_id: "libp2p"}


@pytest.mark.parametrize("port", ["closed", "of another peer"])
async def test_a_port_where_the_peer_is_not_costs_nothing(start_transport: StartTransport, port: str) -> None:
    callee, other = await start_transport("callee", [SampleBlobs().add]), await start_transport("other", direct=0)
    client = await start_transport("client")
    client.introduce(callee.peer_id, await callee.addresses(), 1 if port == "closed" else other.direct_port)
    choice = client.bulk._link(callee.peer_id).choice
    for _ in range(20):
        assert await asyncio.wait_for(ask(client, callee.peer_id), 5) == client.peer_id
    await until(lambda: not choice.wants_proof(asyncio.get_running_loop().time()))
    assert client.bulk.paths() == {callee.peer_id: "libp2p"}


async def test_a_transfer_whose_direct_path_dies_goes_on_by_libp2p(library: Library) -> None:
    fetching = asyncio.create_task(library.fetch())
    await until(lambda: library.taker.bulk.bytes_received[Way.DIRECT] > 4 * PIECE_BYTES)
    assert library.source.door
    await library.source.door.close()
    await fetching
    ways = library.taker.bulk.bytes_received
    assert ways[Way.LIBP2P] > PIECE_BYTES
    assert ways.total() < len(DATA) + 6 * PIECE_BYTES, "no more than what was on its way comes twice"
    assert library.taker.bulk.paths() == {library.source.peer_id: "libp2p"}


async def test_without_a_way_back_the_transfer_would_be_lost(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(Bulk, "leave_direct", lambda *_: None)
    monkeypatch.setattr("protocol.network.paths.Choice.failed", lambda *_: None)
    fetching = asyncio.create_task(library.fetch(deadline=4.0))
    await until(lambda: library.taker.bulk.bytes_received[Way.DIRECT] > 4 * PIECE_BYTES)
    assert library.source.door
    await library.source.door.close()
    with pytest.raises(UnreachableError):
        await fetching


async def test_a_direct_path_comes_back(start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.network.paths.Choice._pause", 0.05, raising=False)
    callee, client = await start_transport("callee", [SampleBlobs().add], direct=0), await start_transport("client")
    await directly(client, callee)
    link = client.bulk._link(callee.peer_id)
    link.choice._pause = 0.05
    with client.bulk.lease(callee.peer_id) as lease:
        lease.broken("for once")
    assert not is_direct(client, callee.peer_id)
    async with asyncio.timeout(10):
        while not is_direct(client, callee.peer_id):
            assert await ask(client, callee.peer_id) == client.peer_id
            await asyncio.sleep(0.02)


async def test_a_peer_that_moves_is_found_again(start_transport: StartTransport) -> None:
    callee, client = await start_transport("callee", [SampleBlobs().add], direct=0), await start_transport("client")
    await directly(client, callee)
    with client.bulk.lease(callee.peer_id) as lease:
        call = BlobsStub(lease.channel).Fetch(FetchRequest(length=64 << 20), timeout=30)
        await call.read()
        assert callee.door
        await callee.door.close()
        callee.door.port = 0
        callee.door.open(["127.0.0.1"], 0)
        await meet(client, callee)
        assert not is_direct(client, callee.peer_id)
    await directly(client, callee)
    assert await ask(client, callee.peer_id) == client.peer_id
    assert client.bulk._link(callee.peer_id).calls == 0


async def test_lanes_are_connections_of_their_own(start_transport: StartTransport) -> None:
    callee, client = await start_transport("callee", [SampleBlobs().add], direct=0), await start_transport("client")
    await directly(client, callee)
    link = client.bulk._link(callee.peer_id)
    link.lanes.width = 4
    assert client.bulk.places(callee.peer_id) == 8
    await ask(client, callee.peer_id)
    await until(lambda: len(callee._tunnels._incoming) == 2)  # one of either path; that of the proof has ended
    leases = [client.bulk.lease(callee.peer_id).__enter__() for _ in range(8)]
    await asyncio.gather(*(BlobsStub(lease.channel).Pieces(PiecesRequest(), timeout=10) for lease in leases))
    assert len({id(lease.channel) for lease in leases}) == 4
    assert [lane.calls for lane in link.open] == [2, 2, 2, 2]
    assert len(callee._tunnels._incoming) == 2 + 3
    link.lanes.width = 1
    for lease in leases:
        lease.__exit__(None, None, None)
    await until(lambda: len(link.open) == 1 and len(callee._tunnels._incoming) == 2)


@pytest.mark.parametrize("kept", [900.0, 0.2])
async def test_one_connection_rests_until_the_next_round(
    start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch, kept: float
) -> None:
    monkeypatch.setattr("protocol.network.bulk.SPARE_SECONDS", 0.2)
    monkeypatch.setattr("protocol.network.bulk.KEPT_SECONDS", kept)
    callee = await start_transport("callee", [SampleBlobs().add], direct=0)
    client = await start_transport("client", limits=TunnelLimits(tick=0.05))
    await directly(client, callee)
    link = client.bulk._link(callee.peer_id)
    link.lanes.width = 3
    leases = [client.bulk.lease(callee.peer_id).__enter__() for _ in range(3)]
    await asyncio.gather(*(BlobsStub(lease.channel).Pieces(PiecesRequest(), timeout=10) for lease in leases))
    for lease in leases:
        lease.__exit__(None, None, None)
    lines = [lane.channel._line for lane in link.open]
    await until(lambda: all(line and line.is_cut for line in lines[0 if kept < 1 else 1 :]))
    assert [bool(line and line.is_cut) for line in lines] == [kept < 1, True, True]


async def test_the_limits_of_tunnels_hold(start_transport: StartTransport, caplog: pytest.LogCaptureFixture) -> None:
    limits = TunnelLimits(incoming_per_peer=3)
    callee = await start_transport("callee", [SampleBlobs().add], direct=0, limits=limits)
    greedy, honest = await start_transport("greedy"), await start_transport("honest")
    await directly(greedy, callee)
    await directly(honest, callee)
    link = greedy.bulk._link(callee.peer_id)
    link.lanes.width = 8
    leases = [greedy.bulk.lease(callee.peer_id).__enter__() for _ in range(8)]
    stubs = [BlobsStub(lease.channel) for lease in leases]
    results = await asyncio.gather(
        *(stub.Pieces(PiecesRequest(), timeout=10) for stub in stubs), return_exceptions=True
    )
    assert 4 <= sum(isinstance(result, Call) for result in results) <= 7
    assert f"refusing {greedy.peer_id}: it holds 3 tunnels" in caplog.text
    assert await ask(honest, callee.peer_id) == honest.peer_id


async def test_a_forgotten_peer_is_cut_off_and_may_come_again(start_transport: StartTransport) -> None:
    callee, client = await start_transport("callee", [SampleBlobs().add], direct=0), await start_transport("client")
    await directly(client, callee)
    with client.bulk.lease(callee.peer_id) as lease:
        call = BlobsStub(lease.channel).Fetch(FetchRequest(length=1 << 30), timeout=30)
        await call.read()
        client.forget(callee.peer_id)
        with pytest.raises((Call, asyncio.CancelledError)):
            while await call.read():
                pass
    assert client.bulk.paths() == {}
    await until(lambda: not client.bulk._lanes)
    await directly(client, callee)
    assert await ask(client, callee.peer_id) == client.peer_id


async def test_a_frozen_peer_holds_up_nobody(start_peer: StartPeer, start_transport: StartTransport) -> None:
    process, about = await start_peer("frozen")
    node = await start_transport("node", limits=TunnelLimits(stall=1.0, tick=0.1))
    other = await start_transport("other", [SampleBlobs().add], direct=0)
    node.introduce(about["peer"], about["addresses"], about["direct"])
    await ask(node, about["peer"])
    await until(lambda: is_direct(node, about["peer"]))
    await ask(node, about["peer"])
    await directly(node, other)
    process.send_signal(signal.SIGSTOP)
    os.kill(about["p2pd"], signal.SIGSTOP)
    with node.bulk.lease(about["peer"]) as lease:
        stub, request = BlobsStub(lease.channel), PiecesRequest(digest=bytes(1 << 20))
        writing = asyncio.gather(*(stub.Pieces(request, timeout=2) for _ in range(24)), return_exceptions=True)
        for _ in range(20):
            assert await asyncio.wait_for(ask(node, other.peer_id), 5) == node.peer_id
        results = await asyncio.wait_for(writing, 20)
    assert all(isinstance(result, Call) for result in results)
    await node.stop()
    os.kill(about["p2pd"], signal.SIGCONT)


async def test_only_so_many_peers_are_remembered(
    start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.network.bulk.MAX_LINKS", 3)
    callee, client = await start_transport("callee", [SampleBlobs().add], direct=0), await start_transport("client")
    await directly(client, callee)
    await ask(client, callee.peer_id)
    with client.bulk.lease(callee.peer_id):
        for _ in range(5):
            client.bulk.lease(Identity.create().peer_id)
        assert callee.peer_id in client.bulk.paths(), "one with a call under way stays"
        assert len(client.bulk.paths()) == 3
    for _ in range(3):
        client.bulk.lease(Identity.create().peer_id)
    assert callee.peer_id not in client.bulk.paths()
    await until(lambda: not client.bulk._lanes)


async def test_stopping_leaves_nothing(start_transport: StartTransport) -> None:
    callee, client = await start_transport("callee", [SampleBlobs().add], direct=0), await start_transport("client")
    await directly(client, callee)
    await ask(client, callee.peer_id)
    for transport in (callee, client):
        await asyncio.wait_for(transport.stop(), 5)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert psutil.Process().net_connections("inet") == []
