"""How much of the ideal a pipeline of unequal peers reaches in virtual time, and who computes how much."""

import pytest

from tests.protocol.pipeline.bugs import weighs_peers_by_round_trips
from tests.protocol.pipeline.virtual_swarm import Scenario, VirtualSwarm

SPEEDS = (1.0, 2.0, 4.0, 8.0)
WARM, END = 15.0, 60.0

pytestmark = pytest.mark.slow


def measure(in_flight: int) -> tuple[float, list[float]]:
    """Return the fraction of the ideal, and for each peer its share over its share of the speed."""
    endless = 10**6
    scenario = Scenario(
        speeds=(SPEEDS,) * 4,
        in_flight=in_flight,
        owners=1,
        quota=endless,
        step_size=endless,
        memory=10**9,
        bandwidth=1e9,
    )
    swarm = VirtualSwarm(scenario, 1)
    swarm.run(WARM)
    done, served = count_done(swarm), {peer.name: peer.served for peer in swarm.peers.values()}
    swarm.run(END)
    ratios = []
    for stage in range(len(scenario.speeds)):
        peers = [peer for peer in swarm.peers.values() if peer.stage == stage]
        total = sum(peer.served - served[peer.name] for peer in peers)
        ratios += [(peer.served - served[peer.name]) / total * sum(SPEEDS) / peer.speed for peer in peers]
    return (count_done(swarm) - done) / (END - WARM) / sum(SPEEDS), ratios


def count_done(swarm: VirtualSwarm) -> int:
    return sum(peer.owner.counts.done for peer in swarm.peers.values() if peer.owner is not None)


def test_shares_follow_speed_and_the_pipeline_is_full() -> None:
    fraction, ratios = measure(in_flight=64)
    print(f"fraction {fraction:.3f}, shares {min(ratios):.2f} to {max(ratios):.2f} of speed")
    assert fraction >= 0.95
    assert all(0.85 <= ratio <= 1.15 for ratio in ratios)


def test_round_trips_as_weights_leave_fast_peers_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    weighs_peers_by_round_trips(monkeypatch)
    fraction, ratios = measure(in_flight=64)
    print(f"fraction {fraction:.3f}, shares {min(ratios):.2f} to {max(ratios):.2f} of speed")
    assert fraction < 0.95
