"""The virtual clock, the links and the gossip."""

import random
from functools import partial

import pytest

from node.loop.peers.catch_up import best_head
from node.simulation.virtual.gossip import VirtualGossip
from node.simulation.virtual.network import LinkDirection, VirtualClock, VirtualNetwork
from protocol.consensus.chain import ChainHead


def test_actions_run_in_order_of_time_then_of_scheduling() -> None:
    clock, seen = VirtualClock(), list[tuple[float, str]]()

    def note(word: str) -> None:
        seen.append((clock.now, word))

    clock.schedule(2.0, lambda: note("late"))
    clock.schedule(1.0, lambda: note("first"))
    clock.schedule(1.0, lambda: note("second"))
    clock.schedule(0.5, lambda: clock.schedule(0.5, lambda: note("third")))
    assert not clock.run(lambda: False)
    assert seen == [(1.0, "first"), (1.0, "second"), (1.0, "third"), (2.0, "late")]


def test_clock_stops_when_finished() -> None:
    clock = VirtualClock()
    clock.schedule(1.0, lambda: None)
    clock.schedule(2.0, lambda: None)
    assert clock.run(lambda: clock.now >= 1.0)
    assert clock.now == 1.0


def arrivals(bandwidths: tuple[float, ...], *transfers: tuple[int, int, int]) -> tuple[list[float], VirtualNetwork]:
    clock, times = VirtualClock(), list[float]()
    links = VirtualNetwork(clock, bandwidths, latency=0.1)
    for source, receiver, size in transfers:
        links.send_blob(source, receiver, size, lambda: times.append(clock.now))
    clock.run(lambda: False)
    return times, links


def test_blob_takes_the_narrower_link_and_the_latency() -> None:
    for bandwidths in ((100.0, 50.0), (50.0, 100.0)):
        times, links = arrivals(bandwidths, (0, 1, 100))
        assert times == [pytest.approx(2.1)]
    assert links.blob_bytes == [100, 0]


def test_uplink_is_shared_equally_by_its_transfers() -> None:
    times, links = arrivals((100.0,) * 4, (0, 1, 100), (0, 2, 100), (0, 3, 50))
    assert times == pytest.approx([1.6, 2.6, 2.6])
    assert links.backlog_seconds(0) == pytest.approx(0.0)


def test_downlink_is_shared_equally_by_its_transfers() -> None:
    times, _ = arrivals((100.0,) * 3, (0, 2, 100), (1, 2, 50))
    assert times == pytest.approx([1.1, 1.6])
    independent, _ = arrivals((100.0,) * 4, (0, 2, 100), (1, 3, 100))
    assert independent == pytest.approx([1.1, 1.1])


def test_sender_with_a_thin_link_delays_only_its_own_blobs() -> None:
    """One after the other, they would arrive after 10.1, 11.1 and 12.1 s."""
    times, _ = arrivals((10.0, 100.0, 100.0, 100.0), (0, 3, 100), (1, 3, 100), (2, 3, 100))
    assert times == pytest.approx([3.1, 3.1, 10.1])


def test_later_transfer_shares_the_link_from_its_start() -> None:
    clock, times = VirtualClock(), dict[str, float]()
    links = VirtualNetwork(clock, (100.0,) * 3, latency=0.0)

    def send(word: str, receiver: int, size: int) -> None:
        links.send_blob(0, receiver, size, lambda: times.update({word: clock.now}))

    send("long", 1, 300)
    clock.schedule(1.0, lambda: send("short", 2, 50))
    clock.schedule(1.5, lambda: times.update(backlog=links.backlog_seconds(0)))
    clock.run(lambda: False)
    assert times == pytest.approx({"short": 2.0, "backlog": 2.0, "long": 3.5})


@pytest.mark.parametrize("seed", range(5))
def test_link_sharing_equals_an_integration_in_small_steps(seed: int) -> None:
    """One link direction gives the same times as an integration without heaps, with late starts and rounding."""
    chance = random.Random(seed)
    begun = sorted(1e4 + 3 * chance.random() for _ in range(20))
    sizes = [chance.randrange(1, 1_000_000) for _ in begun]
    clock, found = VirtualClock(), dict[int, float]()
    end = LinkDirection(clock, 1e7)
    for number, (time, size) in enumerate(zip(begun, sizes, strict=True)):
        clock.schedule(
            time, partial(end.start_transfer, size, partial(lambda done: found.update({done: clock.now}), number))
        )
    clock.run(lambda: False)
    left, step, now, expected = dict(enumerate(map(float, sizes))), 1e-4, begun[0], dict[int, float]()
    while left:
        active = [number for number in left if begun[number] <= now]
        now += step
        for number in active:
            left[number] -= 1e7 * step / len(active)
        for number in [number for number in active if left[number] <= 0]:
            del left[number]
            expected[number] = now
    assert found == pytest.approx(expected, abs=5e-3)


def test_messages_do_not_wait_for_blobs_and_are_counted() -> None:
    clock, heard = VirtualClock(), list[tuple[float, int]]()
    links = VirtualNetwork(clock, (100.0, 100.0, 10.0), latency=0.1)
    links.send_blob(0, 1, 10_000, lambda: None)
    links.send_message(0, [1, 2], 10, lambda slot: heard.append((clock.now, slot)))
    clock.run(lambda: clock.now > 50)
    assert [slot for _, slot in heard] == [1, 2]
    assert [time for time, _ in heard] == pytest.approx([0.2, 1.1])
    assert links.message_bytes == [20, 0, 0]


def head(number: int, tokens: int) -> ChainHead:
    return ChainHead(number, bytes([number]) * 32, tokens)


def test_heads_arrive_after_a_delay_and_dead_peers_expire() -> None:
    clock, told = VirtualClock(), list[float]()
    directory = VirtualGossip(clock, 0.05, 4, 6.0, lambda: told.append(clock.now))
    directory.start_with({"a": head(0, 0), "b": head(0, 0)})
    directory.publish("a", head(1, 100))
    directory.publish("b", head(1, 100))
    directory.remove("b")
    digests = frozenset([head(1, 100).digest])
    assert directory.snapshot.trainers_at(digests) == frozenset()
    clock.run(lambda: len(told) == 1)
    assert directory.snapshot.trainers_at(digests) == {"a", "b"}
    assert best_head(directory.snapshot.peers_by_head)[0] == head(1, 100)
    clock.run(lambda: len(told) == 2)
    assert directory.snapshot.peers.keys() == {"a"}
    assert clock.now == 6.0
