"""RPC over a direct connection without gRPC's transport, with gRPC's stubs and servicers.

gRPC would need a socket of its own next to the connection's and would frame every byte on both. That takes twice the
CPU time of a direct connection, and on a fast link CPU time is the only thing to save.

    frame = length of the body (4 bytes, big-endian), kind (1 byte), body
    CALL   the method's name, a zero byte, the request           from the dialler
    REPLY  a message of the answer                               from the other end
    END    the number of a gRPC status code (1 byte), a reason   from the other end

Calls may be sent one after the other without waiting and are answered in that order. Frames of a cancelled call are
skipped; if there are too many, the connection is cut. Rate limits, byte counts and timeouts are those of the tunnels.
The server answers the calls of a connection one at a time; further calls wait in the caller's socket.
"""

import asyncio
import inspect
import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError

from protocol.errors import LimitError, MalformedError, PeerFault, TransportError, UnreachableError, describe_error
from protocol.identity import PeerId
from protocol.transport.connection_supervisor import ConnectionSupervisor
from protocol.transport.grpc_bridge import SOCKET_NAMESPACE
from protocol.transport.p2pd import BUFFER_BYTES
from protocol.transport.tls.connection import TlsConnection
from protocol.transport.tunnel import CutReason, TransferProgress, cut_reason_for

logger = logging.getLogger(__name__)

FRAME_HEADER: Final = struct.Struct(">IB")
CALL, REPLY, END = 1, 2, 3
MAX_MESSAGE_BYTES = 1024 * 1024 + 64 * 1024
MAX_DISCARDED_BYTES = 2 * MAX_MESSAGE_BYTES
IDLE_SECONDS = 900.0  # without a call; long enough that the next round finds the connection open
SPARE_IDLE_SECONDS = 60.0  # the same for an additional connection to the peer
STATUS_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
Dial = Callable[[PeerId], Awaitable[TlsConnection]]
Deserialize = Callable[[bytes | bytearray], Any]
MAX_REASON_CHARACTERS = 300


class FramedConnection:
    """Frames over one TLS connection, under the supervisor's timeouts.

    `is_outgoing` is true if we dialled. All connections that a peer dialled share one flow of a limited rate, because
    the peer chooses their number. Our calls go over connections that we dialled; these have another flow, so they do
    not wait for the peer's own downloads from us.
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
        side = "ours" if is_outgoing else "theirs"
        self._flows = supervisor.flow_of(peer, f"up, {side}"), supervisor.flow_of(peer, f"down, {side}")
        self._send_lock = asyncio.Lock()
        self._sent = 0
        self._header = bytearray(FRAME_HEADER.size)
        self._body = bytearray()  # of the incoming frame
        self._frame_received = 0  # bytes of that frame, including its header
        self._progress = TransferProgress(asyncio.get_running_loop().time())
        self.last_progress_at = self._progress.last_progress_at

    async def run(self) -> None:
        """Wait until either end closes the connection."""
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
        """Return why this connection must end, or None."""
        self._connection.check_silence()
        pending = self._connection.unsent_bytes
        self._progress.observe(self._sent - pending, pending, now)
        self.last_progress_at = max(self.last_progress_at, self._progress.last_progress_at)
        return cut_reason_for(
            self._progress.stalled_for(now), now - self.last_progress_at, self._limits.stall, self._idle_seconds
        )

    async def send(self, kind: int, body: bytes) -> None:
        """Send a frame; raise ConnectionError if the connection is cut.

        Cancellation in the middle of a frame cuts the connection.
        """
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
        """Return the next frame; after a cancelled call, continue where that one stopped.

        Raises:
            EOFError, OSError: The connection has ended.
            LimitError: The frame is too long.
        """
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
        """Receive the missing bytes of `data`, which begins `offset` bytes into the frame."""
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
    """A call that was sent.

    `is_next` is set once the calls before it are answered or never will be.
    """

    connection: FramedConnection
    queue: "deque[PendingCall]"
    is_next: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> tuple[int, bytearray]:
        """Return the next frame of the answer; the last one lets the next call proceed."""
        await self.is_next.wait()
        try:
            kind, body = await self.connection.receive()
            if kind != REPLY and (kind != END or not body):
                raise MalformedError(f"a frame of kind {kind} and {len(body)} bytes arrived instead of an answer")
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
        """Append this call behind those that were sent before."""
        self.queue.append(self)
        self._wake_first()


class RpcChannel:
    """The client's end of a direct connection; stubs use it like a gRPC channel.

    It dials for the first call, and again when the connection is gone. A connection is closed after `idle_seconds`
    without a call. Keeping it that long pays, because TCP starts a new connection without knowing the link's capacity,
    and where several start at once, one may stay slow for seconds.
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
        self._pending_calls: deque[PendingCall] = deque()  # of the current connection

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

    async def open(self) -> None:
        """Dial if there is no connection. Raises UnreachableError."""
        async with self._send_lock:
            if self._open_connection is None:
                await self._connect()

    async def close(self) -> None:
        if self._connection:
            self._connection.cut()

    @property
    def is_open(self) -> bool:
        """Return whether a call needs no dialling."""
        return self._open_connection is not None

    @property
    def _open_connection(self) -> FramedConnection | None:
        return None if self._connection is None or self._connection.has_ended else self._connection

    async def send_call(self, body: bytes) -> PendingCall:
        async with self._send_lock:
            connection = self._open_connection or await self._connect()
            await connection.send(CALL, body)
            call = PendingCall(connection, self._pending_calls)
            call.enqueue()
            return call

    async def _connect(self) -> FramedConnection:
        connection = await self._dial(self._peer)
        self._connection = FramedConnection(
            self._peer, connection, self._supervisor, self._idle_seconds, is_outgoing=True
        )
        self._pending_calls = deque()
        self._supervisor.spawn(self._supervise(self._connection))
        return self._connection

    async def _supervise(self, connection: FramedConnection) -> None:
        """Run the connection under the timeouts, then drop the reference to it.

        This frees its memory.
        """
        try:
            await self._supervisor.supervise_outgoing(connection)
        finally:
            if self._connection is connection:
                self._connection = None

    def discard_reply(self, call: PendingCall) -> None:
        """Skip the answer to a call that was given up."""
        if not call.connection.has_ended:
            self._supervisor.spawn(_discard_reply(call))


