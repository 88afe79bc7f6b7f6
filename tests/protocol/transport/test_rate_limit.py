"""Whose turn it is, under a clock of our own; and real tunnels and transports under a limit."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from protocol.murmur_pb2 import FetchRequest, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsStub
from protocol.transport.connection_supervisor import ConnectionLimits
from protocol.transport.rate_limit import BURST_SECONDS, FairQueue, Flow, RateLimiter
from protocol.transport.transport import Transport
from tests.protocol.conftest import StartTransport
from tests.protocol.transport.sample_peer import SampleBlobs

RATE = 1_000_000.0
MEASURED_SECONDS = 3.0


@dataclass
class BackloggedFlow:
    """A flow that always has more."""

    size: int
    flow: Flow = field(default_factory=Flow)


def run_queue(
    turns: FairQueue, greedy: Sequence[BackloggedFlow], end: float, begin: float = 0.0
) -> list[tuple[float, int, int]]:
    """(when, who, bytes) of all grants; the clock moves in small uneven steps."""
    asked = [turns.enqueue(one.flow, one.size) for one in greedy]
    now, found, rng = begin, [], random.Random(1)
    while now < end:
        for turn in turns.dequeue_granted(now):
            who = asked.index(turn)
            found.append((now, who, turn.size))
            asked[who] = turns.enqueue(greedy[who].flow, greedy[who].size)
        now += rng.random() * 0.001
    for turn in asked:
        turn.is_active = False
    return found


@pytest.mark.parametrize("rate", [64e3, RATE, 100e6])
def test_the_rate_is_kept_over_any_time(rate: float) -> None:
    turns = FairQueue(rate, 0.0)
    found = run_queue(turns, [BackloggedFlow(turns.grant_bytes), BackloggedFlow(turns.grant_bytes // 3)], 3)
    for begin, end in ((0.0, 3.0), (0.5, 1.5), (1.0, 1.2), (2.9, 3.0)):
        size = sum(size for when, _, size in found if begin <= when < end)
        assert size <= (end - begin + BURST_SECONDS) * rate + turns.grant_bytes
        assert size >= (end - begin) * rate * 0.9 - 2 * turns.grant_bytes


def shares(found: Sequence[tuple[float, int, int]]) -> Counter[int]:
    """Bytes by who got them."""
    counted = Counter[int]()
    for _, who, size in found:
        counted[who] += size
    return counted


def test_all_get_the_same_whatever_they_ask_at_once() -> None:
    turns = FairQueue(RATE, 0.0)
    whole, half = BackloggedFlow(turns.grant_bytes), BackloggedFlow(turns.grant_bytes // 2)
    grants = shares(run_queue(turns, [whole, half, BackloggedFlow(turns.grant_bytes)], 10))
    assert max(grants.values()) < 1.02 * min(grants.values())


@pytest.mark.parametrize("is_shared", [True, False])
def test_many_connections_that_share_a_flow_get_one_share(is_shared: bool) -> None:
    turns, one = FairQueue(RATE, 0.0), Flow()
    many = [BackloggedFlow(turns.grant_bytes, one if is_shared else Flow()) for _ in range(40)]
    others = [BackloggedFlow(turns.grant_bytes) for _ in range(3)]
    grants = shares(run_queue(turns, [*many, *others], 20))
    share = sum(grants[who] for who in range(40)) / grants.total()
    expected = 1 / 4 if is_shared else 40 / 43  # the control: forty lines push three peers aside
    assert share == pytest.approx(expected, rel=0.05)
    assert not is_shared or min(grants[who] for who in range(40)) > 0, "and share it among themselves"


def test_a_small_message_waits_for_one_grant_of_the_others() -> None:
    turns = FairQueue(RATE, 0.0)
    bulk = [Flow() for _ in range(20)]
    first_come = [turns.enqueue(flow, turns.grant_bytes) for flow in bulk]
    for now in (0.0, 0.1, 0.2):
        turns.dequeue_granted(now)
    small = turns.enqueue(Flow(), 300)
    assert turns.dequeue_granted(0.2 + turns.grant_bytes / RATE * 1.01)[0] is small
    ahead = sum(turn.is_active and turn.number < small.number for turn in first_come)
    assert ahead > 5, "first come, first served would have let it wait for all of them"


def test_nobody_saves_up_turns_by_being_silent() -> None:
    turns, busy, silent = FairQueue(RATE, 0.0), BackloggedFlow(10_000), BackloggedFlow(10_000)
    run_queue(turns, [busy], 5)
    grants = shares(run_queue(turns, [busy, silent], 6, begin=5))
    assert grants[1] < 1.05 * grants[0], "a clock left at zero would give all of the second to the silent one"


def test_a_turn_that_is_no_longer_wanted_costs_nothing() -> None:
    turns = FairQueue(RATE, 0.0)
    turns.dequeue_granted(0.0)
    flow = Flow()
    for _ in range(100):
        turns.enqueue(flow, turns.grant_bytes).is_active = False
    wanted = turns.enqueue(Flow(), 100)
    assert turns.dequeue_granted(0.0) == [wanted]
    assert turns.seconds_until_grant(0.0) is None


async def test_a_cancelled_flow_leaves_the_gate() -> None:
    gate, flow = RateLimiter(RATE), Flow()
    waiting = [asyncio.create_task(gate.acquire(Flow(), gate.grant_bytes)) for _ in range(100)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    async with asyncio.timeout(2):
        await gate.acquire(flow, 100)
    gate.close()


async def fetch(client: Transport, callee: str, size: int) -> int:
    """Bytes that came, in the channel for bulk."""
    request, taken = FetchRequest(length=size), 0
    async for chunk in BlobsStub(client.bulk_channel(callee)).Fetch(request, timeout=60):
        taken += len(chunk.data)
    return taken


async def speeds(traffic: Transport, sent: bool) -> list[float]:
    """Bytes a second through the transport's tunnels, again where a busy machine kept them from moving."""
    found: list[float] = []
    while len(found) < 4 and (not found or max(found) < 0.95 * RATE):
        began, before = time.monotonic(), traffic.bytes_sent if sent else traffic.bytes_received
        await asyncio.sleep(MEASURED_SECONDS)
        after = traffic.bytes_sent if sent else traffic.bytes_received
        found.append((after - before) / (time.monotonic() - began))
    return found


