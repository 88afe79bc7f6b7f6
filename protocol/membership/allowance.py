"""How much a peer may ask of us: PURE, the caller passes the time (seconds, monotonic)."""

from typing import Literal

from protocol.identity import PeerId

MAX_CALLERS = 4096


class TokenBuckets:
    """A token bucket for each caller: `burst` calls (or whatever is counted) at once, `rate` a second in the long
    run."""

    def __init__(self, burst: float, rate: float, max_callers: int = MAX_CALLERS) -> None:
        self._burst = burst
        self._rate = rate
        self._max_callers = max_callers
        self._buckets: dict[PeerId, tuple[float, float]] = {}  # tokens left, when; the longest silent first

    def tokens_left(self, peer: PeerId, now: float) -> float:
        left, when = self._buckets.get(peer, (self._burst, now))
        return min(self._burst, left + (now - when) * self._rate)

    def try_take(self, peer: PeerId, now: float, amount: float = 1.0) -> bool:
        left = self.tokens_left(peer, now)
        granted = left >= amount
        self._buckets.pop(peer, None)
        self._buckets[peer] = (left - amount if granted else left), now
        if len(self._buckets) > self._max_callers:
            del self._buckets[next(iter(self._buckets))]
        return granted


class SharedTokenBuckets:
    """One for each caller, and one for all of them together, as anybody has as many names as he likes."""

    def __init__(self, per_peer: TokenBuckets, overall: TokenBuckets) -> None:
        self._per_peer = per_peer
        self._overall = overall

    def charge(self, peer: PeerId, now: float, amount: float = 1.0) -> Literal["caller", "all"] | None:
        """Whose share is used up; None: it is granted. What is refused takes nothing of either."""
        if self._per_peer.tokens_left(peer, now) < amount:
            return "caller"
        if not self._overall.try_take("", now, amount):
            return "all"
        self._per_peer.try_take(peer, now, amount)
        return None
