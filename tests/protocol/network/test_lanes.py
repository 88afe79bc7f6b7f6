"""The number of lanes over simulated links: what a connection carries there follows from the link alone."""

import random
from collections.abc import Callable

import pytest

from protocol.network.lanes import MOST, Bytes, Lanes

TICK = 0.1
Rate = Callable[[int, float], float]  # bytes a second of so many connections, at a time


def lossy(one: float, link: float) -> Rate:
    """Each connection is held down by losses, all of them by the link."""
    return lambda width, now: min(width * one, link)


def climbed(rate: Rate, seconds: float, seed: int = 0, lanes: Lanes | None = None, noise: float = 0.1) -> list[int]:
    """The width at each tick."""
    chance, lanes, received, widths = random.Random(seed), lanes or Lanes(), 0.0, []
    for tick in range(int(seconds / TICK)):
        now = tick * TICK
        received += rate(lanes.width, now) * chance.uniform(1 - noise, 1 + noise) * TICK
        lanes.observe(now, 2 * lanes.width, Bytes(int(received), int(received)))
        widths.append(lanes.width)
    return widths


@pytest.mark.parametrize("seed", range(20))
def test_a_clean_link_needs_one(seed: int) -> None:
    widths = climbed(lossy(12.5e6, 12.5e6), 300.0, seed)
    assert max(widths) <= 4, "a look at four, no more"
    assert widths.count(1) > 0.9 * len(widths), f"seed {seed}"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.1, 0.4])
def test_losses_need_many_and_get_them_soon(seed: int, noise: float) -> None:
    def by_chance(width: int, now: float) -> float:
        chance = random.Random(seed * 100_003 + int(now))  # of this second
        return min(0.9e6 * width * chance.uniform(1 - noise, 1 + noise), 12.5e6)

    widths = climbed(by_chance, 300.0, seed)
    assert widths.index(MOST) * TICK < 10.0, f"seed {seed}"
    assert widths.count(MOST) > 0.8 * len(widths)


@pytest.mark.parametrize("seed", range(20))
def test_it_stops_where_more_is_no_gain(seed: int) -> None:
    widths = climbed(lossy(3e6, 12.5e6), 300.0, seed)
    settled = widths[200:]
    assert 4 <= sum(settled) / len(settled) <= 9, f"seed {seed}"
    assert max(settled) <= MOST


@pytest.mark.parametrize("seed", range(10))
def test_it_follows_a_link_that_changes(seed: int) -> None:
    clean, bad = lossy(12.5e6, 12.5e6), lossy(0.9e6, 12.5e6)
    widths = climbed(lambda width, now: (clean if 300 <= now < 1500 else bad)(width, now), 2100.0, seed)
    at = [widths[int(moment / TICK)] for moment in (290, 1490, 2090)]
    assert at[0] >= 8 and at[1] <= 2 and at[2] >= 8, f"seed {seed}: {at}"


def test_what_others_lose_is_no_gain() -> None:
    """Two transfers over one full link: who has more connections takes from the other, and nothing is won."""

    def widths_for(counts_others: bool) -> list[int]:
        lanes, got = [Lanes(), Lanes()], [0.0, 0.0]
        for tick in range(3000):
            shares = [one.width * (tick >= start) for one, start in zip(lanes, (0, 37), strict=True)]
            for index, share in enumerate(shares):
                got[index] += 12.5e6 * share / sum(shares) * TICK
            for index, one in enumerate(lanes):
                total = sum(got) if counts_others else got[index]
                one.observe(tick * TICK, 2 * shares[index], Bytes(int(got[index]), int(total)))
        return [one.width for one in lanes]

    assert max(widths_for(counts_others=True)) <= 2
    assert min(widths_for(counts_others=False)) >= 8, "the control: each climbs to outdo the other"


def test_without_work_nothing_is_concluded() -> None:
    lanes = Lanes()
    for tick in range(1000):
        lanes.observe(tick * TICK, tick % 2, Bytes(tick, tick))
    assert lanes.width == 1
    many = Lanes()
    many.width = 8
    for tick in range(1000):
        many.observe(tick * TICK, 3, Bytes(0, 0))
    assert many.width == 8
