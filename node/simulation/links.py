"""The virtual network: every peer's own link with a bandwidth (the same both ways), and one latency for all paths.

Each end of a link divides its rate equally among the blobs that it has under way, so that one with a thin link holds up
nobody else. A blob is there when both its ends are done with it and its last byte has travelled. Where an end has n
blobs under way, each of them has had by time t, since it began,

    had(t) - had(began)    with    d had / dt = rate / n

so that a heap of what `had` will be when each is done tells in O(log n) which one is next (processor sharing).

Statements are small and pass beside the blobs: latency, and their own length over the narrower of the two links.
Nothing is lost. Every byte is counted where it is sent.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from node.simulation.clock import VirtualClock

BYTES_PER_MEGABIT = 125_000
INSTANT = 1e-9  # seconds: less is rounding


class Links:
    """`bandwidths` in bytes a second, by the peer's slot; `latency` in seconds, one way."""

    def __init__(self, clock: VirtualClock, bandwidths: Sequence[float], latency: float) -> None:
        self._clock = clock
        self._bandwidths = tuple(bandwidths)
        self.latency = latency
        self._up = [End(clock, rate) for rate in bandwidths]
        self._down = [End(clock, rate) for rate in bandwidths]
        self.blob_bytes = [0] * len(bandwidths)
        self.statement_bytes = [0] * len(bandwidths)

    def backlog(self, slot: int) -> float:
        """How many seconds that uplink has still to send for."""
        return self._up[slot].backlog()

    def carry(self, source: int, receiver: int, size: int, arrived: Callable[[], None]) -> None:
        """A blob from slot to slot."""
        self.blob_bytes[source] += size
        ends = itertools.count(1)

        def done() -> None:
            if next(ends) == 2:
                self._clock.after(self.latency, arrived)

        self._up[source].begin(size, done)
        self._down[receiver].begin(size, done)

    def say(self, sender: int, receivers: Iterable[int], size: int, deliver: Callable[[int], None]) -> None:
        """A statement to several slots; `deliver` is called with each of them."""
        together: dict[float, list[int]] = defaultdict(list)
        for receiver in receivers:
            together[self.latency + size / min(self._bandwidths[sender], self._bandwidths[receiver])].append(receiver)
            self.statement_bytes[sender] += size
        for delay, slots in together.items():
            self._clock.after(delay, partial(_deliver, deliver, slots))


class End:
    """One direction of one link: `rate` bytes a second for all blobs that it has under way together."""

    def __init__(self, clock: VirtualClock, rate: float) -> None:
        self._clock = clock
        self._rate = rate
        self._had = 0.0
        self._at = 0.0  # bytes that each of them had by that time
        self._under_way: list[tuple[float, int, Callable[[], None]]] = []  # what `had` will be when it is done
        self._wanted = 0.0  # the sum of these
        self._numbers = itertools.count()
        self._alarm_at: float | None = None

    def begin(self, size: int, done: Callable[[], None]) -> None:
        self._advance()
        heapq.heappush(self._under_way, (self._had + size, next(self._numbers), done))
        self._wanted += self._had + size
        self._set_alarm()

    def backlog(self) -> float:
        """Seconds until all that is under way now would be done."""
        self._advance()
        return max(0.0, self._wanted - self._had * len(self._under_way)) / self._rate

    def _advance(self) -> None:
        now = self._clock.now
        if self._under_way:
            self._had += (now - self._at) * self._rate / len(self._under_way)
        self._at = now

    def _set_alarm(self) -> None:
        """One that is early by what has begun since looks again; so most blobs that begin need none of their own."""
        seconds = self._seconds_left()
        if self._alarm_at is None or self._clock.now + seconds < self._alarm_at:
            self._alarm_at = self._clock.now + seconds
            self._clock.after(seconds, partial(self._look, self._alarm_at))

    def _seconds_left(self) -> float:
        """Until the next one is done, if none begins before."""
        return max(0.0, self._under_way[0][0] - self._had) * len(self._under_way) / self._rate

    def _look(self, alarm_at: float) -> None:
        if alarm_at != self._alarm_at:
            return
        self._alarm_at = None
        self._advance()
        while self._under_way and self._seconds_left() < INSTANT:
            target, _, done = heapq.heappop(self._under_way)
            self._wanted -= target
            done()
        if self._under_way:
            self._set_alarm()
        else:
            self._had = self._wanted = 0.0


def _deliver(deliver: Callable[[int], None], slots: Sequence[int]) -> None:
    for slot in slots:
        deliver(slot)
