"""Rendezvous: who might be in the run, asked of a distributed hash table (hivemind's DHTNode, in our own event loop).

Each peer announces its addresses, signed, under the run's key at the five nodes nearest to it (Kademlia), and reads
what others announced there. A finding is a hint and no more: gossip with that peer decides. The DHT loses peers, so
nobody is taken for gone because it forgot them.
After p2pd is started again, hivemind's node is bound to a dead socket: it is given up and made anew.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from google.protobuf.message import DecodeError
from hivemind.dht.node import DHTNode
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2

from protocol.errors import PeerFault, TransportError, UnreachableError
from protocol.identity import Identity, PeerId
from protocol.manifest import RunId
from protocol.membership.clock import Clock
from protocol.membership.directory import MAX_ADDRESSES
from protocol.membership.shelf import (
    AnnouncementCheck,
    Door,
    Neighbourhood,
    Shelf,
    announcement,
    node_id,
    read_announcement,
    run_key,
)

logger = logging.getLogger(__name__)

REPLICAS = 5
BEAM = 8  # nodes that a search keeps in view
GREETED = 3  # neighbours that a round makes sure of
CALL_SECONDS = 3.0
CONNECT_SECONDS = 5.0
ROUND_SECONDS = 30.0
STOP_SECONDS = 2.0
FIRST_PERIOD = 0.25  # seconds between rounds; doubles up to
LONGEST_PERIOD = 60.0

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
    """What the rendezvous needs of the transport."""

    @property
    def p2p(self) -> Any: ...
    def on_restart(self, callback: Callable[[], None]) -> None: ...
    async def addresses(self) -> tuple[str, ...]: ...
    async def connect(self, address: str, deadline: float) -> PeerId: ...


class Rendezvous:
    """`neighbours`: peers that may be asked, with addresses. `found` is told of every peer that the DHT names."""

    def __init__(
        self,
        identity: Identity,
        run_id: RunId,
        transport: Host,
        clock: Clock,
        neighbours: Callable[[], Mapping[PeerId, Sequence[str]]],
        found: Callable[[PeerId, Sequence[str]], None],
        rng: random.Random,
    ) -> None:
        self._identity, self._run_id, self._transport, self._clock = identity, run_id, transport, clock
        self._neighbours, self._found, self._rng = neighbours, found, rng
        self._key = run_key(run_id)
        self._check = AnnouncementCheck(run_id)
        self._shelf = Shelf(run_id, clock)
        self._node: Any = None
        self._restarted = asyncio.Event()
        transport.on_restart(self._restarted.set)

    @property
    def refused(self) -> int:
        """Values that were forged, of another run or malformed."""
        return self._check.refused

    async def run(self) -> None:
        """Announce and look up until cancelled: often at first, then once a minute; anew after a restart of p2pd."""
        period = FIRST_PERIOD
        try:
            while True:
                await self._round()
                try:
                    await asyncio.wait_for(self._restarted.wait(), period * self._rng.uniform(0.8, 1.2))
                except TimeoutError:
                    period = min(2 * period, LONGEST_PERIOD)
                else:
                    await self._give_up_node()
                    self._restarted.clear()
                    period = FIRST_PERIOD
        finally:
            await self._give_up_node()

    async def _round(self) -> None:
        try:
            async with asyncio.timeout(ROUND_SECONDS):
                if self._node is None:
                    self._node = await self._make_node()
                await self._greet_some()
                await self._announce_and_ask()
        except FAILURES as error:
            logger.warning("the DHT is out of reach for now: %s", str(error) or type(error).__name__)

    async def _make_node(self) -> Any:
        p2p = self._transport.p2p
        # No caches (they would be filled by strangers, too) and no seeds: dead ones must not stop a start.
        node = await DHTNode.create(
            p2p=p2p,
            node_id=node_id(p2p.peer_id),
            num_replicas=REPLICAS,
            wait_timeout=CALL_SECONDS,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
            record_validator=self._check,
            authorizer=Door(),
        )
        protocol = node.protocol
        protocol.storage = protocol.cache = self._shelf
        table = protocol.routing_table
        protocol.routing_table = Neighbourhood(table.node_id, table.bucket_size, table.depth_modulo)
        return node

    async def _give_up_node(self) -> None:
        """hivemind's shutdown waits for ever where p2pd is dead."""
        node, self._node = self._node, None
        if node is None:
            return
        try:
            await asyncio.wait_for(node.shutdown(), STOP_SECONDS)
        except FAILURES as error:
            logger.info("the DHT node did not end in order: %s", str(error) or type(error).__name__)

    async def _greet_some(self) -> None:
        neighbours = list(self._neighbours().items())
        chosen = self._rng.sample(neighbours, min(GREETED, len(neighbours)))
        await asyncio.gather(*(self._greet(peer, addresses) for peer, addresses in chosen))

    async def _greet(self, peer: PeerId, addresses: Sequence[str]) -> None:
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
            logger.info("no DHT answer from %s: %s", peer, str(error) or type(error).__name__)

    async def _connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        async with asyncio.timeout(CONNECT_SECONDS):
            for address in addresses:
                try:
                    await self._transport.connect(address, CONNECT_SECONDS)
                    return
                except UnreachableError as error:
                    last = error
        raise UnreachableError(f"{peer} has no address") if not addresses else last

    async def _announce_and_ask(self) -> None:
        own = (await self._transport.addresses())[:MAX_ADDRESSES]
        value, expiration = announcement(self._identity, self._run_id, own, self._clock.now())
        self._shelf.store_subkey(self._key, self._identity.peer_id, value, expiration)
        nearest = await self._node.find_nearest_nodes(
            [self._key], k_nearest=REPLICAS, beam_size=BEAM, exclude_self=True
        )
        await asyncio.gather(*(self._visit(peer, value, expiration) for peer in nearest[self._key].values()))
        held = self._shelf.get(self._key)
        if held is not None:
            self._report(held.value)

    async def _visit(self, peer: PeerID, value: bytes, expiration: float) -> None:
        protocol = self._node.protocol
        subkey = self._identity.peer_id
        # Each answer on its own: in hivemind's joint search one bad node spoils what the others say.
        answer = await protocol.call_find(peer, [self._key])
        found, _ = (answer or {}).get(self._key, (None, {}))
        if found is not None and isinstance(found.value, DictionaryDHTValue):
            self._report(found.value)
        await protocol.call_store(peer, [self._key], [value], [expiration], subkeys=[subkey])

    def _report(self, announcements: DictionaryDHTValue) -> None:
        for _, (value, _) in announcements.items():
            try:
                peer, record = read_announcement(value, self._run_id)
            except PeerFault as fault:
                logger.warning("an announcement in the DHT was refused: %s", fault)
                continue
            if peer != self._identity.peer_id:
                self._found(peer, tuple(record.addresses))
