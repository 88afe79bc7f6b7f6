"""A trainer that no longer moves is told from a slow one, and from a daemon that stood still itself."""

from node.daemon.watchdog import LEAST_SECONDS, LOOK_SECONDS, PATIENCE, Watchdog


def silent_for(watchdog: Watchdog, beats: int, since: float, seconds: float) -> float:
    """Looks as the daemon does; returns the time then."""
    now = since
    while now < since + seconds:
        now += LOOK_SECONDS
        watchdog.look(beats, now)
    return now


def test_who_beats_is_not_stuck() -> None:
    watchdog, now = Watchdog(0, 100.0), 100.0
    for beats in range(1, 1000):
        now += LOOK_SECONDS
        watchdog.look(beats, now)
        assert not watchdog.is_stuck and watchdog.silent_seconds == 0


def test_silence_for_long_is_stuck() -> None:
    watchdog = Watchdog(7, 0.0)
    now = silent_for(watchdog, 7, 0.0, LEAST_SECONDS)
    assert not watchdog.is_stuck
    silent_for(watchdog, 7, now, LOOK_SECONDS)
    assert watchdog.is_stuck


def test_who_was_slow_before_may_be_slow_again() -> None:
    watchdog = Watchdog(0, 0.0)
    slow = LEAST_SECONDS / 2
    now = silent_for(watchdog, 0, 0.0, slow)
    watchdog.look(1, now + LOOK_SECONDS)  # it did come back
    now = silent_for(watchdog, 1, now + LOOK_SECONDS, 2 * LEAST_SECONDS)
    assert not watchdog.is_stuck
    silent_for(watchdog, 1, now, PATIENCE * slow)
    assert watchdog.is_stuck


def test_time_in_which_the_daemon_stood_still_does_not_count() -> None:
    watchdog = Watchdog(0, 0.0)
    watchdog.look(0, 10 * LEAST_SECONDS)  # a laptop was shut
    assert not watchdog.is_stuck and watchdog.silent_seconds <= 2 * LOOK_SECONDS
