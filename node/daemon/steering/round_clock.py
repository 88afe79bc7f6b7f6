"""Measure how long the rounds of a run take, from the heads that peers announce. PURE."""

SMOOTHING = 0.3


class RoundClock:
    """The highest announced round, and the mean time of a round in seconds; 0 while it is unknown."""

    def __init__(self) -> None:
        self.round = 0
        self.seconds = 0.0
        self._since: float | None = None

    def observe(self, round_number: int, now: float) -> None:
        """Record a round that a peer announces."""
        if round_number <= self.round:
            return
        if self._since is not None:
            each = (now - self._since) / (round_number - self.round)
            self.seconds = each if not self.seconds else SMOOTHING * each + (1 - SMOOTHING) * self.seconds
        self.round, self._since = round_number, now
