"""PURE: how many connections to one peer a bulk transfer uses: as many as measurement says help.

One TCP connection that halves its window at each loss carries about MSS / (RTT * sqrt(2 p / 3)), however wide the link
(Mathis et al. 1997), so n connections carry n times as much; where the link itself is full, they carry nothing more.
So the number is found by climbing: measure for a second, take more, measure again, stay if that carried clearly more
and go back if not; later and later try again, by turns half as many and more. More is four times as many, and not
twice: on a link with losses a second's rate is off by a third by chance, and too few lanes cost more than too many.
Where packets get lost on the way, theory says already that one connection is too few: all are taken at once. Where
they queue, the link is full, and more connections would only take from others: no more are tried.
What another peer's transfer lost is no gain: the sum over all peers must have grown too. Clock in seconds.
"""

from dataclasses import dataclass

MOST = 32
STEP = 4
SETTLE_SECONDS = 1.0  # after a change: handshakes and slow starts
EPOCH_SECONDS = 1.0
HASTY_SECONDS = 0.3  # of measurement before the first trial, where packets get lost
LOST = 8  # packets within that time: more than a stray one
GAIN = 0.55  # n times as many lanes are worth while if they carry n to this power: 2 carry 1.5, 4 2.1, 32 6.7 times
KEPT = 0.9  # of the speed must be left with fewer
FIRST_HOLD = 3.0  # seconds until another number is tried, for losses come by chance; doubles up to
LONGEST_HOLD = 300.0
LEAST_HOLD_OF_FEWER = 20.0  # that trial costs speed where it fails


@dataclass(frozen=True)
class Arrived:
    """So far: bytes from this peer and from all; packets from this peer that tell of losses on the way. `queued`:
    whether packets from this peer wait somewhere now."""

    peer: int
    total: int
    lost: int = 0
    queued: bool = False


@dataclass(frozen=True)
class Trial:
    """The width before, and what it carried, in bytes a second."""

    width: int
    peer: float
    total: float


class Lanes:
    """`width`: the number of connections to use now."""

    def __init__(self) -> None:
        self.width = 1
        self._trial: Trial | None = None
        self._fewer = False  # which way the next trial goes
        self._hold = FIRST_HOLD
        self._hold_until = float("-inf")
        self._began: tuple[float, Arrived] | None = None
        self._quiet_until = float("-inf")

    def observe(self, now: float, busy: int, arrived: Arrived) -> None:
        """Called some times a second; `busy`: how many carry a call. Changes `width` when an epoch is over."""
        # With too little to do what is measured says nothing of the link, nor while lanes that were given up empty.
        if busy == 0 or not self.width <= 2 * busy <= 2 * self.width:
            self._began = None
        elif self._began is None:
            if now >= self._quiet_until:
                self._began = now, arrived
        elif now - self._began[0] >= self._epoch(arrived.lost - self._began[1].lost):
            began, before = self._began
            seconds, lossy = now - began, arrived.lost - before.lost >= LOST
            more = 1 if arrived.queued else MOST if lossy and self._hold == FIRST_HOLD else STEP
            self._judge((arrived.peer - before.peer) / seconds, (arrived.total - before.total) / seconds, more, now)
            self._began = (now, arrived) if now >= self._quiet_until else None

    def _epoch(self, lost: int) -> float:
        """Seconds; of the first width of all nothing more than a rough figure is needed."""
        is_first = self._trial is None and self.width == 1
        return HASTY_SECONDS if is_first and lost >= LOST else EPOCH_SECONDS

    def _judge(self, peer: float, total: float, more: int, now: float) -> None:
        """`more`: times as many connections that are worth a trial."""
        trial, self._trial = self._trial, None
        if trial is None:
            if now >= self._hold_until:
                self._try(peer, total, more, now)
        elif not self._is_better(trial, peer, total):
            self._move(trial.width, now)
            self._rest(now)
            self._hold = min(2 * self._hold, LONGEST_HOLD)
        elif self.width in (1, MOST):
            self._hold = FIRST_HOLD
            self._rest(now)
        else:
            self._hold = FIRST_HOLD
            self._try(peer, total, more, now)

    def _rest(self, now: float) -> None:
        """This way there is nothing more to gain; the other is tried later."""
        self._fewer = not self._fewer
        self._hold_until = now + max(self._hold, LEAST_HOLD_OF_FEWER if self._fewer and self.width > 1 else 0.0)

    def _is_better(self, trial: Trial, peer: float, total: float) -> bool:
        if self.width < trial.width:
            return peer >= KEPT * trial.peer
        # What the peer's other takers lost is not seen here: at its full link more lanes take from them, but not in
        # proportion. Of what our other peers lost half may be chance.
        enough = (self.width / trial.width) ** GAIN * trial.peer
        return peer >= enough and total - trial.total >= (peer - trial.peer) / 2

    def _try(self, peer: float, total: float, more: int, now: float) -> None:
        self._fewer = self.width == MOST or (self._fewer and self.width > 1)
        width = self.width // 2 if self._fewer else min(more * self.width, MOST)
        if width == self.width:
            return self._rest(now)
        self._trial = Trial(self.width, peer, total)
        self._move(width, now)

    def _move(self, width: int, now: float) -> None:
        self.width = width
        self._quiet_until = now + SETTLE_SECONDS
