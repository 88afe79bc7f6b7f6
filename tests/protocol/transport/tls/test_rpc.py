"""Calls over lines between two ends on loopback."""

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
from protocol.transport.connection_supervisor import ConnectionLimits, ConnectionSupervisor, TrafficCounter
from protocol.transport.libp2p.grpc_bridge import caller
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
)
from protocol.transport.tls.rpc_server import RpcServer
from tests.protocol.garbled_server import GARBLED

CALLER = Identity.create().peer_id
CHUNK = 1 << 18
BROKEN, REFUSED, SLOW = b"broken", b"refused", b"slow"
Peer = Callable[[TlsConnection], Coroutine[None, None, None]]


class EchoServicer(BlobsServicer):
    """`Pieces` says who calls and repeats what was asked; `Fetch` yields `length` bytes in chunks."""

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
    """A caller of `channel`, and who answers."""

    def __init__(self) -> None:
        self.servicer = EchoServicer()
        self.dials = 0
        self.idle = IDLE_SECONDS
        self._servers: list[asyncio.Server] = []
        self._all: list[ConnectionSupervisor] = []

    async def open(self, here: ConnectionLimits | None = None, there: ConnectionLimits | None = None) -> None:
        self.there = self._make_supervisor(there)
        desk = RpcServer(self.there)
        add_BlobsServicer_to_server(self.servicer, desk)

        async def welcome(connection: TlsConnection) -> None:
            await desk.serve_peer(CALLER, connection, b"")
            connection.abort()  # as the door does

        await self.open_to(welcome, here)

    async def open_to(self, peer: Peer, here: ConnectionLimits | None = None) -> None:
        class Accepted(TlsConnection):
            def connection_made(accepted, transport: asyncio.BaseTransport) -> None:  # noqa: N805
                super().connection_made(transport)
                tunnels.spawn(peer(accepted))

        tunnels, context = self._make_supervisor(None), ServerHandshake(Identity.create()).context
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

    async def call(self, words: bytes, seconds: float = 10.0) -> bytes:
        reply: PiecesReply = await self.stub.Pieces(PiecesRequest(digest=words), timeout=seconds)
        return reply.pieces

    def fetch(self, chunks: int, seconds: float = 10.0) -> Any:
        return self.stub.Fetch(FetchRequest(length=chunks * CHUNK), timeout=seconds)

    def cut_server_side(self) -> None:
        """The other end cuts all lines."""
        for line in tuple(self.there._incoming):
            line.cut()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for tunnels in self._all:
            for carried in (*tunnels._incoming, *tunnels._outgoing):
                carried.cut()
        async with asyncio.timeout(10):
            while any(map(len, self._all)):
                await asyncio.sleep(0.005)
        for tunnels in self._all:
            await tunnels.stop()


@pytest.fixture
async def ends() -> AsyncIterator[RpcSetup]:
    made = RpcSetup()
    yield made
    await made.close()


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


async def test_calls_that_follow_one_another_are_answered_in_order(ends: RpcSetup) -> None:
    await ends.open()
    calls = [ends.call(bytes([number])) for number in range(20)]
    streams = [received(ends.fetch(number)) for number in (7, 0, 1)]
    answers = await asyncio.gather(*calls, *streams)
    assert answers == [CALLER.encode() + bytes([number]) for number in range(20)] + [7 * CHUNK, 0, CHUNK]
    assert ends.dials == 1
    sent, came = ends.there.traffic.total, ends.here.traffic.count_of(CALLER)
    assert sent.sent == came.received > 8 * CHUNK and sent.received == came.sent > 0


async def test_a_call_that_is_given_up_holds_up_nobody(ends: RpcSetup) -> None:
    await ends.open()
    first, second = ends.fetch(3), asyncio.create_task(received(ends.fetch(2)))
    await first.read()
    third = asyncio.create_task(ends.call(b"third"))
    await asyncio.sleep(0)
    second.cancel()
    first.cancel()
    assert await third == CALLER.encode() + b"third"
    assert await first.read() is grpc.aio.EOF
    assert ends.dials == 1 and len(ends.channel._pending_calls) == 0


