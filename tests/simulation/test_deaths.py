"""Peers die that are too many for a quorum: the others go on at once where their machines say that they are dead."""

import pytest

from tests.simulation.virtual.network import Scenario
from tests.simulation.virtual.swarm import SimulatedSwarm

PEERS = 8
DEATH = 4.0
LONGEST = 10.0  # seconds of a virtual minute; a round takes some five


def seconds_to_the_next_round(deaths: int, machines_answer: bool, seed: int, away: float | None = None) -> float:
    """After so many have died at once, until all others have applied a round more."""
    scenario = Scenario(
        PEERS, "gather", 1, rounds=100, loss=0.0, duplication=0.0, delay=0.1, transfer=0.1, training=2.0,
        vote_memory=30.0, expiry=15.0, machines_answer=machines_answer,
    )  # fmt: skip
    swarm = SimulatedSwarm(scenario, seed)
    swarm.start()
    swarm.network.run(DEATH)
    doomed = list(swarm.peers)[:deaths]
    reached = max(peer.chain.round for peer in swarm.peers.values())
    for name in doomed:
        swarm.kill(name, away)
    living = [peer for name, peer in swarm.peers.items() if name not in doomed]
    swarm.network.run(DEATH + 120.0, lambda: all(peer.chain.round > reached + 1 for peer in living))
    assert not swarm.forks()
    return swarm.network.now - DEATH


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("deaths", [3, 5])
def test_a_round_goes_on_without_those_whose_machines_say_that_they_are_dead(deaths: int, seed: int) -> None:
    """The control: where nothing is known of them, their votes are remembered."""
    known, silent = (seconds_to_the_next_round(deaths, answer, seed) for answer in (True, False))
    print(f"{deaths} of {PEERS} die: {known:.1f} s, {silent:.1f} s where their machines are silent")
    assert known < LONGEST < 30.0 < silent
