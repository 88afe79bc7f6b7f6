"""The virtual network: every peer's own link with a bandwidth (the same both ways), and one latency for all paths.

Blobs queue: an uplink sends one after the other, a downlink takes one after the other, and the first byte of a blob
enters the downlink one latency after it left. Statements are small and pass beside the blobs: latency, and their own
length over the narrower of the two links. Nothing is lost. Every byte is counted where it is sent.

    up_start   = max(now, up_free)                     up_end   = up_start + size / up
    down_start = max(up_start + latency, down_free)    down_end = max(up_end + latency, down_start + size / down)
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from node.simulation.clock import VirtualClock

BYTES_PER_MEGABIT = 125_000


class Links:
    """`bandwidths` in bytes a second, by the peer's slot; `latency` in seconds, one way."""

    def __init__(self, clock: VirtualClock, bandwidths: Sequence[float], latency: float) -> None:
        self._clock = clock
        self._bandwidths = tuple(bandwidths)
        self.latency = latency
        self._up_free = [0.0] * len(bandwidths)
        self._down_free = [0.0] * len(bandwidths)
        self.blob_bytes = [0] * len(bandwidths)
        self.statement_bytes = [0] * len(bandwidths)

    def backlog(self, slot: int) -> float:
        """When that uplink is free again."""
        return self._up_free[slot]

    def carry(self, source: int, receiver: int, size: int, arrived: Callable[[], None]) -> None:
        """A blob from slot to slot."""
        now = self._clock.now
        begun = max(now, self._up_free[source])
        sent = begun + size / self._bandwidths[source]
        first = max(begun + self.latency, self._down_free[receiver])
        taken = max(sent + self.latency, first + size / self._bandwidths[receiver])
        self._up_free[source], self._down_free[receiver] = sent, taken
        self.blob_bytes[source] += size
        self._clock.after(taken - now, arrived)

    def say(self, sender: int, receivers: Iterable[int], size: int, deliver: Callable[[int], None]) -> None:
        """A statement to several slots; `deliver` is called with each of them."""
        together: dict[float, list[int]] = defaultdict(list)
        for receiver in receivers:
            together[self.latency + size / min(self._bandwidths[sender], self._bandwidths[receiver])].append(receiver)
            self.statement_bytes[sender] += size
        for delay, slots in together.items():
            self._clock.after(delay, partial(_deliver, deliver, slots))


def _deliver(deliver: Callable[[int], None], slots: Sequence[int]) -> None:
    for slot in slots:
        deliver(slot)
