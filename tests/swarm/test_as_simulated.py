"""What real peers come to is, to the last bit, what the simulator says for the same seed: state by state."""

from pathlib import Path

import pytest
import torch

from node.data import open_source
from node.folder import RunFolder
from node.program import program_of
from node.simulation.setting import Setting
from node.simulation.swarm import Swarm, identity_of
from optim.rows import Tables
from protocol.manifest import Manifest
from tests.swarm.flock import flying, manifest_with, write_run

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

PEERS, ROUNDS = 3, 4
SHORT = {"inner_steps": 4}
RECIPES: dict[str, Tables] = {
    "diloco": {"schedule": SHORT},
    "sparseloco": {"schedule": SHORT},
    "streaming-diloco": {"schedule": {"inner_steps": 6, "fragments": 2, "ahead": 2, "delay": 2}},
    "co2": {"schedule": {"inner_steps": 3, "ahead": 3, "delay": 3}},
    "noloco": {"schedule": SHORT},
    "demo": {},
}


def manifest_of(recipe: str, tables: Tables, seed: int = 0) -> Manifest:
    """With all the time that a busy machine needs: a late message would be another run."""
    return manifest_with(
        run={"min_peers": PEERS, "seed": seed},
        method={"recipe": recipe, "schedule": {}, **tables},
        round={"grace": 60.0, "leader_timeout": 20.0, "exchange_timeout": 60.0, "parts": 5},
        target={"rounds": ROUNDS},
    )


def simulated(manifest: Manifest, base: Path) -> dict[str, str]:
    """The state of each peer after the last round."""
    torch.set_num_threads(1)
    steps = program_of(manifest).steps_before(ROUNDS)
    setting = Setting(manifest, base, PEERS, steps, (1.0,) * PEERS, (1e7,) * PEERS, 0.01)
    corpus = open_source(manifest.data, base)
    swarm = Swarm(setting, program_of(manifest).method, corpus, lambda *_: None, lambda: None)
    swarm.run()
    assert all(peer.chain.round == ROUNDS for peer in swarm.alive)
    return {peer.name: peer.applied[1].digest.hex() for peer in swarm.alive}


def real(manifest: Manifest, folder: Path) -> dict[str, str]:
    with flying(folder, manifest, PEERS) as flock:
        for slot, peer in enumerate(flock.peers):
            key = RunFolder(peer.folder).key
            key.parent.mkdir(parents=True, exist_ok=True)
            key.write_bytes(identity_of(slot).to_bytes())
            key.chmod(0o600)
        flock.start()
        flock.wait(lambda: all(status.round >= ROUNDS for status in flock.look()), "all have finished", 120)
        return {status.peer_id: status.state_digest for status in flock.look()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_real_peers_come_to_what_the_simulator_says(recipe: str, tmp_path: Path) -> None:
    manifest = manifest_of(recipe, RECIPES[recipe])
    write_run(tmp_path / "simulated", manifest)
    expected = simulated(manifest, tmp_path / "simulated")
    assert real(manifest, tmp_path / "real") == expected
    # The control: from another seed the same peers come to something else.
    other = manifest_of(recipe, RECIPES[recipe], seed=1)
    assert set(simulated(other, tmp_path / "simulated").values()).isdisjoint(expected.values())
