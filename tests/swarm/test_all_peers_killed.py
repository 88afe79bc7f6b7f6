"""All processes of all peers die at once, again and again, at moments that nothing can foresee."""

import random
import time
from pathlib import Path

import pytest

from node.commands.up.peer_process import PeerProcess
from tests.slices import nightly
from tests.swarm.process_swarm import ENDLESS, POLL_SECONDS, ProcessSwarm, manifest_with, running_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

EARLY_DEATHS = 1  # more, before anything was resumed


class ProgressObserver:
    """Remembers the highest round that each peer has shown, and whether a life began more than one below it."""

    def __init__(self, swarm: ProcessSwarm) -> None:
        self._swarm = swarm
        self.shown: dict[PeerProcess, int] = {}
        self.fallen: list[str] = []
        self._fresh: set[PeerProcess] = set()

    def on_restart(self) -> None:
        self._fresh = set(self._swarm.peers)

    def poll(self) -> int:
        """The highest round that anybody shows now."""
        self._swarm.poll()
        told = {peer: peer.status.round for peer in self._swarm.peers if peer.status}
        for peer in self._fresh & told.keys():
            if told[peer] < self.shown.get(peer, 0) - 1:
                self.fallen.append(f"{peer.name} fell from round {self.shown[peer]} to {told[peer]}")
        self._fresh -= told.keys()
        self.shown |= told
        return max(told.values(), default=0)

    def wait_for_more_than(self, round_number: int) -> None:
        self._swarm.wait_until(lambda: self.poll() > round_number, f"the run goes on from round {round_number}")

    def watch(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.poll()
            time.sleep(POLL_SECONDS)


@pytest.mark.parametrize("deaths", [1, *nightly([5])])
def test_deaths_of_everything(tmp_path: Path, deaths: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    with running_swarm(tmp_path, manifest_with(target={"rounds": ENDLESS})) as swarm:
        witness = ProgressObserver(swarm)
        early = set(draw.sample(range(deaths + EARLY_DEATHS), EARLY_DEATHS))
        for death in range(deaths + EARLY_DEATHS):
            before = max(witness.shown.values(), default=0)
            witness.on_restart()
            swarm.start()
            if death in early:
                witness.watch(draw.uniform(0.0, 3.0))
            else:
                witness.wait_for_more_than(before)
                witness.watch(draw.uniform(0.0, 1.5))
            swarm.kill()
        assert not witness.fallen, witness.fallen
        swarm.start()
        swarm.wait_for_agreement(after=max(witness.shown.values()) + 1)


def test_the_witness_notices_a_fall(tmp_path: Path) -> None:
    """The control: with a checkpoint only now and then, a death does cost more than one round."""
    rare = manifest_with(target={"rounds": ENDLESS}, run={"min_peers": 1}, checkpoint={"every_rounds": 1000})
    with running_swarm(tmp_path, rare, peers=1) as swarm:
        witness = ProgressObserver(swarm)
        swarm.start()
        swarm.wait_until(lambda: witness.poll() >= 3, "some rounds")
        swarm.kill()
        witness.on_restart()
        swarm.start()
        swarm.wait_until(lambda: bool(swarm.poll()), "it answers again")
        witness.poll()
        assert len(witness.fallen) == 1
