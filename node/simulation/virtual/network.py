"""The virtual clock and the virtual network.

The clock runs actions in the order of their times, and actions of equal times in the order in which they were
scheduled. Every peer has its own link with a bandwidth (the same in both directions); all paths have one latency.

Each end of a link divides its rate equally among its current transfers (processor sharing), so a peer with a thin link
does not slow down the transfers of other peers. A blob arrives when both ends are done and its last byte has travelled.
With n transfers, each of them has received since its start at time t0

    served(t) - served(t0)    with    d served / dt = rate / n

so a heap of the values of `served` at which the transfers end gives the next one in O(log n).

Signed messages are small and do not share the rate with blobs: they take the latency plus their own size over the
narrower of the two links. Nothing is lost. Every byte is counted at its sender.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial


class VirtualClock:
    """A queue of scheduled actions; `now` is in virtual seconds since the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def schedule(self, delay: float, action: Callable[[], None]) -> None:
        """Run `action` after `delay` virtual seconds."""
        heapq.heappush(self._queue, (self.now + delay, next(self._numbers), action))

    def run(self, is_finished: Callable[[], bool]) -> bool:
        """Run actions until `is_finished`; returns False if none are left before that."""
        while not is_finished():
            if not self._queue:
                return False
            self.now, _, action = heapq.heappop(self._queue)
            action()
        return True


BYTES_PER_MEGABIT = 125_000
ROUNDING_SECONDS = 1e-9  # shorter times are rounding errors


class VirtualNetwork:
    """The links of all peers; `bandwidths` are in bytes per second by slot, `latency` in seconds one way."""

    def __init__(self, clock: VirtualClock, bandwidths: Sequence[float], latency: float) -> None:
        self._clock = clock
        self._bandwidths = tuple(bandwidths)
        self.latency = latency
        self._up = [LinkDirection(clock, rate) for rate in bandwidths]
        self._down = [LinkDirection(clock, rate) for rate in bandwidths]
        self.blob_bytes = [0] * len(bandwidths)
        self.message_bytes = [0] * len(bandwidths)

    def backlog_seconds(self, slot: int) -> float:
        """Return the seconds that the uplink of a slot needs for its current transfers."""
        return self._up[slot].backlog_seconds()

    def send_blob(self, sender: int, receiver: int, size: int, on_arrival: Callable[[], None]) -> None:
        """Send a blob from slot to slot."""
        self.blob_bytes[sender] += size
        ends = itertools.count(1)

        def done() -> None:
            if next(ends) == 2:
                self._clock.schedule(self.latency, on_arrival)

        self._up[sender].start_transfer(size, done)
        self._down[receiver].start_transfer(size, done)

    def send_message(self, sender: int, receivers: Iterable[int], size: int, deliver: Callable[[int], None]) -> None:
        """Send a message to several slots; `deliver` is called with each of them."""
        slots_by_delay: dict[float, list[int]] = defaultdict(list)
        for receiver in receivers:
            delay = self.latency + size / min(self._bandwidths[sender], self._bandwidths[receiver])
            slots_by_delay[delay].append(receiver)
            self.message_bytes[sender] += size
        for delay, slots in slots_by_delay.items():
            self._clock.schedule(delay, partial(_deliver_to_all, deliver, slots))


class LinkDirection:
    """One direction of one link, whose `rate` in bytes per second is shared by its transfers."""

    def __init__(self, clock: VirtualClock, rate: float) -> None:
        self._clock = clock
        self._rate = rate
        self._served_bytes = 0.0
        self._served_at = 0.0  # the time up to which _served_bytes is counted
        self._transfers: list[tuple[float, int, Callable[[], None]]] = []  # a heap by _served_bytes at the end
        self._target_sum = 0.0  # the sum of these targets
        self._numbers = itertools.count()
        self._alarm_at: float | None = None

    def start_transfer(self, size: int, on_done: Callable[[], None]) -> None:
        """Start a transfer; `on_done` is called at its end."""
        self._advance()
        heapq.heappush(self._transfers, (self._served_bytes + size, next(self._numbers), on_done))
        self._target_sum += self._served_bytes + size
        self._set_alarm()

    def backlog_seconds(self) -> float:
        """Return the seconds until all current transfers would be done."""
        self._advance()
        return max(0.0, self._target_sum - self._served_bytes * len(self._transfers)) / self._rate

    def _advance(self) -> None:
        now = self._clock.now
        if self._transfers:
            self._served_bytes += (now - self._served_at) * self._rate / len(self._transfers)
        self._served_at = now

    def _set_alarm(self) -> None:
        """Schedule an alarm for the next end of a transfer.

        An alarm that comes too early, because transfers started since, sets the next one; so most new transfers need no
        alarm of their own.
        """
        seconds = self._seconds_left()
        if self._alarm_at is None or self._clock.now + seconds < self._alarm_at:
            self._alarm_at = self._clock.now + seconds
            self._clock.schedule(seconds, partial(self._on_alarm, self._alarm_at))

    def _seconds_left(self) -> float:
        """Return the seconds until the next transfer ends if no other one starts."""
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