@pytest.mark.parametrize("limited", ["upload", "download"])
async def test_a_limit_is_kept_by_all_tunnels_together(start_transport: StartTransport, limited: str) -> None:
    limits = ConnectionLimits(upload=RATE) if limited == "upload" else ConnectionLimits(download=RATE)
    quick = ConnectionLimits()
    server = await start_transport("server", [SampleBlobs().add], limits=limits if limited == "upload" else quick)
    others = [await start_transport(name, limits=limits if limited == "download" else quick) for name in ("a", "b")]
    clients = others if limited == "upload" else others[:1]
    for client in clients:
        client.introduce(server.peer_id, await server.addresses())
    fetching = [asyncio.create_task(fetch(client, server.peer_id, 64 * 1024 * 1024)) for client in clients]
    while min(client.bytes_received for client in clients) < RATE * BURST_SECONDS:
        await asyncio.sleep(0.01)
    counted = server if limited == "upload" else clients[0]
    measured = await speeds(counted, limited == "upload")
    for task in fetching:
        task.cancel()
    await asyncio.gather(*fetching, return_exceptions=True)
    print(f"of the limit: {[round(speed / RATE, 3) for speed in measured]}")
    assert 0.95 * RATE < max(measured) < 1.05 * RATE
    if len(clients) == 2:
        first, second = (client.bytes_received for client in clients)
        assert 0.8 < first / second < 1.25


async def test_without_a_limit_it_is_far_faster(start_transport: StartTransport) -> None:
    """The control of the test above."""
    server = await start_transport("server", [SampleBlobs().add])
    client = await start_transport("client")
    client.introduce(server.peer_id, await server.addresses())
    began = time.monotonic()
    assert await fetch(client, server.peer_id, 32 * 1024 * 1024) == 32 * 1024 * 1024
    assert 32 * 1024 * 1024 / (time.monotonic() - began) > 5 * RATE


async def round_trip(client: Transport, callee: str, bulk: bool) -> float:
    """Seconds of a small call."""
    channel, began = (client.bulk_channel if bulk else client.channel)(callee), time.monotonic()
    await BlobsStub(channel).Pieces(PiecesRequest(), timeout=60)
    return time.monotonic() - began


async def test_a_small_call_is_prompt_while_bulk_fills_the_limit(start_transport: StartTransport) -> None:
    server = await start_transport("server", [SampleBlobs().add], limits=ConnectionLimits(upload=RATE / 4))
    client = await start_transport("client")
    client.introduce(server.peer_id, await server.addresses())
    await round_trip(client, server.peer_id, bulk=False)
    fetching = asyncio.create_task(fetch(client, server.peer_id, 64 * 1024 * 1024))
    while client.bytes_received < RATE / 4:
        await asyncio.sleep(0.01)
    prompt = sorted([await round_trip(client, server.peer_id, bulk=False) for _ in range(9)])
    behind = await round_trip(client, server.peer_id, bulk=True)
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    print(f"seconds: median {prompt[4]:.3f}, most {prompt[-1]:.3f}; in the tunnel of the bulk {behind:.3f}")
    assert prompt[4] < 0.15
    assert behind > 3 * prompt[4], "the naive way: behind what the bulk's tunnel holds"
