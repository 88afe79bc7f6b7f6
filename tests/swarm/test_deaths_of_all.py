"""All processes of all peers die at once, again and again, at moments that nothing can foresee."""

import random
import time
from pathlib import Path

import pytest

from node.local.peer_process import PeerProcess
from tests.swarm.flock import ENDLESS, LOOK, Flock, flying, manifest_with

pytestmark = [pytest.mark.swarm, pytest.mark.ordeal, pytest.mark.timeout(300)]

DEATHS = 10
STILLBORN = 2  # more, before anything was resumed


class Witness:
    """Remembers the highest round that each peer has shown, and whether a life began more than one below it."""

    def __init__(self, flock: Flock) -> None:
        self._flock = flock
        self.shown: dict[PeerProcess, int] = {}
        self.fallen: list[str] = []
        self._fresh: set[PeerProcess] = set()

    def new_life(self) -> None:
        self._fresh = set(self._flock.peers)

    def look(self) -> int:
        """The highest round that anybody shows now."""
        self._flock.look()
        told = {peer: peer.status.round for peer in self._flock.peers if peer.status}
        for peer in self._fresh & told.keys():
            if told[peer] < self.shown.get(peer, 0) - 1:
                self.fallen.append(f"{peer.name} fell from round {self.shown[peer]} to {told[peer]}")
        self._fresh -= told.keys()
        self.shown |= told
        return max(told.values(), default=0)

    def wait_for_more_than(self, round_number: int) -> None:
        self._flock.wait(lambda: self.look() > round_number, f"the run goes on from round {round_number}")

    def watch(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.look()
            time.sleep(LOOK)


def test_ten_deaths_of_everything(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    with flying(tmp_path, manifest_with(target={"rounds": ENDLESS})) as flock:
        witness = Witness(flock)
        early = set(draw.sample(range(DEATHS + STILLBORN), STILLBORN))
        for death in range(DEATHS + STILLBORN):
            before = max(witness.shown.values(), default=0)
            witness.new_life()
            flock.start()
            if death in early:
                witness.watch(draw.uniform(0.0, 3.0))
            else:
                witness.wait_for_more_than(before)
                witness.watch(draw.uniform(0.0, 1.5))
            flock.kill()
        assert not witness.fallen, witness.fallen
        flock.start()
        flock.wait_for_agreement(after=max(witness.shown.values()) + 1)


def test_the_witness_notices_a_fall(tmp_path: Path) -> None:
    """The control: with a checkpoint only now and then, a death does cost more than one round."""
    rare = manifest_with(target={"rounds": ENDLESS}, run={"min_peers": 1}, checkpoint={"every_rounds": 1000})
    with flying(tmp_path, rare, peers=1) as flock:
        witness = Witness(flock)
        flock.start()
        flock.wait(lambda: witness.look() >= 3, "some rounds")
        flock.kill()
        witness.new_life()
        flock.start()
        flock.wait(lambda: bool(flock.look()), "it answers again")
        witness.look()
        assert len(witness.fallen) == 1
