"""The network side of a node: gRPC over libp2p streams, and bulk transfers over direct connections too.

Creating a channel to a peer returns at once; the channel dials on demand, so nothing waits for an absent peer. gRPC
does flow control inside a connection, and the sockets do it around the connection. The caller sets the deadline of each
call, and gRPC enforces it whatever the other side does.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Literal, Self, get_args

import grpc

from protocol.errors import MalformedError, MurmurError, TransportError, UnreachableError
from protocol.identity import Identity, PeerId, public_key
from protocol.recent import RecentTable
from protocol.transport.call_guard import CallGuard, GuardedServer
from protocol.transport.connection_supervisor import ConnectionSupervisor
from protocol.transport.dial_policy import DialPolicy, GuardedDials, Resolver
from protocol.transport.ended import endpoints_to_ask, refuse_all
from protocol.transport.grpc_bridge import UNKNOWN_CALLER, Dial, InboundBridge, OutboundBridge, caller
from protocol.transport.local_sockets import SocketFolder, retry_while_port_taken
from protocol.transport.multipath import BulkTransport
from protocol.transport.nat import CIRCUIT_MARKER
from protocol.transport.p2pd import P2pd, P2pdOptions, Stream, split_address
from protocol.transport.tls.listener import DirectEndpoint, TlsDialer, TlsLimits, TlsListener
from protocol.transport.tls.rpc import MAX_MESSAGE_BYTES, RpcChannel, RpcServer
from protocol.transport.tunnel import ConnectionLimits, TrafficCounter

__all__ = ["UNKNOWN_CALLER", "Transport", "caller"]

logger = logging.getLogger(__name__)

PROTOCOL = "/murmur/grpc/1"
MAX_PEERS = 8192  # peers whose addresses are remembered
MAX_ADDRESSES = 8  # addresses per peer
STOP_SECONDS = 10.0
MAX_OUTBOUND_BRIDGES = 128  # each holds a socket; above this, bridges without a connection are closed
FAILING_CALL_SECONDS = 1.0  # grace for calls that are already failing to return their error

COMMON_OPTIONS = {
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_metadata_size": 16 * 1024,
    # Pings detect a peer that vanished. On a slow link an upload may queue ahead of a ping for minutes.
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_timeout_ms": 60_000,
}
CHANNEL_OPTIONS = COMMON_OPTIONS | {
    "grpc.use_local_subchannel_pool": 1,
    "grpc.client_idle_timeout_ms": 60_000,
    "grpc.initial_reconnect_backoff_ms": 250,
    "grpc.min_reconnect_backoff_ms": 15_000,  # also the limit of one attempt, so it must exceed our own dial timeout
    "grpc.max_reconnect_backoff_ms": 5_000,
    "grpc.enable_http_proxy": 0,
}
SERVER_OPTIONS = COMMON_OPTIONS | {
    # Calls per connection. Times the streams per peer, this caps calls by caller: each may hold up to a megabyte.
    "grpc.max_concurrent_streams": 16,
    "grpc.max_connection_idle_ms": 120_000,
    "grpc.http2.min_ping_interval_without_data_ms": 10_000,
    "grpc.so_reuseport": 0,
}

AddServicer = Callable[[Any], None]  # adds a servicer to a server
ChannelUse = Literal["small", "bulk"]


class Transport:
    """The network side of a node.

    It is created by `create`, usable after `open`, and fully released by `stop`.
    """

    def __init__(self, identity: Identity, identity_path: Path, folder: SocketFolder, limits: ConnectionLimits) -> None:
        self.peer_id: PeerId = identity.peer_id
        self.traffic = TrafficCounter()
        self.listener: TlsListener | None = None  # accepts direct connections; `None` if this node takes none
        self.identity = identity
        self._identity_path = identity_path
        self._sockets = folder
        self._folder = folder.path
        self._limits = limits
        self._direct_limits = TlsLimits(stall=limits.stall)
        self._stack = AsyncExitStack()
        self._supervisor = ConnectionSupervisor(limits, self.traffic)
        self._guard = CallGuard(self._supervisor)
        self._dialer = TlsDialer(identity, self._direct_limits)
        self.bulk = BulkTransport(self._dialer, self._supervisor, self.bulk_channel)
        self._addresses = RecentTable[PeerId, tuple[str, ...]](MAX_PEERS)
        self._supervisor.is_known = self._addresses.__contains__
        self._outbound_bridges: dict[tuple[PeerId, ChannelUse], OutboundBridge] = {}
        self._bridges_made = 0
        self._started_p2pd: P2pd | None = None
        self._dials: GuardedDials | None = None  # None: every address is dialled, because the user named all of them

    @classmethod
    def create(cls, identity_path: Path, folder: Path, limits: ConnectionLimits | None = None) -> Self:
        """Create a transport that is not on the network yet.

        Channels made before `open` dial later.

        Only one process at a time may use the node's `folder`.

        Raises:
            IdentityError, AlreadyRunningError, StorageError: The key or the folder cannot be used.
        """
        identity = Identity.load_or_create(identity_path)
        self = cls(identity, identity_path, SocketFolder.create(folder), limits or ConnectionLimits())
        self._stack.callback(self._sockets.remove)
        self._stack.push_async_callback(self._supervisor.stop)
        self._stack.push_async_callback(self._close_bridges)
        self._stack.push_async_callback(self.bulk.close)
        return self

    @classmethod
    async def start(cls, identity_path: Path, folder: Path, services: Sequence[AddServicer], **options: Any) -> Self:
        """Create and open a transport whose services do not need the transport themselves."""
        self = cls.create(identity_path, folder, options.pop("limits", None))
        await self.open(services, **options)
        return self

    async def open(
        self,
        services: Sequence[AddServicer],
        listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce: Sequence[str] = (),
        relays: Sequence[str] = (),
        direct: int | None = None,
    ) -> None:
        """Serve calls and become reachable, without dialling anyone.

        `services` add their servicers to a gRPC server; a servicer learns its caller from `caller`. `direct` is the
        port for direct connections on the hosts of `listen`: 0 picks a free port, `None` disables them.

        Raises:
            TransportError: p2pd or a listener cannot be started.
        """
        options = P2pdOptions(self._identity_path, tuple(listen), tuple(announce), tuple(relays))
        try:
            await self._open(options, services, direct)
        except BaseException:
            await self.stop()
            raise

    async def _open(self, options: P2pdOptions, services: Sequence[AddServicer], direct: int | None) -> None:
        server_path, inbound_path = self._folder / "server.sock", self._folder / "in.sock"
        server = grpc.aio.server(options=list(SERVER_OPTIONS.items()))
        for service in services:
            service(GuardedServer(server, self._guard))
        server.add_insecure_port(f"unix:{server_path}")
        self._stack.push_async_callback(server.stop, grace=0.5)
        await server.start()
        inbound = InboundBridge(inbound_path, server_path, self._supervisor)
        await inbound.open()
        self._stack.callback(inbound.close)
        if direct is not None:
            await self._open_listener(services, _hosts_of(options.listen), direct)
        self._started_p2pd = await P2pd.start(options, self._folder, {PROTOCOL: inbound_path})
        self._stack.push_async_callback(self._started_p2pd.stop)

    async def _open_listener(self, services: Sequence[AddServicer], hosts: Sequence[str], port: int) -> None:
        server = RpcServer(self._supervisor)
        for service in services:
            service(GuardedServer(server, self._guard))
        self.listener = listener = TlsListener(self.identity, server.serve_peer, self._direct_limits)
        self._stack.push_async_callback(listener.close)

        async def bind() -> None:
            listener.listen(hosts, port)

        await retry_while_port_taken(bind)

    async def stop(self) -> None:
        """Release everything within STOP_SECONDS; a second call does nothing."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._stack.aclose()
        except TimeoutError:
            logger.warning("the transport did not stop within %g s", STOP_SECONDS)

    @property
    def _p2pd(self) -> P2pd:
        if not self._started_p2pd:
            raise TransportError("the transport is not open yet")
        return self._started_p2pd

    @property
    def p2p(self) -> Any:
        """Return hivemind's P2P on our p2pd.

        Each restart of p2pd replaces it (see `on_restart`).
        """
        return self._p2pd.p2p

    def on_restart(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each restart of p2pd.

        `p2p` is new then, and known peers are redialled on demand.
        """
        self._p2pd.on_restart(callback)

    @property
    def bytes_sent(self) -> int:
        return self.traffic.total.sent

    @property
    def bytes_received(self) -> int:
        return self.traffic.total.received

    @property
    def direct_port(self) -> int:
        """Return the port for direct connections, or 0 if this node takes none."""
        return self.listener.port if self.listener else 0

    @property
    def direct_refusals(self) -> Mapping[str, int]:
        """Return the number of refused direct connections by reason."""
        return self.listener.refusals if self.listener else {}

    @property
    def refusals(self) -> Mapping[str, int]:
        """Return the number of refused or cut streams by reason."""
        return self._supervisor.refusals

    async def addresses(self) -> tuple[str, ...]:
        """Return the multiaddresses, ending in /p2p/<peer id>, at which others reach us.

        Raises:
            TransportError: p2pd is being restarted.
        """
        _, addresses = await self._p2pd.client.identify()
        if self._dials is not None:
            self._dials.policy.set_own_addresses(addresses)
        return tuple(f"{address}/p2p/{self.peer_id}" for address in addresses)

    async def remote_addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Return the remote ends of our connections with a peer, as NAT shows them."""
        return await self._p2pd.client.remote_addresses(peer)

    def limit_dials(self, contacts: Sequence[str]) -> None:
        """Dial other addresses than these only as `dial_policy` says, because other peers name them."""
        self._dials = GuardedDials(DialPolicy(contacts), Resolver(), self._supervisor.refusals)
        self._dialer.policy = self._dials.policy

    def introduce(self, peer: PeerId, addresses: Sequence[str], direct_port: int = 0) -> None:
        """Replace the known addresses of `peer` without dialling it.

        `addresses` are multiaddresses that end in /p2p/<peer id>; the peer takes direct connections at `direct_port`
        of their hosts, or none if it is 0. News of a peer may mean that it is back, so channels that failed a moment
        ago are closed and the next call dials again.

        Raises:
            MalformedError: An address is invalid, or belongs to another peer.
        """
        if len(addresses) > MAX_ADDRESSES:
            raise MalformedError(f"{peer} has more than {MAX_ADDRESSES} addresses")
        split = [split_address(address) for address in addresses]
        if any(owner != peer for owner, _ in split):
            raise MalformedError(f"an address of {peer} belongs to another peer")
        routes = self._addresses[peer] = tuple(route for _, route in split)
        self.bulk.set_endpoint(peer, DirectEndpoint(_hosts_of(routes), direct_port) if direct_port else None)
        for key in [(peer, use) for use in get_args(ChannelUse)]:
            if key in self._outbound_bridges and self._outbound_bridges[key].has_failed:
                self._supervisor.spawn(self._outbound_bridges.pop(key).close(FAILING_CALL_SECONDS))

    async def has_ended(self, peer: PeerId) -> bool:
        """Return whether the machine of a peer says that its process has ended (`ended`); takes two seconds at most."""
        policy = self._dials.policy if self._dials is not None else None
        routes, direct = self._addresses.get(peer, ()), self.bulk.endpoint_of(peer)
        endpoints = endpoints_to_ask(
            routes, direct, lambda endpoint: policy is None or policy.has_proved(peer, endpoint)
        )
        return await refuse_all(endpoints)

    def set_voters(self, voters: frozenset[PeerId]) -> None:
        """Set the peers whose calls and connections go before those of others; empty while nobody has a vote yet."""
        self._supervisor.voters = voters

    def forget(self, peer: PeerId) -> None:
        """Forget a peer's addresses, cut its connections and close its channels.

        It may be introduced again.
        """
        self._addresses.pop(peer, None)
        self._supervisor.cut_peer(peer)
        self.bulk.forget(peer)
        bridges = [self._outbound_bridges.pop(key) for key in list(self._outbound_bridges) if key[0] == peer]
        self._supervisor.spawn(self._disconnect(peer, bridges))

    async def _disconnect(self, peer: PeerId, bridges: Sequence[OutboundBridge]) -> None:
        for bridge in bridges:
            await bridge.close()
        try:
            await self._p2pd.client.disconnect(peer)
        except (UnreachableError, TransportError) as error:
            logger.debug("cannot disconnect from %s: %s", peer, error)

    async def connect(self, address: str, timeout: float) -> PeerId:
        """Dial within `timeout` seconds and remember the address.

        UnreachableError names the address and the reason.
        """
        try:
            peer, route = split_address(address)
            await self._connect(peer, (route,), timeout)
        except MurmurError as error:
            raise UnreachableError(f"cannot reach {address}: {error}") from error
        if route not in self._addresses.get(peer, ()):
            known = [f"{other}/p2p/{peer}" for other in self._addresses.get(peer, ())]
            self.introduce(peer, [address, *known][:MAX_ADDRESSES])
        return peer

    def channel(self, peer: PeerId) -> grpc.aio.Channel:
        """Return the channel for small calls, valid until `forget`.

        Calls fail as UNAVAILABLE if the peer cannot be reached.
        """
        return self._channel(peer, "small")

    def idle_channel(self, peer: PeerId) -> AbstractContextManager[RpcChannel | None]:
        """Lend an open, idle direct connection for one small call, or None.

        A direct connection saves the two extra processes that a libp2p channel's bytes pass through.
        """
        return self.bulk.idle_channel(peer)

    def open_direct(self, peer: PeerId) -> None:
        """Open a direct connection in the background to a peer that gets many small calls."""
        self.bulk.open_direct(peer)

    def fallback_channel(self, peer: PeerId) -> AbstractContextManager[RpcChannel | None]:
        """Lend a direct connection for one small call that failed by libp2p.

        The result is None if there is no direct path.

        The call may queue behind bulk transfers.
        """
        return self.bulk.fallback_channel(peer)

    def bulk_channel(self, peer: PeerId) -> grpc.aio.Channel:
        """Return the libp2p channel for bulk calls.

        Its own tunnel keeps them from queueing ahead of small calls.
        """
        return self._channel(peer, "bulk")

    def _channel(self, peer: PeerId, use: ChannelUse) -> grpc.aio.Channel:
        if (peer, use) not in self._outbound_bridges:
            public_key(peer)
            if len(self._outbound_bridges) >= MAX_OUTBOUND_BRIDGES:
                self._close_unused_bridges()
            self._outbound_bridges[peer, use] = self._make_bridge(peer, self._dial)
        return self._outbound_bridges[peer, use].channel

    def _close_unused_bridges(self) -> None:
        """Close the unconnected bridges in the older half.

        Nothing else closes the bridges of peers that never answered, or that left before they were called.
        """
        for key in list(self._outbound_bridges)[: MAX_OUTBOUND_BRIDGES // 2]:
            if not self._outbound_bridges[key].is_connected:
                self._supervisor.spawn(self._outbound_bridges.pop(key).close(FAILING_CALL_SECONDS))

    def _make_bridge(self, peer: PeerId, dial: Dial) -> OutboundBridge:
        self._bridges_made += 1
        path = self._folder / f"out-{self._bridges_made}.sock"
        return OutboundBridge(peer, path, dial, self._supervisor, list(CHANNEL_OPTIONS.items()))

    async def _dial(self, peer: PeerId) -> Stream:
        if routes := self._addresses.get(peer):
            await self._connect(peer, routes, self._limits.dial)
        return await self._p2pd.client.open_stream(peer, PROTOCOL, self._limits.dial)

    async def _connect(self, peer: PeerId, routes: Sequence[str], timeout: float) -> None:
        if self._dials is None:
            await self._p2pd.client.connect(peer, routes, timeout)
        else:
            await self._dials.connect(self._p2pd.client, peer, routes, timeout)

    async def _close_bridges(self) -> None:
        while self._outbound_bridges:
            _, bridge = self._outbound_bridges.popitem()
            await bridge.close()


def _hosts_of(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct hosts of multiaddresses.

    Circuit addresses are left out, because their host is the relay's.
    """
    return tuple(dict.fromkeys(route.split("/")[2] for route in addresses if CIRCUIT_MARKER not in route))
