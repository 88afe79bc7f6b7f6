"""Rate limits: fair queueing of a node's bytes, and token buckets for requests of other peers.

`FairQueue` is a token bucket behind start-time fair queueing (Goyal, Vin and Cheng 1996). Each flow has a virtual clock
that advances by the bytes it was granted, and the flow whose clock is lowest is served next. A flow that was silent
starts at the clock of the request served last. It therefore goes ahead of all flows that queue for more, so a small
message waits for one grant of another flow and not for its whole bulk transfer, and no flow can save up grants by
being silent. Connections that share a flow together get as much as any other flow.

`TokenBuckets` limits how much a peer may ask of us. Both take the time (seconds, monotonic) from the caller.
"""

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field
from typing import Literal

from protocol.identity import PeerId
from protocol.recent import RecentTable

BURST_SECONDS = 0.1  # of the rate; also how late a timer may be before throughput is lost
GRANT_SECONDS = 0.02  # of the rate; how long one flow may delay the others
MIN_GRANT_BYTES = 2048
MAX_GRANT_BYTES = 64 * 1024
MAX_CALLERS = 4096  # token buckets that are remembered


@dataclass
class Flow:
    """A member of a shared rate, with the virtual time at which its last request ends."""

    finish_tag: float = 0.0  # in bytes


@dataclass(order=True)
class QueuedRequest:
    """A queued request for `size` bytes.

    `is_active` is cleared when its caller gives up.
    """

    start_tag: float
    size: int  # among equal tags the smaller request goes first
    number: int
    is_active: bool = field(default=True, compare=False)


class FairQueue:
    """Decides which requests may proceed at `rate` bytes a second.

    Over any time it grants at most `rate` times that time, plus a burst and one grant.
    """

    def __init__(self, rate: float, now: float) -> None:
        self.grant_bytes = int(min(MAX_GRANT_BYTES, max(MIN_GRANT_BYTES, rate * GRANT_SECONDS)))
        self._rate = rate
        self._burst = rate * BURST_SECONDS
        self._tokens = self._burst
        self._updated_at = now
        self._virtual_time = 0.0  # start tag of the request that was granted last
        self._queue: list[QueuedRequest] = []
        self._numbers = itertools.count()

    def enqueue(self, flow: Flow, size: int) -> QueuedRequest:
        """Queue a request of at most `grant_bytes`.

        A connection queues one request at a time.
        """
        request = QueuedRequest(max(self._virtual_time, flow.finish_tag), size, next(self._numbers))
        flow.finish_tag = request.start_tag + size
        heapq.heappush(self._queue, request)
        return request

    def dequeue_granted(self, now: float) -> list[QueuedRequest]:
        """Return the requests that may proceed now, and drop cancelled ones."""
        self._tokens = min(self._burst, self._tokens + (now - self._updated_at) * self._rate)
        self._updated_at = now
        granted = []
        while self._queue and (self._tokens > 0 or not self._queue[0].is_active):
            request = heapq.heappop(self._queue)
            if request.is_active:
                self._virtual_time = request.start_tag
                self._tokens -= request.size
                granted.append(request)
        return granted

    def seconds_until_grant(self, now: float) -> float | None:
        """Return the seconds until the next grant, or None if the queue is empty."""
        if not self._queue:
            return None
        return max(0.0, self._updated_at - self._tokens / self._rate - now)


class RateLimiter:
    """Delays senders and receivers to keep all flows to `rate` bytes a second."""

    def __init__(self, rate: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = FairQueue(rate, self._loop.time())
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def grant_bytes(self) -> int:
        return self._queue.grant_bytes

    async def acquire(self, flow: Flow, size: int) -> None:
        """Wait until this flow is granted `size` bytes."""
        request = self._queue.enqueue(flow, size)
        self._waiters[request.number] = granted = self._loop.create_future()
        self._grant_due()
        try:
            await granted
        finally:
            request.is_active = False
            self._waiters.pop(request.number, None)

    def _grant_due(self) -> None:
        if self._timer:
            self._timer.cancel()
        now = self._loop.time()
        for request in self._queue.dequeue_granted(now):
            if not self._waiters[request.number].done():
                self._waiters[request.number].set_result(None)
        delay = self._queue.seconds_until_grant(now)
        self._timer = None if delay is None else self._loop.call_later(delay, self._grant_due)

    def close(self) -> None:
        if self._timer:
            self._timer.cancel()


class TokenBuckets:
    """A token bucket per caller.

    It grants `burst` units at once and `rate` units a second in the long run.
    """

    def __init__(self, burst: float, rate: float, max_callers: int = MAX_CALLERS) -> None:
        self._burst = burst
        self._rate = rate
        self._buckets = RecentTable[PeerId, tuple[float, float]](max_callers)  # tokens left, and when

    def tokens_left(self, peer: PeerId, now: float) -> float:
        left, when = self._buckets.get(peer, (self._burst, now))
        return min(self._burst, left + (now - when) * self._rate)

    def try_take(self, peer: PeerId, now: float, amount: float = 1.0) -> bool:
        left = self.tokens_left(peer, now)
        granted = left >= amount
        self._buckets[peer] = (left - amount if granted else left), now
        return granted


class SharedTokenBuckets:
    """A bucket per caller, and one for all callers together.

    Creating an identity costs nothing.
    """

    def __init__(self, per_peer: TokenBuckets, overall: TokenBuckets) -> None:
        self._per_peer = per_peer
        self._overall = overall

    def charge(self, peer: PeerId, now: float, amount: float = 1.0) -> Literal["caller", "all"] | None:
        """Take tokens and return None, or return whose bucket is empty.

        A refused call takes nothing from either.
        """
        if self._per_peer.tokens_left(peer, now) < amount:
            return "caller"
        if not self._overall.try_take("", now, amount):
            return "all"
        self._per_peer.try_take(peer, now, amount)
        return None
