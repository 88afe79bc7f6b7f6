"""Server side of direct connections (see `rpc`), with the same servicers as gRPC's server.

It answers the calls of a connection one at a time; further calls wait in the caller's socket.
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

MAX_REASON_CHARACTERS = 300


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
