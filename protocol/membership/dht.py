"""A node of a distributed hash table (hivemind's DHTNode in our own event loop) that serves a few topics.

Seeds are pinged after the start, so dead ones do not prevent it. After a restart of p2pd, hivemind's node is bound to a
dead socket: `close` drops it, and the next use creates another.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from google.protobuf.message import DecodeError
from hivemind.dht.node import DHTNode
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2

from protocol.errors import TransportError, UnreachableError, describe_error
from protocol.identity import PeerId
from protocol.membership.clock import SwarmClock
from protocol.membership.dht_storage import (
    Announcement,
    AnnouncementValidator,
    BoundedStorage,
    PeerIdRoutingTable,
    RequestLimiter,
    Topic,
    node_id,
)

logger = logging.getLogger(__name__)

REPLICAS = 5
BEAM_SIZE = 8  # nodes that a search considers at once
CALL_TIMEOUT_SECONDS = 3.0
CONNECT_TIMEOUT_SECONDS = 5.0
STOP_TIMEOUT_SECONDS = 2.0

# Errors of hivemind when p2pd is dead or refuses, a peer is unreachable, or a peer's answer is invalid.
DHT_ERRORS = (
    OSError,
    EOFError,
    TimeoutError,
    DecodeError,
    P2PDaemonError,
    P2PHandlerError,
    TransportError,
    UnreachableError,
)


class DhtTransport(Protocol):
    """The part of the transport that the DHT uses."""

    @property
    def p2p(self) -> Any: ...
    async def connect(self, address: str, timeout: float) -> PeerId: ...


class DhtNode:
    """Our DHT node, which stores only values of `topics`.

    In client mode it stores none, and others do not learn of it.
    """

    def __init__(
        self, transport: DhtTransport, clock: SwarmClock, topics: Iterable[Topic], client_mode: bool = False
    ) -> None:
        kept, self._client_mode = tuple(topics), client_mode
        self._transport = transport
        self._clock = clock
        self._validator = AnnouncementValidator(kept)
        self._storage = BoundedStorage(kept, clock)
        self._limiter = RequestLimiter()
        self._node: Any = None

    @property
    def refused_count(self) -> int:
        """Return the number of invalid values and oversized requests.

        Invalid values are forged, malformed or of another run.
        """
        return self._validator.refused_count + self._limiter.refused_count

    def set_known_peers(self, peers: Iterable[PeerId]) -> None:
        """Set the peers whose announcements no stranger displaces here."""
        self._storage.known = frozenset(peers)

    async def open(self) -> None:
        """Create hivemind's node unless it is open."""
        if self._node is None:
            self._node = await self._create_node()

    async def close(self) -> None:
        """Shut down within STOP_TIMEOUT_SECONDS.

        hivemind's own shutdown waits for ever if p2pd is dead.
        """
        node, self._node = self._node, None
        if node is None:
            return
        try:
            await asyncio.wait_for(node.shutdown(), STOP_TIMEOUT_SECONDS)
        except DHT_ERRORS as error:
            logger.debug("the DHT node did not shut down cleanly: %s", describe_error(error))

    async def _create_node(self) -> Any:
        p2p = self._transport.p2p
        # No caches, which strangers could fill, and no seeds: dead ones must not prevent the start.
        node = await DHTNode.create(
            p2p=p2p,
            node_id=node_id(p2p.peer_id),
            client_mode=self._client_mode,
            num_replicas=REPLICAS,
            wait_timeout=CALL_TIMEOUT_SECONDS,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
            record_validator=self._validator,
            authorizer=self._limiter,
        )
        protocol = node.protocol
        protocol.storage = protocol.cache = self._storage
        table = protocol.routing_table
        protocol.routing_table = PeerIdRoutingTable(table.node_id, table.bucket_size, table.depth_modulo)
        return node

    async def ping_peer(self, peer: PeerId, addresses: Sequence[str]) -> bool:
        """Make a peer known to the DHT node and observe its clock.

        Before any gossip this is our only source of time.
        """
        node = self._node
        try:
            await self._connect(peer, addresses)
            remote = PeerID.from_base58(peer)
            sent = self._clock.local()
            request = dht_pb2.PingRequest(peer=node.protocol.node_info)
            response = await node.protocol.get_stub(remote).rpc_ping(request, timeout=CALL_TIMEOUT_SECONDS)
            self._clock.observe(peer, response.dht_time, sent, self._clock.local())
            await node.protocol.update_routing_table(node_id(remote), remote, responded=True)
        except DHT_ERRORS as error:
            logger.debug("no DHT answer from %s: %s", peer, describe_error(error))
            return False
        return True

    def forget_peer(self, peer: PeerId) -> None:
        """Make no more calls to a peer until it is pinged, or calls us."""
        if self._node is None:
            return
        table = self._node.protocol.routing_table
        uid = table.get(peer_id=PeerID.from_base58(peer))
        if uid is not None:
            del table[uid]

    async def _connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
            for address in addresses:
                try:
                    await self._transport.connect(address, CONNECT_TIMEOUT_SECONDS)
                    return
                except UnreachableError as error:
                    last = error
        raise UnreachableError(f"{peer} has no address") if not addresses else last

    async def announce_and_lookup(
        self, topic: Topic, announcement: Announcement | None, on_value: Callable[[bytes], None]
    ) -> None:
        """Look up a topic, and store our announcement at the nearest nodes.

        Calls `on_value` with every value at these nodes and here.
        """
        if announcement is not None:
            self._storage.store_subkey(topic.key, announcement.subkey, announcement.value, announcement.dht_expiration)
        nearest = await self._node.find_nearest_nodes(
            [topic.key], k_nearest=REPLICAS, beam_size=BEAM_SIZE, exclude_self=True
        )
        await asyncio.gather(
            *(self._query_node(peer, topic, announcement, on_value) for peer in nearest[topic.key].values())
        )
        stored = self._storage.get(topic.key)
        if stored is not None:
            _report_values(stored.value, on_value)

    async def _query_node(
        self, peer: PeerID, topic: Topic, announcement: Announcement | None, on_value: Callable[[bytes], None]
    ) -> None:
        protocol, key = self._node.protocol, topic.key
        # One call per node, because in hivemind's joint search one bad node spoils the answers of the others.
        answer: Mapping[Any, Any] = await protocol.call_find(peer, [key]) or {}
        value, _ = answer.get(key, (None, {}))
        if value is not None and isinstance(value.value, DictionaryDHTValue):
            _report_values(value.value, on_value)
        if announcement is not None:
            await protocol.call_store(
                peer, [key], [announcement.value], [announcement.dht_expiration], subkeys=[announcement.subkey]
            )


def _report_values(values: DictionaryDHTValue, on_value: Callable[[bytes], None]) -> None:
    for _, (value, _) in values.items():
        on_value(value)
