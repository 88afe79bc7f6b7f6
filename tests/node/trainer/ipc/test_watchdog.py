"""The watchdog distinguishes a stuck trainer from a slow one, and from a suspended daemon."""

from node.trainer.ipc.trainer_process import MIN_STUCK_SECONDS, STUCK_FACTOR, WATCHDOG_SECONDS, Watchdog


def observe_silence(watchdog: Watchdog, heartbeat_count: int, since: float, seconds: float) -> float:
    """Observe an unchanged count as often as the daemon does; return the time at the end."""
    now = since
    while now < since + seconds:
        now += WATCHDOG_SECONDS
        watchdog.observe(heartbeat_count, now)
    return now


def test_trainer_with_heartbeats_is_not_stuck() -> None:
    watchdog, now = Watchdog(0, 100.0), 100.0
    for heartbeat_count in range(1, 1000):
        now += WATCHDOG_SECONDS
        watchdog.observe(heartbeat_count, now)
        assert not watchdog.is_stuck and watchdog.silent_seconds == 0


def test_long_silence_is_stuck() -> None:
    watchdog = Watchdog(7, 0.0)
    now = observe_silence(watchdog, 7, 0.0, MIN_STUCK_SECONDS)
    assert not watchdog.is_stuck
    observe_silence(watchdog, 7, now, WATCHDOG_SECONDS)
    assert watchdog.is_stuck


def test_longest_silence_so_far_extends_the_limit() -> None:
    watchdog = Watchdog(0, 0.0)
    slow = MIN_STUCK_SECONDS / 2
    now = observe_silence(watchdog, 0, 0.0, slow)
    watchdog.observe(1, now + WATCHDOG_SECONDS)  # it resumed
    now = observe_silence(watchdog, 1, now + WATCHDOG_SECONDS, 2 * MIN_STUCK_SECONDS)
    assert not watchdog.is_stuck
    observe_silence(watchdog, 1, now, STUCK_FACTOR * slow)
    assert watchdog.is_stuck


def test_suspension_of_the_daemon_does_not_count() -> None:
    watchdog = Watchdog(0, 0.0)
    watchdog.observe(0, 10 * MIN_STUCK_SECONDS)  # a laptop was closed
    assert not watchdog.is_stuck and watchdog.silent_seconds <= 2 * WATCHDOG_SECONDS
