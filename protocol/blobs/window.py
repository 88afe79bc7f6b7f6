"""PURE: how many bytes may have been asked for and not come yet, over all sources.

What was asked for queues on its way: before our own link if that is the narrow one, before the sources' otherwise, and
what is asked for later comes later, however urgent. So it is as much as lately came in two seconds, and never less than
keeps a few calls running. Clock in seconds.
"""

from protocol.blobs.blob import PIECE_BYTES

WINDOW_SECONDS = 2.0
SAMPLE_SECONDS = 0.5
RATE_DECAY = 0.9  # of a rate, from one sample to the next: it was one source that paused, or the link that changed
MIN_PIECES = 4
SLOW_LINK_RATE = 16e6  # bytes a second: where fewer come, squeezing them takes a twentieth of a core at most, and saves a sixth


class InFlightLimit:
    """`bytes`: that may be awaited now. `rate`: bytes a second lately; 0 where nothing came yet."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._since: tuple[float, int] | None = None

    def observe(self, now: float, received: int, is_idle: bool) -> None:
        """`received`: bytes so far; nothing is learned from a time in which nothing was asked for."""
        if is_idle:
            self._since = None
        elif self._since is None:
            self._since = now, received
        elif now - self._since[0] >= SAMPLE_SECONDS:
            rate = (received - self._since[1]) / (now - self._since[0])
            self.rate = max(rate, RATE_DECAY * self.rate)
            self._since = now, received

    @property
    def is_slow(self) -> bool:
        """Whether a line is known to be what we wait for."""
        return 0 < self.rate < SLOW_LINK_RATE

    def max_bytes(self, min_pieces: int) -> int:
        """`calls`: those that the source with the most connections needs."""
        return max(int(WINDOW_SECONDS * self.rate), max(min_pieces, MIN_PIECES) * PIECE_BYTES)
