"""Gossip among directories on a simulated network with faults, and once over real transports."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.membership.clock import SwarmClock
from protocol.membership.contacts import load_addresses
from protocol.membership.directory import PeerDirectory
from protocol.membership.gossip import MAX_RECORDS, DirectoryOptions
from protocol.membership.peer_table import KIND, PeerJoined, PeerLeft, PeerUpdated
from protocol.murmur_pb2 import GossipReply, GossipRequest, PeerRecord
from protocol.signing import sign
from protocol.transport.transport import Transport
from tests.protocol.membership.simulated_gossip import (
    HEARTBEAT,
    RUN,
    EventRecorder,
    FakeContext,
    GossipSwarm,
    address_of,
    all_see,
    rpc_error,
    start_chain,
    until,
)

pytestmark = pytest.mark.slow


async def test_chain_of_peers_converges(swarm: GossipSwarm) -> None:
    peers = start_chain(swarm, 7)
    await until(lambda: all_see(peers, peers))
    peers[0].publish(name="first", round=5, tokens=100)
    await until(lambda: all(peer.live()[peers[0].peer_id].tokens == 100 for peer in peers))
    assert all(not peer.refusals for peer in peers)


async def test_urgent_change_is_pushed_without_a_heartbeat(swarm: GossipSwarm) -> None:
    peers = [swarm.add()]
    peers += [swarm.add(bootstrap=[address_of(peers[0])]) for _ in range(5)]
    await until(lambda: all_see(peers, peers))
    for task in swarm.tasks.values():
        task.cancel()
    await asyncio.wait(swarm.tasks.values())
    peers[2].publish(round=1)  # control: no peer learns of it while nobody gossips
    await asyncio.sleep(0.1)
    assert all(peer.live()[peers[2].peer_id].round == 0 for peer in peers if peer is not peers[2])
    peers[2].publish(round=2, urgent=True)
    await until(lambda: all(peer.live()[peers[2].peer_id].round == 2 for peer in peers), 1.0)


async def test_dead_peer_is_gone_for_all_others(swarm: GossipSwarm) -> None:
    peers = start_chain(swarm, 5)
    await until(lambda: all_see(peers, peers))
    swarm.kill(peers[2])
    survivors = [*peers[:2], *peers[3:]]
    await until(lambda: all_see(survivors, survivors))
    await asyncio.sleep(4 * HEARTBEAT)
    assert all_see(survivors, survivors)  # and no other table brings it back


async def test_peer_that_stops_renewing_expires(swarm: GossipSwarm) -> None:
    one, other = start_chain(swarm, 2)
    events = EventRecorder()
    one.subscribe(events)
    await until(lambda: all_see([one, other], [one, other]))
    swarm.tasks[other.peer_id].cancel()  # it still answers, but its record is not renewed
    await until(lambda: PeerLeft(other.peer_id, "expired") in events)


async def test_leaving_peer_is_gone_at_once(swarm: GossipSwarm) -> None:
    peers = start_chain(swarm, 4, expiry=60.0)
    events = EventRecorder()
    peers[0].subscribe(events)
    await until(lambda: all_see(peers, peers))
    swarm.tasks[peers[3].peer_id].cancel()
    await asyncio.wait_for(peers[3].leave(), 2.5)
    assert all_see(peers[:3], peers[:3])
    assert [event for event in events if event.peer == peers[3].peer_id][-1] == PeerLeft(peers[3].peer_id, "left")


async def count_calls_after(swarm: GossipSwarm, viewers: list[PeerDirectory], gone: PeerDirectory) -> int:
    """Return how often the viewers call a peer in the heartbeats after it has gone, with its record expired."""
    await until(lambda: all_see(viewers, viewers))
    swarm.network.calls.clear()
    await asyncio.sleep(1.0)
    return sum(target == gone.peer_id for source, target in swarm.network.calls if source != gone.peer_id)


async def test_nobody_calls_a_peer_that_said_goodbye(swarm: GossipSwarm, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    peers = start_chain(swarm, 5, expiry=0.5)
    await until(lambda: all_see(peers, peers))
    await peers[4].leave()
    swarm.kill(peers[4])
    assert await count_calls_after(swarm, peers[:4], peers[4]) == 0
    assert not caplog.records
    swarm.kill(peers[3])  # the control: a peer that vanished is called again
    assert await count_calls_after(swarm, peers[:3], peers[3]) > 0


async def test_peer_that_said_goodbye_is_welcome_again(swarm: GossipSwarm) -> None:
    identity = Identity.create()
    seed = swarm.add(expiry=0.5)
    left = swarm.add(identity, bootstrap=[address_of(seed)], expiry=0.5)
    await until(lambda: all_see([seed, left], [seed, left]))
    await left.leave()
    swarm.kill(left)
    await until(lambda: all_see([seed], [seed]))
    again = swarm.add(identity, bootstrap=[address_of(seed)], expiry=0.5)
    await until(lambda: all_see([seed, again], [seed, again]))
    swarm.kill(again)  # and is called again when it vanishes then
    assert await count_calls_after(swarm, [seed], again) > 0


async def test_leaving_is_bounded_though_nobody_answers(swarm: GossipSwarm) -> None:
    peers = start_chain(swarm, 3)
    await until(lambda: all_see(peers, peers))
    swarm.network.frozen = {peers[0].peer_id, peers[1].peer_id}
    await asyncio.wait_for(peers[2].leave(), 3.0)


async def test_peer_is_suspected_after_two_failures_until_it_speaks_again(swarm: GossipSwarm) -> None:
    peers = start_chain(swarm, 3, expiry=60.0)
    events = EventRecorder()
    peers[0].subscribe(events)
    await until(lambda: all_see(peers, peers))
    swarm.network.dead.add(peers[2].peer_id)
    swarm.tasks[peers[2].peer_id].cancel()
    await until(lambda: all_see(peers[:2], peers[:2]), 5.0)  # long before the record expires
    assert PeerLeft(peers[2].peer_id, "unreachable") in events
    swarm.network.dead.clear()
    swarm.tasks[peers[2].peer_id] = asyncio.create_task(peers[2].run())
    await until(lambda: all_see(peers, peers))
    assert isinstance(events[-1], PeerJoined | PeerUpdated)


async def test_peer_whose_machine_says_that_it_is_dead_is_gone_at_once(swarm: GossipSwarm) -> None:
    """Nobody asks after those that answer. The test above is the control: there the machine is silent."""
    peers = start_chain(swarm, 3, expiry=60.0)
    events = EventRecorder()
    peers[0].subscribe(events)
    await until(lambda: all_see(peers, peers))
    dead = peers[2].peer_id
    swarm.network.ended.add(dead)
    swarm.kill(peers[2])
    await until(lambda: PeerLeft(dead, "ended") in events and all_see(peers[:1], peers[:2]))
    assert set(swarm.network.asked_machines) == {dead}


async def test_peer_that_did_not_answer_is_reported_again_once_its_machine_says_that_it_is_dead(
    swarm: GossipSwarm,
) -> None:
    peers = start_chain(swarm, 2, expiry=60.0)
    events = EventRecorder()
    peers[0].subscribe(events)
    await until(lambda: all_see(peers, peers))
    other = peers[1].peer_id
    peers[0].suspect(other, "it does not take messages")
    await until(lambda: not peers[0]._end_checks)
    swarm.network.ended.add(other)
    peers[0]._start_end_check(other)
    await until(lambda: PeerLeft(other, "ended") in events)
    assert PeerLeft(other, "unreachable") in events
    swarm.network.ended.clear()
    peers[1].publish(urgent=True, step=5)
    await until(lambda: all_see(peers, peers))
    assert isinstance(events[-1], PeerJoined | PeerUpdated), "it has spoken"


async def test_frozen_peer_does_not_delay_the_others(swarm: GossipSwarm) -> None:
    peers = start_chain(swarm, 5, expiry=60.0)
    await until(lambda: all_see(peers, peers))
    swarm.network.frozen.add(peers[4].peer_id)
    for step in range(1, 6):  # each call to the frozen peer hangs for two seconds
        peers[0].publish(step=step)
        await until(lambda step=step: all(p.live()[peers[0].peer_id].step == step for p in peers[:4]), 1.5)  # type: ignore[misc]


async def test_halves_of_a_partition_find_each_other_again(swarm: GossipSwarm) -> None:
    """A partition lasts longer than the expiry: both halves forget each other, and meet again without any DHT."""
    peers = start_chain(swarm, 4)
    await until(lambda: all_see(peers, peers))
    call = swarm.network.call
    left = {peer.peer_id for peer in peers[:2]}

    async def cut(source: str, target: str, request: GossipRequest, seconds: float) -> GossipReply:
        if (source in left) != (target in left):
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "cut")
        return await call(source, target, request, seconds)

    swarm.network.call = cut  # type: ignore[method-assign]
    await until(lambda: all_see(peers[:2], peers[:2]) and all_see(peers[2:], peers[2:]))
    await asyncio.sleep(2.0)  # past the expiry of every record
    swarm.network.call = call  # type: ignore[method-assign]
    await until(lambda: all_see(peers, peers))


async def test_restarted_peer_overrides_its_former_record(swarm: GossipSwarm) -> None:
    identity = Identity.create()
    seed = swarm.add()
    first = swarm.add(identity, bootstrap=[address_of(seed)])
    first.publish(name="before", tokens=7)
    await until(lambda: all_see([seed], [seed, first]))
    swarm.kill(first)
    again = swarm.add(identity, bootstrap=[address_of(seed)])
    again.publish(name="after")
    await until(lambda: seed.live().get(identity.peer_id, PeerRecord()).name == "after", 1.0)
    assert seed.live()[identity.peer_id].tokens == 0


async def test_foreign_record_of_our_own_key_is_overridden(swarm: GossipSwarm) -> None:
    """Another node still has the last record of an earlier start, made with a clock that was ahead."""
    identity = Identity.create()
    seed, peer = swarm.add(), swarm.add(identity)
    now = SwarmClock().now()
    former = PeerRecord(sequence=int((now + 30) * 1000), expires=now + 1.5, role="trainer", name="former")
    request = GossipRequest(run=bytes.fromhex(RUN), records=[sign(identity, KIND, RUN, former)])
    await seed.Gossip(request, FakeContext(identity.peer_id))
    assert seed.live()[identity.peer_id].name == "former"
    peer.add_contact(seed.peer_id, [address_of(seed)])
    await until(lambda: seed.live()[identity.peer_id].name == "" and peer.live()[identity.peer_id].name == "")


@pytest.mark.parametrize("others", [1, 2, 3])
@pytest.mark.parametrize("skew", [-7200.0, 86400.0])
async def test_peer_with_a_wrong_clock_joins(swarm: GossipSwarm, skew: float, others: int) -> None:
    peers = start_chain(swarm, others)
    await until(lambda: all_see(peers, peers))
    wrong = swarm.add(skew=skew, bootstrap=[address_of(peers[0])])
    everybody = [*peers, wrong]
    await until(lambda: all_see(everybody, everybody))
    await asyncio.sleep(2.0)  # longer than the expiry
    assert all_see(everybody, everybody)


async def test_two_peers_agree_on_the_time_in_their_first_exchange(swarm: GossipSwarm) -> None:
    seed = swarm.add(heartbeat=30.0)
    wrong = swarm.add(heartbeat=30.0, skew=7200.0, bootstrap=[address_of(seed)])
    await until(lambda: all_see([seed, wrong], [seed, wrong]), 10.0)  # long before the next heartbeat


async def test_peer_that_slept_is_answered_at_once(swarm: GossipSwarm) -> None:
    """Its record has expired meanwhile; forgetting it now would cut the connection that it calls on."""
    one, other = start_chain(swarm, 2, expiry=0.3)
    await until(lambda: all_see([one, other], [one, other]))
    for directory in (one, other):
        swarm.tasks[directory.peer_id].cancel()
    await asyncio.sleep(0.4)
    assert one.live().keys() == set()
    other.publish(name="awake")
    request = GossipRequest(run=bytes.fromhex(RUN), records=other._known.table.records_of([other.peer_id]))
    await one.Gossip(request, FakeContext(other.peer_id))
    assert other.peer_id in one.live()
    assert other.peer_id not in swarm.nodes[one.peer_id].forgotten


async def test_listeners_get_every_event_once(swarm: GossipSwarm) -> None:
    one = swarm.add()
    events = EventRecorder()
    one.subscribe(events)
    other = swarm.add(bootstrap=[address_of(one)])
    await until(lambda: len(events) > 3)
    joined = [event for event in events if isinstance(event, PeerJoined)]
    assert [event.peer for event in joined] == [other.peer_id] and events[0] == joined[0]
    sequences = [event.record.sequence for event in events if not isinstance(event, PeerLeft)]
    assert sequences == sorted(set(sequences))


async def test_node_without_peers_logs_its_attempts_and_continues(
    swarm: GossipSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    missing = Identity.create()
    one = swarm.add(bootstrap=[f"/memory/1/p2p/{missing.peer_id}"])
    await until(lambda: caplog.records)
    message = caplog.records[0].getMessage()
    assert missing.peer_id in message and "/memory/1/p2p/" in message and "trying again in" in message
    late = swarm.add(missing)
    await until(lambda: all_see([one, late], [one, late]))


async def test_addresses_survive_a_restart_of_all(swarm: GossipSwarm, tmp_path: Path) -> None:
    peers = start_chain(swarm, 2, addresses_file=tmp_path / "addresses.json")
    await until(lambda: all_see(peers, peers))
    await peers[0].leave()
    assert peers[1].peer_id in load_addresses(tmp_path / "addresses.json")
    swarm.kill(peers[0])
    again = swarm.add(addresses_file=tmp_path / "addresses.json")
    await until(lambda: all_see([again, peers[1]], [again, peers[1]]))


async def test_peer_killed_soon_after_meeting_others_finds_them_again(swarm: GossipSwarm, tmp_path: Path) -> None:
    """The first peer of a swarm had no bootstrap peer, so when it comes back, it has only its address file."""
    first = swarm.add(addresses_file=tmp_path / "addresses.json")
    other = swarm.add(bootstrap=[f"/memory/1/p2p/{first.peer_id}"])
    await until(lambda: all_see([first, other], [first, other]))
    await until(lambda: other.peer_id in load_addresses(tmp_path / "addresses.json"), 5.0)
    swarm.kill(first)
    again = swarm.add(addresses_file=tmp_path / "addresses.json")
    await until(lambda: all_see([again, other], [again, other]))


async def test_own_addresses_may_be_unreadable_for_a_while(
    swarm: GossipSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    peers = start_chain(swarm, 2)
    await until(lambda: all_see(peers, peers))
    swarm.nodes[peers[0].peer_id].is_broken = True
    await until(lambda: "p2pd is being restarted" in caplog.text)
    sequence = peers[1].live()[peers[0].peer_id].sequence
    await until(lambda: peers[1].live()[peers[0].peer_id].sequence > sequence)
    assert list(peers[1].live()[peers[0].peer_id].addresses) == [address_of(peers[0])]


async def test_invalid_fields_are_not_published(swarm: GossipSwarm) -> None:
    one = swarm.add()
    one.publish(name="good")
    for fields in ({"name": "x" * 100}, {"loss": float("nan")}, {"role": "king"}):
        with pytest.raises(MalformedError):
            one.publish(**fields)
    with pytest.raises(AttributeError):
        one.publish(nmae="typo")
    assert one.live()[one.peer_id].name == "good"


@asynccontextmanager
async def refused(code: grpc.StatusCode) -> AsyncIterator[None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code() == code


async def test_bad_calls_are_refused_and_counted(swarm: GossipSwarm, caplog: pytest.LogCaptureFixture) -> None:
    one, stranger = swarm.add(), Identity.create()
    context, run = FakeContext(stranger.peer_id), bytes.fromhex(RUN)
    good = sign(stranger, KIND, RUN, PeerRecord())
    async with refused(grpc.StatusCode.FAILED_PRECONDITION):
        await one.Gossip(GossipRequest(run=bytes(32)), context)
    async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
        await one.Gossip(GossipRequest(run=run, records=[good] * (MAX_RECORDS + 1)), context)
    async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
        await one.Gossip(GossipRequest(run=run, salt=bytes(8), known=bytes(8 * 5000)), context)
    for salt, entries in ((bytes(7), b""), (bytes(8), bytes(12))):
        async with refused(grpc.StatusCode.INVALID_ARGUMENT):
            await one.Gossip(GossipRequest(run=run, salt=salt, known=entries), context)
    async with refused(grpc.StatusCode.INVALID_ARGUMENT):
        await one.Gossip(GossipRequest(run=run), FakeContext("nobody"))
    assert one.refusals == {"stale": 1, "limit": 2, "malformed": 3}
    assert len(caplog.records) == 6


async def test_forged_records_are_dropped_and_honest_ones_kept(swarm: GossipSwarm) -> None:
    one, honest, liar = swarm.add(), Identity.create(), Identity.create()
    now = SwarmClock().now()
    body = PeerRecord(sequence=int(now * 1000), expires=now + 1.0, role="trainer")
    forged = sign(liar, KIND, RUN, body)
    forged.peer = Identity.create().peer_id
    request = GossipRequest(run=bytes.fromhex(RUN), records=[forged, sign(honest, KIND, RUN, body)])
    await one.Gossip(request, FakeContext(liar.peer_id))
    assert one.live().keys() == {one.peer_id}  # nobody vouches for the honest one yet
    await one.Gossip(GossipRequest(run=bytes.fromhex(RUN)), FakeContext(honest.peer_id))
    assert one.live().keys() == {one.peer_id, honest.peer_id}
    assert one.refusals == {"forged": 1}


async def test_caller_that_gossips_too_often_is_refused(swarm: GossipSwarm) -> None:
    one, greedy, modest = swarm.add(heartbeat=10.0), Identity.create(), Identity.create()
    request = GossipRequest(run=bytes.fromhex(RUN))
    async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
        for _ in range(100):
            await one.Gossip(request, FakeContext(greedy.peer_id))
    await one.Gossip(request, FakeContext(modest.peer_id))


async def test_five_peers_over_real_transports(
    start_transport: Callable[..., Awaitable[Transport]], tmp_path: Path
) -> None:
    peers: list[PeerDirectory] = []
    transports: list[Transport] = []
    tasks: list[asyncio.Task[None]] = []
    try:
        for index in range(5):
            servers: list[grpc.aio.Server] = []
            transport = await start_transport(str(index), [servers.append])
            identity = Identity.load_or_create(tmp_path / str(index) / "key")
            bootstrap = await transports[-1].addresses() if transports else ()
            options = DirectoryOptions(run_id=RUN, heartbeat=0.2, expiry=3.0, bootstrap=bootstrap[:4])
            peer = PeerDirectory(options, identity, transport, SwarmClock(), random.Random(index))
            peer.register(servers[0])
            transports.append(transport)
            peers.append(peer)
            tasks.append(asyncio.create_task(peer.run()))
        await until(lambda: all_see(peers, peers))
        await transports[2].stop()
        tasks[2].cancel()
        survivors = [*peers[:2], *peers[3:]]
        await until(lambda: all_see(survivors, survivors))
        await peers[4].leave()
        assert all_see(peers[:2], [*peers[:2], peers[3]])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.mark.parametrize("lie", [-1e300, -1e18, 0.0, 1.0, 1e18, float("inf"), float("nan")])
async def test_absurd_clock_of_a_caller_has_no_effect(swarm: GossipSwarm, lie: float) -> None:
    one = swarm.add()
    for _ in range(5):
        request = GossipRequest(run=bytes.fromhex(RUN), time=lie)
        await one.Gossip(request, FakeContext(Identity.create().peer_id))
    assert abs(one.live()[one.peer_id].expires - time.time()) < 2
    other = swarm.add(bootstrap=[address_of(one)])
    await until(lambda: all_see([one, other], [one, other]))
