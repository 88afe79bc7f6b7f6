"""Peers die that are too many for a quorum: the others go on at once where their machines say that they are dead."""

from dataclasses import replace

import pytest

from protocol.consensus.events import MembershipChanged
from protocol.consensus.quorum import VoterSet
from tests.simulation.virtual.network import Scenario
from tests.simulation.virtual.swarm import SimulatedSwarm

PEERS = 8
DEATH = 4.0
EXPIRY, VOTE_MEMORY = 15.0, 30.0  # those of a manifest that names none
LONGEST = 10.0  # seconds; a round takes three


def scenario(machines_answer: bool) -> Scenario:
    return Scenario(
        PEERS, "gather", 1, rounds=100, loss=0.0, duplication=0.0, delay=0.1, transfer=0.1, training=2.0,
        vote_memory=VOTE_MEMORY, expiry=EXPIRY, machines_answer=machines_answer,
    )  # fmt: skip


def seconds_to_the_next_round(deaths: int, machines_answer: bool, seed: int, away: float | None = None) -> float:
    """After so many have died at once, until all others have applied a round more."""
    swarm = SimulatedSwarm(scenario(machines_answer), seed)
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


@pytest.mark.parametrize("deaths", [3, 5])
def test_a_round_goes_on_without_those_whose_machines_say_that_they_are_dead(deaths: int) -> None:
    seconds = seconds_to_the_next_round(deaths, machines_answer=True, seed=deaths)
    print(f"{deaths} of {PEERS} die: {seconds:.1f} s")
    assert seconds < LONGEST


def test_votes_are_remembered_of_those_whose_machines_are_silent() -> None:
    """The control: they may be on another side of a split."""
    seconds = seconds_to_the_next_round(3, machines_answer=False, seed=3)
    print(f"their machines are silent: {seconds:.1f} s")
    assert seconds > EXPIRY + VOTE_MEMORY


def test_dead_peers_that_may_have_decided_alone_are_waited_for() -> None:
    """Six of eight decide: the two that live may know nothing of it, so they wait until the votes are forgotten."""
    seconds = seconds_to_the_next_round(6, machines_answer=True, seed=6)
    assert seconds > VOTE_MEMORY


@pytest.mark.parametrize("away", [2.0, 6.0])
def test_who_comes_back_meanwhile_finds_one_chain(away: float) -> None:
    """The dead may come back before the others have decided without them, or after it."""
    assert seconds_to_the_next_round(4, machines_answer=True, seed=4, away=away) < LONGEST


def forks_of_a_split() -> int:
    """Five of eight peers and the three others are apart for longer than a record lasts."""
    swarm = SimulatedSwarm(scenario(machines_answer=True), seed=1, forks_allowed=True)
    swarm.start()
    islands = {name: int(index < 3) for index, name in enumerate(swarm.peers)}
    swarm.network.schedule(DEATH, lambda: swarm.split(islands, EXPIRY + LONGEST))
    swarm.network.run(DEATH + EXPIRY + 2 * LONGEST)
    return len(swarm.forks())


def takes_silence_for_an_end(patch: pytest.MonkeyPatch) -> None:
    update = VoterSet.update

    def updated(self: VoterSet, membership: MembershipChanged, now: float) -> None:
        silent = (self.live | self._vanished.keys()) - membership.peers
        update(self, replace(membership, ended=silent), now)

    patch.setattr(VoterSet, "update", updated)


def test_neither_side_of_a_split_takes_the_other_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control takes every silent peer for dead."""
    assert forks_of_a_split() == 0
    takes_silence_for_an_end(monkeypatch)
    assert forks_of_a_split() > 0
