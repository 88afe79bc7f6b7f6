import math
import random
import statistics

import pytest

from protocol.membership.clock import (
    HOLD_SECONDS,
    MAX_OFFSET_SECONDS,
    MAX_VOTES,
    VOTE_LIFETIME_SECONDS,
    SwarmClock,
)

NOW = 1_800_000_000.0


class ManualClock:
    """A local clock that moves only when it is set."""

    def __init__(self, time: float = NOW) -> None:
        self.time = time

    def __call__(self) -> float:
        return self.time


def observe_all(clock: SwarmClock, local_clock: ManualClock, offsets: list[float], round_trip: float = 0.2) -> None:
    for index, offset in enumerate(offsets):
        sent = local_clock.time
        clock.observe(f"peer {index}", sent + round_trip / 2 + offset, sent, sent + round_trip)


def test_swarm_time_without_peers_is_the_local_clock() -> None:
    local_clock = ManualClock()
    assert SwarmClock(local_clock).now() == local_clock.time


def test_wrong_clock_follows_the_others() -> None:
    local_clock = ManualClock()
    clock = SwarmClock(local_clock)
    observe_all(clock, local_clock, [3600.0, 3600.1, 3599.9])
    assert clock.now() - local_clock.time == pytest.approx(3600, abs=0.2)


def test_two_peers_meet_in_the_middle() -> None:
    """Neither can know which clock is right, but they need one common time."""
    here, there = ManualClock(NOW), ManualClock(NOW + 90)
    one, other = SwarmClock(here), SwarmClock(there)
    one.observe("other", there(), here(), here())
    other.observe("one", here(), there(), there())
    assert one.now() == other.now() == NOW + 45


@pytest.mark.parametrize("seed", range(20))
def test_minority_of_liars_does_not_move_the_clock(seed: int) -> None:
    rng = random.Random(seed)
    honest = [rng.uniform(-0.5, 0.5) for _ in range(10)]
    lies = [rng.choice((-1, 1)) * 10 ** rng.uniform(1, 8) for _ in range(10)]
    offsets = honest + lies
    rng.shuffle(offsets)
    local_clock = ManualClock()
    clock = SwarmClock(local_clock)
    observe_all(clock, local_clock, offsets)
    assert abs(clock.offset) <= 0.5, f"seed {seed}"
    assert abs(statistics.fmean([0.0, *offsets])) > 0.5  # control: the mean is moved


def test_each_peer_has_one_vote() -> None:
    local_clock = ManualClock()
    clock = SwarmClock(local_clock)
    observe_all(clock, local_clock, [0.0, 0.1, -0.1])
    for _ in range(100):
        clock.observe("liar", local_clock.time + 5000, local_clock.time, local_clock.time)
    assert abs(clock.offset) <= 0.1
    assert statistics.median([0.0, 0.1, -0.1, *[5000.0] * 100]) == 5000  # control: a vote a call


@pytest.mark.parametrize("theirs", [math.nan, math.inf, -math.inf, 1e300, -1e300, 0.0, 1e9])
def test_implausible_clock_is_ignored(theirs: float) -> None:
    clock = SwarmClock(ManualClock())
    clock.observe("peer", theirs, clock.local(), clock.local())
    assert clock.offset == 0


@pytest.mark.parametrize("round_trip", [-1.0, 11.0])
def test_vote_with_an_invalid_round_trip_is_ignored(round_trip: float) -> None:
    clock = SwarmClock(ManualClock())
    clock.observe("peer", clock.local() + 50, clock.local(), clock.local() + round_trip)
    assert clock.offset == 0


def test_votes_are_bounded_and_the_oldest_dropped() -> None:
    local_clock = ManualClock()
    clock = SwarmClock(local_clock)
    observe_all(clock, local_clock, [1000.0] * 200)
    for index in range(MAX_VOTES):
        clock.observe(f"new {index}", local_clock.time + 5, local_clock.time, local_clock.time)
    assert clock.offset == 5


def test_votes_before_a_step_of_our_clock_are_dropped() -> None:
    local_clock = ManualClock()
    clock = SwarmClock(local_clock)
    observe_all(clock, local_clock, [0.0] * 9)
    for step in (VOTE_LIFETIME_SECONDS + 3600, -7200.0):  # the machine slept; then its clock was set back
        local_clock.time += step
        clock.observe("peer", local_clock.time - step, local_clock.time, local_clock.time)
        assert clock.offset == pytest.approx(-step / 2)


def test_callers_clocks_count_only_while_there_are_few_votes() -> None:
    local_clock = ManualClock()
    clock = SwarmClock(local_clock)
    clock.observe_caller("caller", local_clock.time + 100)
    assert clock.offset == 50
    observe_all(clock, local_clock, [0.0, 0.0, 0.0])
    for index in range(50):
        clock.observe_caller(f"liar {index}", local_clock.time + 100)
    assert clock.offset == 0


