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

from protocol.errors import LimitError, MalformedError, PeerFault, TransportError, UnreachableError, told
from protocol.identity import PeerId
from protocol.network.connection import Connection
from protocol.network.control import BUFFER_BYTES
from protocol.network.tunnel import Fault, Progress, Tunnels, fault_of

logger = logging.getLogger(__name__)

HEAD: Final = struct.Struct(">IB")
CALL, REPLY, END = 1, 2, 3
MAX_MESSAGE_BYTES = 1024 * 1024 + 64 * 1024
MAX_SKIPPED_BYTES = 2 * MAX_MESSAGE_BYTES
KEPT_SECONDS = 900.0  # without a call: a line by which the next round goes
SPARE_SECONDS = 60.0  # one beside it
CODES: Final = {code.value[0]: code for code in grpc.StatusCode}

Dial = Callable[[PeerId], Awaitable[Connection]]
Deserialize = Callable[[bytes | bytearray], Any]


class Line:
    """Frames over one connection, and what `Tunnels` wants to know of it. `is_ours`: we have opened it.

    Of a limited rate all lines that a peer has opened get one share, however many: they are its choice. What we ask of
    it goes by ours, which have another one, and does not wait for what it fetches of us.
    """

    def __init__(
        self, peer: PeerId, connection: Connection, tunnels: Tunnels, idle: float, *, is_ours: bool
    ) -> None:
        self.peer = peer
        self._connection = connection
        self._limits = tunnels.limits
        self._idle = idle
        self._traffic = tunnels.traffic
        self._upload, self._download = tunnels.gates
        whose = "ours" if is_ours else "theirs"
        self._flows = tunnels.flow(peer, f"up, {whose}"), tunnels.flow(peer, f"down, {whose}")
        self._sending = asyncio.Lock()
        self._sent = 0
        self._head = bytearray(HEAD.size)
        self._body = bytearray()  # of the frame that is coming
        self._came = 0  # bytes of it
        self._progress = Progress(asyncio.get_running_loop().time())
        self.moved_at = self._progress.moved_at

    async def run(self) -> None:
        """Until it is closed, by either end."""
        try:
            await self._connection.wait_closed()
        finally:
            self.cut()

    def cut(self) -> None:
        self._connection.abort()

    @property
    def is_cut(self) -> bool:
        return self._connection.has_ended

    def fault(self, now: float) -> Fault | None:
        """If it must end."""
        self._connection.look()
        pending = self._connection.pending
        self._progress.observe(self._sent - pending, pending, now)
        self.moved_at = max(self.moved_at, self._progress.moved_at)
        return fault_of(self._progress.stalled_for(now), now - self.moved_at, self._limits.stall, self._idle)

    async def send(self, kind: int, body: bytes) -> None:
        """ConnectionError: it is cut. Who is cancelled in the middle of a frame cuts it."""
        frame = memoryview(b"".join((HEAD.pack(len(body), kind), body)))
        step = self._upload.grant_bytes if self._upload else len(frame)
        async with self._sending:
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
            await self._upload.pass_through(self._flows[0], len(data))
        self._sent += len(data)
        self._traffic.add_sent(self.peer, len(data))
        self._connection.write(data)
        await self._connection.drain()

    async def receive(self) -> tuple[int, bytearray]:
        """The next frame; who comes after one that was cancelled goes on where that was. EOFError, OSError: it has
        ended. LimitError: it is too long."""
        await self._fill(self._head, 0)
        length, kind = HEAD.unpack(self._head)
        if length > MAX_MESSAGE_BYTES:
            raise LimitError(f"a frame of {length} bytes")
        if len(self._body) != length:
            self._body = bytearray(length)
        await self._fill(self._body, HEAD.size)
        body, self._body, self._came = self._body, bytearray(), 0
        return kind, body

    async def _fill(self, data: bytearray, before: int) -> None:
        """All of it that has not come yet; `before`: bytes of the frame ahead of it."""
        step = self._download.grant_bytes if self._download else BUFFER_BYTES
        while (start := self._came - before) < len(data):
            try:
                await self._connection.fill(memoryview(data)[start : start + step])
            finally:
                self._count(self._connection.placed)
            if self._download:
                await self._download.pass_through(self._flows[1], self._connection.placed)

    def _count(self, size: int) -> None:
        self._came += size
        self._traffic.add_received(self.peer, size)
        self.moved_at = asyncio.get_running_loop().time()


@dataclass(eq=False)
class Turn:
    """A call that was sent. `come` once those before it are answered, or cannot be any more."""

    line: Line
    queue: "deque[Turn]"
    come: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> tuple[int, bytearray]:
        """The next frame of the answer; with the last one it is the next call's turn."""
        await self.come.wait()
        try:
            kind, body = await self.line.receive()
            if kind != REPLY and (kind != END or not body):
                raise MalformedError(f"a frame of kind {kind} and {len(body)} bytes where an answer is expected")
        except (OSError, EOFError, PeerFault):
            self.line.cut()
            while self.queue:
                self.queue.popleft().come.set()
            raise
        if kind == END:
            self.queue.popleft()
            self._look()
        return kind, body

    def _look(self) -> None:
        if self.queue:
            self.queue[0].come.set()

    def wait(self) -> None:
        """Behind those that were sent before."""
        self.queue.append(self)
        self._look()


