"""The number of connections over simulated links, where the rate of a connection follows from the link alone."""

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
Rate = Callable[[int, float], float]  # bytes a second of a number of connections at a time


def lossy(one: float, link: float) -> Rate:
    """Return a link on which losses limit each connection, and the capacity limits all of them."""
    return lambda count, now: min(count * one, link)


def simulate_controller(
    rate: Rate, seconds: float, seed: int = 0, noise: float = 0.1, lost: int = 0, queued: bool = False
) -> list[int]:
    """Return the connection count at each tick; `lost` is the number of packets per tick that indicate losses."""
    rng, controller, received, counts = random.Random(seed), ConnectionCountController(), 0.0, []
    for tick in range(int(seconds / TICK)):
        now = tick * TICK
        received += rate(controller.connections, now) * rng.uniform(1 - noise, 1 + noise) * TICK
        controller.observe(
            now, controller.connections, TransferTotals(int(received), int(received), lost * tick, queued)
        )
        counts.append(controller.connections)
    return counts


@pytest.mark.parametrize("seed", range(20))
def test_clean_link_uses_one_connection(seed: int) -> None:
    counts = simulate_controller(lossy(12.5e6, 12.5e6), 300.0, seed)
    assert max(counts) <= 4, "at most a trial with four"
    assert counts.count(1) > 0.9 * len(counts), f"seed {seed}"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.1, 0.25])
def test_lossy_link_soon_gets_many_connections(seed: int, noise: float) -> None:
    def by_chance(count: int, now: float) -> float:
        rng = random.Random(seed * 100_003 + int(now))  # constant within a second
        return min(0.42e6 * count * rng.uniform(1 - noise, 1 + noise), 12.5e6)

    counts = simulate_controller(by_chance, 300.0, seed)
    assert counts.index(MAX_CONNECTIONS) * TICK < 10.0, f"seed {seed}"
    assert counts.count(MAX_CONNECTIONS) > 0.8 * len(counts)


@pytest.mark.parametrize("seed", range(20))
def test_count_stops_growing_without_a_gain(seed: int) -> None:
    counts = simulate_controller(lossy(3e6, 12.5e6), 300.0, seed)
    settled = counts[200:]
    assert 4 <= sum(settled) / len(settled) <= 9, f"seed {seed}"
    assert max(settled) <= MAX_CONNECTIONS


@pytest.mark.parametrize("seed", range(10))
def test_count_follows_a_changing_link(seed: int) -> None:
    clean, bad = lossy(12.5e6, 12.5e6), lossy(0.9e6, 12.5e6)
    counts = simulate_controller(lambda count, now: (clean if 300 <= now < 1500 else bad)(count, now), 2100.0, seed)
    at = [counts[int(moment / TICK)] for moment in (290, 1490, 2090)]
    assert at[0] >= 8 and at[1] <= 2 and at[2] >= 8, f"seed {seed}: {at}"


def test_bandwidth_taken_from_our_other_peers_is_not_a_gain() -> None:
    """Two transfers share one full link: the one with more connections takes from the other, and nothing is gained."""

    def widths_for(counts_others: bool) -> list[int]:
        controllers, got = [ConnectionCountController(), ConnectionCountController()], [0.0, 0.0]
        for tick in range(3000):
            loads = [one.connections * (tick >= start) for one, start in zip(controllers, (0, 37), strict=True)]
            for index, load in enumerate(loads):
                got[index] += 12.5e6 * load / sum(loads) * TICK
            for index, one in enumerate(controllers):
                total = sum(got) if counts_others else got[index]
                one.observe(tick * TICK, loads[index], TransferTotals(int(got[index]), int(total)))
        return [one.connections for one in controllers]

    assert max(widths_for(counts_others=True)) <= 2
    assert min(widths_for(counts_others=False)) >= 4, "the control: each opens more to outdo the other"


@pytest.mark.parametrize("seed", range(20))
def test_observed_losses_open_all_connections_at_once(seed: int) -> None:
    def by_chance(count: int, now: float) -> float:
        return min(0.6e6 * count * random.Random(seed * 100_003 + int(now)).uniform(0.6, 1.4), 12.5e6)

    soon, blind = (
        simulate_controller(by_chance, 60.0, seed, lost=lost).index(MAX_CONNECTIONS) * TICK
        for lost in (LOSSY_PACKETS, 0)
    )
    assert soon < 1.0 and blind > 2 * soon, f"seed {seed}: without loss observation it takes {blind:.1f} s"


def test_bandwidth_taken_from_other_receivers_is_not_a_gain() -> None:
    """Three receivers at one full link: with more connections one of them gets at most three times as much."""
    counts = simulate_controller(lambda count, now: 12.5e6 * count / (count + 2), 300.0, lost=LOSSY_PACKETS)
    assert counts.count(1) > 0.85 * len(counts)


def test_losses_of_a_full_link_open_no_connections() -> None:
    counts = simulate_controller(lossy(12.5e6, 12.5e6), 300.0, lost=LOSSY_PACKETS)
    assert counts.count(1) > 0.85 * len(counts), "trials are given up because they carry no more"


def test_queued_packets_stop_trials_with_more_connections() -> None:
    """They are not tried even if they would get more, as they do at the expense of others."""
    assert set(simulate_controller(lossy(0.9e6, 12.5e6), 100.0, lost=LOSSY_PACKETS, queued=True)) == {1}
    assert max(simulate_controller(lossy(0.9e6, 12.5e6), 100.0, lost=LOSSY_PACKETS)) == MAX_CONNECTIONS, "the control"


def test_bytes_of_draining_connections_are_not_counted() -> None:
    """Draining connections carry their calls for seconds, so fewer would seem to carry as much."""

    def counts(counts_old: bool) -> list[int]:
        controller, received, old, found = ConnectionCountController(), 0.0, deque([MAX_CONNECTIONS] * 40), []
        controller.connections = MAX_CONNECTIONS
        for tick in range(1200):
            received += 0.35e6 * max(old) * TICK  # each call continues for 4 s
            controller.observe(
                tick * TICK,
                max(old) if counts_old else controller.connections,
                TransferTotals(int(received), int(received)),
            )
            old.append(controller.connections)
            old.popleft()
            found.append(controller.connections)
        return found

    assert min(counts(counts_old=True)) == MAX_CONNECTIONS // 2, "a trial with fewer is given up"
    assert min(counts(counts_old=False)) < MAX_CONNECTIONS // 2, "the control"


def test_without_work_the_count_stays() -> None:
    controller = ConnectionCountController()
    for tick in range(1000):
        controller.observe(tick * TICK, tick % 2, TransferTotals(tick, tick))
    assert controller.connections == 1
    many = ConnectionCountController()
    many.connections = 8
    for tick in range(1000):
        many.observe(tick * TICK, 3, TransferTotals(0, 0))
    assert many.connections == 8
