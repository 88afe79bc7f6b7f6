"""Which path bulk transfers to a peer take, and over how many connections. No I/O; the caller passes the time.

Clock in seconds, rates in bytes a second.

Path. libp2p reaches every peer and is used until a direct connection has succeeded. From then on bulk takes the direct
path, which costs a third of the CPU time and allows several connections. Measurements can overrule this: a path that
is twice as fast as the other is used instead. From time to time a single call tries the other path again. That call
shares the link with all running transfers, so it measures too low; therefore the factor is 2. A direct path that fails
is left at once and must be verified again before it is used, after a delay that doubles with each further failure.

Connections. One TCP connection that halves its window at each loss carries about MSS / (RTT * sqrt(2 p / 3)), however
wide the link (Mathis et al. 1997), so n connections carry n times as much; once the link itself is full, they carry
nothing more. The controller finds the number by hill climbing: measure for a second, open more, measure again, keep
them if they carried clearly more, and go back if not. It tries again at growing intervals, alternately with half as
many and with more. "More" means four times as many rather than twice: on a lossy link the rate of one second is off by
a third by chance, and too few connections cost more than too many. Where packets are lost on the way, theory already
says that one connection is too few, so the controller opens all at once. Where packets queue, the link is full and
more connections would only take bandwidth from others, so it opens no more. Bandwidth that another peer's transfer
lost is not a gain: the sum over all peers must have grown too.
"""

from dataclasses import dataclass, field
from enum import StrEnum

TRIAL_INTERVAL_SECONDS = 120.0  # between two trial calls on the other path
MIN_RETRY_DELAY_SECONDS = 15.0  # after the first failure; doubles up to the maximum
MAX_RETRY_DELAY_SECONDS = 600.0
SWITCH_RATIO = 2.0  # libp2p must be this many times as fast to replace the direct path
MIN_SAMPLE_BYTES = 1 << 20
MIN_SAMPLE_SECONDS = 0.5
SMOOTHING = 0.3


class BulkPath(StrEnum):
    LIBP2P = "libp2p"
    DIRECT = "direct"


@dataclass
class Goodput:
    """The exponentially averaged rate of a path while at least one call uses it."""

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
    """The choice between the two paths to one peer."""

    goodput: dict[BulkPath, Goodput] = field(default_factory=lambda: {path: Goodput() for path in BulkPath})
    is_direct_verified: bool = False
    _retry_delay: float = MIN_RETRY_DELAY_SECONDS
    _next_probe_at: float = float("-inf")
    _next_trial_at: float = float("-inf")

    def should_probe(self, now: float) -> bool:
        """Return whether it is time to try a direct connection."""
        return not self.is_direct_verified and now >= self._next_probe_at

    def record_probe_success(self, now: float) -> None:
        """Record that a direct connection succeeded."""
        self.is_direct_verified = True
        self._next_trial_at = now + TRIAL_INTERVAL_SECONDS

    def record_failure(self, now: float) -> None:
        """Record that a direct connection could not be made, or failed a call."""
        self._next_probe_at = now + self._retry_delay
        self._retry_delay = min(2 * self._retry_delay, MAX_RETRY_DELAY_SECONDS)
        self.is_direct_verified = False

    def reset_direct(self) -> None:
        """Discard the verification because the peer's endpoint changed.

        The delay after a failure stays, so that nobody can make us dial many endpoints in a row.
        """
        self.is_direct_verified = False
        self.goodput[BulkPath.DIRECT].rate = None

    def record_delivery(self) -> None:
        """Record that a call over the direct path succeeded."""
        self._retry_delay = MIN_RETRY_DELAY_SECONDS

    @property
    def best_path(self) -> BulkPath:
        """Return the path that measurements favour now."""
        if not self.is_direct_verified:
            return BulkPath.LIBP2P
        libp2p, direct = self.goodput[BulkPath.LIBP2P].rate, self.goodput[BulkPath.DIRECT].rate
        if libp2p is not None and direct is not None and libp2p > SWITCH_RATIO * direct:
            return BulkPath.LIBP2P
        return BulkPath.DIRECT

    def next_path(self, now: float) -> BulkPath:
        """Return the path for a call that begins now.

        It is the best one or, from time to time, the other one as a trial.
        """
        if not self.is_direct_verified or now < self._next_trial_at:
            return self.best_path
        self._next_trial_at = now + TRIAL_INTERVAL_SECONDS
        return BulkPath.LIBP2P if self.best_path is BulkPath.DIRECT else BulkPath.DIRECT


