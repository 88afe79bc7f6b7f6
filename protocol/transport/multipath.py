"""Bulk to and from peers: over several direct connections where there is a direct path, else over libp2p.

A call takes a lease on a channel and gives it back; meanwhile it says what it received and whether it broke. What is
decided from that stands in `paths` (which path) and `lanes` (how many connections); here are the connections.
Nothing waits for a direct path: it is proved beside the calls that go by libp2p, and calls move over when it stands.
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
from protocol.transport.connection_supervisor import ConnectionSupervisor
from protocol.transport.multipath_policy import BulkPath, ConnectionCountController, PathSelector, TransferTotals
from protocol.transport.tls.connection import TcpReceiveStats, TlsConnection, count_link_losses, read_tcp_receive_stats
from protocol.transport.tls.listener import Endpoint, TlsDialer
from protocol.transport.tls.rpc import IDLE_SECONDS, SPARE_IDLE_SECONDS, RpcChannel

logger = logging.getLogger(__name__)

OBSERVE_INTERVAL_SECONDS = 0.1  # seconds between two looks at the lanes
CALLS_PER_CONNECTION = 2  # so that a lane is never without work
MAX_ENDPOINTS = 8192  # that are remembered
MAX_PEERS = 256  # peers to whom bulk went lately


@dataclass(eq=False)
class PooledConnection:
    """One connection of its own."""

    channel: RpcChannel = field(init=False)
    calls: int = 0
    tcp_socket: socket.socket | None = None  # once it stands
    tcp_stats: TcpReceiveStats = field(default_factory=TcpReceiveStats)

    def count_new_losses(self) -> int:
        """How many packets show, since the last look, that the link loses some."""
        before, self.tcp_stats = (
            self.tcp_stats,
            read_tcp_receive_stats(self.tcp_socket) if self.tcp_socket else TcpReceiveStats(),
        )
        return count_link_losses(before, self.tcp_stats)


@dataclass(eq=False)
class PeerConnections:
    """All that bulk knows of a peer. `host`: at which it answered last."""

    endpoint: Endpoint | None = None
    last_host: str = ""
    path_selector: PathSelector = field(default_factory=PathSelector)
    count_controller: ConnectionCountController = field(default_factory=ConnectionCountController)
    active: list[PooledConnection] = field(default_factory=list)
    draining: set[PooledConnection] = field(default_factory=set)  # calls still run on them
    lost_packets: int = 0  # packets so far that show that the link loses some
    is_probing: bool = False

    @property
    def running_calls(self) -> int:
        return sum(goodput.calls for goodput in self.path_selector.goodput.values())

    @property
    def busy_connections(self) -> int:
        """Lanes that carry a call."""
        return len(self.draining) + sum(lane.calls > 0 for lane in self.active)

    def observe(self, now: float, peer_bytes: int, total_bytes: int) -> None:
        """Bytes so far from this peer and from all."""
        self.lost_packets += sum(lane.count_new_losses() for lane in self.active)
        queued = 2 * sum(lane.tcp_stats.is_queued for lane in self.active) > len(self.active)
        self.count_controller.observe(
            now, self.busy_connections, TransferTotals(peer_bytes, total_bytes, self.lost_packets, queued)
        )


class BulkLease:
    """A channel for one call; enter it for as long as the call runs."""

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
        """The call failed, and the connection may be why."""
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
    """`usual` gives the channel by libp2p."""

    def __init__(
        self, dialer: TlsDialer, supervisor: ConnectionSupervisor, libp2p_channel: Callable[[PeerId], grpc.aio.Channel]
    ) -> None:
        self.bytes_received: Counter[BulkPath] = Counter()  # payload of calls
        self._dialer = dialer
        self._supervisor = supervisor
        self._libp2p_channel = libp2p_channel
        self._endpoints: OrderedDict[PeerId, Endpoint] = OrderedDict()
        self._peers: OrderedDict[PeerId, PeerConnections] = OrderedDict()
        self._open_connections: set[PooledConnection] = set()
        supervisor.spawn(self._observe_loop())

    def set_endpoint(self, peer: PeerId, endpoint: Endpoint | None) -> None:
        """Where `peer` takes direct connections now, if it does."""
        if endpoint is None:
            self._endpoints.pop(peer, None)
        else:
            self._endpoints[peer] = endpoint
            self._endpoints.move_to_end(peer)
            if len(self._endpoints) > MAX_ENDPOINTS:
                self._endpoints.popitem(last=False)
        link = self._peers.get(peer)
        if link and link.endpoint != endpoint:
            self._change_endpoint(link, endpoint)

    def _change_endpoint(self, connections: PeerConnections, endpoint: Endpoint | None) -> None:
        connections.endpoint = endpoint
        connections.path_selector.reset_direct()
        self._drain(connections, 0)

    def lease_channel(self, peer: PeerId) -> BulkLease:
        """For one call to `peer`, by the path and the lane that serve it best now."""
        now, link = _now(), self._connections_of(peer)
        if link.endpoint and not link.is_probing and link.path_selector.should_probe(now):
            link.is_probing = True
            self._supervisor.spawn(self._probe_direct(peer, link, link.endpoint))
        path = link.path_selector.next_path(now)
        if path is BulkPath.LIBP2P:
            return BulkLease(self, link, path, self._libp2p_channel(peer), None)
        lane = self._pick_connection(peer, link)
        return BulkLease(self, link, path, lane.channel, lane)

    def fallback_channel(self, peer: PeerId) -> AbstractContextManager[RpcChannel | None]:
        """A lane for one call that is no bulk and tells nothing of a path; None where no direct path is proved."""
        link = self._peers.get(peer)
        if link is None or not link.endpoint or not link.path_selector.is_direct_verified:
            return nullcontext()
        return self._borrow(link, self._pick_connection(peer, link))

    def idle_channel(self, peer: PeerId) -> AbstractContextManager[RpcChannel | None]:
        """The same, but on a connection that is open and without work."""
        link = self._peers.get(peer)
        if link is None or link.path_selector.best_path is not BulkPath.DIRECT:
            return nullcontext()
        free = next((lane for lane in link.active if not lane.calls and lane.channel.is_open), None)
        return self._borrow(link, free) if free else nullcontext()

    @contextmanager
    def _borrow(self, connections: PeerConnections, connection: PooledConnection) -> Iterator[RpcChannel]:
        connection.calls += 1
        try:
            yield connection.channel
        finally:
            self.release_connection(connections, connection)

    def parallelism(self, peer: PeerId) -> int:
        """How many calls to `peer` may well run at once."""
        link = self._peers.get(peer)
        if link is None or link.path_selector.best_path is BulkPath.LIBP2P:
            return CALLS_PER_CONNECTION
        # What began by libp2p takes no lane's place.
        return (
            CALLS_PER_CONNECTION * link.count_controller.connections + link.path_selector.goodput[BulkPath.LIBP2P].calls
        )

    def describe_paths(self) -> dict[PeerId, str]:
        """How bulk goes to each peer that lately had some, in words."""
        return {peer: _describe_path(link) for peer, link in self._peers.items()}

    def forget(self, peer: PeerId) -> None:
        """Its place and its lanes, whatever runs on them."""
        self._endpoints.pop(peer, None)
        if link := self._peers.pop(peer, None):
            link.endpoint = None
            self._drain(link, 0)

    async def close(self) -> None:
        lanes, self._open_connections = self._open_connections, set()
        for lane in lanes:
            await lane.channel.close()

    def abandon_direct(self, connections: PeerConnections, reason: str) -> None:
        """Calls that begin from now on go by libp2p."""
        logger.info("a direct connection to %s broke (%s); libp2p for now", connections.last_host, reason)
        connections.path_selector.record_failure(_now())
        self._drain(connections, 0)

    def release_connection(self, connections: PeerConnections, connection: PooledConnection) -> None:
        """A call on it has ended."""
        connection.calls -= 1
        if connection in connections.draining:
            self._close_if_unused(connections, connection)

    def _connections_of(self, peer: PeerId) -> PeerConnections:
        link = self._peers.get(peer)
        if link is None:
            link = self._peers[peer] = PeerConnections(self._endpoints.get(peer))
            self._evict_unused_peers()
        self._peers.move_to_end(peer)
        return link

    def _evict_unused_peers(self) -> None:
        unused = [peer for peer, link in self._peers.items() if not link.running_calls]
        for peer in unused[: max(0, len(self._peers) - MAX_PEERS)]:
            self._drain(self._peers.pop(peer), 0)

    def _pick_connection(self, peer: PeerId, connections: PeerConnections) -> PooledConnection:
        """The least busy; one more is opened where all are busy and there may be more."""
        least = min(connections.active, key=lambda lane: lane.calls, default=None)
        if least and (least.calls == 0 or len(connections.active) >= connections.count_controller.connections):
            return least
        lane = PooledConnection()
        idle = SPARE_IDLE_SECONDS if connections.active else IDLE_SECONDS
        lane.channel = RpcChannel(peer, partial(self._dial_direct, connections, lane), self._supervisor, idle)
        connections.active.append(lane)
        self._open_connections.add(lane)
        return lane

    async def _dial_direct(self, connections: PeerConnections, pooled: PooledConnection, peer: PeerId) -> TlsConnection:
        if not connections.endpoint:
            raise UnreachableError("it takes no direct connections any more")
        connection, _ = await self._dialer.dial(peer, Endpoint((connections.last_host,), connections.endpoint.port))
        pooled.tcp_socket = connection.socket
        return connection

    async def _probe_direct(self, peer: PeerId, connections: PeerConnections, endpoint: Endpoint) -> None:
        try:
            connection, host = await self._dialer.dial(peer, endpoint)
        except UnreachableError as error:
            connections.path_selector.record_failure(_now())
            logger.info("%s is reached by libp2p: %s", peer, error)
        else:
            connection.abort()
            if connections.endpoint == endpoint:
                connections.last_host = host
                connections.path_selector.record_probe_success(_now())
                logger.info("%s is reached directly, at %s port %d", peer, host, endpoint.port)
        finally:
            connections.is_probing = False

    async def _observe_loop(self) -> None:
        while True:
            await asyncio.sleep(OBSERVE_INTERVAL_SECONDS)
            total = self._supervisor.traffic.total.received
            for peer, link in self._peers.items():
                if link.active or link.draining:
                    link.observe(_now(), self._supervisor.traffic.count_of(peer).received, total)
                    self._drain(link, link.count_controller.connections)

    def _drain(self, connections: PeerConnections, keep: int) -> None:
        while len(connections.active) > keep:
            lane = connections.active.pop()
            connections.draining.add(lane)
            self._close_if_unused(connections, lane)

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
