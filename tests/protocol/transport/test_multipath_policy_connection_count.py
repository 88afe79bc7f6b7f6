"""The number of lanes over simulated links: what a connection carries there follows from the link alone."""

import random
from collections import deque
from collections.abc import Callable

import pytest

from protocol.transport.multipath_policy import (
    LOSSY_PACKETS,
    MAX_CONNECTIONS,
    ConnectionCountController,
    TransferTotals,
)

TICK = 0.1
Rate = Callable[[int, float], float]  # bytes a second of so many connections, at a time


def lossy(one: float, link: float) -> Rate:
    """Each connection is held down by losses, all of them by the link."""
    return lambda width, now: min(width * one, link)


def simulate_controller(
    rate: Rate, seconds: float, seed: int = 0, noise: float = 0.1, lost: int = 0, queued: bool = False
) -> list[int]:
    """The width at each tick; `lost`: packets a tick that are seen to get lost on the way."""
    chance, lanes, received, widths = random.Random(seed), ConnectionCountController(), 0.0, []
    for tick in range(int(seconds / TICK)):
        now = tick * TICK
        received += rate(lanes.connections, now) * chance.uniform(1 - noise, 1 + noise) * TICK
        lanes.observe(now, lanes.connections, TransferTotals(int(received), int(received), lost * tick, queued))
        widths.append(lanes.connections)
    return widths


@pytest.mark.parametrize("seed", range(20))
def test_a_clean_link_needs_one(seed: int) -> None:
    widths = simulate_controller(lossy(12.5e6, 12.5e6), 300.0, seed)
    assert max(widths) <= 4, "a look at four, no more"
    assert widths.count(1) > 0.9 * len(widths), f"seed {seed}"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.1, 0.25])
def test_losses_need_many_and_get_them_soon(seed: int, noise: float) -> None:
    def by_chance(width: int, now: float) -> float:
        chance = random.Random(seed * 100_003 + int(now))  # of this second
        return min(0.42e6 * width * chance.uniform(1 - noise, 1 + noise), 12.5e6)

    widths = simulate_controller(by_chance, 300.0, seed)
    assert widths.index(MAX_CONNECTIONS) * TICK < 10.0, f"seed {seed}"
    assert widths.count(MAX_CONNECTIONS) > 0.8 * len(widths)


@pytest.mark.parametrize("seed", range(20))
def test_it_stops_where_more_is_no_gain(seed: int) -> None:
    widths = simulate_controller(lossy(3e6, 12.5e6), 300.0, seed)
    settled = widths[200:]
    assert 4 <= sum(settled) / len(settled) <= 9, f"seed {seed}"
    assert max(settled) <= MAX_CONNECTIONS


@pytest.mark.parametrize("seed", range(10))
def test_it_follows_a_link_that_changes(seed: int) -> None:
    clean, bad = lossy(12.5e6, 12.5e6), lossy(0.9e6, 12.5e6)
    widths = simulate_controller(lambda width, now: (clean if 300 <= now < 1500 else bad)(width, now), 2100.0, seed)
    at = [widths[int(moment / TICK)] for moment in (290, 1490, 2090)]
    assert at[0] >= 8 and at[1] <= 2 and at[2] >= 8, f"seed {seed}: {at}"


def test_what_others_lose_is_no_gain() -> None:
    """Two transfers over one full link: who has more connections takes from the other, and nothing is won."""

    def widths_for(counts_others: bool) -> list[int]:
        lanes, got = [ConnectionCountController(), ConnectionCountController()], [0.0, 0.0]
        for tick in range(3000):
            shares = [one.connections * (tick >= start) for one, start in zip(lanes, (0, 37), strict=True)]
            for index, share in enumerate(shares):
                got[index] += 12.5e6 * share / sum(shares) * TICK
            for index, one in enumerate(lanes):
                total = sum(got) if counts_others else got[index]
                one.observe(tick * TICK, shares[index], TransferTotals(int(got[index]), int(total)))
        return [one.connections for one in lanes]

    assert max(widths_for(counts_others=True)) <= 2
    assert min(widths_for(counts_others=False)) >= 4, "the control: each climbs to outdo the other"


@pytest.mark.parametrize("seed", range(20))
def test_where_losses_show_all_lanes_are_taken_at_once(seed: int) -> None:
    def by_chance(width: int, now: float) -> float:
        return min(0.6e6 * width * random.Random(seed * 100_003 + int(now)).uniform(0.6, 1.4), 12.5e6)

    soon, blind = (
        simulate_controller(by_chance, 60.0, seed, lost=lost).index(MAX_CONNECTIONS) * TICK
        for lost in (LOSSY_PACKETS, 0)
    )
    assert soon < 1.0 and blind > 2 * soon, f"seed {seed}: who does not look at losses takes {blind:.1f} s"


def test_what_is_taken_from_a_peers_other_takers_is_no_gain() -> None:
    """Three of us at one full link: who opens more gets at most three times as much."""
    widths = simulate_controller(lambda width, now: 12.5e6 * width / (width + 2), 300.0, lost=LOSSY_PACKETS)
    assert widths.count(1) > 0.85 * len(widths)


def test_losses_of_a_full_link_give_no_lanes() -> None:
    widths = simulate_controller(lossy(12.5e6, 12.5e6), 300.0, lost=LOSSY_PACKETS)
    assert widths.count(1) > 0.85 * len(widths), "tried now and then, given up as it carries no more"


def test_where_packets_queue_no_more_are_tried() -> None:
    """Even if they would get more, as they do from others' shares."""
    assert set(simulate_controller(lossy(0.9e6, 12.5e6), 100.0, lost=LOSSY_PACKETS, queued=True)) == {1}
    assert max(simulate_controller(lossy(0.9e6, 12.5e6), 100.0, lost=LOSSY_PACKETS)) == MAX_CONNECTIONS, "the control"


def test_what_lanes_that_were_given_up_still_carry_is_not_counted() -> None:
    """Calls run on for seconds on lanes that take no new ones: fewer would seem to carry as much."""

    def widths(counts_old: bool) -> list[int]:
        lanes, received, old, found = ConnectionCountController(), 0.0, deque([MAX_CONNECTIONS] * 40), []
        lanes.connections = MAX_CONNECTIONS
        for tick in range(1200):
            received += 0.35e6 * max(old) * TICK  # each runs on for 4 s
            lanes.observe(
                tick * TICK, max(old) if counts_old else lanes.connections, TransferTotals(int(received), int(received))
            )
            old.append(lanes.connections)
            old.popleft()
            found.append(lanes.connections)
        return found

    assert min(widths(counts_old=True)) == MAX_CONNECTIONS // 2, "it is tried, and given up"
    assert min(widths(counts_old=False)) < MAX_CONNECTIONS // 2, "the control"


def test_without_work_nothing_is_concluded() -> None:
    lanes = ConnectionCountController()
    for tick in range(1000):
        lanes.observe(tick * TICK, tick % 2, TransferTotals(tick, tick))
    assert lanes.connections == 1
    many = ConnectionCountController()
    many.connections = 8
    for tick in range(1000):
        many.observe(tick * TICK, 3, TransferTotals(0, 0))
    assert many.connections == 8
