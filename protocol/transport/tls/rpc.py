"""A direct connection as a line: the services of gRPC, call after call, without gRPC.

gRPC wants a socket of its own beside the connection's, and frames every byte on both: that takes twice the processor
time of a line, which is all that a fast link leaves to save. Stubs and servicers are those of gRPC.

    frame = length of the body (4 bytes, big-endian), kind (1 byte), body
    CALL   the method's name, a zero byte, the request     from who dialled
    REPLY  a message of the answer                         from the other end
    END    gRPC's number of a status (1 byte), a reason    the same

Calls may be sent one after the other without waiting, and are answered in that order. What comes for a call that was
given up is skipped; where that is much, the line is cut. Rates, counts and the clock over it are those of the tunnels.
"""

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from protocol.errors import LimitError, MalformedError, PeerFault, TransportError, UnreachableError, describe_error
from protocol.identity import PeerId
from protocol.transport.connection_supervisor import ConnectionSupervisor, CutReason, TransferProgress, cut_reason_for
from protocol.transport.libp2p.client import BUFFER_BYTES
from protocol.transport.tls.connection import TlsConnection

logger = logging.getLogger(__name__)

FRAME_HEADER: Final = struct.Struct(">IB")
CALL, REPLY, END = 1, 2, 3
MAX_MESSAGE_BYTES = 1024 * 1024 + 64 * 1024
MAX_DISCARDED_BYTES = 2 * MAX_MESSAGE_BYTES
IDLE_SECONDS = 900.0  # without a call: a line by which the next round goes
SPARE_IDLE_SECONDS = 60.0  # one beside it
STATUS_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}

Dial = Callable[[PeerId], Awaitable[TlsConnection]]
Deserialize = Callable[[bytes | bytearray], Any]


class FramedConnection:
    """Frames over one connection, and what `Tunnels` wants to know of it. `is_ours`: we have opened it.

    Of a limited rate all lines that a peer has opened get one share, however many: they are its choice. What we ask of
    it goes by ours, which have another one, and does not wait for what it fetches of us.
    """

    def __init__(
        self,
        peer: PeerId,
        connection: TlsConnection,
        supervisor: ConnectionSupervisor,
        idle_seconds: float,
        *,
        is_outgoing: bool,
    ) -> None:
        self.peer = peer
        self._connection = connection
        self._limits = supervisor.limits
        self._idle_seconds = idle_seconds
        self._traffic = supervisor.traffic
        self._upload, self._download = supervisor.limiters
        whose = "ours" if is_outgoing else "theirs"
        self._flows = supervisor.flow_of(peer, f"up, {whose}"), supervisor.flow_of(peer, f"down, {whose}")
        self._send_lock = asyncio.Lock()
        self._sent = 0
        self._header = bytearray(FRAME_HEADER.size)
        self._body = bytearray()  # of the frame that is coming
        self._frame_received = 0  # bytes of it
        self._progress = TransferProgress(asyncio.get_running_loop().time())
        self.last_progress_at = self._progress.last_progress_at

    async def run(self) -> None:
        """Until it is closed, by either end."""
        try:
            await self._connection.wait_closed()
        finally:
            self.cut()

    def cut(self) -> None:
        self._connection.abort()

    @property
    def has_ended(self) -> bool:
        return self._connection.has_ended

    def find_cut_reason(self, now: float) -> CutReason | None:
        """If it must end."""
        self._connection.check_silence()
        pending = self._connection.unsent_bytes
        self._progress.observe(self._sent - pending, pending, now)
        self.last_progress_at = max(self.last_progress_at, self._progress.last_progress_at)
        return cut_reason_for(
            self._progress.stalled_for(now), now - self.last_progress_at, self._limits.stall, self._idle_seconds
        )

    async def send(self, kind: int, body: bytes) -> None:
        """ConnectionError: it is cut. Who is cancelled in the middle of a frame cuts it."""
        frame = memoryview(b"".join((FRAME_HEADER.pack(len(body), kind), body)))
        step = self._upload.grant_bytes if self._upload else len(frame)
        async with self._send_lock:
            sent = self._sent
            try:
                for start in range(0, len(frame), step):
                    await self._write(frame[start : start + step])
            except BaseException:
                if self._sent > sent:
                    self.cut()
                raise

    async def _write(self, data: memoryview) -> None:
        if self._upload:
            await self._upload.acquire(self._flows[0], len(data))
        self._sent += len(data)
        self._traffic.add_sent(self.peer, len(data))
        self._connection.write(data)
        await self._connection.drain()

    async def receive(self) -> tuple[int, bytearray]:
        """The next frame; who comes after one that was cancelled goes on where that was. EOFError, OSError: it has
        ended. LimitError: it is too long."""
        await self._fill(self._header, 0)
        length, kind = FRAME_HEADER.unpack(self._header)
        if length > MAX_MESSAGE_BYTES:
            raise LimitError(f"a frame of {length} bytes")
        if len(self._body) != length:
            self._body = bytearray(length)
        await self._fill(self._body, FRAME_HEADER.size)
        body, self._body, self._frame_received = self._body, bytearray(), 0
        return kind, body

    async def _fill(self, data: bytearray, offset: int) -> None:
        """All of it that has not come yet; `before`: bytes of the frame ahead of it."""
        step = self._download.grant_bytes if self._download else BUFFER_BYTES
        while (start := self._frame_received - offset) < len(data):
            try:
                await self._connection.fill(memoryview(data)[start : start + step])
            finally:
                self._record_received(self._connection.filled_bytes)
            if self._download:
                await self._download.acquire(self._flows[1], self._connection.filled_bytes)

    def _record_received(self, size: int) -> None:
        self._frame_received += size
        self._traffic.add_received(self.peer, size)
        self.last_progress_at = asyncio.get_running_loop().time()


