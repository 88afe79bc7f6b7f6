"""Direct TLS connections between peers that can reach each other: the door that listens, and how one is dialled.

Who is who stands in `proof`. A stream of either end is as good as one of p2pd's: authenticated, encrypted, carried by
the same tunnels with the same limits. A connection that has not said who it is costs little and not for long: its
handshake has a deadline and exact sizes, one host has few of them open at a time, and where all places are taken the
oldest yields its own, so that somebody who opens many and says nothing shuts nobody out.
"""

import asyncio
import errno
import functools
import ipaddress
import logging
import os
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from protocol.errors import ForgedError, PeerFault, PortTakenError, TransportError, UnreachableError, describe_error
from protocol.identity import Identity, PeerId
from protocol.transport.tls.connection import TlsConnection
from protocol.transport.tls.handshake import (
    NONCE_BYTES,
    PROOF_BYTES,
    ServerHandshake,
    check_certificate,
    make_client_context,
    make_proof,
)
from protocol.transport.tls.resolver import Resolver

logger = logging.getLogger(__name__)

ACCEPTED = b"\x01"
BACKLOG = 64
ACCEPT_RETRY_SECONDS = 0.2  # before the next attempt to accept, where the machine has no socket left
KEEPALIVE_SECONDS = 30  # sooner than a home router forgets a connection
ServePeer = Callable[[PeerId, TlsConnection, bytes], Awaitable[None]]


@dataclass(frozen=True)
class TlsLimits:
    """Of connections that have not proved who they are. `stall`: see TunnelLimits."""

    handshake: float = 5.0  # seconds for all of it, on either side
    max_unauthenticated: int = 128
    max_unauthenticated_per_host: int = 48  # all lanes of a peer at once, and some of a neighbour's
    stall: float = 30.0


@dataclass(frozen=True)
class Endpoint:
    """Where a peer listens for direct connections: any of `hosts` (names or addresses), all at one port."""

    hosts: tuple[str, ...]
    port: int


