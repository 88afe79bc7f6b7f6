"""Call other nodes' daemons, and send messages to peers: one bounded queue and one worker per peer.

Failed calls raise UnreachableError or PeerFault, nothing else.

Messages are idempotent at the receiver, and the round machine repeats the important ones. The outbox retries a batch
that cannot be delivered, with growing pauses; then it reports the peer as unreachable and drops its queue. It drops a
rejected batch alone, because the peer is alive. Replies may have messages that we seem to lack. A worker exists only
while its peer's queue is not empty, so peers that come and go leave nothing behind.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Protocol

import grpc

from node.monitoring.status import ErrorRecorder
from node.processes.workers import FaultSink
from protocol.consensus.messages.briefs import BriefCache
from protocol.errors import LimitError, PeerFault, Reply, UnreachableError, require_reply
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.membership.summary import SALT_BYTES
from protocol.murmur_pb2 import (
    CarryRequest,
    ChainReply,
    ChainRequest,
    DeliverReply,
    DeliverRequest,
    GossipReply,
    GossipRequest,
    Signed,
)
from protocol.murmur_pb2_grpc import CarriersStub, MembershipStub, RoundsStub
from protocol.traffic import ControlTraffic

logger = logging.getLogger(__name__)

MAX_QUEUED = 256
MAX_BATCH_MESSAGES = 16
MAX_BATCH_BYTES = 768 * 1024  # of messages; one call takes 1 MiB
CALL_SECONDS = 5.0
RETRY_DELAYS = (0.1, 0.4, 1.0)
# A decision comes with the acknowledgements of a majority; the bytes are bounded by the transport.
MAX_REPLY_MESSAGES = 1024
MAX_DETAIL_CHARACTERS = 200  # of a peer's error text
CHAIN_SECONDS = 10.0
IDLE_CHANNEL_SECONDS = 1.0  # for a reply on a direct connection that may be dead
REFUSAL_CODES = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
ChannelTo = Callable[[PeerId], grpc.aio.Channel]


class PeerChannels(Protocol):
    """The channels to a peer."""

    def channel(self, peer: PeerId) -> grpc.aio.Channel: ...
    def idle_channel(self, peer: PeerId) -> AbstractContextManager[Any]: ...  # a channel, or None
    def fallback_channel(self, peer: PeerId) -> AbstractContextManager[Any]: ...  # the same


async def deliver(
    run_id: RunId,
    channels: PeerChannels,
    peer: PeerId,
    messages: Sequence[Signed],
    seconds: float,
    brief_cache: BriefCache | None = None,
    traffic: ControlTraffic | None = None,
) -> Iterable[Signed]:
    """Deliver messages to a peer within `seconds`; return the messages that it thinks we lack.

    Messages that have a brief go as such, and again in full if the peer cannot restore them.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    traffic = traffic or ControlTraffic()
    briefs = [(signed, brief) for signed in messages if brief_cache and (brief := brief_cache.brief_of(signed))]
    abridged = {signed.signature for signed, _ in briefs}

    async def send(request: DeliverRequest) -> DeliverReply:
        async def call(channel: Any, seconds: float) -> DeliverReply:
            traffic.record_sent("deliver", request)
            return await await_reply(peer, lambda: RoundsStub(channel).Deliver(request, timeout=seconds))

        reply = await call_by_best_channel(channels, peer, call, lambda: deadline - clock())
        traffic.record_received("deliver", reply)
        if len(reply.statements) > MAX_REPLY_MESSAGES:
            raise LimitError(f"{peer} replied with {len(reply.statements)} messages; at most {MAX_REPLY_MESSAGES}")
        return reply

    run, whole = bytes.fromhex(run_id), [signed for signed in messages if signed.signature not in abridged]
    reply = await send(DeliverRequest(run=run, statements=whole, briefs=[brief for _, brief in briefs]))
    unresolved = [signed for place, (signed, _) in enumerate(briefs) if place in reply.unresolved]
    answers = list(reply.statements)
    if unresolved:
        answers += (await send(DeliverRequest(run=run, statements=unresolved))).statements
    return answers


