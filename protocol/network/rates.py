"""Rate limits: how many bytes a second all tunnels of a node move together, and whose turn it is.

Turns (PURE, the caller passes the time) is a token bucket behind start-time fair queueing (Goyal, Vin and Cheng 1996).
Each flow has a clock of its own that runs by the bytes it was granted; the flow whose clock shows least comes next. A
flow that was silent starts at the clock of the one served last: it goes before all that queue for more, so a small
message waits for one grant of somebody else's and not for their bulk, and nobody saves up turns by being silent.
Connections may share a flow: they get together what another flow gets.
"""

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field

BURST_SECONDS = 0.1  # of the rate; also how late a timer may be before throughput is lost
GRANT_SECONDS = 0.02  # of the rate: what one flow may hold the others up
MIN_GRANT_BYTES = 2048
MAX_GRANT_BYTES = 64 * 1024


@dataclass
class Flow:
    """One of those who share a rate."""

    clock: float = 0.0  # in bytes


@dataclass(order=True)
class Turn:
    """A place in the queue."""

    start: float
    size: int  # among equals the smaller goes first
    number: int
    is_wanted: bool = field(default=True, compare=False)


class Turns:
    """`rate` in bytes a second; over any time at most `rate` times that, a burst and one grant."""

    def __init__(self, rate: float, now: float) -> None:
        self.grant_bytes = int(min(MAX_GRANT_BYTES, max(MIN_GRANT_BYTES, rate * GRANT_SECONDS)))
        self._rate = rate
        self._burst = rate * BURST_SECONDS
        self._tokens = self._burst
        self._when = now
        self._served = 0.0  # the start of the turn that was granted last
        self._queue: list[Turn] = []
        self._numbers = itertools.count()

    def ask(self, flow: Flow, size: int) -> Turn:
        """`size` of at most `grant_bytes`, one at a time for each connection."""
        turn = Turn(max(self._served, flow.clock), size, next(self._numbers))
        flow.clock = turn.start + size
        heapq.heappush(self._queue, turn)
        return turn

    def granted(self, now: float) -> list[Turn]:
        """Whose turn it is; those that are no longer wanted are dropped."""
        self._tokens = min(self._burst, self._tokens + (now - self._when) * self._rate)
        self._when = now
        found = []
        while self._queue and (self._tokens > 0 or not self._queue[0].is_wanted):
            turn = heapq.heappop(self._queue)
            if turn.is_wanted:
                self._served = turn.start
                self._tokens -= turn.size
                found.append(turn)
        return found

    def wait(self, now: float) -> float | None:
        """Seconds until `granted` may grant; None: nobody waits."""
        if not self._queue:
            return None
        return max(0.0, self._when - self._tokens / self._rate - now)


class Gate:
    """Lets bytes pass at a rate."""

    def __init__(self, rate: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._turns = Turns(rate, self._loop.time())
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def grant_bytes(self) -> int:
        return self._turns.grant_bytes

    async def pass_through(self, flow: Flow, size: int) -> None:
        """Returns when it is this flow's turn."""
        turn = self._turns.ask(flow, size)
        self._waiting[turn.number] = waiting = self._loop.create_future()
        self._look()
        try:
            await waiting
        finally:
            turn.is_wanted = False
            self._waiting.pop(turn.number, None)

    def _look(self) -> None:
        if self._timer:
            self._timer.cancel()
        now = self._loop.time()
        for turn in self._turns.granted(now):
            if not self._waiting[turn.number].done():
                self._waiting[turn.number].set_result(None)
        wait = self._turns.wait(now)
        self._timer = None if wait is None else self._loop.call_later(wait, self._look)

    def close(self) -> None:
        if self._timer:
            self._timer.cancel()
