"""The plan in a simulated world: virtual sources with a speed and a temper, under a virtual clock."""

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
PACE = DownloadPolicy()


@dataclass(frozen=True)
class SourceBehavior:
    """How a simulated source behaves. `speed` is of one call, in bytes a second; 0 is frozen."""

    speed: float = 10e6
    lies: bool = False
    fails: float = 0.0  # share of calls that fail in some way


@dataclass
class SimulatedSources:
    """Carries out the calls of a plan; `narrow`: the bytes a second that all calls together get."""

    natures: dict[str, SourceBehavior]
    seed: int
    narrow: float = float("inf")
    now: float = 0.0
    asked: Counter[int] = field(default_factory=Counter)
    delivered: Counter[str] = field(default_factory=Counter)
    most_calls: int = 0
    most_sources: int = 0
    running: dict[PieceRequest, float] = field(default_factory=dict)  # to the bytes that came
    begun: dict[PieceRequest, float] = field(default_factory=dict)
    last: dict[PieceRequest, float] = field(default_factory=dict)

    def run(self, lengths: dict[int, int], limit: float = 3600.0, step: float = 0.05) -> float:
        chance = random.Random(self.seed)
        self.sources = SourceSet(PACE, random.Random(self.seed + 1))
        self.sources.update_present(self.natures)
        plan = DownloadScheduler(lengths, self.sources)
        while not plan.is_done:
            assert self.now < limit, f"not done after {limit} s, seed {self.seed}"
            while (call := plan.next_request(self.now)) is not None:
                assert call not in self.running, "a source was asked twice for one piece"
                self.asked[call.piece] += 1
                self.running[call], self.begun[call], self.last[call] = 0.0, self.now, self.now
            self.most_calls = max(self.most_calls, len(self.running))
            self.most_sources = max(self.most_sources, len({call.peer for call in self.running}))
            self.now += step
            for call in list(self.running):
                if call in self.running:
                    self._advance(plan, call, lengths[call.piece], step, chance)
        return self.now

    def _advance(
        self, plan: DownloadScheduler, call: PieceRequest, length: int, step: float, chance: random.Random
    ) -> None:
        nature = self.natures[call.peer]
        rate = min(nature.speed * chance.uniform(0.5, 1.5), self.narrow / len(self.running))
        if rate > 0:
            size = min(rate * step, length - self.running[call])
            self.running[call] += size
            self.last[call] = self.now
            plan.record_received(call, int(size))
        if chance.random() < nature.fails:
            self._fail(plan, call, chance.choice([RequestFailure.ABSENT, RequestFailure.BUSY, RequestFailure.LOST]))
        elif self.running[call] >= length:
            self._deliver(plan, call, nature)
        elif self.now - self.last[call] > PACE.stall_seconds or self.now - self.begun[call] > call.seconds:
            self._fail(plan, call, RequestFailure.SLOW)

    def _deliver(self, plan: DownloadScheduler, call: PieceRequest, nature: SourceBehavior) -> None:
        if nature.lies:
            return self._fail(plan, call, RequestFailure.LIED)
        del self.running[call]
        self.delivered[call.peer] += 1
        for other in plan.record_success(call, self.now):
            del self.running[other]

    def _fail(self, plan: DownloadScheduler, call: PieceRequest, failure: RequestFailure) -> None:
        del self.running[call]
        plan.record_failure(call, failure, failure, self.now)


def pieces(count: int) -> dict[int, int]:
    return dict.fromkeys(range(count), PIECE)


@pytest.mark.parametrize("seed", range(20))
def test_without_faults_every_piece_is_asked_for_exactly_once(seed: int) -> None:
    chance = random.Random(seed)
    natures = {f"peer {n}": SourceBehavior(chance.uniform(1e6, 50e6)) for n in range(chance.randint(1, 9))}
    world = SimulatedSources(natures, seed)
    count = chance.randint(1, 60)
    world.run(pieces(count))
    assert world.asked == Counter(range(count)), f"seed {seed}"
    assert world.most_calls <= PACE.sources * PACE.pieces_per_source
    assert world.most_sources <= PACE.sources


@pytest.mark.parametrize("seed", range(40))
def test_it_ends_under_random_faults_while_one_source_is_sound(seed: int) -> None:
    chance = random.Random(seed)
    natures = {
        f"peer {n}": SourceBehavior(
            chance.choice([0.0, 1e3, 1e5, 1e7]), chance.random() < 0.3, chance.choice([0.0, 0.1, 0.9])
        )
        for n in range(chance.randint(0, 12))
    }
    world = SimulatedSources(natures | {"sound": SourceBehavior(2e6, fails=0.02)}, seed)
    count = chance.randint(1, 20)
    world.run(pieces(count))
    assert world.asked.keys() == set(range(count))
    assert sum(world.delivered.values()) == count, f"seed {seed}"
    assert world.most_calls <= 2 * PACE.sources * PACE.pieces_per_source
    assert not any(natures[peer].lies for peer in world.delivered if peer != "sound")