async def test_without_skipping_the_others_would_wait_for_ever(ends: RpcSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(RpcChannel, "discard_reply", lambda *_: None)
    await ends.open()
    first = ends.fetch(3)
    await first.read()
    first.cancel()
    assert await status_of(ends.call(b"third", 0.3)) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_much_that_nobody_waits_for_is_not_read_to_its_end(ends: RpcSetup) -> None:
    await ends.open()
    first = ends.fetch(1 << 20)
    await first.read()
    first.cancel()
    assert await status_of(ends.call(b"behind it")) is grpc.StatusCode.UNAVAILABLE
    assert ends.here.traffic.total.received < 64 * CHUNK
    assert await ends.call(b"again") == CALLER.encode() + b"again"
    assert ends.dials == 2


async def test_what_a_servicer_refuses_and_how_it_breaks(ends: RpcSetup, caplog: pytest.LogCaptureFixture) -> None:
    await ends.open()
    assert await status_of(ends.call(REFUSED)) is grpc.StatusCode.NOT_FOUND
    assert await status_of(ends.call(BROKEN)) is grpc.StatusCode.UNKNOWN
    assert f"a call from {CALLER} failed" in caplog.text and "it breaks" in caplog.text
    strange = ends.channel.unary_unary("/none", bytes, bytes)
    assert await status_of(strange(b"?", timeout=5)) is grpc.StatusCode.UNIMPLEMENTED
    garbled = ends.channel.unary_unary("/murmur.v1.Blobs/Pieces", bytes, bytes)
    assert await status_of(garbled(b"\xff\xff", timeout=5)) is grpc.StatusCode.INVALID_ARGUMENT
    assert await ends.call(b"well") == CALLER.encode() + b"well"
    assert ends.dials == 1


async def test_no_answer_in_time(ends: RpcSetup) -> None:
    await ends.open()
    assert await status_of(ends.call(SLOW, 0.1)) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_who_hangs_up_is_worked_for_no_more(ends: RpcSetup) -> None:
    await ends.open()
    asking = asyncio.create_task(ends.call(SLOW))
    await until(lambda: ends.there.traffic.total.received)
    await ends.channel.close()
    assert await status_of(asking) is grpc.StatusCode.UNAVAILABLE
    await until(lambda: ends.servicer.given_up == 1)
    await until(lambda: len(ends.there) == len(ends.here) == 0)


@pytest.mark.parametrize(
    "frame",
    [FRAME_HEADER.pack(MAX_MESSAGE_BYTES + 1, CALL), FRAME_HEADER.pack(0, REPLY), FRAME_HEADER.pack(1, 77) + b"x"],
)
async def test_a_caller_that_sends_nonsense_is_cut(
    ends: RpcSetup, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await ends.open()
    connection = await ends._dial(CALLER)
    connection.write(frame)
    with pytest.raises((EOFError, ConnectionError)):
        await asyncio.wait_for(connection.read(1), 5)
    connection.abort()
    assert f"cutting a direct connection of {CALLER}" in caplog.text
    assert await ends.call(b"honest") == CALLER.encode() + b"honest"


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
async def test_an_answer_that_is_none_ends_the_line(ends: RpcSetup, answer: bytes) -> None:
    async def peer(connection: TlsConnection) -> None:
        await connection.read(1)
        connection.write(answer)
        assert connection._transport
        connection._transport.close()

    await ends.open_to(peer)
    for dials in (1, 2):
        assert await status_of(ends.call(b"?")) is grpc.StatusCode.UNAVAILABLE
        assert ends.dials == dials


async def test_an_answer_that_does_not_parse_is_none_as_grpc_has_it_and_holds_up_nobody(ends: RpcSetup) -> None:
    async def peer(connection: TlsConnection) -> None:
        for _ in range(2):
            length, _ = FRAME_HEADER.unpack(await connection.read(FRAME_HEADER.size))
            await connection.read(length)
            connection.write(FRAME_HEADER.pack(len(GARBLED), REPLY) + GARBLED + FRAME_HEADER.pack(1, END) + bytes(1))

    await ends.open_to(peer)
    for _ in range(2):
        assert await ends.stub.Pieces(PiecesRequest(), timeout=5) is None
    assert ends.dials == 1


async def test_a_caller_that_takes_nothing_is_cut_by_the_clock(
    ends: RpcSetup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await ends.open(there=ConnectionLimits(stall=0.3, check_interval=0.05))
    lazy = ends.fetch(1 << 20, 60)
    await lazy.read()
    await until(lambda: "nothing was taken for" in caplog.text)
    await until(lambda: len(ends.there) == 0)
    assert ends.there.traffic.total.sent < 256 * CHUNK, "and nothing piled up for it"


async def test_a_line_without_calls_is_closed_and_opened_again(ends: RpcSetup) -> None:
    ends.idle = 0.2
    await ends.open(here=ConnectionLimits(check_interval=0.05))
    assert await ends.call(b"one") == CALLER.encode() + b"one"
    await until(lambda: len(ends.here) == len(ends.there) == 0)
    assert await ends.call(b"two") == CALLER.encode() + b"two"
    assert ends.dials == 2
    assert not ends.here.refusals, "who closes what nobody needs refuses nothing"


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Only what nobody refers to any more is freed, and no cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def buffers() -> int:
    """What is held for the ends of connections: asyncio's memory for TLS, and ours."""
    return sum(issubclass(type(held), SSLProtocol | TlsConnection) for held in gc.get_objects())


@pytest.mark.parametrize("ending", ["closed", "cut", "cut in a call"])
async def test_a_line_that_has_ended_holds_no_memory(ends: RpcSetup, uncollected: None, ending: str) -> None:
    before = buffers()
    await ends.open()
    await ends.call(b"?")
    assert buffers() == before + 4
    if ending == "closed":
        await ends.channel.close()
    else:
        calls = [asyncio.create_task(ends.call(SLOW))] if ending == "cut in a call" else []
        await until(lambda: len(ends.channel._pending_calls) == len(calls))
        ends.cut_server_side()
        await asyncio.gather(*calls, return_exceptions=True)
        calls.clear()
    await until(lambda: len(ends.here) == len(ends.there) == 0)
    await until(lambda: buffers() == before, 1.0)


@pytest.mark.parametrize("limited", ["upload", "download", ""])
async def test_rates_hold_for_lines(ends: RpcSetup, limited: str) -> None:
    rate = 2_000_000.0
    here = ConnectionLimits(download=rate) if limited == "download" else None
    await ends.open(here, ConnectionLimits(upload=rate) if limited == "upload" else None)
    began = time.monotonic()
    assert await received(ends.fetch(4)) == 4 * CHUNK
    seconds = time.monotonic() - began
    least = (4 * CHUNK - 0.3 * rate) / rate
    assert seconds >= least if limited else seconds < least, "the control: without a limit it is faster"


async def test_all_lines_that_a_peer_opens_have_one_share_of_a_limited_rate() -> None:
    tunnels = ConnectionSupervisor(ConnectionLimits(), TrafficCounter())
    lines = [FramedConnection("greedy", TlsConnection(), tunnels, 1.0, is_outgoing=False) for _ in range(3)]
    other = FramedConnection("modest", TlsConnection(), tunnels, 1.0, is_outgoing=False)
    asking = FramedConnection("greedy", TlsConnection(), tunnels, 1.0, is_outgoing=True)
    assert all(line._flows[way] is lines[0]._flows[way] for line in lines for way in (0, 1))
    up, down = lines[0]._flows
    assert len({id(flow) for flow in (up, down, *other._flows, *asking._flows)}) == 6
    lines[0]._flows[0].finish_tag = 1e9
    del up, down, lines
    assert tunnels.flow_of("greedy", "up, theirs").finish_tag == 0, "it goes with the last of them"
    await tunnels.stop()


async def test_one_peer_has_so_many_lines_and_no_more(ends: RpcSetup, caplog: pytest.LogCaptureFixture) -> None:
    await ends.open(there=ConnectionLimits(max_incoming_per_peer=1))
    assert await ends.call(b"one")
    more = BlobsStub(RpcChannel(CALLER, ends._dial, ends.here))
    assert await status_of(more.Pieces(PiecesRequest(), timeout=5)) is grpc.StatusCode.UNAVAILABLE
    assert f"refusing {CALLER}: it holds 1 tunnels" in caplog.text
    assert await ends.call(b"two")
