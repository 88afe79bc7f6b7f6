"""The DHT over real p2pd processes."""

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from hivemind.p2p import PeerID

from protocol.identity import Identity
from protocol.membership.clock import SwarmClock
from protocol.membership.dht import DhtNode
from protocol.membership.dht_storage import EXPIRATION_OFFSET_SECONDS, KIND, LIFETIME_SECONDS, Announcement, run_topic
from protocol.membership.directory import PeerDirectory
from protocol.membership.gossip import DirectoryOptions
from protocol.membership.peer_table import PeerLeft
from protocol.membership.rendezvous import PUBLIC_RUNS_TOPIC, Rendezvous, make_run_announcement, parse_public_run
from protocol.murmur_pb2 import PeerRecord, PublicRun
from protocol.signing import sign
from protocol.transport.transport import Transport

pytestmark = pytest.mark.slow

RUN = "ab" * 32
Start = Callable[..., Awaitable[Transport]]


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


class RendezvousPeer:
    """A rendezvous on a transport of its own, without gossip; `found` holds the peers that the DHT named."""

    def __init__(
        self, transport: Transport, identity: Identity, seeds: Mapping[str, Sequence[str]], skew: float
    ) -> None:
        self.transport = transport
        self.identity = identity
        self.found: dict[str, tuple[str, ...]] = {}
        self.clock = SwarmClock(lambda: time.time() + skew)
        self.run_id = RUN
        self._seeds = seeds
        self.rendezvous = Rendezvous(identity, transport, self.clock, self, random.Random(transport.peer_id))
        self.task = asyncio.create_task(self.rendezvous.run())

    def known_addresses(self) -> Mapping[str, Sequence[str]]:
        return self._seeds

    def add_contact(self, peer: str, addresses: Sequence[str]) -> None:
        self.found[peer] = tuple(addresses)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        assert self.task.cancelled()


Join = Callable[..., Awaitable[RendezvousPeer]]


@pytest.fixture
async def join(start_transport: Start, tmp_path: Path) -> AsyncIterator[Join]:
    """Start a peer that knows the given ones: `await join(name, *seeds)`."""
    peers: list[RendezvousPeer] = []

    async def start(name: str, *seeds: RendezvousPeer, skew: float = 0.0) -> RendezvousPeer:
        transport = await start_transport(name)
        identity = Identity.load_or_create(tmp_path / name / "key")
        known = {seed.identity.peer_id: await seed.transport.addresses() for seed in seeds}
        peers.append(RendezvousPeer(transport, identity, known, skew))
        return peers[-1]

    yield start
    for peer in peers:
        await peer.stop()


@pytest.mark.parametrize("reason", ["left", "expired"])
async def test_dht_calls_no_peer_that_said_goodbye(join: Join, reason: str) -> None:
    first = await join("first")
    other = await join("other", first)
    await until(lambda: other.transport.peer_id in first.found)
    first.task.cancel()  # it calls nobody by itself from now on
    first.rendezvous.on_membership_changed([PeerLeft(other.transport.peer_id, reason, None)])
    table = first.rendezvous._dht._node and first.rendezvous._dht._node.protocol.routing_table
    known = table.get(peer_id=PeerID.from_base58(other.transport.peer_id)) is not None
    assert known == (reason == "expired"), "the control: a peer that vanished is called again"


async def test_peers_that_share_only_a_seed_find_each_other(join: Join) -> None:
    seed = await join("seed")
    one, other = await join("one", seed), await join("other", seed)
    await until(lambda: other.identity.peer_id in one.found and one.identity.peer_id in other.found)
    assert one.found[other.identity.peer_id] == await other.transport.addresses()
    assert seed.rendezvous.refusals == one.rendezvous.refusals == other.rendezvous.refusals == {"dht": 0}


@pytest.mark.parametrize("skew", [-7200.0, 7200.0])
async def test_peer_with_a_wrong_clock_finds_and_is_found(join: Join, skew: float) -> None:
    seed = await join("seed")
    one = await join("one", seed)
    await until(lambda: seed.identity.peer_id in one.found)
    wrong = await join("wrong", seed, one, skew=skew)
    await until(lambda: wrong.identity.peer_id in one.found and one.identity.peer_id in wrong.found)
    assert abs(wrong.clock.now() - time.time()) < 5


