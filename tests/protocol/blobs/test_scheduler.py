"""The scheduler against simulated sources of various speed and behaviour, under a virtual clock."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from protocol.blobs.blob import PIECE_BYTES
from protocol.blobs.scheduler import (
    SMALL_BYTES,
    DownloadPolicy,
    DownloadScheduler,
    InflowStats,
    PieceRequest,
    RequestFailure,
    SourceSet,
)

PIECE = 1 << 20
POLICY = DownloadPolicy()


@dataclass(frozen=True)
class SourceBehavior:
    """The behaviour of a simulated source; `speed` is of one call in bytes a second, and 0 means frozen."""

    speed: float = 10e6
    lies: bool = False
    fails: float = 0.0  # probability per step that a call fails in some way


@dataclass
class SimulatedSources:
    """Carries out the requests of a scheduler; `narrow` is the rate in bytes a second of all calls together."""

    behaviors: dict[str, SourceBehavior]
    seed: int
    narrow: float = float("inf")
    now: float = 0.0
    asked: Counter[int] = field(default_factory=Counter)
    delivered: Counter[str] = field(default_factory=Counter)
    most_calls: int = 0
    most_sources: int = 0
    running: dict[PieceRequest, float] = field(default_factory=dict)  # received bytes by request
    started: dict[PieceRequest, float] = field(default_factory=dict)
    last: dict[PieceRequest, float] = field(default_factory=dict)

    def run(self, lengths: dict[int, int], limit: float = 3600.0, step: float = 0.05) -> float:
        rng = random.Random(self.seed)
        self.sources = SourceSet(POLICY, random.Random(self.seed + 1))
        self.sources.update_present(self.behaviors)
        scheduler = DownloadScheduler(lengths, self.sources)
        while not scheduler.is_done:
            assert self.now < limit, f"not done after {limit} s, seed {self.seed}"
            while (request := scheduler.next_request(self.now)) is not None:
                assert request not in self.running, "a source was asked for one piece twice"
                self.asked[request.piece] += 1
                self.running[request], self.started[request], self.last[request] = 0.0, self.now, self.now
            self.most_calls = max(self.most_calls, len(self.running))
            self.most_sources = max(self.most_sources, len({request.peer for request in self.running}))
            self.now += step
            for request in list(self.running):
                if request in self.running:
                    self._advance(scheduler, request, lengths[request.piece], step, rng)
        return self.now

    def _advance(
        self, scheduler: DownloadScheduler, request: PieceRequest, length: int, step: float, rng: random.Random
    ) -> None:
        behavior = self.behaviors[request.peer]
        rate = min(behavior.speed * rng.uniform(0.5, 1.5), self.narrow / len(self.running))
        if rate > 0:
            size = min(rate * step, length - self.running[request])
            self.running[request] += size
            self.last[request] = self.now
            scheduler.record_received(request, int(size))
        if rng.random() < behavior.fails:
            self._fail(
                scheduler, request, rng.choice([RequestFailure.ABSENT, RequestFailure.BUSY, RequestFailure.LOST])
            )
        elif self.running[request] >= length:
            self._deliver(scheduler, request, behavior)
        elif self.now - self.last[request] > POLICY.stall_seconds or self.now - self.started[request] > request.seconds:
            self._fail(scheduler, request, RequestFailure.SLOW)

    def _deliver(self, scheduler: DownloadScheduler, request: PieceRequest, behavior: SourceBehavior) -> None:
        if behavior.lies:
            return self._fail(scheduler, request, RequestFailure.LIED)
        del self.running[request]
        self.delivered[request.peer] += 1
        for other in scheduler.record_success(request, self.now):
            del self.running[other]

    def _fail(self, scheduler: DownloadScheduler, request: PieceRequest, failure: RequestFailure) -> None:
        del self.running[request]
        scheduler.record_failure(request, failure, failure, self.now)


def pieces(count: int) -> dict[int, int]:
    return dict.fromkeys(range(count), PIECE)


@pytest.mark.parametrize("seed", range(20))
def test_without_faults_every_piece_is_requested_exactly_once(seed: int) -> None:
    rng = random.Random(seed)
    behaviors = {f"peer {n}": SourceBehavior(rng.uniform(1e6, 50e6)) for n in range(rng.randint(1, 9))}
    world = SimulatedSources(behaviors, seed)
    count = rng.randint(1, 60)
    world.run(pieces(count))
    assert world.asked == Counter(range(count)), f"seed {seed}"
    assert world.most_calls <= POLICY.sources * POLICY.pieces_per_source
    assert world.most_sources <= POLICY.sources


@pytest.mark.parametrize("seed", range(40))
def test_download_ends_under_random_faults_with_one_sound_source(seed: int) -> None:
    rng = random.Random(seed)
    behaviors = {
        f"peer {n}": SourceBehavior(rng.choice([0.0, 1e3, 1e5, 1e7]), rng.random() < 0.3, rng.choice([0.0, 0.1, 0.9]))
        for n in range(rng.randint(0, 12))
    }
    world = SimulatedSources(behaviors | {"sound": SourceBehavior(2e6, fails=0.02)}, seed)
    count = rng.randint(1, 20)
    world.run(pieces(count))
    assert world.asked.keys() == set(range(count))
    assert sum(world.delivered.values()) == count, f"seed {seed}"
    assert world.most_calls <= 2 * POLICY.sources * POLICY.pieces_per_source
    assert not any(behaviors[peer].lies for peer in world.delivered if peer != "sound")


def test_liar_stays_banned_even_after_an_absence() -> None:
    sources = SourceSet(POLICY, random.Random(1))
    sources.update_present(["liar"])
    scheduler = DownloadScheduler(pieces(3), sources)
    request = scheduler.next_request(0.0)
    assert request is not None
    scheduler.record_failure(request, RequestFailure.LIED, "a piece does not match its hash", 0.1)
    sources.update_present([])
    sources.update_present(["liar"])
    # The control: a source that was only busy is used again.
    assert scheduler.next_request(1e6) is None
    sources.update_present(["liar", "other"])
    request = scheduler.next_request(1e6)
    assert request is not None
    assert request.peer == "other"
    scheduler.record_failure(request, RequestFailure.BUSY, "", 1e6)
    again = scheduler.next_request(2e6)
    assert again is not None
    assert again.peer == "other"
    assert sources.last_failures() == {"liar": "a piece does not match its hash", "other": "is busy"}


def test_retry_delays_grow_until_a_success() -> None:
    sources = SourceSet(POLICY, random.Random(2))
    sources.update_present(["peer"])
    pauses, now = [], 0.0
    for _ in range(12):
        sources.record_failure("peer", RequestFailure.ABSENT, "", now)
        pauses.append(sources.by_peer["peer"].retry_at - now)
        assert sources.available_sources(now) == []
        now = sources.by_peer["peer"].retry_at
        assert sources.available_sources(now) == ["peer"]
    assert pauses[0] < 0.5
    assert pauses[3] > pauses[0]
    assert max(pauses) <= 1.5 * POLICY.max_retry_seconds
    sources.record_success("peer", 1e6)
    sources.record_failure("peer", RequestFailure.ABSENT, "", now)
    assert sources.by_peer["peer"].retry_at - now < 0.5


def test_frozen_sources_do_not_delay_the_download() -> None:
    behaviors = {f"frozen {n}": SourceBehavior(0.0) for n in range(8)} | {"sound": SourceBehavior(10e6)}
    world = SimulatedSources(behaviors, seed=3)
    seconds = world.run(pieces(20))
    # Waiting for each pair of frozen requests to time out would take longer than this.
    assert seconds < 2 * POLICY.stall_seconds
    assert world.delivered == Counter({"sound": 20})


def test_trickling_sources_do_not_delay_the_download() -> None:
    behaviors = {f"trickle {n}": SourceBehavior(100.0) for n in range(4)} | {"sound": SourceBehavior(10e6)}
    seconds = SimulatedSources(behaviors, seed=4).run(pieces(10))
    # The control: 100 bytes a second pass every check for silence, and one piece alone would take hours.
    assert seconds < 10


def test_nothing_is_requested_twice_over_a_narrow_link_of_our_own() -> None:
    behaviors = {f"peer {n}": SourceBehavior(10e6) for n in range(8)}
    world = SimulatedSources(behaviors, seed=5, narrow=125e3)
    seconds = world.run(pieces(12))
    assert world.asked == Counter(range(12))
    assert seconds < 1.1 * 12 * PIECE / 125e3


def test_fast_sources_are_found_and_used() -> None:
    behaviors = {f"slow {n}": SourceBehavior(0.3e6) for n in range(12)} | {
        f"fast {n}": SourceBehavior(20e6) for n in range(4)
    }
    world = SimulatedSources(behaviors, seed=6)
    seconds = world.run(pieces(200))
    fast = sum(count for peer, count in world.delivered.items() if peer.startswith("fast"))
    assert fast > 150
    # The control: keeping the first four of sixteen, mostly slow, would take several times as long.
    assert seconds < 200 * PIECE / (4 * 2 * 0.3e6) / 2


def test_moderately_slow_source_makes_room_for_a_faster_one() -> None:
    # Not slow enough to be late: only giving the next piece to the best few moves the work.
    behaviors = {f"slow {n}": SourceBehavior(1e6) for n in range(12)} | {
        f"fast {n}": SourceBehavior(3.5e6) for n in range(4)
    }
    world = SimulatedSources(behaviors, seed=3)
    world.run(pieces(200))
    assert sum(count for peer, count in world.delivered.items() if peer.startswith("fast")) > 150


def test_last_piece_is_requested_from_another_source_when_late() -> None:
    sources = SourceSet(POLICY, random.Random(7))
    sources.update_present(["one", "two"])
    scheduler = DownloadScheduler(pieces(1), sources)
    first = scheduler.next_request(0.0)
    assert first is not None
    assert scheduler.next_request(0.0) is None
    assert scheduler.next_request(POLICY.late_after_seconds - 0.01) is None
    second = scheduler.next_request(POLICY.late_after_seconds)
    assert second is not None
    assert {first.peer, second.peer} == {"one", "two"}
    assert scheduler.record_success(second, 1.5) == [first]
    assert scheduler.is_done
    assert not scheduler.is_running(first)
    scheduler.record_failure(first, RequestFailure.LOST, "slower than others", 1.6)
    assert scheduler.is_done, "a late failure does not request the piece again"
    assert sources.last_failures()[first.peer] == "slower than others"


def test_bytes_awaited_elsewhere_take_up_a_sources_slots() -> None:
    sources = SourceSet(POLICY, random.Random(8))
    sources.update_present(["one", "two"])
    scheduler = DownloadScheduler(pieces(8), sources)
    awaited_elsewhere = {"one": POLICY.pieces_per_source * PIECE_BYTES}
    calls = [request for _ in range(8) if (request := scheduler.next_request(0.0, awaited_elsewhere))]
    assert {request.peer for request in calls} == {"two"} and len(calls) == POLICY.pieces_per_source
    assert scheduler.awaited_bytes(0.0) == {"two": POLICY.pieces_per_source * PIECE}
    assert scheduler.awaited_bytes(1e9) == {}, "late requests do not count"
    other = scheduler.next_request(0.0)
    assert other is not None and other.peer == "one"


@pytest.mark.parametrize("is_shared", [True, False])
def test_request_behind_others_of_its_source_is_not_late(is_shared: bool) -> None:
    """It waits behind pieces of another download from the same source; the control does not see those arrive."""
    inflow = InflowStats()
    ahead, behind = (
        SourceSet(POLICY, random.Random(8), inflow=inflow if is_shared or n else InflowStats()) for n in range(2)
    )
    schedulers = [DownloadScheduler(pieces(2), ahead), DownloadScheduler(pieces(1), behind)]
    ahead.update_present(["one"])
    behind.update_present(["one", "two"])
    first = schedulers[0].next_request(0.0)
    last = schedulers[1].next_request(0.0, {"one": 0, "two": 2 * PIECE_BYTES})
    assert first is not None and last is not None and first.peer == last.peer == "one"
    schedulers[0].record_received(first, PIECE // 2)
    again = schedulers[1].next_request(POLICY.late_after_seconds)
    assert (again is None) == is_shared, "another source is asked for a piece that was about to arrive"


@pytest.mark.parametrize(("megabytes", "late_from"), [(0.0, 1.0), (12.0, 1.05), (2.4, 5.0), (0.1, 5.0)])
def test_silent_source_has_more_time_on_slow_links(megabytes: float, late_from: float) -> None:
    """It serves others first; the control, which knows nothing of the link, asks another source after a second."""
    sources = SourceSet(POLICY, random.Random(8))
    sources.inflow.received_by_peer.update({"one": PIECE, "two": PIECE, "three": PIECE})
    sources.inflow.rate = megabytes * 1e6
    sources.update_present(["one", "two"])
    scheduler = DownloadScheduler(pieces(1), sources)
    request = scheduler.next_request(0.0, {"one": PIECE_BYTES, "two": PIECE_BYTES})
    assert request is not None
    assert scheduler.next_request(late_from - 0.01) is None
    assert scheduler.next_request(late_from) is not None


def test_request_that_is_passed_over_is_late() -> None:
    sources = SourceSet(POLICY, random.Random(8))
    sources.update_present(["one", "two"])
    scheduler = DownloadScheduler(pieces(1), sources)
    request = scheduler.next_request(0.0, {"one": PIECE, "two": 2 * PIECE_BYTES})
    assert request is not None and request.peer == "one"
    sources.inflow.received_by_peer["one"] += 4 * PIECE - 1
    assert scheduler.next_request(POLICY.late_after_seconds) is None, "its bytes may be next"
    sources.inflow.received_by_peer["one"] += 1
    assert scheduler.next_request(POLICY.late_after_seconds) is not None
    scheduler.record_received(request, 1)
    assert scheduler.awaited_bytes(POLICY.late_after_seconds)["one"], "it has started"


def test_idle_only_uses_idle_sources() -> None:
    sources = SourceSet(POLICY, random.Random(8))
    sources.update_present(["one", "two", "three"])
    scheduler = DownloadScheduler(pieces(8), sources)
    calls = [request for _ in range(8) if (request := scheduler.next_request(0.0, {"two": 1}, idle_only=True))]
    assert sorted(request.peer for request in calls) == ["one", "three"]
    assert scheduler.next_request(0.0, {"two": 1}) is not None, "the control"


@pytest.mark.parametrize("size", [SMALL_BYTES, SMALL_BYTES + 1])
def test_hash_list_waits_for_no_slot(size: int) -> None:
    sources = SourceSet(POLICY, random.Random(8))
    sources.update_present(["one"])
    scheduler = DownloadScheduler({0: size}, sources)
    full = {"one": POLICY.pieces_per_source * PIECE_BYTES}
    assert scheduler.can_start_request(0.0)
    request = scheduler.next_request(0.0, full)
    assert (request is not None) == (size <= SMALL_BYTES), "the control: a byte more has to wait"
    assert scheduler.can_start_request(0.0) == (request is None)
    assert scheduler.can_start_request(1e9), "the running request is late by now"


def test_timeouts_follow_the_measured_speed_within_bounds() -> None:
    sources = SourceSet(POLICY, random.Random(9))
    sources.update_present(["peer"])
    slowest = PIECE / POLICY.min_speed
    assert sources.timeout_for("peer", PIECE) == slowest
    sources.record_success("peer", 1e9)
    assert sources.timeout_for("peer", PIECE) == POLICY.min_seconds
    sources.by_peer["peer"].speed = 2**19
    assert sources.timeout_for("peer", PIECE) == POLICY.slack * 2
    sources.record_failure("peer", RequestFailure.SLOW, "", 0.0)
    assert sources.timeout_for("peer", PIECE) == POLICY.slack * 4
    sources.by_peer["peer"].speed = 1.0
    assert sources.timeout_for("peer", PIECE) == slowest


def test_same_seed_gives_the_same_requests() -> None:
    behaviors = {f"peer {n}": SourceBehavior(1e6 * (n + 1), fails=0.05) for n in range(6)}
    first, second, other = (
        SimulatedSources(behaviors, 10),
        SimulatedSources(behaviors, 10),
        SimulatedSources(behaviors, 11),
    )
    for world in (first, second, other):
        world.run(pieces(30))
    assert first.delivered == second.delivered
    assert first.now == second.now
    assert first.delivered != other.delivered
