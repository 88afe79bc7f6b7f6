"""When a trainer counts as stuck: a driver that hangs raises nothing, and its process lives on.

The trainer beats at every turn of its loop, a step or a short wait. It may be silent for LEAST_SECONDS, or PATIENCE
times the longest silence that it came back from, whichever is longer: steps take minutes on some machines. Time in
which the daemon itself stood still (a suspended laptop, a stopped container) counts as one look at most.
"""

LOOK_SECONDS = 5.0
LEAST_SECONDS = 300.0
PATIENCE = 20.0


class Watchdog:
    """Of one life of a trainer, from its first beat on. `now` in seconds of a clock that only goes forward."""

    def __init__(self, beats: int, now: float) -> None:
        self._beats = beats
        self._looked_at = now
        self._longest = 0.0
        self.silent_seconds = 0.0

    @property
    def is_stuck(self) -> bool:
        return self.silent_seconds > max(LEAST_SECONDS, PATIENCE * self._longest)

    def look(self, beats: int, now: float) -> None:
        """`beats`: how many there were until now."""
        lived = min(now - self._looked_at, 2 * LOOK_SECONDS)
        self._looked_at = now
        self.silent_seconds += lived
        if beats != self._beats:
            self._longest = max(self._longest, self.silent_seconds)
            self._beats = beats
            self.silent_seconds = 0.0
