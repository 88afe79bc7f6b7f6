"""Run a small web server in the node's own event loop."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from protocol.errors import UsageError
from protocol.transport.nat import is_port_free
from protocol.transport.tls.listener import limit_unacknowledged

STOP_SECONDS = 3.0
WRITE_SECONDS = 20.0  # for the client to acknowledge written bytes
REQUEST_SECONDS = 10.0  # for a connection to send a whole request
MIN_CONNECTIONS_PER_HOST = 8  # connections that one address may always have
BACKLOG = 32


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the node."""
        yield


@contextlib.asynccontextmanager
async def serve(
    application: Starlette, listener: socket.socket, max_connections: int, request_seconds: float = REQUEST_SECONDS
) -> AsyncIterator[int]:
    """Serve at most `max_connections` connections; yield the port, and close the listener at the end.

    One address may open at most a quarter of them, except this machine's own, which may be a proxy. A connection that
    sends no whole request for `request_seconds` is closed, because an idle connection costs the client nothing.
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
    max_per_host = max(MIN_CONNECTIONS_PER_HOST, max_connections // 4)

    class LimitedProtocol(H11Protocol):
        host = ""
        watch: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.host = self.client[0] if self.client else ""
            same = sum(isinstance(other, LimitedProtocol) and other.host == self.host for other in self.connections)
            if len(self.connections) > max_connections or (same > max_per_host and not is_loopback(self.host)):
                transport.abort()
            else:
                self.schedule_check(None)

        def connection_lost(self, exc: Exception | None) -> None:
            if self.watch is not None:
                self.watch.cancel()
            super().connection_lost(exc)

        def schedule_check(self, answered: object) -> None:
            """Check again later; `answered` is the last answered request, None before the first."""
            self.watch = self.loop.call_later(request_seconds, self.check, answered)

        def check(self, answered: object) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self.schedule_check(None)
            elif self.cycle is not answered:
                self.schedule_check(self.cycle)
            else:
                self.transport.abort()

    return LimitedProtocol


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, also an IPv4 one mapped into IPv6."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


async def _wait_stopped(running: asyncio.Task[None]) -> None:
    _, pending = await asyncio.wait({running}, timeout=STOP_SECONDS)
    if pending:
        running.cancel()
        await asyncio.wait({running}, timeout=STOP_SECONDS)


def open_listener(host: str, port: int, option: str) -> socket.socket:
    """Return a listening TCP socket. Raises UsageError, which names the option to change.

    All interfaces are those of IPv4 and IPv6, as far as this machine has them.
    """
    bound = "::" if host == "0.0.0.0" and is_port_free(0, socket.AF_INET6) else host
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(bound != "::"))
    # Each connection inherits this: without it, written bytes that are never read outlive a close for ever.
    limit_unacknowledged(listener, WRITE_SECONDS)
    try:
        listener.bind((bound, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {option}") from error
    listener.setblocking(False)
    return listener
