"""Rate limits: how many bytes a second all tunnels of a node move together, and whose turn it is.

Turns (PURE, the caller passes the time) is a token bucket behind start-time fair queueing (Goyal, Vin and Cheng 1996).
Each flow has a clock of its own that runs by the bytes it was granted; the flow whose clock shows least comes next. A
flow that was silent starts at the clock of the one served last: it goes before all that queue for more, so a small
message waits for one grant of somebody else's and not for their bulk, and nobody saves up turns by being silent.
Connections may share a flow: they get together what another flow gets.

How much a peer may ask of us: PURE, the caller passes the time (seconds, monotonic).
"""

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field
from typing import Literal

from protocol.identity import PeerId

BURST_SECONDS = 0.1  # of the rate; also how late a timer may be before throughput is lost
GRANT_SECONDS = 0.02  # of the rate: what one flow may hold the others up
MIN_GRANT_BYTES = 2048
MAX_GRANT_BYTES = 64 * 1024


@dataclass
class Flow:
    """One of those who share a rate."""

    finish_tag: float = 0.0  # in bytes


@dataclass(order=True)
class QueuedRequest:
    """A place in the queue."""

    start_tag: float
    size: int  # among equals the smaller goes first
    number: int
    is_active: bool = field(default=True, compare=False)


class FairQueue:
    """`rate` in bytes a second; over any time at most `rate` times that, a burst and one grant."""

    def __init__(self, rate: float, now: float) -> None:
        self.grant_bytes = int(min(MAX_GRANT_BYTES, max(MIN_GRANT_BYTES, rate * GRANT_SECONDS)))
        self._rate = rate
        self._burst = rate * BURST_SECONDS
        self._tokens = self._burst
        self._updated_at = now
        self._virtual_time = 0.0  # the start of the turn that was granted last
        self._queue: list[QueuedRequest] = []
        self._numbers = itertools.count()

    def enqueue(self, flow: Flow, size: int) -> QueuedRequest:
        """`size` of at most `grant_bytes`, one at a time for each connection."""
        turn = QueuedRequest(max(self._virtual_time, flow.finish_tag), size, next(self._numbers))
        flow.finish_tag = turn.start_tag + size
        heapq.heappush(self._queue, turn)
        return turn

    def dequeue_granted(self, now: float) -> list[QueuedRequest]:
        """Whose turn it is; those that are no longer wanted are dropped."""
        self._tokens = min(self._burst, self._tokens + (now - self._updated_at) * self._rate)
        self._updated_at = now
        found = []
        while self._queue and (self._tokens > 0 or not self._queue[0].is_active):
            turn = heapq.heappop(self._queue)
            if turn.is_active:
                self._virtual_time = turn.start_tag
                self._tokens -= turn.size
                found.append(turn)
        return found

    def seconds_until_grant(self, now: float) -> float | None:
        """Seconds until `granted` may grant; None: nobody waits."""
        if not self._queue:
            return None
        return max(0.0, self._updated_at - self._tokens / self._rate - now)


class RateLimiter:
    """Lets bytes pass at a rate."""

    def __init__(self, rate: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = FairQueue(rate, self._loop.time())
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def grant_bytes(self) -> int:
        return self._queue.grant_bytes

    async def acquire(self, flow: Flow, size: int) -> None:
        """Returns when it is this flow's turn."""
        turn = self._queue.enqueue(flow, size)
        self._waiters[turn.number] = waiting = self._loop.create_future()
        self._grant_due()
        try:
            await waiting
        finally:
            turn.is_active = False
            self._waiters.pop(turn.number, None)

    def _grant_due(self) -> None:
        if self._timer:
            self._timer.cancel()
        now = self._loop.time()
        for turn in self._queue.dequeue_granted(now):
            if not self._waiters[turn.number].done():
                self._waiters[turn.number].set_result(None)
        wait = self._queue.seconds_until_grant(now)
        self._timer = None if wait is None else self._loop.call_later(wait, self._grant_due)

    def close(self) -> None:
        if self._timer:
            self._timer.cancel()


MAX_CALLERS = 4096


class TokenBuckets:
    """A token bucket for each caller: `burst` calls (or whatever is counted) at once, `rate` a second in the long
    run."""

    def __init__(self, burst: float, rate: float, max_callers: int = MAX_CALLERS) -> None:
        self._burst = burst
        self._rate = rate
        self._max_callers = max_callers
        self._buckets: dict[PeerId, tuple[float, float]] = {}  # tokens left, when; the longest silent first

    def tokens_left(self, peer: PeerId, now: float) -> float:
        left, when = self._buckets.get(peer, (self._burst, now))
        return min(self._burst, left + (now - when) * self._rate)

    def try_take(self, peer: PeerId, now: float, amount: float = 1.0) -> bool:
        left = self.tokens_left(peer, now)
        granted = left >= amount
        self._buckets.pop(peer, None)
        self._buckets[peer] = (left - amount if granted else left), now
        if len(self._buckets) > self._max_callers:
            del self._buckets[next(iter(self._buckets))]
        return granted


class SharedTokenBuckets:
    """One for each caller, and one for all of them together, as anybody has as many names as he likes."""

    def __init__(self, per_peer: TokenBuckets, overall: TokenBuckets) -> None:
        self._per_peer = per_peer
        self._overall = overall

    def charge(self, peer: PeerId, now: float, amount: float = 1.0) -> Literal["caller", "all"] | None:
        """Whose share is used up; None: it is granted. What is refused takes nothing of either."""
        if self._per_peer.tokens_left(peer, now) < amount:
            return "caller"
        if not self._overall.try_take("", now, amount):
            return "all"
        self._per_peer.try_take(peer, now, amount)
        return None