async def call_by_best_channel(
    channels: PeerChannels,
    peer: PeerId,
    call: Callable[[Any, float], Awaitable[Reply]],
    seconds_left: Callable[[], float],
) -> Reply:
    """Make a call by the cheapest channel that works.

    First an idle direct connection, because libp2p costs more than a small call. Then libp2p, if that does not answer
    soon. At last a direct connection that may be busy, so that a round need not wait for a dial that libp2p delays or
    for a p2pd that is restarting.
    """
    with channels.idle_channel(peer) as direct:
        if direct is not None:
            with suppress(UnreachableError):
                return await call(direct, min(IDLE_CHANNEL_SECONDS, seconds_left() / 2))
    try:
        return await call(channels.channel(peer), seconds_left())
    except UnreachableError:
        with channels.fallback_channel(peer) as direct:
            if direct is None or seconds_left() <= 0:
                raise
            return await call(direct, seconds_left())


async def request_chain(run_id: RunId, channel: ChannelTo, peer: PeerId, after_round: int) -> ChainReply:
    """Request a peer's head, the blob of its state, and its commits after `after_round`."""
    request = ChainRequest(run=bytes.fromhex(run_id), after_round=after_round)
    return await await_reply(peer, lambda: RoundsStub(channel(peer)).Chain(request, timeout=CHAIN_SECONDS))


async def request_peer_table(run_id: RunId, channel: ChannelTo, peer: PeerId, seconds: float) -> GossipReply:
    """Request all records that a peer knows, without having any; raises as `await_reply` does.

    No time is sent, so that our clock, which may be wrong, does not affect the peer's.
    """
    request = GossipRequest(run=bytes.fromhex(run_id), salt=secrets.token_bytes(SALT_BYTES))
    return await await_reply(peer, lambda: MembershipStub(channel(peer)).Gossip(request, timeout=seconds))


async def request_relay(
    run_id: RunId, channel: ChannelTo, peer: PeerId, message: Signed, digest: bytes, seconds: float
) -> None:
    """Request that a peer fetches a blob named in `message`; it has the blob when this returns."""
    request = CarryRequest(run=bytes.fromhex(run_id), statement=message, digest=digest)
    await await_reply(peer, lambda: CarriersStub(channel(peer)).Carry(request, timeout=seconds))


class PeerRpc:
    """The calls of one run over the channels of the node.

    `brief_cache` makes the briefs of messages (`None`: all go in full); `traffic` counts the bytes of deliveries.
    """

    def __init__(
        self,
        run_id: RunId,
        channels: PeerChannels,
        brief_cache: BriefCache | None = None,
        traffic: ControlTraffic | None = None,
    ) -> None:
        self._run_id = run_id
        self._channels = channels
        self._brief_cache = brief_cache
        self._traffic = traffic

    async def deliver(self, peer: PeerId, messages: Sequence[Signed], seconds: float) -> Iterable[Signed]:
        return await deliver(self._run_id, self._channels, peer, messages, seconds, self._brief_cache, self._traffic)

    async def request_relay(self, relay: PeerId, message: Signed, digest: bytes, seconds: float) -> None:
        await request_relay(self._run_id, self._channels.channel, relay, message, digest, seconds)


