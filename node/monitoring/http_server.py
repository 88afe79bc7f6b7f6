"""A small web server inside the node's own event loop."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from protocol.errors import UsageError

STOP_SECONDS = 3.0
WRITE_SECONDS = 20.0  # that the other side may take to accept what is sent
REQUEST_SECONDS = 10.0  # that a connection may take to bring a request
MIN_CONNECTIONS_PER_HOST = 8  # connections that one address may always have
BACKLOG = 32


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the node."""
        yield


@contextlib.asynccontextmanager
async def serve(
    application: Starlette, listener: socket.socket, max_connections: int, request_seconds: float = REQUEST_SECONDS
) -> AsyncIterator[int]:
    """Serve at most so many connections; yields the port. The listener is closed at the end.

    One address has at most a quarter of them, but for this machine's own, where a proxy may stand before us. What
    brings no whole request for `patience` seconds is closed: a held connection costs its other side nothing.
    """
    config = uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http=_limited_protocol(max_connections, request_seconds),
        backlog=BACKLOG,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]), name="web server")
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await _wait_stopped(running)
        listener.close()


def _limited_protocol(max_connections: int, request_seconds: float) -> type[H11Protocol]:
    share = max(MIN_CONNECTIONS_PER_HOST, max_connections // 4)

    class Guarded(H11Protocol):
        host = ""
        watch: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.host = self.client[0] if self.client else ""
            same = sum(isinstance(other, Guarded) and other.host == self.host for other in self.connections)
            if len(self.connections) > max_connections or (same > share and not is_loopback(self.host)):
                transport.abort()
            else:
                self.look_after(None)

        def connection_lost(self, exc: Exception | None) -> None:
            if self.watch is not None:
                self.watch.cancel()
            super().connection_lost(exc)

        def look_after(self, seen: object) -> None:
            """`seen`: the request that was answered when we looked last; None: there was none yet."""
            self.watch = self.loop.call_later(request_seconds, self.look, seen)

        def look(self, seen: object) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self.look_after(None)
            elif self.cycle is not seen:
                self.look_after(self.cycle)
            else:
                self.transport.abort()

    return Guarded


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine's loopback, also where IPv6 carries IPv4."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


async def _wait_stopped(running: asyncio.Task[None]) -> None:
    _, late = await asyncio.wait({running}, timeout=STOP_SECONDS)
    if late:
        running.cancel()
        await asyncio.wait({running}, timeout=STOP_SECONDS)


def open_listener(host: str, port: int, option: str) -> socket.socket:
    """A TCP socket that listens; raises UsageError, which names the option to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Also inherited by each connection: what is written but never read does not stay for ever after a close.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(WRITE_SECONDS * 1000))
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; give another {option}") from error
    listener.setblocking(False)
    return listener