class LineChannel:
    """Dials when there is something to call, and again when the line is gone. For a stub it is gRPC's channel.

    A line is closed after `idle` seconds without a call. TCP begins on a new connection without knowing how much the
    link carries, and where several begin at once, one may stay slow for seconds; one that rested knows.
    """

    def __init__(self, peer: PeerId, dial: Dial, tunnels: Tunnels, idle: float = KEPT_SECONDS) -> None:
        self._peer = peer
        self._dial = dial
        self._tunnels = tunnels
        self._idle = idle
        self._sending = asyncio.Lock()  # calls are answered in the order in which they were sent
        self._line: Line | None = None
        self._turns: deque[Turn] = deque()  # of that line

    def unary_unary(
        self, name: str, request_serializer: Callable[[Any], bytes], response_deserializer: Deserialize,
        **_: object,
    ) -> Callable[..., Awaitable[Any]]:  # fmt: skip
        async def call(request: Any, timeout: float) -> Any:
            replies = Replies(self, _called(name, request_serializer(request)), response_deserializer, timeout)
            reply = await replies.read()
            if reply is grpc.aio.EOF or await replies.read() is not grpc.aio.EOF:
                replies.cancel()
                raise _error(grpc.StatusCode.INTERNAL, "not one reply")
            return reply

        return call

    def unary_stream(
        self, name: str, request_serializer: Callable[[Any], bytes], response_deserializer: Deserialize,
        **_: object,
    ) -> "Callable[..., Replies]":  # fmt: skip
        def call(request: Any, timeout: float) -> Replies:
            return Replies(self, _called(name, request_serializer(request)), response_deserializer, timeout)

        return call

    async def close(self) -> None:
        if self._line:
            self._line.cut()

    @property
    def stands(self) -> bool:
        """Nothing need be dialled."""
        return self._standing is not None

    @property
    def _standing(self) -> Line | None:
        return None if self._line is None or self._line.is_cut else self._line

    async def send(self, body: bytes) -> Turn:
        async with self._sending:
            line = self._standing or await self._opened()
            await line.send(CALL, body)
            turn = Turn(line, self._turns)
            turn.wait()
            return turn

    async def _opened(self) -> Line:
        connection = await self._dial(self._peer)
        self._line = Line(self._peer, connection, self._tunnels, self._idle, is_ours=True)
        self._turns = deque()
        self._tunnels.spawn(self._keep(self._line))
        return self._line

    async def _keep(self, line: Line) -> None:
        """Until it ends; its memory goes with it."""
        try:
            await self._tunnels.keep_out(line)
        finally:
            if self._line is line:
                self._line = None

    def skip(self, turn: Turn) -> None:
        """Nobody waits for its answer any more."""
        if not turn.line.is_cut:
            self._tunnels.spawn(_skip(turn))


class Replies:
    """The answer to one call. AioRpcError: as gRPC says it."""

    def __init__(self, channel: LineChannel, body: bytes, deserialize: Deserialize, seconds: float) -> None:
        self._channel = channel
        self._body = body
        self._deserialize = deserialize
        self._ends = asyncio.get_running_loop().time() + seconds
        self._turn: Turn | None = None
        self._ended = False

    def __aiter__(self) -> "Replies":
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
            async with asyncio.timeout_at(self._ends):
                frame = await self._next()
            return grpc.aio.EOF if frame is None else self._parsed(frame)
        except TimeoutError as error:
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time") from error
        except (UnreachableError, TransportError, OSError, EOFError, PeerFault) as error:
            raise _error(grpc.StatusCode.UNAVAILABLE, told(error)) from error

    def _parsed(self, frame: bytearray) -> Any:
        """None where it does not parse, as gRPC has it."""
        try:
            return self._deserialize(frame)
        except DecodeError:
            return None

    async def _next(self) -> bytearray | None:
        try:
            return await self._frame()
        except BaseException:
            self.cancel()
            raise

    async def _frame(self) -> bytearray | None:
        if self._turn is None:
            self._turn = await self._channel.send(self._body)
        kind, body = await self._turn.receive()
        if kind == REPLY:
            return body
        self._ended = True
        if status := body[0]:
            raise _error(CODES.get(status, grpc.StatusCode.UNKNOWN), body[1:].decode(errors="replace"))
        return None

    def cancel(self) -> None:
        if self._turn and not self._ended:
            self._channel.skip(self._turn)
        self._ended = True


async def _skip(turn: Turn) -> None:
    kind, skipped = REPLY, 0
    with suppress(OSError, EOFError, PeerFault):
        while kind != END:
            kind, body = await turn.receive()
            skipped += HEAD.size + len(body)
            if skipped > MAX_SKIPPED_BYTES:
                logger.info("cutting a line to %s: what nobody waits for any more does not end", turn.line.peer)
                turn.line.cut()


def _called(name: str, request: bytes) -> bytes:
    return b"\0".join((name.encode(), request))


def _error(code: grpc.StatusCode, reason: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=reason)
