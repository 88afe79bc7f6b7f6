"""The choice of the path from measurements."""

import pytest

from protocol.transport.multipath_policy import (
    MAX_RETRY_DELAY_SECONDS,
    MIN_RETRY_DELAY_SECONDS,
    TRIAL_INTERVAL_SECONDS,
    BulkPath,
    Goodput,
    PathSelector,
)


def transfer(selector: PathSelector, path: BulkPath, rate: float, now: float, seconds: float = 1.0) -> float:
    """Simulate a call at `rate` bytes a second, and return the time of its end."""
    selector.goodput[path].call_started(now)
    selector.goodput[path].record_bytes(int(rate * seconds))
    selector.goodput[path].call_ended(now + seconds)
    return now + seconds


def test_direct_path_is_used_only_once_verified() -> None:
    selector = PathSelector()
    assert selector.should_probe(0.0) and [selector.next_path(0.0), selector.best_path] == [BulkPath.LIBP2P] * 2
    selector.record_probe_success(1.0)
    assert not selector.should_probe(1.0) and [selector.next_path(1.0), selector.best_path] == [BulkPath.DIRECT] * 2


def test_retry_delay_doubles_with_each_failure() -> None:
    selector, now, waits = PathSelector(), 0.0, []
    for _ in range(10):
        selector.record_probe_success(now)
        selector.record_failure(now)
        assert selector.next_path(now) is BulkPath.LIBP2P
        started = now
        while not selector.should_probe(now):
            now += 1.0
        waits.append(now - started)
    assert (
        waits[:3] == [MIN_RETRY_DELAY_SECONDS, 2 * MIN_RETRY_DELAY_SECONDS, 4 * MIN_RETRY_DELAY_SECONDS]
        and waits[-1] == MAX_RETRY_DELAY_SECONDS
    )
    selector.record_probe_success(now)
    selector.record_delivery()
    selector.record_failure(now)
    assert selector.should_probe(now + MIN_RETRY_DELAY_SECONDS), "one success resets the delay"


def test_new_endpoint_is_probed_at_once_unless_the_last_just_failed() -> None:
    selector = PathSelector()
    selector.record_probe_success(0.0)
    selector.goodput[BulkPath.DIRECT].call_started(0.0)
    selector.reset_direct()
    assert selector.should_probe(0.0) and selector.best_path is BulkPath.LIBP2P
    selector.record_failure(0.0)
    selector.reset_direct()
    assert not selector.should_probe(MIN_RETRY_DELAY_SECONDS - 1) and selector.should_probe(MIN_RETRY_DELAY_SECONDS)
    selector.goodput[BulkPath.DIRECT].call_ended(1.0)
    assert selector.goodput[BulkPath.DIRECT].calls == 0, "the running call is still counted"


@pytest.mark.parametrize(
    ("libp2p", "direct", "best"), [(1e6, 9e6, "direct"), (9e6, 5e6, "direct"), (9e6, 4e6, "libp2p")]
)
def test_direct_path_is_used_unless_libp2p_is_twice_as_fast(libp2p: float, direct: float, best: str) -> None:
    selector = PathSelector()
    now = transfer(selector, BulkPath.LIBP2P, libp2p, 0.0)
    selector.record_probe_success(now)
    assert selector.best_path is BulkPath.DIRECT, "an unmeasured direct path is tried"
    transfer(selector, BulkPath.DIRECT, direct, now)
    assert selector.best_path == best


def test_other_path_is_tried_and_used_once_it_is_faster() -> None:
    selector = PathSelector()
    selector.record_probe_success(0.0)
    rates, taken, now = {BulkPath.DIRECT: 1e6, BulkPath.LIBP2P: 9e6}, [], 0.0
    while now < 8 * TRIAL_INTERVAL_SECONDS:
        path = selector.next_path(now)
        taken.append(path)
        rates = {BulkPath.DIRECT: 9e6, BulkPath.LIBP2P: 1e6} if now > 4 * TRIAL_INTERVAL_SECONDS else rates
        now = transfer(selector, path, rates[path], now)
    quarter = len(taken) // 8
    assert set(taken[: quarter - 2]) == {BulkPath.DIRECT}, "no trial before the interval is over"
    middle, last = taken[2 * quarter : 4 * quarter], taken[-quarter:]
    assert middle.count(BulkPath.DIRECT) <= 3, "a trial showed that the other path is better"
    assert last.count(BulkPath.LIBP2P) <= 2, "a later trial showed that it no longer is"


def test_goodput_counts_only_time_with_running_calls() -> None:
    goodput = Goodput()
    for start in (0.0, 100.0):
        goodput.call_started(start)
        goodput.call_started(start)
        goodput.record_bytes(1 << 20)
        goodput.call_ended(start + 0.5)
        goodput.record_bytes(1 << 20)
        goodput.call_ended(start + 1.0)
        assert goodput.rate == pytest.approx(2 << 20), "two parallel calls, and the pause does not count"


def test_few_bytes_give_no_measurement() -> None:
    goodput = Goodput()
    for moment in range(5):
        goodput.call_started(moment)
        goodput.record_bytes(100)
        goodput.call_ended(moment + 0.01)
    assert goodput.rate is None
