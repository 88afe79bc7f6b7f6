"""How much of the ideal a pipeline of unequal peers reaches in virtual time, and who computes how much."""

from dataclasses import dataclass

import pytest

from tests.protocol.pipeline.virtual.bugs import invites_nobody, weighs_peers_by_round_trips
from tests.protocol.pipeline.virtual.faulty_world import FaultyWorld
from tests.protocol.pipeline.virtual.scenario import Scenario

SPEEDS = (1.0, 2.0, 4.0, 8.0)
WARM, END = 15.0, 60.0
ENDLESS = 10**6

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Figures:
    """`fraction` of the ideal; the `shares` of peers over those of their speed; answers `busy` for each microbatch."""

    fraction: float
    shares: list[float]
    busy: float


def measure(in_flight: int, owners: int = 1, step_size: int = ENDLESS) -> Figures:
    scenario = Scenario(
        speeds=(SPEEDS,) * 4,
        in_flight=in_flight,
        owners=owners,
        quota=ENDLESS,
        step_size=step_size,
        memory=10**9,
        bandwidth=1e9,
    )
    world = FaultyWorld(scenario, 1)
    world.run(WARM)
    done, busy, served = count_done(world), count_busy(world), {peer.name: peer.served for peer in world.peers.values()}
    world.run(END)
    ratios = []
    for stage in range(len(scenario.speeds)):
        peers = [peer for peer in world.peers.values() if peer.stage == stage]
        total = sum(peer.served - served[peer.name] for peer in peers)
        ratios += [(peer.served - served[peer.name]) / total * sum(SPEEDS) / peer.speed for peer in peers]
    done, busy = count_done(world) - done, count_busy(world) - busy
    figures = Figures(done / (END - WARM) / sum(SPEEDS), ratios, busy / done)
    print(f"fraction {figures.fraction:.3f}, shares {min(ratios):.2f} to {max(ratios):.2f}, {figures.busy:.1f} busy")
    return figures


def count_done(world: FaultyWorld) -> int:
    return sum(peer.owner.counts.done for peer in world.peers.values())


def count_busy(world: FaultyWorld) -> int:
    return sum(
        server.counts.answers["busy"]
        for peer in world.peers.values()
        if (server := peer.process.loop.server) is not None
    )


def test_shares_follow_speed_and_the_pipeline_is_full() -> None:
    figures = measure(in_flight=64)
    assert figures.fraction >= 0.95
    assert all(0.85 <= ratio <= 1.15 for ratio in figures.shares)


def test_round_trips_as_weights_leave_fast_peers_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    weighs_peers_by_round_trips(monkeypatch)
    assert measure(in_flight=64).fraction < 0.95


def test_many_owners_that_wait_for_steps_are_invited(monkeypatch: pytest.MonkeyPatch) -> None:
    invited = measure(in_flight=8, owners=16, step_size=64)
    invites_nobody(monkeypatch)
    asking = measure(in_flight=8, owners=16, step_size=64)
    assert invited.fraction > 1.3 * asking.fraction
    assert invited.busy < asking.busy / 4
