"""Rendezvous: who might be in the run, asked of a distributed hash table.

Each peer announces its addresses, signed, under the run's key at the five nodes nearest to it (Kademlia), and reads
what others announced there. A finding is a hint and no more: gossip with that peer decides. The DHT loses peers, so
nobody is taken for gone because it forgot them. The organiser of a public run announces that there, too.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from protocol import errors
from protocol.identity import Identity, PeerId
from protocol.manifest import RunId
from protocol.membership import dht
from protocol.membership.clock import SwarmClock
from protocol.membership.dht import DHT_ERRORS, DhtNode
from protocol.membership.dht_storage import Announcement, make_announcement, parse_announcement, run_topic
from protocol.membership.peer_table import MAX_ADDRESSES
from protocol.membership.run_registry import PUBLIC_RUNS_TOPIC

logger = logging.getLogger(__name__)

PINGED_PEERS = 3  # neighbours that a round makes sure of
LOOKUP_TIMEOUT_SECONDS = 30.0
MIN_PERIOD_SECONDS = 0.25  # seconds between rounds; doubles up to
MAX_PERIOD_SECONDS = 60.0
MakeAnnouncement = Callable[[float], Awaitable[Announcement]]  # what to announce at a swarm time


class RendezvousTransport(dht.DhtTransport, Protocol):
    """What the rendezvous needs of the transport."""

    def on_restart(self, callback: Callable[[], None]) -> None: ...
    async def addresses(self) -> tuple[str, ...]: ...


class KnownPeers(Protocol):
    """The peers of a run, as far as they are known; a PeerDirectory."""

    @property
    def run_id(self) -> RunId: ...

    def known_addresses(self) -> Mapping[PeerId, Sequence[str]]:
        """Return the peers that may be asked, with their addresses."""

    def add_contact(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Take note of a peer that the DHT names."""


class Rendezvous:
    """Announces this node and looks for peers of one run in the DHT."""

    def __init__(
        self,
        identity: Identity,
        transport: RendezvousTransport,
        clock: SwarmClock,
        peers: KnownPeers,
        rng: random.Random,
    ) -> None:
        self._identity = identity
        self._run_id = run_id = peers.run_id
        self._peers = peers
        self._transport = transport
        self._clock = clock
        self._rng = rng
        self._topic = run_topic(run_id)
        self._dht = DhtNode(transport, clock, (self._topic, PUBLIC_RUNS_TOPIC))
        self._make_run_announcement: MakeAnnouncement | None = None
        self._extra_peers: Mapping[PeerId, Sequence[str]] = {}
        self._has_restarted = False
        self._wake = asyncio.Event()
        self._invalid_count = 0  # announcements that others hold
        transport.on_restart(self._on_restart)

    @property
    def refusals(self) -> Mapping[str, int]:
        """Return the number of values that were refused: forged, of another run or malformed, or too large."""
        return {"dht": self._dht.refused_count + self._invalid_count}

    def advertise_run(self, make_announcement: MakeAnnouncement, extra_peers: Mapping[PeerId, Sequence[str]]) -> None:
        """From now on announce the run itself as well, also at peers of other runs: `doors`, with their addresses."""
        self._make_run_announcement = make_announcement
        self._extra_peers = extra_peers
        self._wake.set()

    def _on_restart(self) -> None:
        self._has_restarted = True
        self._wake.set()

    async def run(self) -> None:
        """Announce and look up until cancelled: often at first, then once a minute; anew after a restart of p2pd."""
        period = MIN_PERIOD_SECONDS
        try:
            while True:
                await self._announce_and_lookup()
                try:
                    await asyncio.wait_for(self._wake.wait(), period * self._rng.uniform(0.8, 1.2))
                except TimeoutError:
                    period = min(2 * period, MAX_PERIOD_SECONDS)
                    continue
                self._wake.clear()
                if self._has_restarted:
                    self._has_restarted, period = False, MIN_PERIOD_SECONDS
                    await self._dht.close()
        finally:
            await self._dht.close()

    async def _announce_and_lookup(self) -> None:
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_SECONDS):
                await self._dht.open()
                await self._ping_some()
                own = (await self._transport.addresses())[:MAX_ADDRESSES]
                notice = make_announcement(self._identity, self._run_id, own, self._clock.now())
                await self._dht.announce_and_lookup(self._topic, notice, self._on_announcement)
                await self._announce_run()
        except DHT_ERRORS as error:
            logger.warning("the DHT is out of reach for now: %s", errors.describe_error(error))

    async def _ping_some(self) -> None:
        neighbours = list(self._peers.known_addresses().items())
        chosen = self._rng.sample(neighbours, min(PINGED_PEERS, len(neighbours)))
        await asyncio.gather(*(self._dht.ping_peer(peer, addresses) for peer, addresses in chosen))

    async def _announce_run(self) -> None:
        if self._make_run_announcement is not None:
            await asyncio.gather(
                *(self._dht.ping_peer(peer, addresses) for peer, addresses in self._extra_peers.items())
            )
            notice = await self._make_run_announcement(self._clock.now())
            await self._dht.announce_and_lookup(PUBLIC_RUNS_TOPIC, notice, lambda value: None)

    def _on_announcement(self, value: bytes) -> None:
        try:
            peer, record = parse_announcement(value, self._run_id)
        except errors.PeerFault as fault:
            self._invalid_count += 1
            logger.warning("an announcement in the DHT was refused: %s", fault)
            return
        if peer != self._identity.peer_id:
            self._peers.add_contact(peer, tuple(record.addresses))
