"""Where calls that come by lines (see `line`) are answered, by the same servicers as gRPC's.

One call of a line is answered at a time; what follows waits in the caller's socket.
"""

import asyncio
import inspect
import logging
from collections.abc import Mapping
from typing import Any, NoReturn

import grpc

from protocol.errors import LimitError, PeerFault
from protocol.identity import PeerId
from protocol.network.connection import Connection
from protocol.network.doors import NAME
from protocol.network.line import CALL, END, REPLY, Line
from protocol.network.tunnel import Tunnels

logger = logging.getLogger(__name__)

MAX_REASON = 300  # characters


class RefusedError(Exception):
    """A servicer has ended a call."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Context:
    """What servicers use of gRPC's."""

    def __init__(self, line: Line, handler: Any) -> None:
        self._line = line
        self._handler = handler

    def peer(self) -> str:
        """As gRPC names a caller that came in by the entrance."""
        return f"unix-abstract:{NAME}/{self._line.peer}/line"

    async def write(self, reply: Any) -> None:
        await self._line.send(REPLY, self._handler.response_serializer(reply))

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise RefusedError(code, details)


class Desk:
    """For the generated code it is a server to which servicers are added."""

    def __init__(self, tunnels: Tunnels) -> None:
        self._tunnels = tunnels
        self._handlers: dict[bytes, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same as the registered ones."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self._handlers |= {f"/{service}/{name}".encode(): handler for name, handler in handlers.items()}

    async def welcome(self, peer: PeerId, connection: Connection, greeting: bytes) -> None:
        """Answer the calls of a peer who has proved its identity, as long as it stays; `greeting` is sent first."""
        if not self._tunnels.admits(peer):
            return
        connection.write(greeting)
        line = Line(peer, connection, self._tunnels, self._tunnels.limits.line_idle, is_ours=False)
        answering = asyncio.create_task(self._answer_all(line))
        try:
            await self._tunnels.keep_in(line)
        finally:
            answering.cancel()
            await asyncio.wait([answering])
            line.cut()

    async def _answer_all(self, line: Line) -> None:
        try:
            while True:
                kind, body = await line.receive()
                if kind != CALL:
                    raise LimitError(f"a frame of kind {kind} where a call is expected")
                await self._answer(line, body)
        except PeerFault as fault:
            self._tunnels.refusals[fault.word] += 1
            logger.warning("cutting a line of %s: %s", line.peer, fault)
        except (OSError, EOFError) as error:
            logger.debug("a line of %s has ended: %s", line.peer, error)
        finally:
            line.cut()

    async def _answer(self, line: Line, body: bytearray) -> None:
        code, reason = grpc.StatusCode.OK, ""
        name, _, request = bytes(body).partition(b"\0")
        try:
            await self._serve(line, name, request)
        except RefusedError as refusal:
            code, reason = refusal.code, str(refusal)
        except Exception:  # a fault of a servicer ends its call, as gRPC has it, and nothing else
            if line.is_cut:
                return
            logger.exception("a call of %s broke", line.peer)
            code = grpc.StatusCode.UNKNOWN
        await line.send(END, bytes([code.value[0]]) + reason[:MAX_REASON].encode())

    async def _serve(self, line: Line, name: bytes, request: bytes) -> None:
        handler = self._handlers.get(name)
        if handler is None or handler.request_streaming:
            raise RefusedError(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        context = Context(line, handler)
        try:
            message = handler.request_deserializer(request)
        except Exception as error:  # protobuf's own kind
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "the request does not parse") from error
        if not handler.response_streaming:
            await context.write(await handler.unary_unary(message, context))
            return
        answer = handler.unary_stream(message, context)
        if inspect.isawaitable(answer):
            await answer
            return
        async for reply in answer:
            await context.write(reply)
