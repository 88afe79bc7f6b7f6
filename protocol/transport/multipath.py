"""Bulk transfers with peers: over several direct connections where a direct path works, else over libp2p.

A call leases a channel and returns it; meanwhile it reports the bytes it received and whether the connection broke.
`multipath_policy` decides from these reports which path to use and how many connections; this module owns the
connections. Nothing waits for a direct path: it is probed while calls go by libp2p, and later calls move over to it.
"""

import asyncio
import logging
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import grpc

from protocol.errors import UnreachableError
from protocol.identity import PeerId
from protocol.recent import RecentTable
from protocol.tasks import run_periodically
from protocol.transport.connection_supervisor import ConnectionSupervisor
from protocol.transport.multipath_policy import BulkPath, ConnectionCountController, PathSelector, TransferTotals
from protocol.transport.tls.connection import TcpReceiveStats, TlsConnection, count_link_losses, read_tcp_receive_stats
from protocol.transport.tls.listener import DirectEndpoint, TlsDialer
from protocol.transport.tls.rpc import IDLE_SECONDS, SPARE_IDLE_SECONDS, RpcChannel

logger = logging.getLogger(__name__)

OBSERVE_INTERVAL_SECONDS = 0.1  # between two measurements of the connections
CALLS_PER_CONNECTION = 2  # so that a connection is never without work
MAX_ENDPOINTS = 8192  # endpoints that are remembered
MAX_PEERS = 256  # peers with recent bulk transfers


@dataclass(eq=False)
class PooledConnection:
    """One direct connection and the number of calls on it."""

    channel: RpcChannel = field(init=False)
    calls: int = 0
    tcp_socket: socket.socket | None = None  # once it is connected
    tcp_stats: TcpReceiveStats = field(default_factory=TcpReceiveStats)

    def count_new_losses(self) -> int:
        """Return how many new packets indicate losses on the link."""
        before, self.tcp_stats = (
            self.tcp_stats,
            read_tcp_receive_stats(self.tcp_socket) if self.tcp_socket else TcpReceiveStats(),
        )
        return count_link_losses(before, self.tcp_stats)


@dataclass(eq=False)
class PeerConnections:
    """The direct connections with one peer and the measurements that steer them.

    `last_host` is the host at which the peer answered last.
    """

    endpoint: DirectEndpoint | None = None
    last_host: str = ""
    path_selector: PathSelector = field(default_factory=PathSelector)
    count_controller: ConnectionCountController = field(default_factory=ConnectionCountController)
    active: list[PooledConnection] = field(default_factory=list)
    draining: set[PooledConnection] = field(default_factory=set)  # no new calls; closed after the last one
    lost_packets: int = 0  # received packets so far that indicate losses on the link
    is_probing: bool = False  # or opens a connection without a call

    @property
    def running_calls(self) -> int:
        return sum(goodput.calls for goodput in self.path_selector.goodput.values())

    @property
    def busy_connections(self) -> int:
        """Return the number of connections that carry a call."""
        return len(self.draining) + sum(connection.calls > 0 for connection in self.active)

    def observe(self, now: float, peer_bytes: int, total_bytes: int) -> None:
        """Update the connection count from the bytes received so far."""
        self.lost_packets += sum(connection.count_new_losses() for connection in self.active)
        queued = 2 * sum(connection.tcp_stats.is_queued for connection in self.active) > len(self.active)
        self.count_controller.observe(
            now, self.busy_connections, TransferTotals(peer_bytes, total_bytes, self.lost_packets, queued)
        )


class BulkLease:
    """A channel leased for one call; enter it for the duration of the call."""

    def __init__(
        self,
        bulk: "BulkTransport",
        peer_connections: PeerConnections,
        path: BulkPath,
        channel: grpc.aio.Channel | RpcChannel,
        connection: PooledConnection | None,
    ) -> None:
        self.channel = channel
        self._bulk = bulk
        self._peer_connections = peer_connections
        self._path = path
        self._connection = connection
        self._is_broken = False

    def record_received(self, size: int) -> None:
        self._peer_connections.path_selector.goodput[self._path].record_bytes(size)
        self._bulk.bytes_received[self._path] += size

    def report_broken(self, reason: str) -> None:
        """Report that the call failed, possibly because of the connection."""
        self._is_broken = True
        if self._path is BulkPath.DIRECT and self._peer_connections.path_selector.is_direct_verified:
            self._bulk.abandon_direct(self._peer_connections, reason)

    def __enter__(self) -> Self:
        self._peer_connections.path_selector.goodput[self._path].call_started(_now())
        if self._connection:
            self._connection.calls += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._peer_connections.path_selector.goodput[self._path].call_ended(_now())
        if self._path is BulkPath.DIRECT and not self._is_broken and error is None:
            self._peer_connections.path_selector.record_delivery()
        if self._connection:
            self._bulk.release_connection(self._peer_connections, self._connection)


