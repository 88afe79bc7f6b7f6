import math
import random
import statistics

import pytest

from protocol.membership.clock import MAX_VOTES, VOTE_LIFETIME_SECONDS, SwarmClock

NOW = 1_800_000_000.0


class ManualClock:
    """A local clock that stands until it is moved."""

    def __init__(self, time: float = NOW) -> None:
        self.time = time

    def __call__(self) -> float:
        return self.time


def observe_all(clock: SwarmClock, watch: ManualClock, offsets: list[float], round_trip: float = 0.2) -> None:
    for number, offset in enumerate(offsets):
        sent = watch.time
        clock.observe(f"peer {number}", sent + round_trip / 2 + offset, sent, sent + round_trip)


def test_alone_it_is_the_local_clock() -> None:
    watch = ManualClock()
    assert SwarmClock(watch).now() == watch.time


def test_a_wrong_clock_follows_the_others() -> None:
    watch = ManualClock()
    clock = SwarmClock(watch)
    observe_all(clock, watch, [3600.0, 3600.1, 3599.9])
    assert clock.now() - watch.time == pytest.approx(3600, abs=0.2)


def test_two_peers_meet_in_the_middle() -> None:
    """Neither can know who is right; they need one time all the same."""
    here, there = ManualClock(NOW), ManualClock(NOW + 90)
    one, other = SwarmClock(here), SwarmClock(there)
    one.observe("other", there(), here(), here())
    other.observe("one", here(), there(), there())
    assert one.now() == other.now() == NOW + 45


@pytest.mark.parametrize("seed", range(20))
def test_a_minority_of_liars_moves_nothing(seed: int) -> None:
    rng = random.Random(seed)
    honest = [rng.uniform(-0.5, 0.5) for _ in range(10)]
    lies = [rng.choice((-1, 1)) * 10 ** rng.uniform(1, 8) for _ in range(10)]
    offsets = honest + lies
    rng.shuffle(offsets)
    watch = ManualClock()
    clock = SwarmClock(watch)
    observe_all(clock, watch, offsets)
    assert abs(clock.offset) <= 0.5, f"seed {seed}"
    assert abs(statistics.fmean([0.0, *offsets])) > 0.5  # control: the mean is moved


def test_a_peer_has_one_vote() -> None:
    watch = ManualClock()
    clock = SwarmClock(watch)
    observe_all(clock, watch, [0.0, 0.1, -0.1])
    for _ in range(100):
        clock.observe("liar", watch.time + 5000, watch.time, watch.time)
    assert abs(clock.offset) <= 0.1
    assert statistics.median([0.0, 0.1, -0.1, *[5000.0] * 100]) == 5000  # control: a vote a call


@pytest.mark.parametrize("theirs", [math.nan, math.inf, -math.inf, 1e300, -1e300, 0.0, 1e9])
def test_nonsense_is_not_counted(theirs: float) -> None:
    clock = SwarmClock(ManualClock())
    clock.observe("peer", theirs, clock.local(), clock.local())
    assert clock.offset == 0


@pytest.mark.parametrize("round_trip", [-1.0, 11.0])
def test_a_vote_that_took_too_long_is_not_counted(round_trip: float) -> None:
    clock = SwarmClock(ManualClock())
    clock.observe("peer", clock.local() + 50, clock.local(), clock.local() + round_trip)
    assert clock.offset == 0


def test_votes_are_bounded_and_the_oldest_go() -> None:
    watch = ManualClock()
    clock = SwarmClock(watch)
    observe_all(clock, watch, [1000.0] * 200)
    for number in range(MAX_VOTES):
        clock.observe(f"new {number}", watch.time + 5, watch.time, watch.time)
    assert clock.offset == 5


def test_a_step_of_our_own_clock_is_forgotten() -> None:
    watch = ManualClock()
    clock = SwarmClock(watch)
    observe_all(clock, watch, [0.0] * 9)
    for step in (VOTE_LIFETIME_SECONDS + 3600, -7200.0):  # the machine slept; then somebody set it back
        watch.time += step
        clock.observe("peer", watch.time - step, watch.time, watch.time)
        assert clock.offset == pytest.approx(-step / 2)


def test_callers_count_while_there_are_few_others() -> None:
    watch = ManualClock()
    clock = SwarmClock(watch)
    clock.observe_caller("caller", watch.time + 100)
    assert clock.offset == 50
    observe_all(clock, watch, [0.0, 0.0, 0.0])
    for number in range(50):
        clock.observe_caller(f"liar {number}", watch.time + 100)
    assert clock.offset == 0


def test_a_clock_that_stands_in_1970_has_no_vote_anywhere() -> None:
    watch = ManualClock(5.0)
    clock = SwarmClock(watch)
    clock.observe("peer", NOW, watch.time, watch.time)
    assert clock.now() == NOW
    other = SwarmClock(ManualClock())
    other.observe_caller("the one in 1970", watch.time)
    assert other.now() == NOW
