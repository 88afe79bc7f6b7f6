"""The virtual clock: things happen in the order of their times, and of equal times in the order they were asked for.

The virtual network: every peer's own link with a bandwidth (the same both ways), and one latency for all paths.

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


class VirtualClock:
    """`now` in virtual seconds since the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def schedule(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._numbers), action))

    def run(self, is_finished: Callable[[], bool]) -> bool:
        """Until `finished`; False when nothing is left to happen before that."""
        while not is_finished():
            if not self._queue:
                return False
            self.now, _, action = heapq.heappop(self._queue)
            action()
        return True


BYTES_PER_MEGABIT = 125_000
ROUNDING_SECONDS = 1e-9  # seconds: less is rounding


class VirtualNetwork:
    """`bandwidths` in bytes a second, by the peer's slot; `latency` in seconds, one way."""

    def __init__(self, clock: VirtualClock, bandwidths: Sequence[float], latency: float) -> None:
        self._clock = clock
        self._bandwidths = tuple(bandwidths)
        self.latency = latency
        self._up = [LinkDirection(clock, rate) for rate in bandwidths]
        self._down = [LinkDirection(clock, rate) for rate in bandwidths]
        self.blob_bytes = [0] * len(bandwidths)
        self.message_bytes = [0] * len(bandwidths)

    def backlog_seconds(self, slot: int) -> float:
        """How many seconds that uplink has still to send for."""
        return self._up[slot].backlog_seconds()

    def send_blob(self, sender: int, receiver: int, size: int, on_arrival: Callable[[], None]) -> None:
        """A blob from slot to slot."""
        self.blob_bytes[sender] += size
        ends = itertools.count(1)

        def done() -> None:
            if next(ends) == 2:
                self._clock.schedule(self.latency, on_arrival)

        self._up[sender].start_transfer(size, done)
        self._down[receiver].start_transfer(size, done)

    def send_message(self, sender: int, receivers: Iterable[int], size: int, deliver: Callable[[int], None]) -> None:
        """A statement to several slots; `deliver` is called with each of them."""
        together: dict[float, list[int]] = defaultdict(list)
        for receiver in receivers:
            together[self.latency + size / min(self._bandwidths[sender], self._bandwidths[receiver])].append(receiver)
            self.message_bytes[sender] += size
        for delay, slots in together.items():
            self._clock.schedule(delay, partial(_deliver_to_all, deliver, slots))


class LinkDirection:
    """One direction of one link: `rate` bytes a second for all blobs that it has under way together."""

    def __init__(self, clock: VirtualClock, rate: float) -> None:
        self._clock = clock
        self._rate = rate
        self._served_bytes = 0.0
        self._served_at = 0.0  # bytes that each of them had by that time
        self._transfers: list[tuple[float, int, Callable[[], None]]] = []  # what `had` will be when it is done
        self._target_sum = 0.0  # the sum of these
        self._numbers = itertools.count()
        self._alarm_at: float | None = None

    def start_transfer(self, size: int, on_done: Callable[[], None]) -> None:
        self._advance()
        heapq.heappush(self._transfers, (self._served_bytes + size, next(self._numbers), on_done))
        self._target_sum += self._served_bytes + size
        self._set_alarm()

    def backlog_seconds(self) -> float:
        """Seconds until all that is under way now would be done."""
        self._advance()
        return max(0.0, self._target_sum - self._served_bytes * len(self._transfers)) / self._rate

    def _advance(self) -> None:
        now = self._clock.now
        if self._transfers:
            self._served_bytes += (now - self._served_at) * self._rate / len(self._transfers)
        self._served_at = now

    def _set_alarm(self) -> None:
        """One that is early by what has begun since looks again; so most blobs that begin need none of their own."""
        seconds = self._seconds_left()
        if self._alarm_at is None or self._clock.now + seconds < self._alarm_at:
            self._alarm_at = self._clock.now + seconds
            self._clock.schedule(seconds, partial(self._on_alarm, self._alarm_at))

    def _seconds_left(self) -> float:
        """Until the next one is done, if none begins before."""
        return max(0.0, self._transfers[0][0] - self._served_bytes) * len(self._transfers) / self._rate

    def _on_alarm(self, alarm_at: float) -> None:
        if alarm_at != self._alarm_at:
            return
        self._alarm_at = None
        self._advance()
        while self._transfers and self._seconds_left() < ROUNDING_SECONDS:
            target, _, done = heapq.heappop(self._transfers)
            self._target_sum -= target
            done()
        if self._transfers:
            self._set_alarm()
        else:
            self._served_bytes = self._target_sum = 0.0


def _deliver_to_all(deliver: Callable[[int], None], slots: Sequence[int]) -> None:
    for slot in slots:
        deliver(slot)