MAX_CONNECTIONS = 32
GROWTH_FACTOR = 4
SETTLE_SECONDS = 1.0  # after a change, for handshakes and slow starts
EPOCH_SECONDS = 1.0
FIRST_EPOCH_SECONDS = 0.3  # length of the first epoch where packets are lost
LOSSY_PACKETS = 8  # loss indications in one epoch; fewer may be chance
# n times as many connections are worth keeping if they carry n to this power: 2 carry 1.5, 4 2.1, 32 6.7 times as much.
GAIN_EXPONENT = 0.55
MIN_KEPT_RATE = 0.9  # fraction of the rate that must remain with fewer connections
MIN_HOLD_SECONDS = 3.0  # until the next trial, because losses vary by chance; doubles up to the maximum
MAX_HOLD_SECONDS = 300.0
MIN_HOLD_BEFORE_SHRINK_SECONDS = 20.0  # a failed trial with fewer connections costs speed


@dataclass(frozen=True)
class TransferTotals:
    """Totals so far of bytes and of packets that indicate losses.

    `is_queued` says whether packets from this peer wait in a queue now.
    """

    peer_bytes: int
    total_bytes: int
    lost_packets: int = 0
    is_queued: bool = False


@dataclass(frozen=True)
class Trial:
    """A running trial: the previous connection count and its rates.

    Rates are in bytes a second.
    """

    connections: int
    peer_rate: float
    total_rate: float


class ConnectionCountController:
    """Decides how many connections to one peer to use now (`connections`)."""

    def __init__(self) -> None:
        self.connections = 1
        self._trial: Trial | None = None
        self._tries_fewer = False  # direction of the next trial
        self._hold = MIN_HOLD_SECONDS
        self._hold_until = float("-inf")
        self._epoch_start: tuple[float, TransferTotals] | None = None
        self._settled_at = float("-inf")

    def observe(self, now: float, busy: int, totals: TransferTotals) -> None:
        """Take a measurement, and change `connections` when an epoch is over.

        `busy` is the number of connections that carry a call.
        """
        # With too little work, or while surplus connections drain, the rate says nothing about the link.
        if busy == 0 or not self.connections <= 2 * busy <= 2 * self.connections:
            self._epoch_start = None
        elif self._epoch_start is None:
            if now >= self._settled_at:
                self._epoch_start = now, totals
        elif now - self._epoch_start[0] >= self._epoch_seconds(totals.lost_packets - self._epoch_start[1].lost_packets):
            started, before = self._epoch_start
            seconds, lossy = now - started, totals.lost_packets - before.lost_packets >= LOSSY_PACKETS
            growth = (
                1
                if totals.is_queued
                else MAX_CONNECTIONS
                if lossy and self._hold == MIN_HOLD_SECONDS
                else GROWTH_FACTOR
            )
            self._evaluate(
                (totals.peer_bytes - before.peer_bytes) / seconds,
                (totals.total_bytes - before.total_bytes) / seconds,
                growth,
                now,
            )
            self._epoch_start = (now, totals) if now >= self._settled_at else None

    def _epoch_seconds(self, lost_packets: int) -> float:
        """Return the length of an epoch.

        A first single connection on a lossy link needs only a rough figure.
        """
        is_first = self._trial is None and self.connections == 1
        return FIRST_EPOCH_SECONDS if is_first and lost_packets >= LOSSY_PACKETS else EPOCH_SECONDS

    def _evaluate(self, peer_rate: float, total_rate: float, growth: int, now: float) -> None:
        """Judge the running trial at the end of an epoch, and start the next one.

        `growth` is the factor of a trial with more connections.
        """
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
        """Pause the trials and reverse the direction of the next one.

        The present direction gains nothing more.
        """
        self._tries_fewer = not self._tries_fewer
        self._hold_until = now + max(
            self._hold, MIN_HOLD_BEFORE_SHRINK_SECONDS if self._tries_fewer and self.connections > 1 else 0.0
        )

    def _is_better(self, trial: Trial, peer_rate: float, total_rate: float) -> bool:
        if self.connections < trial.connections:
            return peer_rate >= MIN_KEPT_RATE * trial.peer_rate
        # This check cannot see what the peer's other receivers lose: on the peer's full link, more connections take
        # from them, but less than in proportion. Half of our other peers' loss may be chance.
        enough = (self.connections / trial.connections) ** GAIN_EXPONENT * trial.peer_rate
        return peer_rate >= enough and total_rate - trial.total_rate >= (peer_rate - trial.peer_rate) / 2

    def _start_trial(self, peer_rate: float, total_rate: float, growth: int, now: float) -> None:
        self._tries_fewer = self.connections == MAX_CONNECTIONS or (self._tries_fewer and self.connections > 1)
        connections = self.connections // 2 if self._tries_fewer else min(growth * self.connections, MAX_CONNECTIONS)
        if connections == self.connections:
            return self._hold_and_turn(now)
        self._trial = Trial(self.connections, peer_rate, total_rate)
        self._set_connections(connections, now)

    def _set_connections(self, connections: int, now: float) -> None:
        self.connections = connections
        self._settled_at = now + SETTLE_SECONDS