class TlsListener:
    """Listens; `welcome` carries a stream whose peer has proved who it is, and first sends it the bytes given."""

    def __init__(self, identity: Identity, serve_peer: ServePeer, limits: TlsLimits | None = None) -> None:
        self.refusals: Counter[str] = Counter()
        self.port = 0
        self._handshake = ServerHandshake(identity)
        self._serve_peer = serve_peer
        self._limits = limits or TlsLimits()
        self._sockets: list[socket.socket] = []
        self._accept_tasks: set[asyncio.Task[None]] = set()
        self._unauthenticated: dict[asyncio.Task[None], str] = {}  # to their hosts; the oldest first
        self._authenticated: set[asyncio.Task[None]] = set()

    def listen(self, hosts: Sequence[str], port: int) -> None:
        """Listen at `port` (0: a free one) of each of these addresses, or of none.

        PortTakenError: somebody has it. TransportError: it cannot be had at all.
        """
        found: list[socket.socket] = []
        for host in hosts:
            try:
                found.append(_open_listening_socket(host, found[0].getsockname()[1] if found else port))
            except OSError as error:
                for listening in found:
                    listening.close()
                kind = PortTakenError if error.errno == errno.EADDRINUSE else TransportError
                raise kind(
                    f"cannot listen for direct connections on {host} port {port}: {error.strerror}; "
                    "choose another --direct, or `--direct off`"
                ) from error
        for listening in found:
            self.port = listening.getsockname()[1]
            self._sockets.append(listening)
            self._accept_tasks.add(
                asyncio.create_task(self._accept_loop(listening), name=f"direct door at {self.port}")
            )

    async def close(self) -> None:
        """Ends what is under way, too."""
        tasks = [*self._accept_tasks, *self._unauthenticated, *self._authenticated]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for listening in self._sockets:
            listening.close()

    async def _accept_loop(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError as error:
                self._refuse("not accepted", "somebody", error)
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            self._start_handshake(connection, str(address[0]))

    def _start_handshake(self, connection: socket.socket, host: str) -> None:
        neighbourhood = _host_group(host)
        if list(self._unauthenticated.values()).count(neighbourhood) >= self._limits.max_unauthenticated_per_host:
            self._refuse("too many from one host", host, None)
            return connection.close()
        if len(self._unauthenticated) >= self._limits.max_unauthenticated:
            oldest = next(iter(self._unauthenticated))
            self._refuse("gave way", self._unauthenticated.pop(oldest), None)
            oldest.cancel()
        task = asyncio.create_task(self._handle_connection(connection, host))
        self._unauthenticated[task] = neighbourhood
        task.add_done_callback(functools.partial(self._on_connection_done, connection))

    def _on_connection_done(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._unauthenticated.pop(task, None)
        self._authenticated.discard(task)
        connection.close()  # asyncio has it by now, unless the task was cancelled before it began

    async def _handle_connection(self, accepted: socket.socket, host: str) -> None:
        connection: TlsConnection | None = None
        try:
            async with asyncio.timeout(self._limits.handshake):
                connection = await self._start_tls(accepted)
                peer = await self._authenticate_peer(connection)
        except (OSError, EOFError, PeerFault) as error:
            self._refuse(_refusal_reason(error), host, error)
        else:
            task = asyncio.current_task()
            assert task
            self._unauthenticated.pop(task, None)
            self._authenticated.add(task)
            await self._serve_peer(peer, connection, ACCEPTED)
        finally:
            if connection:
                connection.abort()

    async def _start_tls(self, accepted: socket.socket) -> TlsConnection:
        accepted.setblocking(False)
        _configure_socket(accepted, self._limits.stall)
        # From here on the descriptor is asyncio's, which closes it with the transport, however that ends.
        owned, loop = socket.socket(fileno=accepted.detach()), asyncio.get_running_loop()
        _, connection = await loop.connect_accepted_socket(TlsConnection, owned, ssl=self._handshake.context)
        return connection

    async def _authenticate_peer(self, connection: TlsConnection) -> PeerId:
        nonce = os.urandom(NONCE_BYTES)
        connection.write(nonce)
        return self._handshake.verify_proof(await connection.read(PROOF_BYTES), nonce)

    def _refuse(self, reason: str, host: str, error: Exception | None) -> None:
        self.refusals[reason] += 1
        more = describe_error(error) if error else "no more is known"
        logger.info("refusing a direct connection from %s: %s: %s", host, reason, more)


class TlsDialer:
    """Opens direct connections."""

    def __init__(self, identity: Identity, limits: TlsLimits | None = None, resolver: Resolver | None = None) -> None:
        self._identity = identity
        self._limits = limits or TlsLimits()
        self._resolver = resolver or Resolver()
        self._context = make_client_context()

    async def dial(self, peer: PeerId, endpoint: Endpoint) -> tuple[TlsConnection, str]:
        """A connection to `peer`, and the host of the place at which it answered first. UnreachableError: none."""
        attempts = {asyncio.create_task(self._dial_host(peer, host, endpoint.port)): host for host in endpoint.hosts}
        reasons = ["it names no host"] if not attempts else []
        waiting = set(attempts)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for attempt in done:
                    try:
                        return attempt.result(), attempts.pop(attempt)
                    except UnreachableError as error:
                        reasons.append(str(error))
        finally:
            await _cancel_attempts(attempts)
        raise UnreachableError(f"no direct connection: {'; '.join(dict.fromkeys(reasons))}"[:300])

    async def _dial_host(self, peer: PeerId, host: str, port: int) -> TlsConnection:
        connection: TlsConnection | None = None
        try:
            async with asyncio.timeout(self._limits.handshake):
                connection = await self._connect_to_any(await self._resolver.resolve(host, port), port)
                await self._authenticate(peer, connection)
        except BaseException as error:
            if connection:
                connection.abort()
            # A name that is none is a UnicodeError.
            if isinstance(error, OSError | EOFError | UnicodeError | PeerFault):
                raise UnreachableError(f"{host} port {port}: {_refusal_reason(error)}") from error
            raise
        return connection

    async def _connect_to_any(self, addresses: Sequence[str], port: int) -> TlsConnection:
        """With the first that answers."""
        *others, last = addresses
        for address in others:
            with suppress(OSError):
                return await self._connect_to(address, port)
        return await self._connect_to(last, port)

    async def _connect_to(self, address: str, port: int) -> TlsConnection:
        # Without a server name: what TLS would make of it is not asked for, and the wire would show it.
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            TlsConnection, address, port, ssl=self._context, server_hostname=""
        )
        _configure_socket(connection.socket, self._limits.stall)
        return connection

    async def _authenticate(self, peer: PeerId, connection: TlsConnection) -> None:
        certificate = connection.peer_certificate()
        check_certificate(peer, certificate)
        nonce = await connection.read(NONCE_BYTES)
        connection.write(make_proof(self._identity, peer, certificate, nonce))
        if await connection.read(len(ACCEPTED)) != ACCEPTED:
            raise ForgedError("it answers in another protocol")


async def _cancel_attempts(attempts: dict[asyncio.Task[TlsConnection], str]) -> None:
    """Of attempts whose outcome is no longer wanted, none may be left half open."""
    for attempt in attempts:
        attempt.cancel()
    if attempts:
        await asyncio.wait(attempts)
    for attempt in attempts:
        if not attempt.cancelled() and attempt.exception() is None:
            attempt.result().abort()


def _refusal_reason(error: BaseException) -> str:
    """A few fixed words: they are counted."""
    if isinstance(error, TimeoutError):
        return "too slow"
    if isinstance(error, ForgedError):
        return "forged"
    if isinstance(error, PeerFault):
        return "malformed"
    if isinstance(error, ssl.SSLError):
        return "no TLS of ours"
    return "cut"


def _open_listening_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def _configure_socket(connection: socket.socket, stall: float) -> None:
    """The kernel cuts a connection whose other end takes nothing, however little waits; later than a tunnel would. An
    idle one is kept alive, in routers on its way too, and cut after as long where nobody answers to that."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2 * stall * 1000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _host_group(host: str) -> str:
    """Whom one person may be: an IPv4 address, or the 64 bits of an IPv6 one that a provider hands out."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(address) if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))
