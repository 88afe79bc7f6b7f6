"""PURE: how many connections to one peer a bulk transfer uses: as many as measurement says help.

One TCP connection that halves its window at each loss carries about MSS / (RTT * sqrt(2 p / 3)), however wide the link
(Mathis et al. 1997), so n connections carry n times as much; where the link itself is full, they carry nothing more.
So the number is found by climbing: measure for a second, take four times as many, measure again, stay if that carried
clearly more and go back if not; later and later try again, by turns half as many and more. Four times and not twice: on
a link with losses a second's rate is off by a third by chance, and too few lanes cost more than too many. What another
peer's transfer lost is no gain: the sum over all peers must have grown too. Clock in seconds.
"""

from dataclasses import dataclass

MOST = 16
STEP = 4
SETTLE_SECONDS = 1.0  # after a change: handshakes and slow starts
EPOCH_SECONDS = 1.0
GAIN = 1.3  # times as fast makes more lanes worth while
KEPT = 0.9  # of the speed must be left with fewer
FIRST_HOLD = 3.0  # seconds until another number is tried, for losses come by chance; doubles up to
LONGEST_HOLD = 300.0
LEAST_HOLD_OF_FEWER = 10.0  # that trial costs speed where it fails


@dataclass(frozen=True)
class Bytes:
    """Received so far: from this peer, and from all."""

    peer: int
    total: int


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
        self._began: tuple[float, Bytes] | None = None
        self._quiet_until = float("-inf")

    def observe(self, now: float, calls: int, received: Bytes) -> None:
        """Called some times a second; `calls`: how many run. Changes `width` when an epoch is over."""
        if 2 * calls < self.width or calls == 0:
            self._began = None  # too little to do: what is measured then says nothing of the link
        elif self._began is None:
            if now >= self._quiet_until:
                self._began = now, received
        elif now - self._began[0] >= EPOCH_SECONDS:
            began, before = self._began
            seconds = now - began
            self._judge((received.peer - before.peer) / seconds, (received.total - before.total) / seconds, now)
            self._began = (now, received) if now >= self._quiet_until else None

    def _judge(self, peer: float, total: float, now: float) -> None:
        trial, self._trial = self._trial, None
        if trial is None:
            if now >= self._hold_until:
                self._try(peer, total, now)
        elif not self._is_better(trial, peer, total):
            self._move(trial.width, now)
            self._rest(now)
            self._hold = min(2 * self._hold, LONGEST_HOLD)
        elif self.width in (1, MOST):
            self._hold = FIRST_HOLD
            self._rest(now)
        else:
            self._hold = FIRST_HOLD
            self._try(peer, total, now)

    def _rest(self, now: float) -> None:
        """This way there is nothing more to gain; the other is tried later."""
        self._fewer = not self._fewer
        self._hold_until = now + max(self._hold, LEAST_HOLD_OF_FEWER if self._fewer and self.width > 1 else 0.0)

    def _is_better(self, trial: Trial, peer: float, total: float) -> bool:
        if self.width < trial.width:
            return peer >= KEPT * trial.peer
        # Half of the gain may be what the others lost by chance.
        return peer >= GAIN * trial.peer and total - trial.total >= (peer - trial.peer) / 2

    def _try(self, peer: float, total: float, now: float) -> None:
        self._fewer = self.width == MOST or (self._fewer and self.width > 1)
        self._trial = Trial(self.width, peer, total)
        self._move(self.width // 2 if self._fewer else min(STEP * self.width, MOST), now)

    def _move(self, width: int, now: float) -> None:
        self.width = width
        self._quiet_until = now + SETTLE_SECONDS
