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
from protocol.membership.board import Notice
from protocol.membership.clock import Clock
from protocol.membership.dht import FAILURES, Dht
from protocol.membership.directory import MAX_ADDRESSES
from protocol.membership.public_runs import PUBLIC
from protocol.membership.shelf import announcement, read_announcement, run_board

logger = logging.getLogger(__name__)

GREETED = 3  # neighbours that a round makes sure of
ROUND_SECONDS = 30.0
FIRST_PERIOD = 0.25  # seconds between rounds; doubles up to
LONGEST_PERIOD = 60.0
Advertisement = Callable[[float], Awaitable[Notice]]  # what to announce at a swarm time


class Host(dht.Host, Protocol):
    """What the rendezvous needs of the transport."""

    def on_restart(self, callback: Callable[[], None]) -> None: ...
    async def addresses(self) -> tuple[str, ...]: ...


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
        self._identity = identity
        self._run_id = run_id
        self._transport = transport
        self._clock = clock
        self._neighbours = neighbours
        self._found = found
        self._rng = rng
        self._board = run_board(run_id)
        self._dht = Dht(transport, clock, (self._board, PUBLIC))
        self._advertisement: Advertisement | None = None
        self._doors: Mapping[PeerId, Sequence[str]] = {}
        self._restarted = False
        self._wake = asyncio.Event()
        self._unreadable = 0  # announcements that others hold
        transport.on_restart(self._note_restart)

    @property
    def refused(self) -> int:
        """Values that were forged, of another run or malformed, and requests that were too large."""
        return self._dht.refused + self._unreadable

    def advertise(self, advertisement: Advertisement, doors: Mapping[PeerId, Sequence[str]]) -> None:
        """From now on announce the run itself as well, also at peers of other runs: `doors`, with their addresses."""
        self._advertisement = advertisement
        self._doors = doors
        self._wake.set()

    def _note_restart(self) -> None:
        self._restarted = True
        self._wake.set()

    async def run(self) -> None:
        """Announce and look up until cancelled: often at first, then once a minute; anew after a restart of p2pd."""
        period = FIRST_PERIOD
        try:
            while True:
                await self._round()
                try:
                    await asyncio.wait_for(self._wake.wait(), period * self._rng.uniform(0.8, 1.2))
                except TimeoutError:
                    period = min(2 * period, LONGEST_PERIOD)
                    continue
                self._wake.clear()
                if self._restarted:
                    self._restarted, period = False, FIRST_PERIOD
                    await self._dht.close()
        finally:
            await self._dht.close()

    async def _round(self) -> None:
        try:
            async with asyncio.timeout(ROUND_SECONDS):
                await self._dht.open()
                await self._greet_some()
                own = (await self._transport.addresses())[:MAX_ADDRESSES]
                notice = announcement(self._identity, self._run_id, own, self._clock.now())
                await self._dht.exchange(self._board, notice, self._report)
                await self._advertise()
        except FAILURES as error:
            logger.warning("the DHT is out of reach for now: %s", errors.told(error))

    async def _greet_some(self) -> None:
        neighbours = list(self._neighbours().items())
        chosen = self._rng.sample(neighbours, min(GREETED, len(neighbours)))
        await asyncio.gather(*(self._dht.greet(peer, addresses) for peer, addresses in chosen))

    async def _advertise(self) -> None:
        if self._advertisement is not None:
            await asyncio.gather(*(self._dht.greet(peer, addresses) for peer, addresses in self._doors.items()))
            notice = await self._advertisement(self._clock.now())
            await self._dht.exchange(PUBLIC, notice, lambda value: None)

    def _report(self, value: bytes) -> None:
        try:
            peer, record = read_announcement(value, self._run_id)
        except errors.PeerFault as fault:
            self._unreadable += 1
            logger.warning("an announcement in the DHT was refused: %s", fault)
            return
        if peer != self._identity.peer_id:
            self._found(peer, tuple(record.addresses))