def test_clock_in_1970_has_no_vote() -> None:
    local_clock = ManualClock(5.0)
    clock = SwarmClock(local_clock)
    clock.observe("peer", NOW, local_clock.time, local_clock.time)
    assert clock.now() == NOW
    other = SwarmClock(ManualClock())
    other.observe_caller("the one in 1970", local_clock.time)
    assert other.now() == NOW


@pytest.mark.parametrize("defended", [True, False])
def test_clocks_of_keys_without_a_vote_move_nobody(defended: bool) -> None:
    """Five observers that told each victim another time split a swarm of three within ten seconds."""
    local_clock, voters = ManualClock(), frozenset(["peer 0", "peer 1"])
    clock = SwarmClock(local_clock)
    if defended:
        clock.count_only(voters, frozenset())
    observe_all(clock, local_clock, [0.1, -0.1, *[3600.0] * 5])
    assert clock.offset == (0.0 if defended else MAX_OFFSET_SECONDS)


def test_votes_of_others_are_dropped_once_there_are_voters() -> None:
    local_clock = ManualClock()
    clock = SwarmClock(local_clock)
    clock.count_only(frozenset(), frozenset(["peer 0", "peer 1"]))
    observe_all(clock, local_clock, [10.0, 10.0, 0.0])
    assert clock.offset == 10.0
    clock.count_only(frozenset(["peer 2"]), frozenset())
    assert clock.offset == 0.0
    observe_all(clock, local_clock, [10.0, 10.0, 4.0])
    assert clock.offset == 2.0


@pytest.mark.parametrize("agrees", [True, False])
def test_no_majority_of_voters_moves_a_clock_far_while_another_peer_agrees_with_it(agrees: bool) -> None:
    local_clock = ManualClock()
    clock = SwarmClock(local_clock)
    clock.count_only(frozenset(f"peer {number}" for number in range(7)), frozenset())
    observe_all(clock, local_clock, [-3600.0] * 6 + [1.0 if agrees else -3600.0])
    assert clock.offset == (-60.0 if agrees else -3600.0)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("contact", ["peer 0", "host"])
def test_first_commit_does_not_move_a_clock_that_is_an_hour_ahead(contact: str, waits: bool) -> None:
    """Half of the way to the first of two voters, or back to its own time, all its records and peers would expire."""
    local_clock = ManualClock()
    clock = SwarmClock(local_clock)
    clock.count_only(frozenset(), frozenset([contact]))
    clock.observe(contact, local_clock.time - 3600, local_clock.time, local_clock.time, counts_us=False)
    clock.count_only(frozenset(["peer 0", "peer 1", "this one"]), frozenset([contact]))
    local_clock.time += 0 if waits else HOLD_SECONDS
    observe_all(clock, local_clock, [-3600.0])
    assert clock.offset == (-3600.0 if waits else -1800.0)
    observe_all(clock, local_clock, [-3600.0] * 2)
    assert clock.offset == -3600.0


@pytest.mark.parametrize("waits", [True, False])
def test_a_clock_that_is_an_hour_ahead_moves_no_other_although_it_is_read_first(waits: bool) -> None:
    local_clock = ManualClock()
    clock = SwarmClock(local_clock)
    clock.count_only(frozenset(["peer 0", "peer 1", "this one"]), frozenset())
    local_clock.time += 0 if waits else HOLD_SECONDS
    observe_all(clock, local_clock, [3600.0])
    assert clock.offset == (0.0 if waits else 1800.0)
    observe_all(clock, local_clock, [3600.0, 0.0])
    assert clock.offset == 0.0


@pytest.mark.parametrize("difference", [8.0, 20.0, -20.0, 900.0, -7200.0])
def test_node_that_nobody_counts_follows_all_the_way(difference: float) -> None:
    """Control: half of the way, as for two that count each other, would leave it out of the run."""
    local_clock = ManualClock()
    clock = SwarmClock(local_clock)
    clock.count_only(frozenset(), frozenset(["contact"]))
    clock.observe("contact", NOW + difference, NOW, NOW, counts_us=False)
    assert clock.offset == difference
    clock.observe_caller("contact", NOW + difference)
    assert clock.offset == difference, "a call does not tell that we are counted"
    clock.observe("contact", NOW + difference, NOW, NOW, counts_us=True)
    assert clock.offset == difference / 2


def test_node_without_a_vote_has_the_time_of_the_only_voter_that_is_left() -> None:
    here, there = ManualClock(NOW), ManualClock(NOW + 40)
    newcomer, voter = SwarmClock(here), SwarmClock(there)
    for clock in (newcomer, voter):
        clock.count_only(frozenset(["voter", "gone"]), frozenset())
    voter.observe_caller("newcomer", here())
    newcomer.observe("voter", there(), here(), here(), counts_us=voter.counts("newcomer"))
    assert newcomer.now() == voter.now() == NOW + 40


def test_implausible_clock_follows_the_voters_without_a_bound() -> None:
    local_clock = ManualClock(5.0)
    clock = SwarmClock(local_clock)
    clock.count_only(frozenset(["peer 0"]), frozenset())
    observe_all(clock, local_clock, [NOW - 5.0])
    assert clock.now() == NOW
