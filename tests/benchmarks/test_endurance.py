"""What the benchmarks of endurance see and do: standstills, losses at equal tokens, who dies when."""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from benchmarks import churn, soak
from benchmarks.churn import Deaths, Report
from benchmarks.endurance import faults
from benchmarks.endurance.faults import FaultInjector
from benchmarks.endurance.resources import WARM_UP_SECONDS, Growth, ResourceMonitor, fit_slope
from benchmarks.endurance.run_observer import RunObserver, Standstill, loss_at, loss_up_to
from node.monitoring.status import NodeStatus

KINDS = {"kill", "freeze", "cut", "rejoin"}
CURVE = [(100, 4.0), (200, 3.0), (400, 2.0)]


def test_a_loss_is_read_between_two_points_and_never_beyond_them() -> None:
    assert [loss_at(CURVE, tokens) for tokens in (100, 150, 200, 350, 400)] == [4.0, 3.5, 3.0, 2.25, 2.0]
    for outside in (99, 401):
        with pytest.raises(ValueError, match="not measured"):
            loss_at(CURVE, outside)


def test_of_a_flight_the_losses_of_the_last_tenth_count() -> None:
    jagged = [(tokens, 2.0 + (-1) ** (tokens // 10)) for tokens in range(0, 401, 10)]
    assert loss_at(jagged, 400) == 3.0 and loss_up_to(jagged, 400) == pytest.approx(2.0, abs=0.15)
    assert loss_up_to([(0, 4.0), (400, 0.0)], 400) == pytest.approx(0.18), "nothing before that"


def test_what_a_peer_comes_to_while_it_is_cut_off_is_not_the_runs_loss() -> None:
    swarm = FakeSwarm(3)
    watch = RunObserver(cast(Any, swarm))

    def see(name: str, number: int, digest: str, tokens: int, evaluated: int | None = None, loss: float = 0.0) -> None:
        measured = {} if evaluated is None else {"validation_round": evaluated, "validation_loss": loss}
        told = {"round": number, "digest": digest, "chain_tokens": tokens, **measured}
        watch._record(NodeStatus.model_validate({"peer_id": name, "run": "r", "run_id": "00", **told}))

    for name in ("one", "two", "cut"):
        see(name, 1, "a", 300, 1, 4.0)
    see("one", 2, "b", 500, 2, 3.5)
    see("two", 2, "b", 500)
    see("cut", 2, "x", 400, 2, 3.9)
    see("two", 3, "c", 700, 3, 3.2)
    see("one", 3, "c", 700)
    see("cut", 3, "c", 700, 2, 3.9)  # it is back, and still says what it last evaluated
    assert watch.curve == [(300, 4.0), (500, 3.5), (700, 3.2)]
    see("late", 9, "z", 1000, 8, 9.9)
    assert watch.curve == [(300, 4.0), (500, 3.5), (700, 3.2)], "of round 8 nothing else is known"


def test_a_standstill_counts_from_the_last_round_or_the_start() -> None:
    standstill = Standstill()
    for now, number in ((0.0, -1), (5.0, -1), (6.0, 3), (8.0, 3), (20.0, 4)):
        standstill.record("one", number, now)
    assert standstill.worst == 14.0
    standstill.reset("one")
    standstill.record("one", 4, 100.0)
    standstill.record("one", 5, 101.0)
    assert standstill.worst == 14.0, "what it was absent for is no standstill"


class FakePeer:
    def __init__(self, name: str) -> None:
        self.name = name
        self.is_running = True
        self.lives = 1
        self.status: NodeStatus | None = NodeStatus(peer_id=name, run="r", run_id="00")

    def addresses(self) -> tuple[str, ...]:
        return (f"/{self.name}",) if self.is_running else ()

    def kill(self) -> None:
        self.is_running = False

    def start(self, peers: Sequence[str]) -> None:
        assert peers and f"/{self.name}" not in peers
        self.is_running = True
        self.lives = self.lives + 1


class FakeSwarm:
    def __init__(self, count: int) -> None:
        self.peers = [FakePeer(f"peer-{index}") for index in range(count)]

    def poll(self, *peers: FakePeer) -> list[NodeStatus]:
        return [peer.status for peer in peers if peer.status is not None]

    @property
    def living(self) -> int:
        return sum(peer.is_running for peer in self.peers)


def deaths_among(count: int, share: float) -> tuple[FakeSwarm, RunObserver, Deaths]:
    swarm = FakeSwarm(count)
    watch = RunObserver(cast(Any, swarm))
    return swarm, watch, Deaths(cast(Any, swarm), watch, share, seed=1)


def test_in_each_round_a_share_dies_and_those_of_the_last_one_come_back() -> None:
    swarm, watch, deaths = deaths_among(8, 0.25)
    start = deaths._round_began
    for number in range(1, 11):
        watch.round = number
        deaths.go_on(start + 10.0 * number)
        assert swarm.living == 8, "a new round: all are back, and nobody has died yet"
        deaths.go_on(start + 10.0 * number + 9.99)
        assert swarm.living == 6
    assert deaths.count == 20
    deaths.revive()
    assert swarm.living == 8 and sum(peer.lives for peer in swarm.peers) == 28


def test_somebody_always_stays() -> None:
    swarm, watch, deaths = deaths_among(2, 1.0)
    watch.round = 1
    deaths.go_on(deaths._round_began + 1.0)
    deaths.go_on(deaths._round_began + 100.0)
    assert swarm.living == 1 and deaths.count == 1


def test_a_virtual_run_with_deaths_is_compared_with_one_without() -> None:
    report = churn.virtual(share=0.3, rounds=2, seeds=1, peers=3)
    assert report.deaths > 0 and report.churned.keys() == report.undisturbed.keys() == {0}
    assert report.churned != report.undisturbed, "the control: the deaths did change something"
    assert "deaths" in churn.table(report)


def test_a_start_is_no_standstill_and_is_told_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, clock = FakeSwarm(1), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watch, peer = RunObserver(cast(Any, swarm)), swarm.peers[0]

    def look(now: float, *, answers: bool) -> None:
        peer.status = NodeStatus(peer_id=peer.name, run="r", run_id="00") if answers else None
        clock[0] = now
        watch.poll()

    for now in (0.0, 15.0, 30.0):
        look(now, answers=False)
    look(40.0, answers=True)
    look(45.0, answers=True)
    assert watch.starting.worst == 40.0 and watch.standstill.worst == 5.0
    watch.reset_standstill(peer.name)
    look(50.0, answers=False)
    watch.reset_standstill(peer.name)  # killed in its start
    look(100.0, answers=False)
    look(110.0, answers=True)
    assert watch.starting.worst == 40.0, "what is dead does not start"


def test_the_excess_is_of_the_means() -> None:
    assert Report({0: 2.0, 1: 4.0}, {0: 2.2, 1: 4.1}).excess == pytest.approx(0.05)


def test_growth_is_of_each_life_behind_its_warm_up() -> None:
    resources = ResourceMonitor()
    starting = [(float(now), 50.0 + now) for now in range(0, 900, 5)]
    flat = [(float(now), 100.0 + now % 60) for now in range(900, 2300, 5)]
    leaking = [(now, amount + now / 3600) for now, amount in flat]
    resources.lives["resident_mb"] = {1: starting + flat, 2: starting + leaking, 3: starting}
    growth = resources.growth()
    assert list(growth) == ["resident_mb"], "of the others there is nothing to tell"
    assert growth["resident_mb"] == pytest.approx((0.5, 1.0, 0.0, 2)), "what comes and goes in a minute is none"
    assert fit_slope([*starting, *flat[:30]], WARM_UP_SECONDS) is None, "too short to tell"
    assert replace(resources, warm_up=0.0).growth()["resident_mb"].middle < -100, "what rises first was left out"


def test_a_slope_is_as_sure_as_its_minutes_are_alike() -> None:
    drawn = random.Random(7)
    minutes = [(900.0 + 60 * minute, 2.0 * minute / 60) for minute in range(45)]
    errors, rates = [], []
    for _ in range(200):
        slope = fit_slope(
            [(0.0, 0.0), *((now, amount + drawn.gauss(0.0, 3.0)) for now, amount in minutes)], WARM_UP_SECONDS
        )
        assert slope is not None
        errors.append(slope.error)
        rates.append(slope.rate)
    assert statistics.fmean(rates) == pytest.approx(2.0, abs=0.5)
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(rates), rel=0.2)


class FakeLaboratory:
    def __init__(self) -> None:
        self.cut_off: list[str] = []

    def cut(self, node: str) -> None:
        self.cut_off.append(node)

    def heal(self) -> None:
        self.cut_off.clear()


class FakeLabPeer(FakePeer):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.node = name
        self.public_addresses = self.addresses

    def log_tail(self, lines: int) -> list[str]:
        return ["why"][-lines:]


class FakeLabSwarm:
    def __init__(self, count: int) -> None:
        self.laboratory = FakeLaboratory()
        self.lab_peers = [FakeLabPeer(f"peer-{index}") for index in range(count)]


def test_faults_come_one_after_the_other_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep: list[str] = []
    swarm = FakeLabSwarm(8)
    monkeypatch.setattr(faults, "daemon_pid", lambda peer: peer.name)
    monkeypatch.setattr(faults, "process_tree", lambda name: [FakeProcess(name, asleep)])
    storm = FaultInjector(cast(Any, swarm), RunObserver(cast(Any, swarm)), seed=3)
    most_dead, struck, killed = 0, set[str](), set[str]()
    for second in range(3000):
        storm.step(float(second))
        away = [*asleep, *swarm.laboratory.cut_off]
        assert sorted(storm.absent) == sorted(away) and len(away) <= 1
        most_dead = max(most_dead, sum(not peer.is_running for peer in swarm.lab_peers))
        struck.update(away)
        killed.update(peer.name for peer in swarm.lab_peers if not peer.is_running)
    assert most_dead == faults.MAX_ABSENT
    assert sum(storm.counts.values()) == 2999 // int(faults.PERIOD) and storm.counts.keys() == KINDS
    assert len(struck) == 8, "it may hit everybody"
    assert killed == {f"peer-{index}" for index in range(8 - faults.SPARED)}, "but some live on"
    storm.stop()
    assert all(peer.is_running for peer in swarm.lab_peers) and not storm.absent
    swarm.lab_peers[2].kill()
    with pytest.raises(SystemExit, match="peer-2 ended by itself:\nwhy"):
        storm.step(3000.0)


class FakeProcess:
    def __init__(self, name: str, asleep: list[str]) -> None:
        self._name = name
        self._asleep = asleep

    def suspend(self) -> None:
        self._asleep.append(self._name)

    def resume(self) -> None:
        self._asleep.remove(self._name)


@pytest.mark.parametrize(
    "change",
    [
        {"longest_standstill": 61.0},
        {"longest_start": 61.0},
        {"digests_equal": False},
        {"loss": 2.1},
        {"growth": {"resident_mb": Growth(2.0, 9.0, 1.0, 2)}},
        {"calm_growth": {"resident_mb": Growth(2.0, 9.0, 1.0, 8)}},
    ],
)
def test_a_soak_fails_for_any_one_reason(change: dict[str, Any]) -> None:
    good = soak.Report(30.0, {"kill": 3}, 9, 20.0, 30.0, True, 2.0, 2.0, {"resident_mb": Growth(0.5, 9.0, 1.0, 2)})
    assert good.passed and not replace(good, **change).passed
    assert replace(good, growth={}).passed, "minutes are too few to tell"
    assert "3 x kill" in soak.table(good) and "| resident_mb, with faults | 2 | 0.5 | 9.0 | 1.0 |" in soak.table(good)
