"""What real peers come to is, to the last bit, what the simulator says for the same seed: state by state."""

from pathlib import Path

import pytest
import torch

from node.data import open_corpus
from node.from_manifest import build_program
from node.run_dir import RunDir
from node.simulation.config import SimulationConfig
from node.simulation.swarm import VirtualSwarm, simulated_identity
from optim.recipes import OptionTables
from protocol.manifest.run import Manifest
from tests.slices import sliced
from tests.swarm.process_swarm import manifest_with, running_swarm, write_run

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

PEERS, ROUNDS = 3, 4
SHORT = {"inner_steps": 4}
EXPERTS = {"kind": "qwen3-moe", "hidden": 16, "experts": 8, "experts_per_token": 1, "balance_loss": 0.0}
RECIPES: dict[str, OptionTables] = {
    "diloco": {"schedule": {**SHORT, "experts": "trained"}},
    "streaming-diloco": {"schedule": {"inner_steps": 6, "fragments": 2, "ahead": 2, "delay": 2}},
    "noloco": {"schedule": SHORT},
}


def manifest_of(recipe: str, tables: OptionTables, seed: int = 0) -> Manifest:
    """With all the time that a busy machine needs: a late message would be another run."""
    return manifest_with(
        model=EXPERTS if "experts" in tables["schedule"] else {},
        run={"min_peers": PEERS, "seed": seed},
        method={"recipe": recipe, "schedule": {}, **tables},
        round={"grace": 60.0, "leader_timeout": 20.0, "exchange_timeout": 60.0, "parts": 5},
        target={"rounds": ROUNDS},
    )


def simulated(manifest: Manifest, base: Path) -> dict[str, str]:
    """The state of each peer after the last round."""
    torch.set_num_threads(1)
    steps = build_program(manifest).steps_before(ROUNDS)
    setting = SimulationConfig(manifest, base, PEERS, steps, (1.0,) * PEERS, (1e7,) * PEERS, 0.01)
    corpus = open_corpus(manifest.data, base)
    swarm = VirtualSwarm(setting, build_program(manifest).method, corpus, lambda *_: None, lambda: None)
    swarm.run()
    assert all(peer.chain.round == ROUNDS for peer in swarm.live_peers)
    return {peer.peer_id: peer.applied_state[1].digest.hex() for peer in swarm.live_peers}


def real(manifest: Manifest, folder: Path) -> dict[str, str]:
    with running_swarm(folder, manifest, PEERS) as swarm:
        for slot, peer in enumerate(swarm.peers):
            key = RunDir(peer.folder).key
            key.parent.mkdir(parents=True, exist_ok=True)
            key.write_bytes(simulated_identity(slot).to_bytes())
            key.chmod(0o600)
        swarm.start()
        swarm.wait_until(lambda: all(status.round >= ROUNDS for status in swarm.poll()), "all have finished", 120)
        return {status.peer_id: status.state_digest for status in swarm.poll()}


@pytest.mark.parametrize("recipe", sliced(("diloco", "noloco", "streaming-diloco"), 1))
def test_real_peers_come_to_what_the_simulator_says(recipe: str, tmp_path: Path) -> None:
    manifest = manifest_of(recipe, RECIPES[recipe])
    write_run(tmp_path / "simulated", manifest)
    expected = simulated(manifest, tmp_path / "simulated")
    assert real(manifest, tmp_path / "real") == expected
    # The control: from another seed the same peers come to something else.
    other = manifest_of(recipe, RECIPES[recipe], seed=1)
    assert set(simulated(other, tmp_path / "simulated").values()).isdisjoint(expected.values())
