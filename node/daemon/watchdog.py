"""When a trainer counts as stuck: a driver that hangs raises nothing, and its process lives on.

The trainer beats at every turn of its loop, a step or a short wait. It may be silent for LEAST_SECONDS, or PATIENCE
times the longest silence that it came back from, whichever is longer: steps take minutes on some machines. Time in
which the daemon itself stood still (a suspended laptop, a stopped container) counts as one look at most.
"""

WATCHDOG_SECONDS = 5.0
MIN_STUCK_SECONDS = 300.0
STUCK_FACTOR = 20.0


class Watchdog:
    """Of one life of a trainer, from its first beat on. `now` in seconds of a clock that only goes forward."""

    def __init__(self, heartbeat_count: int, now: float) -> None:
        self._heartbeat_count = heartbeat_count
        self._observed_at = now
        self._longest_silence = 0.0
        self.silent_seconds = 0.0

    @property
    def is_stuck(self) -> bool:
        return self.silent_seconds > max(MIN_STUCK_SECONDS, STUCK_FACTOR * self._longest_silence)

    def observe(self, heartbeat_count: int, now: float) -> None:
        """`beats`: how many there were until now."""
        lived = min(now - self._observed_at, 2 * WATCHDOG_SECONDS)
        self._observed_at = now
        self.silent_seconds += lived
        if heartbeat_count != self._heartbeat_count:
            self._longest_silence = max(self._longest_silence, self.silent_seconds)
            self._heartbeat_count = heartbeat_count
            self.silent_seconds = 0.0
