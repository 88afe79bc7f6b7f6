"""PURE: by which of two paths bulk goes to a peer; clock in seconds, rates in bytes a second.

libp2p reaches everybody and is what there is until a direct connection has been made. From then on the direct path is
taken: it costs a third of the processor time and may use several connections. Measurement may overrule that: a path
that carries twice as much as the other is taken, and the other is tried again with a single call now and then, which
shares the link with what else runs and so is measured too low; hence twice. A direct path that fails is left at once,
and proved anew before it is used again, after a pause that doubles with each failure that follows.

PURE: how many connections to one peer a bulk transfer uses: as many as measurement says help.

One TCP connection that halves its window at each loss carries about MSS / (RTT * sqrt(2 p / 3)), however wide the link
(Mathis et al. 1997), so n connections carry n times as much; where the link itself is full, they carry nothing more.
So the number is found by climbing: measure for a second, take more, measure again, stay if that carried clearly more
and go back if not; later and later try again, by turns half as many and more. More is four times as many, and not
twice: on a link with losses a second's rate is off by a third by chance, and too few lanes cost more than too many.
Where packets get lost on the way, theory says already that one connection is too few: all are taken at once. Where
they queue, the link is full, and more connections would only take from others: no more are tried.
What another peer's transfer lost is no gain: the sum over all peers must have grown too. Clock in seconds.
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


MAX_CONNECTIONS = 32
GROWTH_FACTOR = 4
SETTLE_SECONDS = 1.0  # after a change: handshakes and slow starts
EPOCH_SECONDS = 1.0
FIRST_EPOCH_SECONDS = 0.3  # of measurement before the first trial, where packets get lost
LOSSY_PACKETS = 8  # packets within that time: more than a stray one
GAIN_EXPONENT = (
    0.55  # n times as many lanes are worth while if they carry n to this power: 2 carry 1.5, 4 2.1, 32 6.7 times
)
MIN_KEPT_RATE = 0.9  # of the speed must be left with fewer
MIN_HOLD_SECONDS = 3.0  # seconds until another number is tried, for losses come by chance; doubles up to
MAX_HOLD_SECONDS = 300.0
MIN_HOLD_BEFORE_SHRINK_SECONDS = 20.0  # that trial costs speed where it fails


@dataclass(frozen=True)
class TransferTotals:
    """So far: bytes from this peer and from all; packets from this peer that tell of losses on the way. `queued`:
    whether packets from this peer wait somewhere now."""

    peer_bytes: int
    total_bytes: int
    lost_packets: int = 0
    is_queued: bool = False


@dataclass(frozen=True)
class Trial:
    """The width before, and what it carried, in bytes a second."""

    connections: int
    peer_rate: float
    total_rate: float


class ConnectionCountController:
    """`width`: the number of connections to use now."""

    def __init__(self) -> None:
        self.connections = 1
        self._trial: Trial | None = None
        self._tries_fewer = False  # which way the next trial goes
        self._hold = MIN_HOLD_SECONDS
        self._hold_until = float("-inf")
        self._epoch_start: tuple[float, TransferTotals] | None = None
        self._settled_at = float("-inf")

    def observe(self, now: float, busy: int, totals: TransferTotals) -> None:
        """Called some times a second; `busy`: how many carry a call. Changes `width` when an epoch is over."""
        # With too little to do what is measured says nothing of the link, nor while lanes that were given up empty.
        if busy == 0 or not self.connections <= 2 * busy <= 2 * self.connections:
            self._epoch_start = None
        elif self._epoch_start is None:
            if now >= self._settled_at:
                self._epoch_start = now, totals
        elif now - self._epoch_start[0] >= self._epoch_seconds(totals.lost_packets - self._epoch_start[1].lost_packets):
            began, before = self._epoch_start
            seconds, lossy = now - began, totals.lost_packets - before.lost_packets >= LOSSY_PACKETS
            more = (
                1
                if totals.is_queued
                else MAX_CONNECTIONS
                if lossy and self._hold == MIN_HOLD_SECONDS
                else GROWTH_FACTOR
            )
            self._evaluate(
                (totals.peer_bytes - before.peer_bytes) / seconds,
                (totals.total_bytes - before.total_bytes) / seconds,
                more,
                now,
            )
            self._epoch_start = (now, totals) if now >= self._settled_at else None

    def _epoch_seconds(self, lost_packets: int) -> float:
        """Seconds; of the first width of all nothing more than a rough figure is needed."""
        is_first = self._trial is None and self.connections == 1
        return FIRST_EPOCH_SECONDS if is_first and lost_packets >= LOSSY_PACKETS else EPOCH_SECONDS

    def _evaluate(self, peer_rate: float, total_rate: float, growth: int, now: float) -> None:
        """`more`: times as many connections that are worth a trial."""
        trial, self._trial = self._trial, None
        if trial is None:
            if now >= self._hold_until:
                self._start_trial(peer_rate, total_rate, growth, now)
        elif not self._is_better(trial, peer_rate, total_rate):
            self._set_connections(trial.connections, now)
            self._hold_and_turn(now)
            self._hold = min(2 * self._hold, MAX_HOLD_SECONDS)
        elif self.connections in (1, MAX_CONNECTIONS):
            self._hold = MIN_HOLD_SECONDS
            self._hold_and_turn(now)
        else:
            self._hold = MIN_HOLD_SECONDS
            self._start_trial(peer_rate, total_rate, growth, now)

    def _hold_and_turn(self, now: float) -> None:
        """This way there is nothing more to gain; the other is tried later."""
        self._tries_fewer = not self._tries_fewer
        self._hold_until = now + max(
            self._hold, MIN_HOLD_BEFORE_SHRINK_SECONDS if self._tries_fewer and self.connections > 1 else 0.0
        )

    def _is_better(self, trial: Trial, peer_rate: float, total_rate: float) -> bool:
        if self.connections < trial.connections:
            return peer_rate >= MIN_KEPT_RATE * trial.peer_rate
        # What the peer's other takers lost is not seen here: at its full link more lanes take from them, but not in
        # proportion. Of what our other peers lost half may be chance.
        enough = (self.connections / trial.connections) ** GAIN_EXPONENT * trial.peer_rate
        return peer_rate >= enough and total_rate - trial.total_rate >= (peer_rate - trial.peer_rate) / 2

    def _start_trial(self, peer_rate: float, total_rate: float, growth: int, now: float) -> None:
        self._tries_fewer = self.connections == MAX_CONNECTIONS or (self._tries_fewer and self.connections > 1)
        width = self.connections // 2 if self._tries_fewer else min(growth * self.connections, MAX_CONNECTIONS)
        if width == self.connections:
            return self._hold_and_turn(now)
        self._trial = Trial(self.connections, peer_rate, total_rate)
        self._set_connections(width, now)

    def _set_connections(self, connections: int, now: float) -> None:
        self.connections = connections
        self._settled_at = now + SETTLE_SECONDS
