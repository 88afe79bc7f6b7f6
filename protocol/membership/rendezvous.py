"""Rendezvous: finding possible peers of the run through a distributed hash table, and announcing public runs there.

Each peer announces its addresses, signed, under the run's key at the five nodes nearest to it (Kademlia), and reads the
announcements of others there. A found peer is only a hint; gossip with that peer decides. The DHT loses entries, so no
peer counts as gone because the DHT forgot it.

The organiser of a public run announces the run there, too, in a small signed record that expires. Such a record costs
its reader little and can do nothing: its fields are few, short and printable, and its link has a form that
`murmur join` takes, where the manifest is checked again. The organiser signs it for the run that it names.
"""

import asyncio
import logging
import math
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from protocol import errors
from protocol.errors import MalformedError, StaleError
from protocol.identity import Identity, PeerId
from protocol.manifest.run import RunId
from protocol.membership import dht
from protocol.membership.clock import SwarmClock
from protocol.membership.dht import DHT_ERRORS, DhtNode
from protocol.membership.dht_storage import (
    Announcement,
    Topic,
    make_announcement,
    parse_announcement,
    parse_envelope,
    run_topic,
)
from protocol.membership.peer_table import MembershipEvent, PeerLeft
from protocol.membership.record_fields import MAX_ADDRESSES
from protocol.murmur_pb2 import PublicRun
from protocol.signing import Voucher, read_unverified, sign, verify_signed

logger = logging.getLogger(__name__)

KIND = "run"
LIFETIME_SECONDS = 300.0
MAX_VALUE_BYTES = 1024
MAX_LINK_CHARACTERS = 400
RUN_BYTES = 32
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
LINK_PATTERN = re.compile(r"(https?://|murmur://(?P<run>[0-9a-f]{64})@/)[!-~]+")
PINGED_PEERS = 3  # known peers that each lookup pings first
LOOKUP_TIMEOUT_SECONDS = 30.0
MIN_PERIOD_SECONDS = 0.25  # between lookups; doubles up to the maximum
MAX_PERIOD_SECONDS = 60.0
MakeAnnouncement = Callable[[float], Awaitable[Announcement]]  # takes the swarm time


def make_run_announcement(identity: Identity, run: PublicRun, now: float) -> Announcement:
    """Sign a run, given without its expiry, at a swarm time.

    Raises MalformedError if peers would refuse it.
    """
    dated = PublicRun()
    dated.CopyFrom(run)
    dated.expires = now + LIFETIME_SECONDS
    value = sign(identity, KIND, run.run.hex(), dated).SerializeToString()
    return parse_run_announcement(value)


def parse_public_run(value: bytes) -> tuple[PeerId, PublicRun]:
    """Return the host that signed an announcement, and the announcement; raise MalformedError or ForgedError."""
    signed = parse_envelope(value, MAX_VALUE_BYTES, "the announcement of a run")
    run = read_unverified(signed, KIND, PublicRun, MAX_VALUE_BYTES)
    _check(run)
    verify_signed(signed, run.run.hex())
    if run.organiser:
        Voucher(run.organiser, signed.peer, run.voucher).verify(run.run.hex())
    return signed.peer, run


def require_current(run: PublicRun, now: float, tolerance: float) -> None:
    """Raise StaleError if an announcement has expired or lasts too long."""
    if not now < run.expires <= now + LIFETIME_SECONDS + tolerance:
        raise StaleError(f"the announcement of the run {run.name} expires in {run.expires - now:.0f} s")


def parse_run_announcement(value: bytes) -> Announcement:
    host, run = parse_public_run(value)
    return Announcement(f"{host}/{run.run.hex()[:16]}", value, run.expires)


