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

from protocol.errors import ForgedError, PeerFault, PortTakenError, TransportError, UnreachableError, told
from protocol.identity import Identity, PeerId
from protocol.network.connection import Connection
from protocol.network.names import Names
from protocol.network.proof import (
    NONCE_BYTES,
    PROOF_BYTES,
    ServerProof,
    check_certificate,
    client_context,
    prove,
)

logger = logging.getLogger(__name__)

WELCOME = b"\x01"
BACKLOG = 64
BREATH_SECONDS = 0.2  # before the next attempt to accept, where the machine has no socket left
KEEPALIVE_SECONDS = 30  # sooner than a home router forgets a connection
Welcome = Callable[[PeerId, Connection, bytes], Awaitable[None]]


@dataclass(frozen=True)
class DirectLimits:
    """Of connections that have not proved who they are. `stall`: see TunnelLimits."""

    handshake: float = 5.0  # seconds for all of it, on either side
    strangers: int = 128
    strangers_per_host: int = 48  # all lanes of a peer at once, and some of a neighbour's
    stall: float = 30.0


@dataclass(frozen=True)
class Place:
    """Where a peer listens for direct connections: any of `hosts` (names or addresses), all at one port."""

    hosts: tuple[str, ...]
    port: int


class DirectDoor:
    """Listens; `welcome` carries a stream whose peer has proved who it is, and first sends it the bytes given."""

    def __init__(self, identity: Identity, welcome: Welcome, limits: DirectLimits | None = None) -> None:
        self.refusals: Counter[str] = Counter()
        self.port = 0
        self._proof = ServerProof(identity)
        self._welcome = welcome
        self._limits = limits or DirectLimits()
        self._listening: list[socket.socket] = []
        self._accepting: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], str] = {}  # to their hosts; the oldest first
        self._carried: set[asyncio.Task[None]] = set()

    def open(self, hosts: Sequence[str], port: int) -> None:
        """Listen at `port` (0: a free one) of each of these addresses, or of none.

        PortTakenError: somebody has it. TransportError: it cannot be had at all.
        """
        found: list[socket.socket] = []
        for host in hosts:
            try:
                found.append(_listen(host, found[0].getsockname()[1] if found else port))
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
            self._listening.append(listening)
            self._accepting.add(asyncio.create_task(self._accept(listening), name=f"direct door at {self.port}"))

    async def close(self) -> None:
        """Ends what is under way, too."""
        tasks = [*self._accepting, *self._strangers, *self._carried]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for listening in self._listening:
            listening.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError as error:
                self._refuse("not accepted", "somebody", error)
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    await asyncio.sleep(BREATH_SECONDS)
                continue
            self._meet(connection, str(address[0]))

    def _meet(self, connection: socket.socket, host: str) -> None:
        neighbourhood = _neighbourhood(host)
        if list(self._strangers.values()).count(neighbourhood) >= self._limits.strangers_per_host:
            self._refuse("too many from one host", host, None)
            return connection.close()
        if len(self._strangers) >= self._limits.strangers:
            oldest = next(iter(self._strangers))
            self._refuse("gave way", self._strangers.pop(oldest), None)
            oldest.cancel()
        task = asyncio.create_task(self._admit(connection, host))
        self._strangers[task] = neighbourhood
        task.add_done_callback(functools.partial(self._gone, connection))

    def _gone(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._carried.discard(task)
        connection.close()  # asyncio has it by now, unless the task was cancelled before it began

    async def _admit(self, accepted: socket.socket, host: str) -> None:
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._limits.handshake):
                connection = await self._secured(accepted)
                peer = await self._identified(connection)
        except (OSError, EOFError, PeerFault) as error:
            self._refuse(_reason(error), host, error)
        else:
            task = asyncio.current_task()
            assert task
            self._strangers.pop(task, None)
            self._carried.add(task)
            await self._welcome(peer, connection, WELCOME)
        finally:
            if connection:
                connection.abort()

    async def _secured(self, accepted: socket.socket) -> Connection:
        accepted.setblocking(False)
        _prepare(accepted, self._limits.stall)
        # From here on the descriptor is asyncio's, which closes it with the transport, however that ends.
        owned, loop = socket.socket(fileno=accepted.detach()), asyncio.get_running_loop()
        _, connection = await loop.connect_accepted_socket(Connection, owned, ssl=self._proof.context)
        return connection

    async def _identified(self, connection: Connection) -> PeerId:
        nonce = os.urandom(NONCE_BYTES)
        connection.write(nonce)
        return self._proof.check(await connection.read(PROOF_BYTES), nonce)

    def _refuse(self, reason: str, host: str, error: Exception | None) -> None:
        self.refusals[reason] += 1
        more = told(error) if error else "no more is known"
        logger.info("refusing a direct connection from %s: %s: %s", host, reason, more)


