"""RPC over direct connections between two ends on loopback."""

import asyncio
import gc
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import grpc
import pytest

from protocol.identity import Identity, PeerId
from protocol.murmur_pb2 import Chunk, FetchRequest, PiecesReply, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsServicer, BlobsStub, add_BlobsServicer_to_server
from protocol.transport.connection_supervisor import ConnectionSupervisor
from protocol.transport.grpc_bridge import caller
from protocol.transport.tls.connection import TlsConnection
from protocol.transport.tls.handshake import ServerHandshake, make_client_context
from protocol.transport.tls.rpc import (
    CALL,
    END,
    FRAME_HEADER,
    IDLE_SECONDS,
    MAX_MESSAGE_BYTES,
    REPLY,
    FramedConnection,
    RpcChannel,
    RpcServer,
)
from protocol.transport.tunnel import ConnectionLimits, TrafficCounter
from tests.protocol.garbled_server import GARBLED

CALLER = Identity.create().peer_id
CHUNK = 1 << 18
BROKEN, REFUSED, SLOW = b"broken", b"refused", b"slow"
Peer = Callable[[TlsConnection], Coroutine[None, None, None]]


class EchoServicer(BlobsServicer):
    """`Pieces` returns the caller and the request; `Fetch` yields `length` bytes in chunks."""

    def __init__(self) -> None:
        self.given_up = 0

    async def Pieces(self, request: PiecesRequest, context: Any) -> PiecesReply:  # noqa: N802
        if request.digest == BROKEN:
            raise RuntimeError("it breaks")
        if request.digest == REFUSED:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not here")
        if request.digest == SLOW:
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up += 1
        return PiecesReply(pieces=caller(context).encode() + request.digest)

    async def Fetch(self, request: FetchRequest, context: Any) -> AsyncIterator[Chunk]:  # noqa: N802
        for _ in range(request.length // CHUNK):
            yield Chunk(data=bytes(CHUNK))


class RpcSetup:
    """A client (`here`) with a channel, and a server (`there`)."""

    def __init__(self) -> None:
        self.servicer = EchoServicer()
        self.dials = 0
        self.idle = IDLE_SECONDS
        self._servers: list[asyncio.Server] = []
        self._all: list[ConnectionSupervisor] = []

    async def open(self, here: ConnectionLimits | None = None, there: ConnectionLimits | None = None) -> None:
        self.there = self._make_supervisor(there)
        server = RpcServer(self.there)
        add_BlobsServicer_to_server(self.servicer, server)

        async def serve(connection: TlsConnection) -> None:
            await server.serve_peer(CALLER, connection, b"")
            connection.abort()  # as the listener does

        await self.open_to(serve, here)

    async def open_to(self, peer: Peer, here: ConnectionLimits | None = None) -> None:
        class Accepted(TlsConnection):
            def connection_made(accepted, transport: asyncio.BaseTransport) -> None:  # noqa: N805
                super().connection_made(transport)
                supervisor.spawn(peer(accepted))

        supervisor, context = self._make_supervisor(None), ServerHandshake(Identity.create()).context
        server = await asyncio.get_running_loop().create_server(Accepted, "127.0.0.1", 0, ssl=context)
        self._servers.append(server)
        self.address = self._servers[-1].sockets[0].getsockname()
        self.here = self._make_supervisor(here)
        self.channel = RpcChannel(CALLER, self._dial, self.here, self.idle)
        self.stub = BlobsStub(self.channel)

    def _make_supervisor(self, limits: ConnectionLimits | None) -> ConnectionSupervisor:
        self._all.append(ConnectionSupervisor(limits or ConnectionLimits(), TrafficCounter()))
        return self._all[-1]

    async def _dial(self, peer: PeerId) -> TlsConnection:
        self.dials += 1
        loop, context = asyncio.get_running_loop(), make_client_context()
        _, connection = await loop.create_connection(TlsConnection, *self.address, ssl=context, server_hostname="")
        return connection

    async def call(self, content: bytes, seconds: float = 10.0) -> bytes:
        reply: PiecesReply = await self.stub.Pieces(PiecesRequest(digest=content), timeout=seconds)
        return reply.pieces

    def fetch(self, chunks: int, seconds: float = 10.0) -> Any:
        return self.stub.Fetch(FetchRequest(length=chunks * CHUNK), timeout=seconds)

    def cut_server_side(self) -> None:
        """Cut all connections at the server."""
        for connection in tuple(self.there._incoming):
            connection.cut()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for supervisor in self._all:
            for connection in (*supervisor._incoming, *supervisor._outgoing):
                connection.cut()
        async with asyncio.timeout(10):
            while any(map(len, self._all)):
                await asyncio.sleep(0.005)
        for supervisor in self._all:
            await supervisor.stop()


@pytest.fixture
async def rpc_setup() -> AsyncIterator[RpcSetup]:
    setup = RpcSetup()
    yield setup
    await setup.close()


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def status_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    code: grpc.StatusCode = caught.value.code()
    return code


async def received(replies: Any) -> int:
    return sum([len(chunk.data) async for chunk in replies])


async def test_concurrent_calls_are_answered_in_order(rpc_setup: RpcSetup) -> None:
    await rpc_setup.open()
    calls = [rpc_setup.call(bytes([index])) for index in range(20)]
    streams = [received(rpc_setup.fetch(index)) for index in (7, 0, 1)]
    answers = await asyncio.gather(*calls, *streams)
    assert answers == [CALLER.encode() + bytes([index]) for index in range(20)] + [7 * CHUNK, 0, CHUNK]
    assert rpc_setup.dials == 1
    sent, received_count = rpc_setup.there.traffic.total, rpc_setup.here.traffic.count_of(CALLER)
    assert sent.sent == received_count.received > 8 * CHUNK and sent.received == received_count.sent > 0


async def test_cancelled_call_does_not_delay_others(rpc_setup: RpcSetup) -> None:
    await rpc_setup.open()
    first, second = rpc_setup.fetch(3), asyncio.create_task(received(rpc_setup.fetch(2)))
    await first.read()
    third = asyncio.create_task(rpc_setup.call(b"third"))
    await asyncio.sleep(0)
    second.cancel()
    first.cancel()
    assert await third == CALLER.encode() + b"third"
    assert await first.read() is grpc.aio.EOF
    assert rpc_setup.dials == 1 and len(rpc_setup.channel._pending_calls) == 0


async def test_without_discarding_other_calls_would_wait_for_ever(
    rpc_setup: RpcSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the test above."""
    monkeypatch.setattr(RpcChannel, "discard_reply", lambda *_: None)
    await rpc_setup.open()
    first = rpc_setup.fetch(3)
    await first.read()
    first.cancel()
    assert await status_of(rpc_setup.call(b"third", 0.3)) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_long_answer_to_a_cancelled_call_cuts_the_connection(rpc_setup: RpcSetup) -> None:
    await rpc_setup.open()
    first = rpc_setup.fetch(1 << 20)
    await first.read()
    first.cancel()
    assert await status_of(rpc_setup.call(b"behind it")) is grpc.StatusCode.UNAVAILABLE
    assert rpc_setup.here.traffic.total.received < 64 * CHUNK
    assert await rpc_setup.call(b"again") == CALLER.encode() + b"again"
    assert rpc_setup.dials == 2


async def test_errors_of_a_servicer_end_only_the_call(rpc_setup: RpcSetup, caplog: pytest.LogCaptureFixture) -> None:
    await rpc_setup.open()
    assert await status_of(rpc_setup.call(REFUSED)) is grpc.StatusCode.NOT_FOUND
    assert await status_of(rpc_setup.call(BROKEN)) is grpc.StatusCode.UNKNOWN
    assert f"a call from {CALLER} failed" in caplog.text and "it breaks" in caplog.text
    strange = rpc_setup.channel.unary_unary("/none", bytes, bytes)
    assert await status_of(strange(b"?", timeout=5)) is grpc.StatusCode.UNIMPLEMENTED
    garbled = rpc_setup.channel.unary_unary("/murmur.v1.Blobs/Pieces", bytes, bytes)
    assert await status_of(garbled(b"\xff\xff", timeout=5)) is grpc.StatusCode.INVALID_ARGUMENT
    assert await rpc_setup.call(b"well") == CALLER.encode() + b"well"
    assert rpc_setup.dials == 1


async def test_slow_call_exceeds_its_deadline(rpc_setup: RpcSetup) -> None:
    await rpc_setup.open()
    assert await status_of(rpc_setup.call(SLOW, 0.1)) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_closed_channel_cancels_the_servicer(rpc_setup: RpcSetup) -> None:
    await rpc_setup.open()
    asking = asyncio.create_task(rpc_setup.call(SLOW))
    await until(lambda: rpc_setup.there.traffic.total.received)
    await rpc_setup.channel.close()
    assert await status_of(asking) is grpc.StatusCode.UNAVAILABLE
    await until(lambda: rpc_setup.servicer.given_up == 1)
    await until(lambda: len(rpc_setup.there) == len(rpc_setup.here) == 0)


@pytest.mark.parametrize(
    "frame",
    [FRAME_HEADER.pack(MAX_MESSAGE_BYTES + 1, CALL), FRAME_HEADER.pack(0, REPLY), FRAME_HEADER.pack(1, 77) + b"x"],
)
async def test_caller_that_sends_invalid_frames_is_cut(
    rpc_setup: RpcSetup, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await rpc_setup.open()
    connection = await rpc_setup._dial(CALLER)
    connection.write(frame)
    with pytest.raises((EOFError, ConnectionError)):
        await asyncio.wait_for(connection.read(1), 5)
    connection.abort()
    assert f"cutting a direct connection of {CALLER}" in caplog.text
    assert await rpc_setup.call(b"honest") == CALLER.encode() + b"honest"


@pytest.mark.parametrize(
    "answer",
    [
        FRAME_HEADER.pack(MAX_MESSAGE_BYTES + 1, REPLY),
        FRAME_HEADER.pack(0, END),
        FRAME_HEADER.pack(1, CALL) + b"x",
        b"half",
        b"",
    ],
)
async def test_invalid_answer_ends_the_connection(rpc_setup: RpcSetup, answer: bytes) -> None:
    async def peer(connection: TlsConnection) -> None:
        await connection.read(1)
        connection.write(answer)
        assert connection._transport
        connection._transport.close()

    await rpc_setup.open_to(peer)
    for dials in (1, 2):
        assert await status_of(rpc_setup.call(b"?")) is grpc.StatusCode.UNAVAILABLE
        assert rpc_setup.dials == dials


async def test_unparsable_answer_is_none_and_does_not_delay_others(rpc_setup: RpcSetup) -> None:
    async def peer(connection: TlsConnection) -> None:
        for _ in range(2):
            length, _ = FRAME_HEADER.unpack(await connection.read(FRAME_HEADER.size))
            await connection.read(length)
            connection.write(FRAME_HEADER.pack(len(GARBLED), REPLY) + GARBLED + FRAME_HEADER.pack(1, END) + bytes(1))

    await rpc_setup.open_to(peer)
    for _ in range(2):
        assert await rpc_setup.stub.Pieces(PiecesRequest(), timeout=5) is None
    assert rpc_setup.dials == 1


async def test_caller_that_reads_nothing_is_cut(rpc_setup: RpcSetup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    await rpc_setup.open(there=ConnectionLimits(stall=0.3, check_interval=0.05))
    lazy = rpc_setup.fetch(1 << 20, 60)
    await lazy.read()
    await until(lambda: "nothing was taken for" in caplog.text)
    await until(lambda: len(rpc_setup.there) == 0)
    assert rpc_setup.there.traffic.total.sent < 256 * CHUNK, "nothing accumulates for the caller"


async def test_idle_connection_is_closed_and_reopened(rpc_setup: RpcSetup) -> None:
    rpc_setup.idle = 0.2
    await rpc_setup.open(here=ConnectionLimits(check_interval=0.05))
    assert await rpc_setup.call(b"one") == CALLER.encode() + b"one"
    await until(lambda: len(rpc_setup.here) == len(rpc_setup.there) == 0)
    assert await rpc_setup.call(b"two") == CALLER.encode() + b"two"
    assert rpc_setup.dials == 2
    assert not rpc_setup.here.refusals, "closing an idle connection is not a refusal"


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disable the garbage collector, so that only objects without references are freed, and no cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def count_connection_objects() -> int:
    """Return the number of connection objects in memory: asyncio's for TLS, and ours."""
    return sum(issubclass(type(item), SSLProtocol | TlsConnection) for item in gc.get_objects())


@pytest.mark.parametrize("ending", ["closed", "cut", "cut in a call"])
async def test_ended_connection_holds_no_memory(rpc_setup: RpcSetup, uncollected: None, ending: str) -> None:
    before = count_connection_objects()
    await rpc_setup.open()
    await rpc_setup.call(b"?")
    assert count_connection_objects() == before + 4
    if ending == "closed":
        await rpc_setup.channel.close()
    else:
        calls = [asyncio.create_task(rpc_setup.call(SLOW))] if ending == "cut in a call" else []
        await until(lambda: len(rpc_setup.channel._pending_calls) == len(calls))
        rpc_setup.cut_server_side()
        await asyncio.gather(*calls, return_exceptions=True)
        calls.clear()
    await until(lambda: len(rpc_setup.here) == len(rpc_setup.there) == 0)
    await until(lambda: count_connection_objects() == before, 1.0)


@pytest.mark.parametrize("limited", ["upload", "download", ""])
async def test_rate_limits_hold_for_direct_connections(rpc_setup: RpcSetup, limited: str) -> None:
    rate = 2_000_000.0
    here = ConnectionLimits(download=rate) if limited == "download" else None
    await rpc_setup.open(here, ConnectionLimits(upload=rate) if limited == "upload" else None)
    began = time.monotonic()
    assert await received(rpc_setup.fetch(4)) == 4 * CHUNK
    seconds = time.monotonic() - began
    least = (4 * CHUNK - 0.3 * rate) / rate
    assert seconds >= least if limited else seconds < least, "the control: without a limit it is faster"


async def test_connections_that_a_peer_opens_share_one_flow() -> None:
    supervisor = ConnectionSupervisor(ConnectionLimits(), TrafficCounter())
    connections = [FramedConnection("greedy", TlsConnection(), supervisor, 1.0, is_outgoing=False) for _ in range(3)]
    other = FramedConnection("modest", TlsConnection(), supervisor, 1.0, is_outgoing=False)
    asking = FramedConnection("greedy", TlsConnection(), supervisor, 1.0, is_outgoing=True)
    assert all(
        connection._flows[direction] is connections[0]._flows[direction]
        for connection in connections
        for direction in (0, 1)
    )
    up, down = connections[0]._flows
    assert len({id(flow) for flow in (up, down, *other._flows, *asking._flows)}) == 6
    connections[0]._flows[0].finish_tag = 1e9
    del up, down, connections
    assert supervisor.flow_of("greedy", "up, theirs").finish_tag == 0, "the flow is dropped with its last connection"
    await supervisor.stop()


async def test_direct_connections_per_peer_are_limited(rpc_setup: RpcSetup, caplog: pytest.LogCaptureFixture) -> None:
    await rpc_setup.open(there=ConnectionLimits(max_incoming_per_peer=1))
    assert await rpc_setup.call(b"one")
    more = BlobsStub(RpcChannel(CALLER, rpc_setup._dial, rpc_setup.here))
    assert await status_of(more.Pieces(PiecesRequest(), timeout=5)) is grpc.StatusCode.UNAVAILABLE
    assert f"refusing {CALLER}: it holds 1 connections" in caplog.text
    assert await rpc_setup.call(b"two")
