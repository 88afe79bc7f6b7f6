"""What the benchmarks of endurance see and do: standstills, losses at equal tokens, who dies when."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from benchmarks import churn
from benchmarks.churn import Deaths, Report
from benchmarks.endurance.watch import Standstill, Watch, loss_at
from node.status import NodeStatus

CURVE = [(100, 4.0), (200, 3.0), (400, 2.0)]


def test_a_loss_is_read_between_two_points_and_never_beyond_them() -> None:
    assert [loss_at(CURVE, tokens) for tokens in (100, 150, 200, 350, 400)] == [4.0, 3.5, 3.0, 2.25, 2.0]
    for outside in (99, 401):
        with pytest.raises(ValueError, match="not measured"):
            loss_at(CURVE, outside)


def test_a_standstill_counts_from_the_last_round_or_the_start() -> None:
    standstill = Standstill()
    for now, number in ((0.0, -1), (5.0, -1), (6.0, 3), (8.0, 3), (20.0, 4)):
        standstill.note("one", number, now)
    assert standstill.worst == 14.0
    standstill.excuse("one")
    standstill.note("one", 4, 100.0)
    standstill.note("one", 5, 101.0)
    assert standstill.worst == 14.0, "what it was absent for is no standstill"


class FakePeer:
    def __init__(self, name: str) -> None:
        self.name, self.running, self.lives = name, True, 1
        self.status: NodeStatus | None = NodeStatus(peer_id=name, run="r", run_id="00")

    def addresses(self) -> tuple[str, ...]:
        return (f"/{self.name}",) if self.running else ()

    def kill(self) -> None:
        self.running = False

    def start(self, peers: Sequence[str]) -> None:
        assert peers and f"/{self.name}" not in peers
        self.running, self.lives = True, self.lives + 1


class FakeFlock:
    def __init__(self, count: int) -> None:
        self.peers = [FakePeer(f"peer-{index}") for index in range(count)]

    @property
    def living(self) -> int:
        return sum(peer.running for peer in self.peers)


def deaths_among(count: int, share: float) -> tuple[FakeFlock, Watch, Deaths]:
    flock = FakeFlock(count)
    watch = Watch(cast(Any, flock))
    return flock, watch, Deaths(cast(Any, flock), watch, share, seed=1)


def test_in_each_round_a_share_dies_and_those_of_the_last_one_come_back() -> None:
    flock, watch, deaths = deaths_among(8, 0.25)
    start = deaths._round_began
    for number in range(1, 11):
        watch.round = number
        deaths.go_on(start + 10.0 * number)
        assert flock.living == 8, "a new round: all are back, and nobody has died yet"
        deaths.go_on(start + 10.0 * number + 9.99)
        assert flock.living == 6
    assert deaths.count == 20
    deaths.revive()
    assert flock.living == 8 and sum(peer.lives for peer in flock.peers) == 28


def test_somebody_always_stays() -> None:
    flock, watch, deaths = deaths_among(2, 1.0)
    watch.round = 1
    deaths.go_on(deaths._round_began + 1.0)
    deaths.go_on(deaths._round_began + 100.0)
    assert flock.living == 1 and deaths.count == 1


def test_a_virtual_run_with_deaths_is_compared_with_one_without() -> None:
    report = churn.virtual(share=0.3, rounds=2, seeds=1, peers=3)
    assert report.deaths > 0 and report.churned.keys() == report.undisturbed.keys() == {0}
    assert report.churned != report.undisturbed, "the control: the deaths did change something"
    assert "deaths" in churn.table(report)


def test_the_excess_is_of_the_means() -> None:
    assert Report({0: 2.0, 1: 4.0}, {0: 2.2, 1: 4.1}).excess == pytest.approx(0.05)
