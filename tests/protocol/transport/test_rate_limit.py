"""Fair queueing under a simulated clock, and real tunnels and transports under a rate limit."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from protocol.murmur_pb2 import FetchRequest, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsStub
from protocol.transport.rate_limit import BURST_SECONDS, FairQueue, Flow, RateLimiter
from protocol.transport.transport import Transport
from protocol.transport.tunnel import ConnectionLimits
from tests.protocol.conftest import StartTransport
from tests.protocol.transport.sample_peer import SampleBlobs

pytestmark = pytest.mark.slow

RATE = 1_000_000.0
MEASURED_SECONDS = 3.0


@dataclass
class BackloggedFlow:
    """A flow that always has more to send."""

    size: int
    flow: Flow = field(default_factory=Flow)


def run_queue(
    queue: FairQueue, greedy: Sequence[BackloggedFlow], end: float, begin: float = 0.0
) -> list[tuple[float, int, int]]:
    """Return (time, index, bytes) of all grants; the clock moves in small uneven steps."""
    pending = [queue.enqueue(backlogged.flow, backlogged.size) for backlogged in greedy]
    now, grants, rng = begin, [], random.Random(1)
    while now < end:
        for request in queue.dequeue_granted(now):
            index = pending.index(request)
            grants.append((now, index, request.size))
            pending[index] = queue.enqueue(greedy[index].flow, greedy[index].size)
        now += rng.random() * 0.001
    for request in pending:
        request.is_active = False
    return grants


@pytest.mark.parametrize("rate", [64e3, RATE, 100e6])
def test_rate_is_kept_over_any_time(rate: float) -> None:
    queue = FairQueue(rate, 0.0)
    grants = run_queue(queue, [BackloggedFlow(queue.grant_bytes), BackloggedFlow(queue.grant_bytes // 3)], 3)
    for begin, end in ((0.0, 3.0), (0.5, 1.5), (1.0, 1.2), (2.9, 3.0)):
        size = sum(size for when, _, size in grants if begin <= when < end)
        assert size <= (end - begin + BURST_SECONDS) * rate + queue.grant_bytes
        assert size >= (end - begin) * rate * 0.9 - 2 * queue.grant_bytes


def bytes_by_flow(grants: Sequence[tuple[float, int, int]]) -> Counter[int]:
    """Return the granted bytes by index of the flow."""
    counted = Counter[int]()
    for _, index, size in grants:
        counted[index] += size
    return counted


def test_flows_get_equal_shares_whatever_their_request_sizes() -> None:
    queue = FairQueue(RATE, 0.0)
    whole, half = BackloggedFlow(queue.grant_bytes), BackloggedFlow(queue.grant_bytes // 2)
    grants = bytes_by_flow(run_queue(queue, [whole, half, BackloggedFlow(queue.grant_bytes)], 10))
    assert max(grants.values()) < 1.02 * min(grants.values())


@pytest.mark.parametrize("is_shared", [True, False])
def test_connections_that_share_a_flow_get_one_share(is_shared: bool) -> None:
    queue, one = FairQueue(RATE, 0.0), Flow()
    many = [BackloggedFlow(queue.grant_bytes, one if is_shared else Flow()) for _ in range(40)]
    others = [BackloggedFlow(queue.grant_bytes) for _ in range(3)]
    grants = bytes_by_flow(run_queue(queue, [*many, *others], 20))
    share = sum(grants[index] for index in range(40)) / grants.total()
    expected = 1 / 4 if is_shared else 40 / 43  # the control: forty connections displace three peers
    assert share == pytest.approx(expected, rel=0.05)
    assert not is_shared or min(grants[index] for index in range(40)) > 0, "they share the flow among themselves"


def test_small_message_waits_for_one_grant_of_another_flow() -> None:
    queue = FairQueue(RATE, 0.0)
    bulk = [Flow() for _ in range(20)]
    first_come = [queue.enqueue(flow, queue.grant_bytes) for flow in bulk]
    for now in (0.0, 0.1, 0.2):
        queue.dequeue_granted(now)
    small = queue.enqueue(Flow(), 300)
    assert queue.dequeue_granted(0.2 + queue.grant_bytes / RATE * 1.01)[0] is small
    ahead = sum(request.is_active and request.number < small.number for request in first_come)
    assert ahead > 5, "with first come, first served it would have waited for all of them"


def test_silent_flow_saves_up_no_grants() -> None:
    queue, busy, silent = FairQueue(RATE, 0.0), BackloggedFlow(10_000), BackloggedFlow(10_000)
    run_queue(queue, [busy], 5)
    grants = bytes_by_flow(run_queue(queue, [busy, silent], 6, begin=5))
    assert grants[1] < 1.05 * grants[0], "a clock left at zero would give the silent flow the whole second"


def test_cancelled_request_costs_nothing() -> None:
    queue = FairQueue(RATE, 0.0)
    queue.dequeue_granted(0.0)
    flow = Flow()
    for _ in range(100):
        queue.enqueue(flow, queue.grant_bytes).is_active = False
    wanted = queue.enqueue(Flow(), 100)
    assert queue.dequeue_granted(0.0) == [wanted]
    assert queue.seconds_until_grant(0.0) is None


async def test_cancelled_waiters_leave_the_limiter() -> None:
    limiter, flow = RateLimiter(RATE), Flow()
    waiting = [asyncio.create_task(limiter.acquire(Flow(), limiter.grant_bytes)) for _ in range(100)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    async with asyncio.timeout(2):
        await limiter.acquire(flow, 100)
    limiter.close()


async def fetch(client: Transport, callee: str, size: int) -> int:
    """Fetch over the bulk channel, and return the received bytes."""
    request, received = FetchRequest(length=size), 0
    async for chunk in BlobsStub(client.bulk_channel(callee)).Fetch(request, timeout=60):
        received += len(chunk.data)
    return received


async def speeds(traffic: Transport, sent: bool) -> list[float]:
    """Measure bytes a second through the transport's tunnels, repeatedly if a busy machine slowed them down."""
    measured: list[float] = []
    while len(measured) < 4 and (not measured or max(measured) < 0.95 * RATE):
        started, before = time.monotonic(), traffic.bytes_sent if sent else traffic.bytes_received
        await asyncio.sleep(MEASURED_SECONDS)
        after = traffic.bytes_sent if sent else traffic.bytes_received
        measured.append((after - before) / (time.monotonic() - started))
    return measured


@pytest.mark.parametrize("limited", ["upload", "download"])
async def test_all_tunnels_together_keep_a_limit(start_transport: StartTransport, limited: str) -> None:
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


async def test_transfer_without_a_limit_is_far_faster(start_transport: StartTransport) -> None:
    """Control of the test above."""
    server = await start_transport("server", [SampleBlobs().add])
    client = await start_transport("client")
    client.introduce(server.peer_id, await server.addresses())
    started = time.monotonic()
    assert await fetch(client, server.peer_id, 32 * 1024 * 1024) == 32 * 1024 * 1024
    assert 32 * 1024 * 1024 / (time.monotonic() - started) > 5 * RATE


async def round_trip(client: Transport, callee: str, bulk: bool) -> float:
    """Return the seconds of a small call."""
    channel, started = (client.bulk_channel if bulk else client.channel)(callee), time.monotonic()
    await BlobsStub(channel).Pieces(PiecesRequest(), timeout=60)
    return time.monotonic() - started


async def test_small_call_is_prompt_while_bulk_uses_the_limit(start_transport: StartTransport) -> None:
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
    assert behind > 3 * prompt[4], "in the bulk tunnel the call waits behind the bulk"
