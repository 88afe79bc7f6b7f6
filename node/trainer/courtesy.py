"""When a trainer stands back for others who use its device, and when it goes on. PURE.

Two thresholds and two delays, so that it neither stops for a moment's work nor goes back and forth.
"""

PAUSE_AFTER_SECONDS = 4.0  # that others need the device before the trainer stands back
RESUME_AFTER_SECONDS = 10.0  # that they leave it alone before it goes on


class PausePolicy:
    """`pause_share`, `resume_share`: of the device in the hands of others, 0 to 1; `now` in seconds, monotonic."""

    def __init__(self, pause_share: float, resume_share: float) -> None:
        self._pause_share = pause_share
        self._resume_share = resume_share
        self._contrary_since: float | None = None  # when the share came to speak against what we do
        self.paused = False

    def update(self, share: float, now: float) -> bool:
        """Takes a measured share into account; whether that has changed `paused`."""
        against = share < self._resume_share if self.paused else share >= self._pause_share
        if not against:
            self._contrary_since = None
            return False
        self._contrary_since = now if self._contrary_since is None else self._contrary_since
        if now - self._contrary_since < (RESUME_AFTER_SECONDS if self.paused else PAUSE_AFTER_SECONDS):
            return False
        self.paused = not self.paused
        self._contrary_since = None
        return True