class BulkTransport:
    """Leases channels for bulk calls to all peers of a node.

    `libp2p_channel` returns the fallback.
    """

    def __init__(
        self, dialer: TlsDialer, supervisor: ConnectionSupervisor, libp2p_channel: Callable[[PeerId], grpc.aio.Channel]
    ) -> None:
        self.bytes_received: Counter[BulkPath] = Counter()  # payload of calls
        self._dialer = dialer
        self._supervisor = supervisor
        self._libp2p_channel = libp2p_channel
        self._endpoints = RecentTable[PeerId, DirectEndpoint](MAX_ENDPOINTS)
        self._peers: OrderedDict[PeerId, PeerConnections] = OrderedDict()
        self._open_connections: set[PooledConnection] = set()
        supervisor.spawn(run_periodically(OBSERVE_INTERVAL_SECONDS, self._observe))

    def set_endpoint(self, peer: PeerId, endpoint: DirectEndpoint | None) -> None:
        """Set where `peer` takes direct connections now; `None` means nowhere."""
        if endpoint is None:
            self._endpoints.pop(peer, None)
        else:
            self._endpoints[peer] = endpoint
        connections = self._peers.get(peer)
        if connections and connections.endpoint != endpoint:
            self._change_endpoint(connections, endpoint)

    def endpoint_of(self, peer: PeerId) -> DirectEndpoint | None:
        """Return where `peer` takes direct connections, None if nowhere."""
        return self._endpoints.get(peer)

    def _change_endpoint(self, connections: PeerConnections, endpoint: DirectEndpoint | None) -> None:
        connections.endpoint = endpoint
        connections.path_selector.reset_direct()
        self._drain(connections, 0)

    def lease_channel(self, peer: PeerId) -> BulkLease:
        """Return a lease for one call to `peer` on the best path and connection."""
        now, connections = _now(), self._connections_of(peer)
        self._probe_if_due(peer, connections, now)
        path = connections.path_selector.next_path(now)
        if path is BulkPath.LIBP2P:
            return BulkLease(self, connections, path, self._libp2p_channel(peer), None)
        pooled = self._pick_connection(peer, connections)
        return BulkLease(self, connections, path, pooled.channel, pooled)

    def open_direct(self, peer: PeerId) -> None:
        """Open a direct connection in the background to a peer that gets many small calls.

        It does nothing if one is open, or if as many peers as we remember have recent transfers.
        """
        if peer not in self._peers and len(self._peers) >= MAX_PEERS:
            return
        connections = self._connections_of(peer)
        self._probe_if_due(peer, connections, _now())
        is_open = any(pooled.channel.is_open for pooled in connections.active)
        if connections.path_selector.best_path is BulkPath.DIRECT and not is_open and not connections.is_probing:
            connections.is_probing = True
            self._supervisor.spawn(self._open_connection(connections, self._pick_connection(peer, connections)))

    async def _open_connection(self, connections: PeerConnections, pooled: PooledConnection) -> None:
        try:
            await pooled.channel.open()
        except UnreachableError as error:
            self.abandon_direct(connections, str(error))
        finally:
            connections.is_probing = False

    def _probe_if_due(self, peer: PeerId, connections: PeerConnections, now: float) -> None:
        if connections.endpoint and not connections.is_probing and connections.path_selector.should_probe(now):
            connections.is_probing = True
            self._supervisor.spawn(self._probe_direct(peer, connections, connections.endpoint))

    def fallback_channel(self, peer: PeerId) -> AbstractContextManager[RpcChannel | None]:
        """Lend a connection for one call that does not count as bulk.

        The result is None if no direct path is verified.
        """
        connections = self._peers.get(peer)
        if connections is None or not connections.endpoint or not connections.path_selector.is_direct_verified:
            return nullcontext()
        return self._borrow(connections, self._pick_connection(peer, connections))

    def idle_channel(self, peer: PeerId) -> AbstractContextManager[RpcChannel | None]:
        """Lend an open, idle connection for one call that does not count as bulk.

        The result is None if there is no such connection.
        """
        connections = self._peers.get(peer)
        if connections is None or connections.path_selector.best_path is not BulkPath.DIRECT:
            return nullcontext()
        free = next((pooled for pooled in connections.active if not pooled.calls and pooled.channel.is_open), None)
        return self._borrow(connections, free) if free else nullcontext()

    @contextmanager
    def _borrow(self, connections: PeerConnections, connection: PooledConnection) -> Iterator[RpcChannel]:
        connection.calls += 1
        try:
            yield connection.channel
        finally:
            self.release_connection(connections, connection)

    def parallelism(self, peer: PeerId) -> int:
        """Return how many calls to `peer` should run at once."""
        connections = self._peers.get(peer)
        if connections is None or connections.path_selector.best_path is BulkPath.LIBP2P:
            return CALLS_PER_CONNECTION
        # Calls that began over libp2p do not occupy a direct connection.
        return (
            CALLS_PER_CONNECTION * connections.count_controller.connections
            + connections.path_selector.goodput[BulkPath.LIBP2P].calls
        )

    def describe_paths(self) -> dict[PeerId, str]:
        """Return a text with path and connection count for each recent bulk peer."""
        return {peer: _describe_path(connections) for peer, connections in self._peers.items()}

    def forget(self, peer: PeerId) -> None:
        """Forget a peer's endpoint and drain its connections."""
        self._endpoints.pop(peer, None)
        if connections := self._peers.pop(peer, None):
            connections.endpoint = None
            self._drain(connections, 0)

    async def close(self) -> None:
        open_connections, self._open_connections = self._open_connections, set()
        for pooled in open_connections:
            await pooled.channel.close()

    def abandon_direct(self, connections: PeerConnections, reason: str) -> None:
        """Send calls that begin from now on over libp2p."""
        logger.debug("a direct connection to %s broke (%s); libp2p for now", connections.last_host, reason)
        connections.path_selector.record_failure(_now())
        self._drain(connections, 0)

    def release_connection(self, connections: PeerConnections, connection: PooledConnection) -> None:
        """Record the end of a call on a connection, and close it if it was draining."""
        connection.calls -= 1
        if connection in connections.draining:
            self._close_if_unused(connections, connection)

    def _connections_of(self, peer: PeerId) -> PeerConnections:
        connections = self._peers.get(peer)
        if connections is None:
            connections = self._peers[peer] = PeerConnections(self._endpoints.get(peer))
            self._evict_unused_peers()
        self._peers.move_to_end(peer)
        return connections

    def _evict_unused_peers(self) -> None:
        unused = [peer for peer, connections in self._peers.items() if not connections.running_calls]
        for peer in unused[: max(0, len(self._peers) - MAX_PEERS)]:
            self._drain(self._peers.pop(peer), 0)

    def _pick_connection(self, peer: PeerId, connections: PeerConnections) -> PooledConnection:
        """Return the least busy connection.

        One more is opened if all are busy and the limit allows it.
        """
        least_busy = min(connections.active, key=lambda pooled: pooled.calls, default=None)
        if least_busy and (
            least_busy.calls == 0 or len(connections.active) >= connections.count_controller.connections
        ):
            return least_busy
        pooled = PooledConnection()
        idle = SPARE_IDLE_SECONDS if connections.active else IDLE_SECONDS
        pooled.channel = RpcChannel(peer, partial(self._dial_direct, connections, pooled), self._supervisor, idle)
        connections.active.append(pooled)
        self._open_connections.add(pooled)
        return pooled

    async def _dial_direct(self, connections: PeerConnections, pooled: PooledConnection, peer: PeerId) -> TlsConnection:
        if not connections.endpoint:
            raise UnreachableError("it takes no direct connections any more")
        connection, _ = await self._dialer.dial(
            peer, DirectEndpoint((connections.last_host,), connections.endpoint.port)
        )
        pooled.tcp_socket = connection.socket
        return connection

    async def _probe_direct(self, peer: PeerId, connections: PeerConnections, endpoint: DirectEndpoint) -> None:
        try:
            connection, host = await self._dialer.dial(peer, endpoint)
        except UnreachableError as error:
            connections.path_selector.record_failure(_now())
            logger.debug("using libp2p to reach %s: %s", peer, error)
        else:
            connection.abort()
            if connections.endpoint == endpoint:
                connections.last_host = host
                connections.path_selector.record_probe_success(_now())
                logger.debug("connected directly to %s at %s port %d", peer, host, endpoint.port)
        finally:
            connections.is_probing = False

    def _observe(self) -> None:
        total = self._supervisor.traffic.total.received
        for peer, connections in self._peers.items():
            if connections.active or connections.draining:
                connections.observe(_now(), self._supervisor.traffic.count_of(peer).received, total)
                self._drain(connections, connections.count_controller.connections)

    def _drain(self, connections: PeerConnections, keep: int) -> None:
        while len(connections.active) > keep:
            pooled = connections.active.pop()
            connections.draining.add(pooled)
            self._close_if_unused(connections, pooled)

    def _close_if_unused(self, connections: PeerConnections, connection: PooledConnection) -> None:
        if connection.calls == 0 and connection in self._open_connections:
            connections.draining.discard(connection)
            self._open_connections.discard(connection)
            self._supervisor.spawn(connection.channel.close())


def _now() -> float:
    return asyncio.get_running_loop().time()


def _describe_path(connections: PeerConnections) -> str:
    if connections.path_selector.best_path is BulkPath.LIBP2P:
        return str(BulkPath.LIBP2P)
    count = connections.count_controller.connections
    return f"{BulkPath.DIRECT}, {count} connection{'s' if count > 1 else ''}"