@dataclass(eq=False)
class PendingCall:
    """A call that was sent. `come` once those before it are answered, or cannot be any more."""

    connection: FramedConnection
    queue: "deque[PendingCall]"
    is_next: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> tuple[int, bytearray]:
        """The next frame of the answer; with the last one it is the next call's turn."""
        await self.is_next.wait()
        try:
            kind, body = await self.connection.receive()
            if kind != REPLY and (kind != END or not body):
                raise MalformedError(f"a frame of kind {kind} and {len(body)} bytes where an answer is expected")
        except (OSError, EOFError, PeerFault):
            self.connection.cut()
            while self.queue:
                self.queue.popleft().is_next.set()
            raise
        if kind == END:
            self.queue.popleft()
            self._wake_first()
        return kind, body

    def _wake_first(self) -> None:
        if self.queue:
            self.queue[0].is_next.set()

    def enqueue(self) -> None:
        """Behind those that were sent before."""
        self.queue.append(self)
        self._wake_first()


class RpcChannel:
    """Dials when there is something to call, and again when the line is gone. For a stub it is gRPC's channel.

    A line is closed after `idle` seconds without a call. TCP begins on a new connection without knowing how much the
    link carries, and where several begin at once, one may stay slow for seconds; one that rested knows.
    """

    def __init__(
        self, peer: PeerId, dial: Dial, supervisor: ConnectionSupervisor, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self._peer = peer
        self._dial = dial
        self._supervisor = supervisor
        self._idle_seconds = idle_seconds
        self._send_lock = asyncio.Lock()  # calls are answered in the order in which they were sent
        self._connection: FramedConnection | None = None
        self._pending_calls: deque[PendingCall] = deque()  # of that line

    def unary_unary(
        self, name: str, request_serializer: Callable[[Any], bytes], response_deserializer: Deserialize,
        **_: object,
    ) -> Callable[..., Awaitable[Any]]:  # fmt: skip
        async def call(request: Any, timeout: float) -> Any:
            replies = ReplyStream(self, _encode_call(name, request_serializer(request)), response_deserializer, timeout)
            reply = await replies.read()
            if reply is grpc.aio.EOF or await replies.read() is not grpc.aio.EOF:
                replies.cancel()
                raise _rpc_error(grpc.StatusCode.INTERNAL, "not one reply")
            return reply

        return call

    def unary_stream(
        self, name: str, request_serializer: Callable[[Any], bytes], response_deserializer: Deserialize,
        **_: object,
    ) -> "Callable[..., ReplyStream]":  # fmt: skip
        def call(request: Any, timeout: float) -> ReplyStream:
            return ReplyStream(self, _encode_call(name, request_serializer(request)), response_deserializer, timeout)

        return call

    async def close(self) -> None:
        if self._connection:
            self._connection.cut()

    @property
    def is_open(self) -> bool:
        """Nothing need be dialled."""
        return self._open_connection is not None

    @property
    def _open_connection(self) -> FramedConnection | None:
        return None if self._connection is None or self._connection.has_ended else self._connection

    async def send_call(self, body: bytes) -> PendingCall:
        async with self._send_lock:
            line = self._open_connection or await self._connect()
            await line.send(CALL, body)
            turn = PendingCall(line, self._pending_calls)
            turn.enqueue()
            return turn

    async def _connect(self) -> FramedConnection:
        connection = await self._dial(self._peer)
        self._connection = FramedConnection(
            self._peer, connection, self._supervisor, self._idle_seconds, is_outgoing=True
        )
        self._pending_calls = deque()
        self._supervisor.spawn(self._supervise(self._connection))
        return self._connection

    async def _supervise(self, connection: FramedConnection) -> None:
        """Until it ends; its memory goes with it."""
        try:
            await self._supervisor.supervise_outgoing(connection)
        finally:
            if self._connection is connection:
                self._connection = None

    def discard_reply(self, call: PendingCall) -> None:
        """Nobody waits for its answer any more."""
        if not call.connection.has_ended:
            self._supervisor.spawn(_discard_reply(call))


class ReplyStream:
    """The answer to one call. AioRpcError: as gRPC says it."""

    def __init__(self, channel: RpcChannel, body: bytes, deserialize: Deserialize, seconds: float) -> None:
        self._channel = channel
        self._body = body
        self._deserialize = deserialize
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._call: PendingCall | None = None
        self._ended = False

    def __aiter__(self) -> "ReplyStream":
        return self

    async def __anext__(self) -> Any:
        reply = await self.read()
        if reply is grpc.aio.EOF:
            raise StopAsyncIteration
        return reply

    async def read(self) -> Any:
        """A message, or EOF."""
        if self._ended:
            return grpc.aio.EOF
        try:
            async with asyncio.timeout_at(self._deadline):
                frame = await self._next_or_cancel()
            return grpc.aio.EOF if frame is None else self._parse(frame)
        except TimeoutError as error:
            raise _rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time") from error
        except (UnreachableError, TransportError, OSError, EOFError, PeerFault) as error:
            raise _rpc_error(grpc.StatusCode.UNAVAILABLE, describe_error(error)) from error

    def _parse(self, frame: bytearray) -> Any:
        """None where it does not parse, as gRPC has it."""
        try:
            return self._deserialize(frame)
        except DecodeError:
            return None

    async def _next_or_cancel(self) -> bytearray | None:
        try:
            return await self._receive_frame()
        except BaseException:
            self.cancel()
            raise

    async def _receive_frame(self) -> bytearray | None:
        if self._call is None:
            self._call = await self._channel.send_call(self._body)
        kind, body = await self._call.receive()
        if kind == REPLY:
            return body
        self._ended = True
        if status := body[0]:
            raise _rpc_error(STATUS_CODES.get(status, grpc.StatusCode.UNKNOWN), body[1:].decode(errors="replace"))
        return None

    def cancel(self) -> None:
        if self._call and not self._ended:
            self._channel.discard_reply(self._call)
        self._ended = True


async def _discard_reply(call: PendingCall) -> None:
    kind, skipped = REPLY, 0
    with suppress(OSError, EOFError, PeerFault):
        while kind != END:
            kind, body = await call.receive()
            skipped += FRAME_HEADER.size + len(body)
            if skipped > MAX_DISCARDED_BYTES:
                logger.info("cutting a line to %s: what nobody waits for any more does not end", call.connection.peer)
                call.connection.cut()


def _encode_call(name: str, request: bytes) -> bytes:
    return b"\0".join((name.encode(), request))


def _rpc_error(code: grpc.StatusCode, reason: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=reason)
