"""Which path is taken, for what has been measured."""

import pytest

from protocol.transport.multipath_policy import (
    MAX_RETRY_DELAY_SECONDS,
    MIN_RETRY_DELAY_SECONDS,
    TRIAL_INTERVAL_SECONDS,
    BulkPath,
    Goodput,
    PathSelector,
)


def transfer(choice: PathSelector, path: BulkPath, rate: float, now: float, seconds: float = 1.0) -> float:
    """One call that gets `rate` bytes a second; the time at its end."""
    choice.goodput[path].call_started(now)
    choice.goodput[path].record_bytes(int(rate * seconds))
    choice.goodput[path].call_ended(now + seconds)
    return now + seconds


def test_nothing_is_direct_before_it_is_proved() -> None:
    choice = PathSelector()
    assert choice.should_probe(0.0) and [choice.next_path(0.0), choice.best_path] == [BulkPath.LIBP2P] * 2
    choice.record_probe_success(1.0)
    assert not choice.should_probe(1.0) and [choice.next_path(1.0), choice.best_path] == [BulkPath.DIRECT] * 2


def test_a_failure_is_felt_at_once_and_longer_each_time() -> None:
    choice, now, waits = PathSelector(), 0.0, []
    for _ in range(10):
        choice.record_probe_success(now)
        choice.record_failure(now)
        assert choice.next_path(now) is BulkPath.LIBP2P
        began = now
        while not choice.should_probe(now):
            now += 1.0
        waits.append(now - began)
    assert (
        waits[:3] == [MIN_RETRY_DELAY_SECONDS, 2 * MIN_RETRY_DELAY_SECONDS, 4 * MIN_RETRY_DELAY_SECONDS]
        and waits[-1] == MAX_RETRY_DELAY_SECONDS
    )
    choice.record_probe_success(now)
    choice.record_delivery()
    choice.record_failure(now)
    assert choice.should_probe(now + MIN_RETRY_DELAY_SECONDS), "one success and the account is clear"


def test_who_moves_is_tried_at_once_unless_it_just_failed() -> None:
    choice = PathSelector()
    choice.record_probe_success(0.0)
    choice.goodput[BulkPath.DIRECT].call_started(0.0)
    choice.reset_direct()
    assert choice.should_probe(0.0) and choice.best_path is BulkPath.LIBP2P
    choice.record_failure(0.0)
    choice.reset_direct()
    assert not choice.should_probe(MIN_RETRY_DELAY_SECONDS - 1) and choice.should_probe(MIN_RETRY_DELAY_SECONDS)
    choice.goodput[BulkPath.DIRECT].call_ended(1.0)
    assert choice.goodput[BulkPath.DIRECT].calls == 0, "what was under way is still counted"


@pytest.mark.parametrize(
    ("usual", "direct", "best"), [(1e6, 9e6, "direct"), (9e6, 5e6, "direct"), (9e6, 4e6, "libp2p")]
)
def test_the_direct_path_is_taken_unless_the_other_carries_twice_as_much(
    usual: float, direct: float, best: str
) -> None:
    choice = PathSelector()
    now = transfer(choice, BulkPath.LIBP2P, usual, 0.0)
    choice.record_probe_success(now)
    assert choice.best_path is BulkPath.DIRECT, "not measured yet, it is tried"
    transfer(choice, BulkPath.DIRECT, direct, now)
    assert choice.best_path == best


def test_the_other_path_is_tried_now_and_then_and_wins_when_it_has_become_better() -> None:
    choice = PathSelector()
    choice.record_probe_success(0.0)
    rates, taken, now = {BulkPath.DIRECT: 1e6, BulkPath.LIBP2P: 9e6}, [], 0.0
    while now < 8 * TRIAL_INTERVAL_SECONDS:
        path = choice.next_path(now)
        taken.append(path)
        rates = {BulkPath.DIRECT: 9e6, BulkPath.LIBP2P: 1e6} if now > 4 * TRIAL_INTERVAL_SECONDS else rates
        now = transfer(choice, path, rates[path], now)
    quarter = len(taken) // 8
    assert set(taken[: quarter - 2]) == {BulkPath.DIRECT}, "no trial before its time"
    middle, last = taken[2 * quarter : 4 * quarter], taken[-quarter:]
    assert middle.count(BulkPath.DIRECT) <= 3, "a trial showed that the other is better"
    assert last.count(BulkPath.LIBP2P) <= 2, "and a later one that it no longer is"


def test_goodput_is_of_the_time_in_which_something_runs() -> None:
    goodput = Goodput()
    for start in (0.0, 100.0):
        goodput.call_started(start)
        goodput.call_started(start)
        goodput.record_bytes(1 << 20)
        goodput.call_ended(start + 0.5)
        goodput.record_bytes(1 << 20)
        goodput.call_ended(start + 1.0)
        assert goodput.rate == pytest.approx(2 << 20), "two calls at once, and no pause counted"


def test_a_few_bytes_measure_nothing() -> None:
    goodput = Goodput()
    for moment in range(5):
        goodput.call_started(moment)
        goodput.record_bytes(100)
        goodput.call_ended(moment + 0.01)
    assert goodput.rate is None
