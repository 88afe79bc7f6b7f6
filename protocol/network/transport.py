"""gRPC between peers over libp2p streams, and bulk over direct connections too: what a node sees of the network.

A channel to a peer is made at once and dials on demand, so nothing waits for a peer that is not there. Flow control is
gRPC's inside a connection and the sockets' around it; the deadline of each call is the caller's, and enforced by gRPC
whatever the other side does.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Literal, Self, get_args

import grpc

from protocol.errors import MalformedError, MurmurError, TransportError, UnreachableError
from protocol.identity import Identity, PeerId, public_key
from protocol.network.bulk import Bulk
from protocol.network.control import Stream, split_address
from protocol.network.desk import Desk
from protocol.network.direct import DirectDialer, DirectDoor, DirectLimits, Place
from protocol.network.doors import SOMEBODY, Dial, Entrance, Exit, caller
from protocol.network.line import MAX_MESSAGE_BYTES, LineChannel
from protocol.network.p2pd import Options, P2pd
from protocol.network.ports import patiently
from protocol.network.reach import RELAYED
from protocol.network.sockets import SocketFolder
from protocol.network.tunnel import Count, Traffic, TunnelLimits, Tunnels

__all__ = ["SOMEBODY", "Transport", "caller"]

logger = logging.getLogger(__name__)

PROTOCOL = "/murmur/grpc/1"
MAX_PEERS = 8192  # whose addresses are remembered
MAX_ADDRESSES = 8  # of one peer
STOP_SECONDS = 10.0
MAX_EXITS = 128  # of which each holds a socket; beyond, those without a connection are closed
FAILING_SECONDS = 1.0  # for calls that are failing already to say so

COMMON_OPTIONS = {
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_metadata_size": 16 * 1024,
    # A peer that vanished is found by pings. An upload may queue ahead of one: minutes on a slow link.
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_timeout_ms": 60_000,
}
CHANNEL_OPTIONS = COMMON_OPTIONS | {
    "grpc.use_local_subchannel_pool": 1,
    "grpc.client_idle_timeout_ms": 60_000,
    "grpc.initial_reconnect_backoff_ms": 250,
    "grpc.min_reconnect_backoff_ms": 15_000,  # also how long one attempt may take: longer than our own dial
    "grpc.max_reconnect_backoff_ms": 5_000,
    "grpc.enable_http_proxy": 0,
}
SERVER_OPTIONS = COMMON_OPTIONS | {
    # Calls of one connection; with the tunnels of one peer, a cap by caller: each may be kept waiting with a megabyte.
    "grpc.max_concurrent_streams": 16,
    "grpc.max_connection_idle_ms": 120_000,
    "grpc.http2.min_ping_interval_without_data_ms": 10_000,
    "grpc.so_reuseport": 0,
}

Service = Callable[[Any], None]  # adds a servicer to a server
Use = Literal["words", "bulk"]


class Transport:
    """The network side of a node. Made by `create`, used after `open`; everything it made is gone after `stop`."""

    def __init__(self, identity: Identity, identity_path: Path, folder: SocketFolder, limits: TunnelLimits) -> None:
        self.peer_id: PeerId = identity.peer_id
        self.traffic = Traffic()
        self.door: DirectDoor | None = None  # for direct connections, where they are taken
        self._identity = identity
        self._identity_path = identity_path
        self._sockets = folder
        self._folder = folder.path
        self._limits = limits
        self._direct_limits = DirectLimits(stall=limits.stall)
        self._stack = AsyncExitStack()
        self._tunnels = Tunnels(limits, self.traffic)
        dialer = DirectDialer(identity, self._direct_limits)
        self.bulk = Bulk(dialer, self._tunnels, self.bulk_channel)
        self._addresses: OrderedDict[PeerId, tuple[str, ...]] = OrderedDict()
        self._tunnels.knows = self._addresses.__contains__
        self._exits: dict[tuple[PeerId, Use], Exit] = {}
        self._exits_made = 0
        self._started: P2pd | None = None

    @classmethod
    def create(cls, identity_path: Path, folder: Path, limits: TunnelLimits | None = None) -> Self:
        """Not on the network yet; channels made now dial later. `folder` is the node's, used by one process at a time.

        Raises IdentityError, AlreadyRunningError or StorageError.
        """
        identity = Identity.load_or_create(identity_path)
        self = cls(identity, identity_path, SocketFolder.create(folder), limits or TunnelLimits())
        self._stack.callback(self._sockets.remove)
        self._stack.push_async_callback(self._tunnels.stop)
        self._stack.push_async_callback(self._close_exits)
        self._stack.push_async_callback(self.bulk.close)
        return self

    @classmethod
    async def start(cls, identity_path: Path, folder: Path, services: Sequence[Service], **options: Any) -> Self:
        """`create` and `open` in one, for those whose services need no transport."""
        self = cls.create(identity_path, folder, options.pop("limits", None))
        await self.open(services, **options)
        return self

    async def open(
        self,
        services: Sequence[Service],
        listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce: Sequence[str] = (),
        relays: Sequence[str] = (),
        direct: int | None = None,
    ) -> None:
        """Serve and be reachable; dials nobody. `services` add their servicers to gRPC's server.

        `direct`: the port for direct connections, on the hosts of `listen`; 0 is a free one, None takes none.
        Each call that a servicer receives carries its caller: see `caller`. Raises TransportError.
        """
        options = Options(self._identity_path, tuple(listen), tuple(announce), tuple(relays))
        try:
            await self._open(options, services, direct)
        except BaseException:
            await self.stop()
            raise

    async def _open(self, options: Options, services: Sequence[Service], direct: int | None) -> None:
        server_path, entrance_path = self._folder / "server.sock", self._folder / "in.sock"
        server = grpc.aio.server(options=list(SERVER_OPTIONS.items()))
        for service in services:
            service(server)
        server.add_insecure_port(f"unix:{server_path}")
        self._stack.push_async_callback(server.stop, grace=0.5)
        await server.start()
        entrance = Entrance(entrance_path, server_path, self._tunnels)
        await entrance.open()
        self._stack.callback(entrance.close)
        if direct is not None:
            await self._open_door(services, _hosts(options.listen), direct)
        self._started = await P2pd.start(options, self._folder, {PROTOCOL: entrance_path})
        self._stack.push_async_callback(self._started.stop)

    async def _open_door(self, services: Sequence[Service], hosts: Sequence[str], port: int) -> None:
        desk = Desk(self._tunnels)
        for service in services:
            service(desk)
        self.door = door = DirectDoor(self._identity, desk.welcome, self._direct_limits)
        self._stack.push_async_callback(door.close)

        async def claim() -> None:
            door.open(hosts, port)

        await patiently(claim)

    async def stop(self) -> None:
        """Within STOP_SECONDS; a second call does nothing."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._stack.aclose()
        except TimeoutError:
            logger.warning("the transport did not stop within %g s", STOP_SECONDS)

    @property
    def _p2pd(self) -> P2pd:
        if not self._started:
            raise TransportError("the transport is not open yet")
        return self._started

    @property
    def p2p(self) -> Any:
        """hivemind's P2P on our p2pd; another one after each restart of p2pd (see `on_restart`)."""
        return self._p2pd.p2p

    @property
    def p2pd_pid(self) -> int:
        return self._p2pd.pid

    def on_restart(self, callback: Callable[[], None]) -> None:
        """Called when p2pd has died and lives again; `p2p` is new, and known addresses are dialled on demand."""
        self._p2pd.on_restart(callback)

    @property
    def bytes_sent(self) -> int:
        return self.traffic.total.sent

    @property
    def bytes_received(self) -> int:
        return self.traffic.total.received

    @property
    def bytes_by_peer(self) -> Mapping[PeerId, Count]:
        return self.traffic.by_peer

    @property
    def direct_port(self) -> int:
        """At which direct connections are taken; 0: none are."""
        return self.door.port if self.door else 0

    @property
    def direct_refusals(self) -> Mapping[str, int]:
        """Direct connections that were not taken, by reason."""
        return self.door.refusals if self.door else {}

    @property
    def refusals(self) -> Mapping[str, int]:
        """Streams that were not taken, or cut, by reason."""
        return self._tunnels.refusals

    async def addresses(self) -> tuple[str, ...]:
        """Where others can reach us: multiaddresses with /p2p/. TransportError while p2pd is being restarted."""
        _, addresses = await self._p2pd.control.identify()
        return tuple(f"{address}/p2p/{self.peer_id}" for address in addresses)

    async def remote_addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Where a peer that we are connected with seems to be: what a network between us shows of it."""
        return await self._p2pd.control.remote_addresses(peer)

    def introduce(self, peer: PeerId, addresses: Sequence[str], direct_port: int = 0) -> None:
        """Remember how `peer` is reached, instead of what was known; dials nothing. MalformedError: an address is none.
        Who is heard of may have come back: what failed a moment ago is tried again by the next call.

        Addresses are multiaddresses that end in /p2p/<peer id>; at their hosts it takes direct connections, if at all.
        """
        if len(addresses) > MAX_ADDRESSES:
            raise MalformedError(f"{peer} has more than {MAX_ADDRESSES} addresses")
        split = [split_address(address) for address in addresses]
        if any(owner != peer for owner, _ in split):
            raise MalformedError(f"an address of {peer} belongs to another peer")
        ways = self._addresses[peer] = tuple(way for _, way in split)
        self.bulk.introduce(peer, Place(_hosts(ways), direct_port) if direct_port else None)
        self._addresses.move_to_end(peer)
        if len(self._addresses) > MAX_PEERS:
            self._addresses.popitem(last=False)
        for key in [(peer, use) for use in get_args(Use)]:
            if key in self._exits and self._exits[key].has_failed:
                self._tunnels.spawn(self._exits.pop(key).close(FAILING_SECONDS))

    def forget(self, peer: PeerId) -> None:
        """Drop its addresses and cut everything between us; it may come again. Its channel is closed."""
        self._addresses.pop(peer, None)
        self._tunnels.cut(peer)
        self.bulk.forget(peer)
        exits = [self._exits.pop(key) for key in list(self._exits) if key[0] == peer]
        self._tunnels.spawn(self._disconnect(peer, exits))

    async def _disconnect(self, peer: PeerId, exits: Sequence[Exit]) -> None:
        for way_out in exits:
            await way_out.close()
        try:
            await self._p2pd.control.disconnect(peer)
        except (UnreachableError, TransportError) as error:
            logger.info("cannot disconnect from %s: %s", peer, error)

    async def connect(self, address: str, deadline: float) -> PeerId:
        """Dial within `deadline` seconds, and remember the address. UnreachableError names the address and why."""
        try:
            peer, way = split_address(address)
            await self._p2pd.control.connect(peer, (way,), deadline)
        except MurmurError as error:
            raise UnreachableError(f"cannot reach {address}: {error}") from error
        if way not in self._addresses.get(peer, ()):
            known = [f"{other}/p2p/{peer}" for other in self._addresses.get(peer, ())]
            self.introduce(peer, [address, *known][:MAX_ADDRESSES])
        return peer

    def channel(self, peer: PeerId) -> grpc.aio.Channel:
        """The one channel for small calls, until `forget`. They fail as UNAVAILABLE where `peer` cannot be reached."""
        return self._channel(peer, "words")

    def quick(self, peer: PeerId) -> AbstractContextManager[LineChannel | None]:
        """A direct connection for one small call, where one is open and without work: by the channel its bytes would
        go through two more processes."""
        return self.bulk.idle(peer)

    def spare(self, peer: PeerId) -> AbstractContextManager[LineChannel | None]:
        """A direct connection for one small call, where such a path stands: for when the channel fails. It may queue
        behind bulk."""
        return self.bulk.standing(peer)

    def bulk_channel(self, peer: PeerId) -> grpc.aio.Channel:
        """The libp2p side of `bulk`: in a tunnel of their own, calls that move much queue before no small one."""
        return self._channel(peer, "bulk")

    def _channel(self, peer: PeerId, use: Use) -> grpc.aio.Channel:
        if (peer, use) not in self._exits:
            public_key(peer)
            if len(self._exits) >= MAX_EXITS:
                self._close_unused()
            self._exits[peer, use] = self._new_exit(peer, self._dial)
        return self._exits[peer, use].channel

    def _close_unused(self) -> None:
        """Of the older half: nobody else closes those of peers that never answered, or left before they were called."""
        for key in list(self._exits)[: MAX_EXITS // 2]:
            if not self._exits[key].is_connected:
                self._tunnels.spawn(self._exits.pop(key).close(FAILING_SECONDS))

    def _new_exit(self, peer: PeerId, dial: Dial) -> Exit:
        self._exits_made += 1
        path = self._folder / f"out-{self._exits_made}.sock"
        return Exit(peer, path, dial, self._tunnels, list(CHANNEL_OPTIONS.items()))

    async def _dial(self, peer: PeerId) -> Stream:
        control, addresses = self._p2pd.control, self._addresses.get(peer)
        if addresses:
            await control.connect(peer, addresses, self._limits.dial)
        return await control.open_stream(peer, PROTOCOL, self._limits.dial)

    async def _close_exits(self) -> None:
        while self._exits:
            _, way_out = self._exits.popitem()
            await way_out.close()


def _hosts(ways: Sequence[str]) -> tuple[str, ...]:
    """Of multiaddresses that begin with a host, each once; a circuit's host is the relay's."""
    return tuple(dict.fromkeys(way.split("/")[2] for way in ways if RELAYED not in way))