class DirectDialer:
    """Opens direct connections."""

    def __init__(self, identity: Identity, limits: DirectLimits | None = None, names: Names | None = None) -> None:
        self._identity = identity
        self._limits = limits or DirectLimits()
        self._names = names or Names()
        self._context = client_context()

    async def dial(self, peer: PeerId, place: Place) -> tuple[Connection, str]:
        """A connection to `peer`, and the host of the place at which it answered first. UnreachableError: none."""
        attempts = {asyncio.create_task(self._attempt(peer, host, place.port)): host for host in place.hosts}
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
            await _abandon(attempts)
        raise UnreachableError(f"no direct connection: {'; '.join(dict.fromkeys(reasons))}"[:300])

    async def _attempt(self, peer: PeerId, host: str, port: int) -> Connection:
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._limits.handshake):
                connection = await self._connected(await self._names.addresses(host, port), port)
                await self._introduce(peer, connection)
        except BaseException as error:
            if connection:
                connection.abort()
            # A name that is none is a UnicodeError.
            if isinstance(error, OSError | EOFError | UnicodeError | PeerFault):
                raise UnreachableError(f"{host} port {port}: {_reason(error)}") from error
            raise
        return connection

    async def _connected(self, addresses: Sequence[str], port: int) -> Connection:
        """With the first that answers."""
        *others, last = addresses
        for address in others:
            with suppress(OSError):
                return await self._connected_with(address, port)
        return await self._connected_with(last, port)

    async def _connected_with(self, address: str, port: int) -> Connection:
        # Without a server name: what TLS would make of it is not asked for, and the wire would show it.
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, address, port, ssl=self._context, server_hostname="")
        _prepare(connection.socket, self._limits.stall)
        return connection

    async def _introduce(self, peer: PeerId, connection: Connection) -> None:
        certificate = connection.certificate()
        check_certificate(peer, certificate)
        nonce = await connection.read(NONCE_BYTES)
        connection.write(prove(self._identity, peer, certificate, nonce))
        if await connection.read(len(WELCOME)) != WELCOME:
            raise ForgedError("it answers in another protocol")


async def _abandon(attempts: dict[asyncio.Task[Connection], str]) -> None:
    """Of attempts whose outcome is no longer wanted, none may be left half open."""
    for attempt in attempts:
        attempt.cancel()
    if attempts:
        await asyncio.wait(attempts)
    for attempt in attempts:
        if not attempt.cancelled() and attempt.exception() is None:
            attempt.result().abort()


def _reason(error: BaseException) -> str:
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


def _listen(host: str, port: int) -> socket.socket:
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


def _prepare(connection: socket.socket, stall: float) -> None:
    """The kernel cuts a connection whose other end takes nothing, however little waits; later than a tunnel would. An
    idle one is kept alive, in routers on its way too, and cut after as long where nobody answers to that."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2 * stall * 1000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _neighbourhood(host: str) -> str:
    """Whom one person may be: an IPv4 address, or the 64 bits of an IPv6 one that a provider hands out."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(address) if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))
