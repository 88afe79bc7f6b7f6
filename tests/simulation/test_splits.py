"""Chains that grow apart for longer than commits are kept become one, by the voters of the last head they share."""

import random

import pytest

from protocol.consensus import fork_choice
from tests.simulation.virtual.network import Scenario
from tests.simulation.virtual.swarm import SimulatedSwarm
from tests.slices import sliced

pytestmark = pytest.mark.slow

SEEDS = range(8)
DEATH = 8.0  # seconds from the start until all peers die, or the network splits
APART = 60.0
HEAL = 150.0  # seconds in which two chains become one; pauses between two questions double
CONTROL_HEAL = 30.0


class LongSplit:
    """A swarm whose peers carry two chains for more rounds than commits are kept.

    In half of the seeds all peers die at once, and a minority is back long before the others; in the other half the
    network splits into two halves.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(f"split {seed}")
        self._are_halves = seed % 2 == 1
        peers = draw.choice([2, 4, 6]) if self._are_halves else draw.randint(3, 7)
        exchange, is_trusted = draw.choice(["gather", "butterfly"]), draw.random() < 0.3
        training = 0.3 if self._are_halves else 0.1
        scenario = Scenario(
            peers, exchange, 1, rounds=100_000, loss=0.0, duplication=0.0, delay=0.02, transfer=0.02, training=training,
            trusted=is_trusted,
        )  # fmt: skip
        self.swarm = SimulatedSwarm(scenario, seed, forks_allowed=True)
        names = draw.sample(sorted(self.swarm.peers), peers)
        count = peers // 2 if self._are_halves else draw.randint(1, max(1, (peers - 1) // 3))
        self.first, self.others = names[:count], names[count:]
        self._has_met = False
        self.had_common_head = False  # when they met

    def run(self, heal: float) -> bool:
        """Return whether all peers are on one chain at most `heal` seconds after they can reach one another."""
        network = self.swarm.network
        self.swarm.start()
        network.schedule(DEATH, self._part)
        network.schedule(DEATH + APART - 0.1, self._compare)
        network.schedule(DEATH + APART + 1.0, self._meet)
        network.run(DEATH + APART + heal, lambda: self._has_met and self.swarm.is_on_one_chain())
        for peer in self.swarm.peers.values():
            peer.progress.check_nothing_twice(peer.chain)
        return self.swarm.is_on_one_chain()

    def _part(self) -> None:
        if self._are_halves:
            self.swarm.split({name: int(name in self.first) for name in self.swarm.peers}, APART)
        else:
            for name in self.swarm.peers:
                self.swarm.kill(name, 1.0 if name in self.first else APART)

    def _compare(self) -> None:
        first, other = (self.swarm.peers[names[0]].chain for names in (self.first, self.others))
        self.had_common_head = any(first.has_head(entry.body.base) for entry in other.log.commits)

    def _meet(self) -> None:
        self._has_met = True


@pytest.mark.parametrize("seed", sliced(SEEDS, 2))
def test_long_splits_end_on_one_chain(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: where the voters of the last common head have no say, the same seed stays split."""
    split = LongSplit(seed)
    assert split.run(HEAL) and not split.had_common_head
    monkeypatch.setattr(fork_choice, "_judge_by_former_voters", lambda own, offer: None)
    assert not LongSplit(seed).run(CONTROL_HEAL)
