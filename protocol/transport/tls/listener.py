"""Listener and dialler of direct TLS connections between peers that can reach each other.

`handshake` authenticates both ends. A connection is then equal to a stream of p2pd: authenticated, encrypted, and under
the same limits. An unauthenticated connection costs little and not for long: its handshake has a deadline and fixed
sizes, one host may have few of them open at a time, and when all slots are taken the oldest is evicted, so that an
attacker who opens many connections and sends nothing shuts nobody out.
"""

import asyncio
import errno
import functools
import ipaddress
import logging
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from protocol.errors import ForgedError, PeerFault, PortTakenError, TransportError, UnreachableError, describe_error
from protocol.identity import Identity, PeerId
from protocol.transport import dial_policy
from protocol.transport.dial_policy import DialPolicy, Resolver
from protocol.transport.tls.connection import TlsConnection
from protocol.transport.tls.handshake import (
    NONCE_BYTES,
    PROOF_BYTES,
    ServerHandshake,
    check_certificate,
    make_client_context,
    make_proof,
)

logger = logging.getLogger(__name__)

ACCEPTED = b"\x01"
BACKLOG = 64
ACCEPT_RETRY_SECONDS = 0.2  # before the next attempt to accept when the machine has no socket left
TCP_RXT_CONNDROPTIME = 0x80  # of macOS; Python does not name it
KEEPALIVE_SECONDS = 30  # shorter than the NAT timeout of a home router
ServePeer = Callable[[PeerId, TlsConnection, bytes], Awaitable[None]]


@dataclass(frozen=True)
class TlsLimits:
    """Limits of unauthenticated connections; for `stall` see ConnectionLimits."""

    handshake: float = 5.0  # seconds for the whole handshake, on either side
    max_unauthenticated: int = 128
    max_unauthenticated_per_host: int = 48  # all connections of a peer at once, and some of a neighbour's
    stall: float = 30.0


@dataclass(frozen=True)
class DirectEndpoint:
    """Where a peer listens for direct connections.

    It listens at any of `hosts` (names or addresses), all on one port.
    """

    hosts: tuple[str, ...]
    port: int


