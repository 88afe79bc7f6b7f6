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
from protocol.transport.connection_supervisor import ConnectionSupervisor
from protocol.transport.libp2p.grpc_bridge import SOCKET_NAMESPACE
from protocol.transport.tls.connection import TlsConnection
from protocol.transport.tls.rpc import CALL, END, REPLY, FramedConnection

logger = logging.getLogger(__name__)

MAX_REASON_CHARACTERS = 300  # characters


class CallAbortedError(Exception):
    """A servicer has ended a call."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class RpcContext:
    """What servicers use of gRPC's."""

    def __init__(self, connection: FramedConnection, handler: Any) -> None:
        self._connection = connection
        self._handler = handler

    def peer(self) -> str:
        """As gRPC names a caller that came in by the entrance."""
        return f"unix-abstract:{SOCKET_NAMESPACE}/{self._connection.peer}/line"

    async def write(self, reply: Any) -> None:
        await self._connection.send(REPLY, self._handler.response_serializer(reply))

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise CallAbortedError(code, details)


class RpcServer:
    """For the generated code it is a server to which servicers are added."""

    def __init__(self, supervisor: ConnectionSupervisor) -> None:
        self._supervisor = supervisor
        self._handlers: dict[bytes, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same as the registered ones."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self._handlers |= {f"/{service}/{name}".encode(): handler for name, handler in handlers.items()}

    async def serve_peer(self, peer: PeerId, connection: TlsConnection, greeting: bytes) -> None:
        """Answer the calls of a peer who has proved its identity, as long as it stays; `greeting` is sent first."""
        if not self._supervisor.try_admit(peer):
            return
        connection.write(greeting)
        line = FramedConnection(peer, connection, self._supervisor, self._supervisor.limits.rpc_idle, is_outgoing=False)
        answering = asyncio.create_task(self._serve_calls(line))
        try:
            await self._supervisor.supervise_incoming(line)
        finally:
            answering.cancel()
            await asyncio.wait([answering])
            line.cut()

    async def _serve_calls(self, connection: FramedConnection) -> None:
        try:
            while True:
                kind, body = await connection.receive()
                if kind != CALL:
                    raise LimitError(f"a frame of kind {kind} where a call is expected")
                await self._serve_call(connection, body)
        except PeerFault as fault:
            self._supervisor.refusals[fault.metric_label] += 1
            logger.warning("cutting a line of %s: %s", connection.peer, fault)
        except (OSError, EOFError) as error:
            logger.debug("a line of %s has ended: %s", connection.peer, error)
        finally:
            connection.cut()

    async def _serve_call(self, connection: FramedConnection, body: bytearray) -> None:
        code, reason = grpc.StatusCode.OK, ""
        name, _, request = bytes(body).partition(b"\0")
        try:
            await self._run_handler(connection, name, request)
        except CallAbortedError as refusal:
            code, reason = refusal.code, str(refusal)
        except Exception:  # a fault of a servicer ends its call, as gRPC has it, and nothing else
            if connection.has_ended:
                return
            logger.exception("a call of %s broke", connection.peer)
            code = grpc.StatusCode.UNKNOWN
        await connection.send(END, bytes([code.value[0]]) + reason[:MAX_REASON_CHARACTERS].encode())

    async def _run_handler(self, connection: FramedConnection, name: bytes, request: bytes) -> None:
        handler = self._handlers.get(name)
        if handler is None or handler.request_streaming:
            raise CallAbortedError(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        context = RpcContext(connection, handler)
        try:
            message = handler.request_deserializer(request)
        except Exception as error:  # protobuf's own kind
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
