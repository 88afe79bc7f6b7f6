"""Choose the pauses between the attempts of a machine to take part in a site. PURE.

The first machine starts its trainer again when a machine joins or is lost, and then waits a few seconds for those that
come back. A machine that comes later makes it start once more. So a machine that was left comes back at once, however
often that happens: if its pauses grew, it would miss each start by more, and cause the next one. Only pauses after the
end of its own ranks grow.
"""

from typing import Final, Literal, TypeAlias

End: TypeAlias = Literal["all told to end", "left", "no connection", "ranks ended"]
SHORT_SECONDS: Final = 0.5  # well below what a start waits
LONG_SECONDS: Final = 2.0  # once the first machine has been away for longer than a start takes
START_SECONDS: Final = 120.0
MAX_SECONDS: Final = 60.0  # after the end of our own ranks
STEADY_SECONDS: Final = 60.0  # after which their end is the first one again


class Pauses:
    """The pauses of one machine."""

    def __init__(self) -> None:
        self._failures = 0  # of our ranks, one after another
        self._left_at: float | None = None

    def after(self, end: End, now: float, lasted: float) -> float:
        """Return how long to wait after an attempt that has ended at `now` and took `lasted`, all in seconds."""
        if end != "no connection" or self._left_at is None:
            self._left_at = now
        if end == "ranks ended":
            self._failures = 1 if lasted > STEADY_SECONDS else self._failures + 1
            return float(min(MAX_SECONDS, SHORT_SECONDS * 2 ** (self._failures - 1)))
        return SHORT_SECONDS if now - self._left_at < START_SECONDS else LONG_SECONDS