def _check(run: PublicRun) -> None:
    if len(run.run) != RUN_BYTES:
        raise MalformedError("the announcement of a run has no run id")
    if not NAME_PATTERN.fullmatch(run.name) or not NAME_PATTERN.fullmatch(run.recipe):
        raise MalformedError("the announcement of a run has an invalid name")
    match = LINK_PATTERN.fullmatch(run.link)
    if match is None or len(run.link) > MAX_LINK_CHARACTERS:
        raise MalformedError(f"the announcement of the run {run.name} has an invalid link")
    if match["run"] not in (None, run.run.hex()):
        raise MalformedError(f"the announcement of the run {run.name} has a link to another run")
    if not math.isfinite(run.expires):
        raise MalformedError(f"the announcement of the run {run.name} has no expiry")


PUBLIC_RUNS_TOPIC = Topic("public runs", parse_run_announcement)


class RendezvousTransport(dht.DhtTransport, Protocol):
    """The part of the transport that the rendezvous uses."""

    def on_restart(self, callback: Callable[[], None]) -> None: ...
    async def addresses(self) -> tuple[str, ...]: ...


class PeerFinder(Protocol):
    """The known peers of a run: a PeerDirectory."""

    @property
    def run_id(self) -> RunId: ...

    def known_addresses(self) -> Mapping[PeerId, Sequence[str]]:
        """Return the peers that may be pinged, with their addresses."""

    def add_contact(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Remember a peer that was found in the DHT."""


class Rendezvous:
    """Announces this node in the DHT and looks up other peers of the run there."""

    def __init__(
        self,
        identity: Identity,
        transport: RendezvousTransport,
        clock: SwarmClock,
        peers: PeerFinder,
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
        self._invalid_count = 0  # invalid announcements stored by others
        transport.on_restart(self._on_restart)

    @property
    def refusals(self) -> Mapping[str, int]:
        """Return the number of invalid values and oversized requests.

        Invalid values are forged, malformed or of another run.
        """
        return {"dht": self._dht.refused_count + self._invalid_count}

    def advertise_run(self, make_announcement: MakeAnnouncement, extra_peers: Mapping[PeerId, Sequence[str]]) -> None:
        """Announce the run itself from now on.

        `extra_peers` are peers of other runs, where it is announced as well.
        """
        self._make_run_announcement = make_announcement
        self._extra_peers = extra_peers
        self._wake.set()

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        """Call no peer that said goodbye."""
        for event in events:
            if isinstance(event, PeerLeft) and event.reason == "left":
                self._dht.forget_peer(event.peer)

    def _on_restart(self) -> None:
        self._has_restarted = True
        self._wake.set()

    async def run(self) -> None:
        """Announce and look up until cancelled.

        This happens often at first and after a restart of p2pd, then once a minute.
        """
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
                announcement = make_announcement(self._identity, self._run_id, own, self._clock.now())
                await self._dht.announce_and_lookup(self._topic, announcement, self._on_announcement)
                await self._announce_run()
        except DHT_ERRORS as error:
            logger.warning("the DHT is unreachable for now: %s", errors.describe_error(error))

    async def _ping_some(self) -> None:
        known = list(self._peers.known_addresses().items())
        self._dht.set_known_peers([self._identity.peer_id, *(peer for peer, _ in known)])
        chosen = self._rng.sample(known, min(PINGED_PEERS, len(known)))
        await asyncio.gather(*(self._dht.ping_peer(peer, addresses) for peer, addresses in chosen))

    async def _announce_run(self) -> None:
        if self._make_run_announcement is not None:
            await asyncio.gather(
                *(self._dht.ping_peer(peer, addresses) for peer, addresses in self._extra_peers.items())
            )
            announcement = await self._make_run_announcement(self._clock.now())
            await self._dht.announce_and_lookup(PUBLIC_RUNS_TOPIC, announcement, lambda value: None)

    def _on_announcement(self, value: bytes) -> None:
        try:
            peer, record = parse_announcement(value, self._run_id)
        except errors.PeerFault as fault:
            self._invalid_count += 1
            logger.warning("refusing an announcement in the DHT: %s", fault)
            return
        if peer != self._identity.peer_id:
            self._peers.add_contact(peer, tuple(record.addresses))
