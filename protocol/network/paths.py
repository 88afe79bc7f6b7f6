"""PURE: by which of two paths bulk goes to a peer; clock in seconds, rates in bytes a second.

libp2p reaches everybody and is what there is until a direct connection has been made. From then on the direct path is
taken: it costs a third of the processor time and may use several connections. Measurement may overrule that: a path
that carries twice as much as the other is taken, and the other is tried again with a single call now and then, which
shares the link with what else runs and so is measured too low; hence twice. A direct path that fails is left at once,
and proved anew before it is used again, after a pause that doubles with each failure that follows.
"""

from dataclasses import dataclass, field
from enum import StrEnum

TRIAL_SECONDS = 120.0  # between two calls by the path that is not taken
FIRST_PAUSE = 15.0  # after a failure; doubles up to
LONGEST_PAUSE = 600.0
CLEARLY = 2.0  # times as fast: only then does the other path replace the direct one
SAMPLE_BYTES = 1 << 20
SAMPLE_SECONDS = 0.5
SMOOTHING = 0.3


class Path(StrEnum):
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

    def began(self, now: float) -> None:
        if self.calls == 0:
            self._since = now
        self.calls += 1

    def received(self, size: int) -> None:
        self._bytes += size

    def ended(self, now: float) -> None:
        self._seconds += now - self._since
        self._since = now
        self.calls -= 1
        if self._seconds > 0 and (self._bytes >= SAMPLE_BYTES or self._seconds >= SAMPLE_SECONDS):
            rate = self._bytes / self._seconds
            self.rate = rate if self.rate is None else (1 - SMOOTHING) * self.rate + SMOOTHING * rate
            self._bytes = 0
            self._seconds = 0.0


@dataclass
class Choice:
    """The paths to one peer."""

    goodput: dict[Path, Goodput] = field(default_factory=lambda: {path: Goodput() for path in Path})
    is_proved: bool = False
    _pause: float = FIRST_PAUSE
    _probe_at: float = float("-inf")
    _trial_at: float = float("-inf")

    def wants_proof(self, now: float) -> bool:
        """Whether it is time to try to make a direct connection."""
        return not self.is_proved and now >= self._probe_at

    def proved(self, now: float) -> None:
        """A direct connection was made."""
        self.is_proved = True
        self._trial_at = now + TRIAL_SECONDS

    def failed(self, now: float) -> None:
        """A direct connection could not be made, or failed a call."""
        self._probe_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self.is_proved = False

    def moved(self) -> None:
        """The peer is elsewhere now. After a failure the pause stays: nobody has us knock at many doors in a row."""
        self.is_proved = False
        self.goodput[Path.DIRECT].rate = None

    def delivered(self) -> None:
        """A call over the direct path succeeded."""
        self._pause = FIRST_PAUSE

    @property
    def best(self) -> Path:
        """The path that is taken."""
        if not self.is_proved:
            return Path.LIBP2P
        usual, direct = self.goodput[Path.LIBP2P].rate, self.goodput[Path.DIRECT].rate
        if usual is not None and direct is not None and usual > CLEARLY * direct:
            return Path.LIBP2P
        return Path.DIRECT

    def next(self, now: float) -> Path:
        """For a call that begins now: the best, or now and then the other."""
        if not self.is_proved or now < self._trial_at:
            return self.best
        self._trial_at = now + TRIAL_SECONDS
        return Path.LIBP2P if self.best is Path.DIRECT else Path.DIRECT
