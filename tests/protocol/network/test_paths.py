"""Which path is taken, for what has been measured."""

import pytest

from protocol.network.paths import FIRST_PAUSE, LONGEST_PAUSE, TRIAL_SECONDS, Choice, Goodput, Path


def transfer(choice: Choice, path: Path, rate: float, now: float, seconds: float = 1.0) -> float:
    """One call that gets `rate` bytes a second; the time at its end."""
    choice.goodput[path].began(now)
    choice.goodput[path].received(int(rate * seconds))
    choice.goodput[path].ended(now + seconds)
    return now + seconds


def test_nothing_is_direct_before_it_is_proved() -> None:
    choice = Choice()
    assert choice.wants_proof(0.0) and [choice.next(0.0), choice.best] == [Path.LIBP2P] * 2
    choice.proved(1.0)
    assert not choice.wants_proof(1.0) and [choice.next(1.0), choice.best] == [Path.DIRECT] * 2


def test_a_failure_is_felt_at_once_and_longer_each_time() -> None:
    choice, now, waits = Choice(), 0.0, []
    for _ in range(10):
        choice.proved(now)
        choice.failed(now)
        assert choice.next(now) is Path.LIBP2P
        began = now
        while not choice.wants_proof(now):
            now += 1.0
        waits.append(now - began)
    assert waits[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE] and waits[-1] == LONGEST_PAUSE
    choice.proved(now)
    choice.delivered()
    choice.failed(now)
    assert choice.wants_proof(now + FIRST_PAUSE), "one success and the account is clear"


def test_who_moves_is_tried_at_once_unless_it_just_failed() -> None:
    choice = Choice()
    choice.proved(0.0)
    choice.goodput[Path.DIRECT].began(0.0)
    choice.moved()
    assert choice.wants_proof(0.0) and choice.best is Path.LIBP2P
    choice.failed(0.0)
    choice.moved()
    assert not choice.wants_proof(FIRST_PAUSE - 1) and choice.wants_proof(FIRST_PAUSE)
    choice.goodput[Path.DIRECT].ended(1.0)
    assert choice.goodput[Path.DIRECT].calls == 0, "what was under way is still counted"


@pytest.mark.parametrize(
    ("usual", "direct", "best"), [(1e6, 9e6, "direct"), (9e6, 5e6, "direct"), (9e6, 4e6, "libp2p")]
)
def test_the_direct_path_is_taken_unless_the_other_carries_twice_as_much(
    usual: float, direct: float, best: str
) -> None:
    choice = Choice()
    now = transfer(choice, Path.LIBP2P, usual, 0.0)
    choice.proved(now)
    assert choice.best is Path.DIRECT, "not measured yet, it is tried"
    transfer(choice, Path.DIRECT, direct, now)
    assert choice.best == best


def test_the_other_path_is_tried_now_and_then_and_wins_when_it_has_become_better() -> None:
    choice = Choice()
    choice.proved(0.0)
    rates, taken, now = {Path.DIRECT: 1e6, Path.LIBP2P: 9e6}, [], 0.0
    while now < 8 * TRIAL_SECONDS:
        path = choice.next(now)
        taken.append(path)
        rates = {Path.DIRECT: 9e6, Path.LIBP2P: 1e6} if now > 4 * TRIAL_SECONDS else rates
        now = transfer(choice, path, rates[path], now)
    quarter = len(taken) // 8
    assert set(taken[: quarter - 2]) == {Path.DIRECT}, "no trial before its time"
    middle, last = taken[2 * quarter : 4 * quarter], taken[-quarter:]
    assert middle.count(Path.DIRECT) <= 3, "a trial showed that the other is better"
    assert last.count(Path.LIBP2P) <= 2, "and a later one that it no longer is"


def test_goodput_is_of_the_time_in_which_something_runs() -> None:
    goodput = Goodput()
    for start in (0.0, 100.0):
        goodput.began(start)
        goodput.began(start)
        goodput.received(1 << 20)
        goodput.ended(start + 0.5)
        goodput.received(1 << 20)
        goodput.ended(start + 1.0)
        assert goodput.rate == pytest.approx(2 << 20), "two calls at once, and no pause counted"


def test_a_few_bytes_measure_nothing() -> None:
    goodput = Goodput()
    for moment in range(5):
        goodput.began(moment)
        goodput.received(100)
        goodput.ended(moment + 0.01)
    assert goodput.rate is None
