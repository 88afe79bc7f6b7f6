"""PURE: by which of two paths bulk goes to a peer; clock in seconds, rates in bytes a second.

libp2p reaches everybody and is what there is until a direct connection has been made. From then on the direct path is
taken: it costs a third of the processor time and may use several connections. Measurement may overrule that: a path
that carries twice as much as the other is taken, and the other is tried again with a single call now and then, which
shares the link with what else runs and so is measured too low; hence twice. A direct path that fails is left at once,
and proved anew before it is used again, after a pause that doubles with each failure that follows.
"""

from dataclasses import dataclass, field
from enum import StrEnum

TRIAL_INTERVAL_SECONDS = 120.0  # between two calls by the path that is not taken
MIN_RETRY_DELAY_SECONDS = 15.0  # after a failure; doubles up to
MAX_RETRY_DELAY_SECONDS = 600.0
SWITCH_RATIO = 2.0  # times as fast: only then does the other path replace the direct one
MIN_SAMPLE_BYTES = 1 << 20
MIN_SAMPLE_SECONDS = 0.5
SMOOTHING = 0.3


class BulkPath(StrEnum):
    LIBP2P = "libp2p"
    DIRECT = "direct"


@dataclass
class Goodput:
    """What a path carries while at least one call uses it, exponentially averaged."""

    rate: float | None = None
    calls: int = 0
    _since: float = 0.0
    _bytes: int = 0
    _seconds: float = 0.0

    def call_started(self, now: float) -> None:
        if self.calls == 0:
            self._since = now
        self.calls += 1

    def record_bytes(self, size: int) -> None:
        self._bytes += size

    def call_ended(self, now: float) -> None:
        self._seconds += now - self._since
        self._since = now
        self.calls -= 1
        if self._seconds > 0 and (self._bytes >= MIN_SAMPLE_BYTES or self._seconds >= MIN_SAMPLE_SECONDS):
            rate = self._bytes / self._seconds
            self.rate = rate if self.rate is None else (1 - SMOOTHING) * self.rate + SMOOTHING * rate
            self._bytes = 0
            self._seconds = 0.0


@dataclass
class PathSelector:
    """The paths to one peer."""

    goodput: dict[BulkPath, Goodput] = field(default_factory=lambda: {path: Goodput() for path in BulkPath})
    is_direct_verified: bool = False
    _retry_delay: float = MIN_RETRY_DELAY_SECONDS
    _next_probe_at: float = float("-inf")
    _next_trial_at: float = float("-inf")

    def should_probe(self, now: float) -> bool:
        """Whether it is time to try to make a direct connection."""
        return not self.is_direct_verified and now >= self._next_probe_at

    def record_probe_success(self, now: float) -> None:
        """A direct connection was made."""
        self.is_direct_verified = True
        self._next_trial_at = now + TRIAL_INTERVAL_SECONDS

    def record_failure(self, now: float) -> None:
        """A direct connection could not be made, or failed a call."""
        self._next_probe_at = now + self._retry_delay
        self._retry_delay = min(2 * self._retry_delay, MAX_RETRY_DELAY_SECONDS)
        self.is_direct_verified = False

    def reset_direct(self) -> None:
        """The peer is elsewhere now. After a failure the pause stays: nobody has us knock at many doors in a row."""
        self.is_direct_verified = False
        self.goodput[BulkPath.DIRECT].rate = None

    def record_delivery(self) -> None:
        """A call over the direct path succeeded."""
        self._retry_delay = MIN_RETRY_DELAY_SECONDS

    @property
    def best_path(self) -> BulkPath:
        """The path that is taken."""
        if not self.is_direct_verified:
            return BulkPath.LIBP2P
        usual, direct = self.goodput[BulkPath.LIBP2P].rate, self.goodput[BulkPath.DIRECT].rate
        if usual is not None and direct is not None and usual > SWITCH_RATIO * direct:
            return BulkPath.LIBP2P
        return BulkPath.DIRECT

    def next_path(self, now: float) -> BulkPath:
        """For a call that begins now: the best, or now and then the other."""
        if not self.is_direct_verified or now < self._next_trial_at:
            return self.best_path
        self._next_trial_at = now + TRIAL_INTERVAL_SECONDS
        return BulkPath.LIBP2P if self.best_path is BulkPath.DIRECT else BulkPath.DIRECT