async def await_reply(peer: PeerId, call: Callable[[], Awaitable[Reply | None]]) -> Reply:
    """Return the reply of a call to a peer. Raises UnreachableError, or PeerFault for a refusal."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()  # a task that caught a cancellation before may still count it
    try:
        return require_reply(await call())
    except grpc.aio.AioRpcError as error:
        reason = f"{error.code().name.lower()}: {(error.details() or '')[:MAX_DETAIL_CHARACTERS]}"
        if error.code() in REFUSAL_CODES:
            raise LimitError(f"{peer} refused the call ({reason})") from error
        raise UnreachableError(f"{peer} does not answer ({reason})") from error
    except grpc.aio.UsageError as error:
        raise UnreachableError(f"the channel to {peer} is closed") from error
    except asyncio.CancelledError as cancelled:
        # A call is also cancelled when its channel is closed because the peer counts as gone.
        if task.cancelling() > before:
            raise
        raise UnreachableError(f"the channel to {peer} was closed") from cancelled


class Outbox:
    """Sends messages to peers, in batches and in order; each peer has its own queue and worker.

    `receive` gets the replies, `suspect` the peers that cannot be reached and why.
    """

    def __init__(
        self,
        rpc: PeerRpc,
        receive: Callable[[PeerId, Iterable[Signed]], object],
        suspect: Callable[[PeerId, str], None],
        faults: FaultSink,
        errors: ErrorRecorder,
    ) -> None:
        self._rpc = rpc
        self._receive = receive
        self._suspect = suspect
        self._faults = faults
        self._errors = errors
        self._queues: dict[PeerId, deque[Signed]] = {}
        self._workers: dict[PeerId, asyncio.Task[None]] = {}

    def send(self, peers: Iterable[PeerId], message: Signed) -> None:
        size = message.ByteSize()
        if size > MAX_BATCH_BYTES:
            line = f"a {message.kind} message of {size} bytes is too large for a call"
            return self._errors.record_recovered("not delivered", line)
        for peer in peers:
            queue = self._queues.setdefault(peer, deque())
            if len(queue) >= MAX_QUEUED:
                self._give_up(peer, "its queue is full")
                continue
            queue.append(message)
            if peer not in self._workers:
                self._start_worker(peer, queue)

    def drop_peer(self, peer: PeerId) -> None:
        """Drop the queue of a peer that is gone."""
        self._queues.pop(peer, deque()).clear()
        worker = self._workers.pop(peer, None)
        if worker is not None:
            worker.cancel()

    async def stop(self) -> None:
        workers = list(self._workers.values())
        for peer in list(self._workers):
            self.drop_peer(peer)
        await asyncio.gather(*workers, return_exceptions=True)

    def _start_worker(self, peer: PeerId, queue: deque[Signed]) -> None:
        worker = asyncio.create_task(self._drain_queue(peer, queue), name=f"outbox to {peer}")
        self._workers[peer] = worker
        worker.add_done_callback(partial(self._on_worker_done, peer))

    def _on_worker_done(self, peer: PeerId, worker: asyncio.Task[None]) -> None:
        if self._workers.get(peer) is worker:
            del self._workers[peer]
            self._queues.pop(peer, None)
        if not worker.cancelled() and (error := worker.exception()) is not None:
            logger.error("the outbox to %s failed", peer, exc_info=error)
            self._faults.fail(error)

    async def _drain_queue(self, peer: PeerId, queue: deque[Signed]) -> None:
        while queue:
            await self._deliver_batch(peer, _take_batch(queue))
        # Not in `_on_worker_done`: a message sent in between would be queued for a worker that has ended.
        if self._queues.get(peer) is queue:
            del self._queues[peer], self._workers[peer]

    async def _deliver_batch(self, peer: PeerId, batch: list[Signed]) -> None:
        fault = ""
        for pause in (*RETRY_DELAYS, None):
            try:
                self._receive(peer, await self._rpc.deliver(peer, batch, CALL_SECONDS))
                return
            except UnreachableError as error:
                fault = str(error)
            except PeerFault as refusal:
                self._errors.record_recovered("not accepted", f"{peer} refused {len(batch)} messages: {refusal}")
                return
            if pause is not None:
                await asyncio.sleep(pause)
        self._give_up(peer, fault, len(batch))

    def _give_up(self, peer: PeerId, reason: str, tried: int = 0) -> None:
        """Drop the queue of a peer and report it as unreachable; `tried` more messages were not delivered."""
        dropped = tried + len(self._queues.get(peer, ()))
        self._errors.record_recovered("not delivered", f"dropped {dropped} messages for {peer}: {reason}")
        self.drop_peer(peer)
        self._suspect(peer, reason)


def _take_batch(queue: deque[Signed]) -> list[Signed]:
    """Remove and return the first messages of a queue that fit in one call, at least one."""
    batch = [queue.popleft()]
    size = batch[0].ByteSize()
    while queue and len(batch) < MAX_BATCH_MESSAGES and size + queue[0].ByteSize() <= MAX_BATCH_BYTES:
        batch.append(queue.popleft())
        size += batch[-1].ByteSize()
    return batch