class ReplyStream:
    """The answer to one call; fails with AioRpcError as gRPC's calls do."""

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
        """Return the next message, or EOF."""
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
        """Parse a message; return None if it does not parse, as gRPC does."""
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
                logger.debug(
                    "cutting a direct connection to %s: too long an answer to a cancelled call", call.connection.peer
                )
                call.connection.cut()


def _encode_call(name: str, request: bytes) -> bytes:
    return b"\0".join((name.encode(), request))


def _rpc_error(code: grpc.StatusCode, reason: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=reason)


class CallAbortedError(Exception):
    """Raised when a servicer aborts a call."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class RpcContext:
    """The part of gRPC's servicer context that our servicers use."""

    def __init__(self, connection: FramedConnection, handler: Any) -> None:
        self._connection = connection
        self._handler = handler
        self._code: grpc.StatusCode | None = None

    def code(self) -> grpc.StatusCode | None:
        """Return the status with which the servicer aborted the call, if it did."""
        return self._code

    def peer(self) -> str:
        """Return the caller in the form that the inbound bridge gives it."""
        return f"unix-abstract:{SOCKET_NAMESPACE}/{self._connection.peer}/line"

    async def write(self, reply: Any) -> None:
        await self._connection.send(REPLY, self._handler.response_serializer(reply))

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        self._code = code
        raise CallAbortedError(code, details)


class RpcServer:
    """Answers calls of direct connections.

    gRPC's generated code adds servicers to it as to a gRPC server.
    """

    def __init__(self, supervisor: ConnectionSupervisor) -> None:
        self._supervisor = supervisor
        self._handlers: dict[bytes, Any] = {}

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        """Ignore them: they duplicate the registered handlers."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self._handlers |= {f"/{service}/{name}".encode(): handler for name, handler in handlers.items()}

    async def serve_peer(self, peer: PeerId, connection: TlsConnection, greeting: bytes) -> None:
        """Send `greeting`, then answer an authenticated peer's calls until the end."""
        if not self._supervisor.try_admit(peer):
            return
        connection.write(greeting)
        framed = FramedConnection(
            peer, connection, self._supervisor, self._supervisor.limits.rpc_idle, is_outgoing=False
        )
        serving = asyncio.create_task(self._serve_calls(framed))
        try:
            await self._supervisor.supervise_incoming(framed)
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            framed.cut()

    async def _serve_calls(self, connection: FramedConnection) -> None:
        try:
            while True:
                kind, body = await connection.receive()
                if kind != CALL:
                    raise LimitError(f"a frame of kind {kind} arrived instead of a call")
                await self._serve_call(connection, body)
        except PeerFault as fault:
            self._supervisor.refusals[fault.metric_label] += 1
            logger.warning("cutting a direct connection of %s: %s", connection.peer, fault)
        except (OSError, EOFError) as error:
            logger.debug("a direct connection of %s has ended: %s", connection.peer, error)
        finally:
            connection.cut()

    async def _serve_call(self, connection: FramedConnection, body: bytearray) -> None:
        code, reason = grpc.StatusCode.OK, ""
        name, _, request = bytes(body).partition(b"\0")
        try:
            await self._run_handler(connection, name, request)
        except CallAbortedError as refusal:
            code, reason = refusal.code, str(refusal)
        except Exception:  # as in gRPC, a fault of a servicer ends only its call
            if connection.has_ended:
                return
            logger.exception("a call from %s failed", connection.peer)
            code = grpc.StatusCode.UNKNOWN
        await connection.send(END, bytes([code.value[0]]) + reason[:MAX_REASON_CHARACTERS].encode())

    async def _run_handler(self, connection: FramedConnection, name: bytes, request: bytes) -> None:
        handler = self._handlers.get(name)
        if handler is None or handler.request_streaming:
            raise CallAbortedError(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        context = RpcContext(connection, handler)
        try:
            message = handler.request_deserializer(request)
        except Exception as error:  # protobuf raises exceptions of its own
            raise CallAbortedError(grpc.StatusCode.INVALID_ARGUMENT, "the request does not parse") from error
        if not handler.response_streaming:
            await context.write(await handler.unary_unary(message, context))
            return
        answer = handler.unary_stream(message, context)
        if inspect.isawaitable(answer):
            await answer
            return
        async for reply in answer:
            await context.write(reply)
