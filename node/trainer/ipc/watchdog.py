"""Detect a trainer that is stuck.

A hanging driver raises nothing and its process lives on. The trainer records a heartbeat at every iteration of its
loop, a step or a short wait. It may be silent for MIN_STUCK_SECONDS, or STUCK_FACTOR times the longest silence so far,
whichever is longer, because steps take minutes on some machines. Time in which the daemon itself was suspended (a
closed laptop, a stopped container) counts as two checks at most.
"""

WATCHDOG_SECONDS = 5.0  # between two checks
MIN_STUCK_SECONDS = 300.0
STUCK_FACTOR = 20.0


class Watchdog:
    """Detects a stuck trainer process by its heartbeats. All times are seconds of a monotonic clock."""

    def __init__(self, heartbeat_count: int, now: float) -> None:
        self._heartbeat_count = heartbeat_count
        self._observed_at = now
        self._longest_silence = 0.0
        self.silent_seconds = 0.0

    @property
    def is_stuck(self) -> bool:
        return self.silent_seconds > max(MIN_STUCK_SECONDS, STUCK_FACTOR * self._longest_silence)

    def observe(self, heartbeat_count: int, now: float) -> None:
        """Take note of the heartbeat count at time `now`."""
        elapsed = min(now - self._observed_at, 2 * WATCHDOG_SECONDS)
        self._observed_at = now
        self.silent_seconds += elapsed
        if heartbeat_count != self._heartbeat_count:
            self._longest_silence = max(self._longest_silence, self.silent_seconds)
            self._heartbeat_count = heartbeat_count
            self.silent_seconds = 0.0
