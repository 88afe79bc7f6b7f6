"""A trainer that no longer moves is told from a slow one, and from a daemon that stood still itself."""

from node.ipc.trainer_process import MIN_STUCK_SECONDS, STUCK_FACTOR, WATCHDOG_SECONDS, Watchdog


def silent_for(watchdog: Watchdog, beats: int, since: float, seconds: float) -> float:
    """Looks as the daemon does; returns the time then."""
    now = since
    while now < since + seconds:
        now += WATCHDOG_SECONDS
        watchdog.observe(beats, now)
    return now


def test_who_beats_is_not_stuck() -> None:
    watchdog, now = Watchdog(0, 100.0), 100.0
    for beats in range(1, 1000):
        now += WATCHDOG_SECONDS
        watchdog.observe(beats, now)
        assert not watchdog.is_stuck and watchdog.silent_seconds == 0


def test_silence_for_long_is_stuck() -> None:
    watchdog = Watchdog(7, 0.0)
    now = silent_for(watchdog, 7, 0.0, MIN_STUCK_SECONDS)
    assert not watchdog.is_stuck
    silent_for(watchdog, 7, now, WATCHDOG_SECONDS)
    assert watchdog.is_stuck


def test_who_was_slow_before_may_be_slow_again() -> None:
    watchdog = Watchdog(0, 0.0)
    slow = MIN_STUCK_SECONDS / 2
    now = silent_for(watchdog, 0, 0.0, slow)
    watchdog.observe(1, now + WATCHDOG_SECONDS)  # it did come back
    now = silent_for(watchdog, 1, now + WATCHDOG_SECONDS, 2 * MIN_STUCK_SECONDS)
    assert not watchdog.is_stuck
    silent_for(watchdog, 1, now, STUCK_FACTOR * slow)
    assert watchdog.is_stuck


def test_time_in_which_the_daemon_stood_still_does_not_count() -> None:
    watchdog = Watchdog(0, 0.0)
    watchdog.observe(0, 10 * MIN_STUCK_SECONDS)  # a laptop was shut
    assert not watchdog.is_stuck and watchdog.silent_seconds <= 2 * WATCHDOG_SECONDS
