"""A node of a distributed hash table (hivemind's DHTNode, in our own event loop) for a few boards.

Seeds are greeted later, so dead ones do not stop a start. After p2pd is started again, hivemind's node is bound to a
dead socket: `close` gives it up, and the next use makes it anew.
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

from protocol.errors import TransportError, UnreachableError, told
from protocol.identity import PeerId
from protocol.membership.board import Board, Notice
from protocol.membership.clock import Clock
from protocol.membership.shelf import AnnouncementCheck, Door, Neighbourhood, Shelf, node_id

logger = logging.getLogger(__name__)

REPLICAS = 5
BEAM = 8  # nodes that a search keeps in view
CALL_SECONDS = 3.0
CONNECT_SECONDS = 5.0
STOP_SECONDS = 2.0

# What comes out of hivemind where p2pd is dead or refuses, a peer cannot be reached, or answers nonsense.
FAILURES = (
    OSError,
    EOFError,
    TimeoutError,
    DecodeError,
    P2PDaemonError,
    P2PHandlerError,
    TransportError,
    UnreachableError,
)


class Host(Protocol):
    """What the DHT needs of the transport."""

    @property
    def p2p(self) -> Any: ...
    async def connect(self, address: str, deadline: float) -> PeerId: ...


class Dht:
    """`boards`: all that is kept for others here. `asks_only`: nothing is, and others do not learn of us."""

    def __init__(self, transport: Host, clock: Clock, boards: Iterable[Board], asks_only: bool = False) -> None:
        kept, self._asks_only = tuple(boards), asks_only
        self._transport = transport
        self._clock = clock
        self._check = AnnouncementCheck(kept)
        self._shelf = Shelf(kept, clock)
        self._door = Door()
        self._node: Any = None

    @property
    def refused(self) -> int:
        """Values that were forged, of another run or malformed, and requests that were too large."""
        return self._check.refused + self._door.refused

    async def open(self) -> None:
        """Where it is not open already."""
        if self._node is None:
            self._node = await self._make_node()

    async def close(self) -> None:
        """hivemind's shutdown waits for ever where p2pd is dead."""
        node, self._node = self._node, None
        if node is None:
            return
        try:
            await asyncio.wait_for(node.shutdown(), STOP_SECONDS)
        except FAILURES as error:
            logger.info("the DHT node did not end in order: %s", told(error))

    async def _make_node(self) -> Any:
        p2p = self._transport.p2p
        # No caches (they would be filled by strangers, too) and no seeds: dead ones must not stop a start.
        node = await DHTNode.create(
            p2p=p2p,
            node_id=node_id(p2p.peer_id),
            client_mode=self._asks_only,
            num_replicas=REPLICAS,
            wait_timeout=CALL_SECONDS,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
            record_validator=self._check,
            authorizer=self._door,
        )
        protocol = node.protocol
        protocol.storage = protocol.cache = self._shelf
        table = protocol.routing_table
        protocol.routing_table = Neighbourhood(table.node_id, table.bucket_size, table.depth_modulo)
        return node

    async def greet(self, peer: PeerId, addresses: Sequence[str]) -> bool:
        """Make a peer known to the DHT node, and learn its clock: before any gossip this is all we know of time."""
        node = self._node
        try:
            await self._connect(peer, addresses)
            remote = PeerID.from_base58(peer)
            sent = self._clock.local()
            request = dht_pb2.PingRequest(peer=node.protocol.node_info)
            response = await node.protocol.get_stub(remote).rpc_ping(request, timeout=CALL_SECONDS)
            self._clock.observe(peer, response.dht_time, sent, self._clock.local())
            await node.protocol.update_routing_table(node_id(remote), remote, responded=True)
        except FAILURES as error:
            logger.info("no DHT answer from %s: %s", peer, told(error))
            return False
        return True

    async def _connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        async with asyncio.timeout(CONNECT_SECONDS):
            for address in addresses:
                try:
                    await self._transport.connect(address, CONNECT_SECONDS)
                    return
                except UnreachableError as error:
                    last = error
        raise UnreachableError(f"{peer} has no address") if not addresses else last

    async def exchange(self, board: Board, notice: Notice | None, found: Callable[[bytes], None]) -> None:
        """Tell `found` of every value on the board at the nodes nearest to it and here; pin ours there."""
        if notice is not None:
            self._shelf.store_subkey(board.key, notice.place, notice.value, notice.expiration)
        nearest = await self._node.find_nearest_nodes(
            [board.key], k_nearest=REPLICAS, beam_size=BEAM, exclude_self=True
        )
        await asyncio.gather(*(self._visit(peer, board, notice, found) for peer in nearest[board.key].values()))
        held = self._shelf.get(board.key)
        if held is not None:
            _report(held.value, found)

    async def _visit(self, peer: PeerID, board: Board, notice: Notice | None, found: Callable[[bytes], None]) -> None:
        protocol, key = self._node.protocol, board.key
        # Each answer on its own: in hivemind's joint search one bad node spoils what the others say.
        answer: Mapping[Any, Any] = await protocol.call_find(peer, [key]) or {}
        value, _ = answer.get(key, (None, {}))
        if value is not None and isinstance(value.value, DictionaryDHTValue):
            _report(value.value, found)
        if notice is not None:
            await protocol.call_store(peer, [key], [notice.value], [notice.expiration], subkeys=[notice.place])


def _report(values: DictionaryDHTValue, found: Callable[[bytes], None]) -> None:
    for _, (value, _) in values.items():
        found(value)