async def test_strangers_can_neither_fill_the_dht_nor_forge_announcements(
    join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    seed, victim = await join("seed"), Identity.create()
    liar = await join("liar", seed)
    await until(lambda: liar.identity.peer_id in seed.found)
    node: Any = liar.rendezvous._dht._node
    now = time.time()
    forged = sign(liar.identity, KIND, RUN, PeerRecord(sequence=1, expires=now + LIFETIME_SECONDS))
    forged.peer = victim.peer_id
    honest = sign(liar.identity, KIND, RUN, PeerRecord(sequence=2, expires=now + LIFETIME_SECONDS + 30))
    target, key = PeerID.from_base58(seed.identity.peer_id), run_topic(RUN).key

    async def store(value: bytes, expiration: float, subkey: str | None, topic_key: Any = key) -> list[bool]:
        stored: list[bool] = await node.protocol.call_store(target, [topic_key], [value], [expiration], [subkey])
        return stored

    for value, subkey in ((forged.SerializeToString(), victim.peer_id), (b"junk", "junk"), (b"junk", None)):
        assert await store(value, EXPIRATION_OFFSET_SECONDS + now + LIFETIME_SECONDS, subkey) == [False]
    assert await store(b"junk", EXPIRATION_OFFSET_SECONDS + now, None, run_topic("cd" * 32).key) == [False]
    assert seed.rendezvous.refusals == {"dht": 4}
    assert await store(
        honest.SerializeToString(), EXPIRATION_OFFSET_SECONDS + now + LIFETIME_SECONDS + 30, liar.identity.peer_id
    ) == [True]
    assert victim.peer_id not in seed.found and "refused so far" in caplog.text


async def test_rendezvous_survives_the_death_of_p2pd(join: Join) -> None:
    seed = await join("seed")
    one = await join("one", seed)
    await until(lambda: one.identity.peer_id in seed.found)
    p2p = one.transport.p2p
    os.kill(one.transport._p2pd.pid, signal.SIGKILL)
    await until(lambda: one.transport.p2p is not p2p)
    late = await join("late", one)
    await until(lambda: late.identity.peer_id in one.found and one.identity.peer_id in late.found)


async def test_dead_seed_does_not_block_the_lookup(join: Join, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    seed, missing = await join("seed"), Identity.create().peer_id
    seeds = {seed.identity.peer_id: await seed.transport.addresses()}
    one = await join("one")
    one._seeds = {missing: (f"/ip4/127.0.0.1/tcp/9/p2p/{missing}",), **seeds}  # the first address is dead
    await until(lambda: one.identity.peer_id in seed.found)
    await until(lambda: f"no DHT answer from {missing}" in caplog.text)


async def test_rendezvous_stops_in_time_while_p2pd_is_frozen(join: Join) -> None:
    seed = await join("seed")
    one = await join("one", seed)
    await until(lambda: seed.identity.peer_id in one.found)
    os.kill(one.transport._p2pd.pid, signal.SIGSTOP)
    try:
        await asyncio.wait_for(one.stop(), 5.0)
    finally:
        os.kill(one.transport._p2pd.pid, signal.SIGCONT)


class SeededDirectory(PeerDirectory):
    """Passes only the seeds to the rendezvous."""

    seeds: Mapping[str, tuple[str, ...]] = {}

    def known_addresses(self) -> Mapping[str, tuple[str, ...]]:
        return self.seeds


async def test_directories_meet_through_the_dht_alone(start_transport: Start, join: Join, tmp_path: Path) -> None:
    """The seed does not gossip. Peers stay known after the DHT forgets them."""
    seed = await join("seed")
    known = {seed.identity.peer_id: await seed.transport.addresses()}
    directories: list[PeerDirectory] = []
    gossip: list[asyncio.Task[None]] = []
    lookups: list[asyncio.Task[None]] = []
    for name in ("one", "other"):
        servers: list[grpc.aio.Server] = []
        transport = await start_transport(name, [servers.append])
        identity, clock = Identity.load_or_create(tmp_path / name / "key"), SwarmClock()
        options = DirectoryOptions(run_id=RUN, heartbeat=0.2, expiry=3.0)
        directory = SeededDirectory(options, identity, transport, clock, random.Random(name))
        directory.seeds = known
        directory.register(servers[0])
        rendezvous = Rendezvous(identity, transport, clock, directory, random.Random(name))
        directories.append(directory)
        gossip.append(asyncio.create_task(directory.run()))
        lookups.append(asyncio.create_task(rendezvous.run()))
    both = {directory.peer_id for directory in directories}
    try:
        await until(lambda: all(directory.live().keys() == both for directory in directories))
        for task in lookups:
            task.cancel()
        await asyncio.wait(lookups)
        await seed.stop()
        await seed.transport.stop()
        await asyncio.sleep(3.5)  # longer than the expiry of a record
        assert all(directory.live().keys() == both for directory in directories)
    finally:
        for task in gossip + lookups:
            task.cancel()
        await asyncio.wait(gossip + lookups)


async def test_public_run_is_found_through_any_known_peer(start_transport: Start, join: Join) -> None:
    seed = await join("seed")
    host, other = await join("host", seed), await join("other", seed)
    run = PublicRun(run=bytes.fromhex(RUN), name="demo", recipe="diloco", link="https://run.example.org/run.toml")

    async def make_announcement(now: float) -> Announcement:
        return make_run_announcement(host.identity, run, now)

    host.rendezvous.advertise_run(make_announcement, {})
    reader, found = await start_transport("reader"), set[bytes]()
    dht = DhtNode(reader, SwarmClock(), (PUBLIC_RUNS_TOPIC,), client_mode=True)
    await dht.open()
    try:
        assert await dht.ping_peer(other.identity.peer_id, await other.transport.addresses())
        async with asyncio.timeout(20):
            while not found:
                await dht.announce_and_lookup(PUBLIC_RUNS_TOPIC, None, found.add)
    finally:
        await dht.close()
    organiser, read = parse_public_run(found.pop())
    assert organiser == host.identity.peer_id and (read.name, read.link) == (run.name, run.link)


async def test_public_run_is_announced_at_peers_of_other_runs(join: Join) -> None:
    """The control: without the extra peers the stranger does not learn of it."""
    stranger, host = await join("stranger"), await join("host")

    async def make_announcement(now: float) -> Announcement:
        return make_run_announcement(
            host.identity, PublicRun(run=bytes(32), name="x", recipe="y", link="https://z"), now
        )

    host.rendezvous.advertise_run(make_announcement, {})
    await until(lambda: PUBLIC_RUNS_TOPIC.key in host.rendezvous._dht._storage)
    assert PUBLIC_RUNS_TOPIC.key not in stranger.rendezvous._dht._storage
    host.rendezvous.advertise_run(make_announcement, {stranger.identity.peer_id: await stranger.transport.addresses()})
    await until(lambda: PUBLIC_RUNS_TOPIC.key in stranger.rendezvous._dht._storage)
