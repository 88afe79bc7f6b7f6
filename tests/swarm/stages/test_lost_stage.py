"""A stage survives its peers: another stage's peer keeps its state, and the organiser's word reaches a new one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from node.commands.steer import SteerOptions, steer
from node.model import shape_table
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, running_swarm
from tests.swarm.stages.test_pipeline import RUN
from tests.swarm.test_steering import Organiser

pytestmark = [pytest.mark.swarm, pytest.mark.nightly, pytest.mark.timeout(500)]

TAKEN = re.compile(r"fetching the state of round (\d+)")


def manifest_of(organiser: Organiser) -> Manifest:
    """One peer of a stage suffices to begin."""
    manifest = load_manifest(RUN)
    run = manifest.run.model_copy(update={"min_peers": 2, "organiser_key": organiser.identity.peer_id})
    target = manifest.target.model_copy(update={"rounds": ENDLESS})
    return manifest.model_copy(update={"run": run, "target": target})


def export_of(swarm: ProcessSwarm, out: Path) -> str:
    """Ask the peers of the run for its model, as anybody may."""
    address = swarm.peers[0].addresses()[0]
    command = [sys.executable, "-m", "node.cli", "export", str(swarm.run), str(out), "--peer", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr + swarm.describe()
    return done.stdout


def test_model_of_a_pipeline_that_goes_on_is_fetched_from_the_peers_of_its_stages(tmp_path: Path) -> None:
    with running_swarm(tmp_path, manifest_of(Organiser(tmp_path)), 0) as swarm:
        swarm.add_peer("--stage", "0")
        swarm.add_peer("--stage", "1")
        swarm.start()
        swarm.wait_for_round(1)
        assert re.fullmatch(r"the model of round [1-9]\d* is in .*\n", export_of(swarm, tmp_path / "model"))
        weights = load_file(tmp_path / "model" / "model.safetensors")
        assert sum(tensor.numel() for tensor in weights.values()) == shape_table(swarm.manifest.model).numel


def test_stage_whose_only_peer_is_killed_goes_on_from_the_state_that_another_stage_keeps(tmp_path: Path) -> None:
    """Without a keeper it begins at the initial weights, as tests/node/loop/test_kept_states.py shows."""
    organiser = Organiser(tmp_path)
    with running_swarm(tmp_path, manifest_of(organiser), 0) as swarm:
        first, lost = swarm.add_peer("--stage", "0"), swarm.add_peer("--stage", "1")
        swarm.start()
        swarm.wait_until(lambda: "holding the state of stage 1" in swarm.log(first), "the first peer keeps stage 1")
        swarm.kill_peer(lost)
        heir = swarm.add_peer("--stage", "1")
        heir.start(first.addresses()[:1])
        before = swarm.poll(first)[0].round
        swarm.wait_for_round(before + 2, first, heir)
        taken = TAKEN.search(swarm.log(heir))
        assert taken is not None and int(taken[1]) > 0, swarm.log(heir)
        steer(SteerOptions(run=str(first.folder), action="stop", key=organiser.key))
        swarm.wait_until(lambda: not (first.is_running or heir.is_running), "both stages have followed the organiser")
        ends = swarm.poll(first, heir)
        assert [(status.phase, status.revision) for status in ends] == [("done", 1)] * 2, swarm.describe()
        assert ends[0].round == ends[1].round