class TlsListener:
    """Accepts direct connections and authenticates them.

    `serve_peer` serves an authenticated connection; it first sends the bytes passed to it.
    """

    def __init__(self, identity: Identity, serve_peer: ServePeer, limits: TlsLimits | None = None) -> None:
        self.refusals: Counter[str] = Counter()
        self.port = 0
        self._handshake = ServerHandshake(identity)
        self._serve_peer = serve_peer
        self._limits = limits or TlsLimits()
        self._sockets: list[socket.socket] = []
        self._accept_tasks: set[asyncio.Task[None]] = set()
        self._unauthenticated: dict[asyncio.Task[None], str] = {}  # host group by task, oldest first
        self._authenticated: set[asyncio.Task[None]] = set()

    def listen(self, hosts: Sequence[str], port: int) -> None:
        """Listen on `port` (0: a free one) of all these addresses, or on none of them.

        Raises:
            PortTakenError: Another program uses the port.
            TransportError: The port cannot be bound.
        """
        opened: list[socket.socket] = []
        for host in hosts:
            try:
                opened.append(_open_listening_socket(host, opened[0].getsockname()[1] if opened else port))
            except OSError as error:
                for listening in opened:
                    listening.close()
                kind = PortTakenError if error.errno == errno.EADDRINUSE else TransportError
                raise kind(
                    f"cannot listen for direct connections on {host} port {port}: {error.strerror}; "
                    "choose another --direct, or `--direct off`"
                ) from error
        for listening in opened:
            self.port = listening.getsockname()[1]
            self._sockets.append(listening)
            self._accept_tasks.add(
                asyncio.create_task(self._accept_loop(listening), name=f"direct listener at {self.port}")
            )

    async def close(self) -> None:
        """Stop listening and end all connections."""
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
                self._refuse("not accepted", "an unknown host", error)
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            self._start_handshake(connection, str(address[0]))

    def _start_handshake(self, connection: socket.socket, host: str) -> None:
        group = _host_group(host)
        if list(self._unauthenticated.values()).count(group) >= self._limits.max_unauthenticated_per_host:
            self._refuse("too many from one host", host, None)
            return connection.close()
        if len(self._unauthenticated) >= self._limits.max_unauthenticated:
            oldest = next(iter(self._unauthenticated))
            self._refuse("evicted", self._unauthenticated.pop(oldest), None)
            oldest.cancel()
        task = asyncio.create_task(self._handle_connection(connection, host))
        self._unauthenticated[task] = group
        task.add_done_callback(functools.partial(self._on_connection_done, connection))

    def _on_connection_done(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._unauthenticated.pop(task, None)
        self._authenticated.discard(task)
        connection.close()  # asyncio owns it by now, unless the task was cancelled before it began

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
        # From here on asyncio owns the descriptor and closes it with the transport, however that ends.
        owned, loop = socket.socket(fileno=accepted.detach()), asyncio.get_running_loop()
        _, connection = await loop.connect_accepted_socket(TlsConnection, owned, ssl=self._handshake.context)
        return connection

    async def _authenticate_peer(self, connection: TlsConnection) -> PeerId:
        nonce = os.urandom(NONCE_BYTES)
        connection.write(nonce)
        return self._handshake.verify_proof(await connection.read(PROOF_BYTES), nonce)

    def _refuse(self, reason: str, host: str, error: Exception | None) -> None:
        self.refusals[reason] += 1
        detail = describe_error(error) if error else "no further details"
        logger.debug("refusing a direct connection from %s: %s: %s", host, reason, detail)


class TlsDialer:
    """Opens direct connections and authenticates both ends."""

    def __init__(self, identity: Identity, limits: TlsLimits | None = None, resolver: Resolver | None = None) -> None:
        self._identity = identity
        self._limits = limits or TlsLimits()
        self._resolver = resolver or Resolver()
        self._context = make_client_context()
        self.policy: DialPolicy | None = None  # None: every address is dialled

    async def dial(self, peer: PeerId, endpoint: DirectEndpoint) -> tuple[TlsConnection, str]:
        """Dial all hosts of a peer, and return the first connection and its host.

        Raises UnreachableError.
        """
        attempts = {asyncio.create_task(self._dial_host(peer, host, endpoint.port)): host for host in endpoint.hosts}
        reasons = ["the peer names no host"] if not attempts else []
        pending = set(attempts)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
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
                addresses = self._admitted(peer, await self._resolver.resolve(host, port), port)
                connection = await self._connect_to_any(addresses, port)
                await self._authenticate(peer, connection)
        except BaseException as error:
            if connection:
                connection.abort()
            self._record_failure(peer, host, port)
            # An invalid name raises a UnicodeError.
            if isinstance(error, OSError | EOFError | UnicodeError | PeerFault):
                raise UnreachableError(f"{host} port {port}: {_refusal_reason(error)}") from error
            raise
        self._record_proof(peer, connection, port)
        return connection

    def _admitted(self, peer: PeerId, addresses: Sequence[str], port: int) -> Sequence[str]:
        """Return the addresses that may be dialled now. Raises UnreachableError if there are none."""
        if self.policy is None:
            return addresses
        now, policy = time.monotonic(), self.policy
        admitted = [address for address in addresses if policy.admits(peer, dial_policy.Endpoint(address, port), now)]
        if not admitted:
            raise UnreachableError(f"port {port} may not be dialled there now")
        return admitted

    def _record_proof(self, peer: PeerId, connection: TlsConnection, port: int) -> None:
        if self.policy is not None:
            address = str(connection.socket.getpeername()[0])
            self.policy.record_proof(peer, dial_policy.Endpoint(address, port), time.monotonic())

    def _record_failure(self, peer: PeerId, host: str, port: int) -> None:
        if self.policy is not None and dial_policy.parse_ip(host) is not None:
            self.policy.record_failure(peer, dial_policy.Endpoint(host, port), time.monotonic())

    async def _connect_to_any(self, addresses: Sequence[str], port: int) -> TlsConnection:
        """Connect to the first address that answers."""
        *others, last = addresses
        for address in others:
            with suppress(OSError):
                return await self._connect_to(address, port)
        return await self._connect_to(last, port)

    async def _connect_to(self, address: str, port: int) -> TlsConnection:
        # Without a server name: we do not need what TLS would do with it, and it would be visible on the wire.
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
            raise ForgedError("it speaks another protocol")


async def _cancel_attempts(attempts: dict[asyncio.Task[TlsConnection], str]) -> None:
    """Cancel the remaining attempts, and abort those that connected meanwhile."""
    for attempt in attempts:
        attempt.cancel()
    if attempts:
        await asyncio.wait(attempts)
    for attempt in attempts:
        if not attempt.cancelled() and attempt.exception() is None:
            attempt.result().abort()


def _refusal_reason(error: BaseException) -> str:
    """Return one of a few fixed texts, because refusals are counted by reason."""
    if isinstance(error, TimeoutError):
        return "too slow"
    if isinstance(error, ForgedError):
        return "forged"
    if isinstance(error, PeerFault):
        return "malformed"
    if isinstance(error, ssl.SSLError):
        return "other protocol"
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
    """Configure the kernel's timeouts of a connection.

    The kernel cuts a connection whose other end takes nothing, however little waits; the supervisor does so sooner.
    Keepalives keep an idle connection open in routers on its path, and cut it after as long without an answer.
    """
    limit_unacknowledged(connection, 2 * stall)
    keep_alive(connection, KEEPALIVE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def limit_unacknowledged(connection: socket.socket, seconds: float) -> None:
    """Let the kernel cut a connection whose bytes the other end has not taken for as long."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
    else:  # macOS counts in seconds
        connection.setsockopt(socket.IPPROTO_TCP, TCP_RXT_CONNDROPTIME, max(1, int(seconds)))


def keep_alive(connection: socket.socket, seconds: int) -> None:
    """Let the kernel send something on an idle connection, and as often until the other end answers."""
    idle: int = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE")  # noqa: B009
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, idle, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)


def _host_group(host: str) -> str:
    """Return the hosts that one person may control.

    That is an IPv4 address, or the /64 network of an IPv6 address.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(address) if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))