def test_a_liar_is_asked_no_more_and_the_ban_outlives_its_absence() -> None:
    sources = SourceSet(PACE, random.Random(1))
    sources.update_present(["liar"])
    plan = DownloadScheduler(pieces(3), sources)
    call = plan.next_request(0.0)
    assert call is not None
    plan.record_failure(call, RequestFailure.LIED, "a piece does not match its hash", 0.1)
    sources.update_present([])
    sources.update_present(["liar"])
    # The control: a source that was only busy is asked again.
    assert plan.next_request(1e6) is None
    sources.update_present(["liar", "other"])
    call = plan.next_request(1e6)
    assert call is not None
    assert call.peer == "other"
    plan.record_failure(call, RequestFailure.BUSY, "", 1e6)
    again = plan.next_request(2e6)
    assert again is not None
    assert again.peer == "other"
    assert sources.last_failures() == {"liar": "a piece does not match its hash", "other": "is busy"}


def test_pauses_grow_and_end_with_a_success() -> None:
    sources = SourceSet(PACE, random.Random(2))
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
    assert max(pauses) <= 1.5 * PACE.max_retry_seconds
    sources.record_success("peer", 1e6)
    sources.record_failure("peer", RequestFailure.ABSENT, "", now)
    assert sources.by_peer["peer"].retry_at - now < 0.5


def test_frozen_sources_hold_nothing_up() -> None:
    natures = {f"frozen {n}": SourceBehavior(0.0) for n in range(8)} | {"sound": SourceBehavior(10e6)}
    world = SimulatedSources(natures, seed=3)
    taken = world.run(pieces(20))
    # Waiting for each pair of frozen calls to run into its time-out would take longer than this.
    assert taken < 2 * PACE.stall_seconds
    assert world.delivered == Counter({"sound": 20})


def test_a_trickle_is_not_taken_for_a_source() -> None:
    natures = {f"trickle {n}": SourceBehavior(100.0) for n in range(4)} | {"sound": SourceBehavior(10e6)}
    taken = SimulatedSources(natures, seed=4).run(pieces(10))
    # The control: 100 bytes a second pass every check for silence, and one piece alone would take hours.
    assert taken < 10


def test_a_narrow_link_of_our_own_is_not_made_narrower() -> None:
    natures = {f"peer {n}": SourceBehavior(10e6) for n in range(8)}
    world = SimulatedSources(natures, seed=5, narrow=125e3)
    taken = world.run(pieces(12))
    assert world.asked == Counter(range(12))
    assert taken < 1.1 * 12 * PIECE / 125e3


def test_the_fast_sources_are_found_and_do_the_work() -> None:
    natures = {f"slow {n}": SourceBehavior(0.3e6) for n in range(12)} | {
        f"fast {n}": SourceBehavior(20e6) for n in range(4)
    }
    world = SimulatedSources(natures, seed=6)
    taken = world.run(pieces(200))
    fast = sum(count for peer, count in world.delivered.items() if peer.startswith("fast"))
    assert fast > 150
    # The control: keeping the first four of sixteen, mostly slow, would take several times as long.
    assert taken < 200 * PIECE / (4 * 2 * 0.3e6) / 2


def test_a_source_that_is_no_snail_but_slow_makes_room_for_a_faster_one() -> None:
    # Not slow enough to be late: only giving the next piece to the best few moves the work.
    natures = {f"slow {n}": SourceBehavior(1e6) for n in range(12)} | {
        f"fast {n}": SourceBehavior(3.5e6) for n in range(4)
    }
    world = SimulatedSources(natures, seed=3)
    world.run(pieces(200))
    assert sum(count for peer, count in world.delivered.items() if peer.startswith("fast")) > 150


def test_the_last_piece_is_asked_of_another_when_its_source_is_late() -> None:
    sources = SourceSet(PACE, random.Random(7))
    sources.update_present(["one", "two"])
    plan = DownloadScheduler(pieces(1), sources)
    first = plan.next_request(0.0)
    assert first is not None
    assert plan.next_request(0.0) is None
    assert plan.next_request(PACE.late_after_seconds - 0.01) is None
    second = plan.next_request(PACE.late_after_seconds)
    assert second is not None
    assert {first.peer, second.peer} == {"one", "two"}
    assert plan.record_success(second, 1.5) == [first]
    assert plan.is_done
    assert not plan.is_running(first)
    plan.record_failure(first, RequestFailure.LOST, "slower than others", 1.6)
    assert plan.is_done, "what failed too late is not fetched again"
    assert sources.last_failures()[first.peer] == "slower than others"


def test_what_other_plans_await_takes_a_sources_places() -> None:
    sources = SourceSet(PACE, random.Random(8))
    sources.update_present(["one", "two"])
    plan = DownloadScheduler(pieces(8), sources)
    free = {"one": PACE.pieces_per_source * PIECE_BYTES}
    calls = [call for _ in range(8) if (call := plan.next_request(0.0, free))]
    assert {call.peer for call in calls} == {"two"} and len(calls) == PACE.pieces_per_source
    assert plan.awaited_bytes(0.0) == {"two": PACE.pieces_per_source * PIECE}
    assert plan.awaited_bytes(1e9) == {}, "for a call that is late nobody waits"
    other = plan.next_request(0.0)
    assert other is not None and other.peer == "one"


@pytest.mark.parametrize("shared", [True, False])
def test_a_call_that_waits_for_its_turn_is_not_late(shared: bool) -> None:
    """Behind another plan's pieces of the same source; the control does not see what comes of them."""
    inflow = InflowStats()
    ahead, behind = (
        SourceSet(PACE, random.Random(8), inflow=inflow if shared or n else InflowStats()) for n in range(2)
    )
    plans = [DownloadScheduler(pieces(2), ahead), DownloadScheduler(pieces(1), behind)]
    ahead.update_present(["one"])
    behind.update_present(["one", "two"])
    first = plans[0].next_request(0.0)
    last = plans[1].next_request(0.0, {"one": 0, "two": 2 * PIECE_BYTES})
    assert first is not None and last is not None and first.peer == last.peer == "one"
    plans[0].record_received(first, PIECE // 2)
    again = plans[1].next_request(PACE.late_after_seconds)
    assert (again is None) == shared, "another is asked for what was about to come"


@pytest.mark.parametrize(("megabytes", "late_from"), [(0.0, 1.0), (12.0, 1.05), (2.4, 5.0), (0.1, 5.0)])
def test_on_slow_links_a_silent_source_has_longer(megabytes: float, late_from: float) -> None:
    """It serves others first; the control, where nothing is known of the link, asks another after a second."""
    sources = SourceSet(PACE, random.Random(8))
    sources.inflow.received_by_peer.update({"one": PIECE, "two": PIECE, "three": PIECE})
    sources.inflow.rate = megabytes * 1e6
    sources.update_present(["one", "two"])
    plan = DownloadScheduler(pieces(1), sources)
    call = plan.next_request(0.0, {"one": PIECE_BYTES, "two": PIECE_BYTES})
    assert call is not None
    assert plan.next_request(late_from - 0.01) is None
    assert plan.next_request(late_from) is not None


def test_a_call_that_is_passed_over_is_late() -> None:
    sources = SourceSet(PACE, random.Random(8))
    sources.update_present(["one", "two"])
    plan = DownloadScheduler(pieces(1), sources)
    call = plan.next_request(0.0, {"one": PIECE, "two": 2 * PIECE_BYTES})
    assert call is not None and call.peer == "one"
    sources.inflow.received_by_peer["one"] += 4 * PIECE - 1
    assert plan.next_request(PACE.late_after_seconds) is None, "its turn may be now"
    sources.inflow.received_by_peer["one"] += 1
    assert plan.next_request(PACE.late_after_seconds) is not None
    plan.record_received(call, 1)
    assert plan.awaited_bytes(PACE.late_after_seconds)["one"], "it has begun"


def test_of_idle_sources_only() -> None:
    sources = SourceSet(PACE, random.Random(8))
    sources.update_present(["one", "two", "three"])
    plan = DownloadScheduler(pieces(8), sources)
    calls = [call for _ in range(8) if (call := plan.next_request(0.0, {"two": 1}, idle_only=True))]
    assert sorted(call.peer for call in calls) == ["one", "three"]
    assert plan.next_request(0.0, {"two": 1}) is not None, "the control"


@pytest.mark.parametrize("size", [SMALL_BYTES, SMALL_BYTES + 1])
def test_a_list_of_hashes_waits_for_no_place_but_of_its_own(size: int) -> None:
    sources = SourceSet(PACE, random.Random(8))
    sources.update_present(["one"])
    plan = DownloadScheduler({0: size}, sources)
    full = {"one": PACE.pieces_per_source * PIECE_BYTES}
    assert plan.can_start_request(0.0)
    call = plan.next_request(0.0, full)
    assert (call is not None) == (size <= SMALL_BYTES), "the control: a byte more has to wait"
    assert plan.can_start_request(0.0) == (call is None)
    assert plan.can_start_request(1e9), "late by now"


def test_deadlines_follow_the_measured_speed_within_bounds() -> None:
    sources = SourceSet(PACE, random.Random(9))
    sources.update_present(["peer"])
    slowest = PIECE / PACE.min_speed
    assert sources.timeout_for("peer", PIECE) == slowest
    sources.record_success("peer", 1e9)
    assert sources.timeout_for("peer", PIECE) == PACE.min_seconds
    sources.by_peer["peer"].speed = 2**19
    assert sources.timeout_for("peer", PIECE) == PACE.slack * 2
    sources.record_failure("peer", RequestFailure.SLOW, "", 0.0)
    assert sources.timeout_for("peer", PIECE) == PACE.slack * 4
    sources.by_peer["peer"].speed = 1.0
    assert sources.timeout_for("peer", PIECE) == slowest


def test_the_same_seed_gives_the_same_plan() -> None:
    natures = {f"peer {n}": SourceBehavior(1e6 * (n + 1), fails=0.05) for n in range(6)}
    first, second, other = SimulatedSources(natures, 10), SimulatedSources(natures, 10), SimulatedSources(natures, 11)
    for world in (first, second, other):
        world.run(pieces(30))
    assert first.delivered == second.delivered
    assert first.now == second.now
    assert first.delivered != other.delivered
