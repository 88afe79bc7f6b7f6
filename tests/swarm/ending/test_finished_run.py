"""The end of a run: a host that holds the model, a last peer that waits for one, and those who come too late."""

import contextlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx2
import pytest

from node.commands.up.peer_process import PeerProcess
from node.monitoring.training_log.file import METRICS_FILE
from node.processes.process import python_environment
from protocol.manifest.run import Manifest
from tests.swarm.process_swarm import START_SECONDS, manifest_with, running_swarm
from tests.swarm.test_dashboard import DashboardProcess

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

ROUNDS = 5
END_SECONDS = START_SECONDS + 60.0
EVERYWHERE = {"source": "python-stdlib", "path": ""}
LOCAL = {"source": "text", "path": "corpus.txt"}  # next to the manifest, and nowhere else


def short_run(min_peers: int = 1, data: Mapping[str, str] = EVERYWHERE, inner_steps: int = 20) -> Manifest:
    return manifest_with(
        run={"min_peers": min_peers},
        data=data,
        method={"schedule": {"inner_steps": inner_steps}},
        target={"rounds": ROUNDS},
    )


@contextlib.contextmanager
def hosted_run(folder: Path, manifest: Manifest, *options: str) -> Iterator[DashboardProcess]:
    with running_swarm(folder, manifest, peers=0) as swarm:
        scene = DashboardProcess(swarm, *options)
        try:
            scene.start()
            yield scene
        finally:
            scene.host.kill()


def wait_for_end(scene: DashboardProcess, peer: PeerProcess) -> str:
    """Wait until a peer has ended successfully; return its log."""
    scene.swarm.wait_until(lambda: peer.returncode is not None, f"{peer.name} has ended", END_SECONDS)
    log = scene.swarm.log(peer)
    assert peer.returncode == 0, log
    return log


def export(source: str, out: Path) -> None:
    command = [sys.executable, "-m", "node.cli", "export", source, str(out)]
    ended = subprocess.run(command, env=python_environment(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and f"the model of round {ROUNDS} is in {out}" in ended.stdout, ended.stderr


def evaluate(source: str) -> None:
    command = [sys.executable, "-m", "node.cli", "eval", source, "--limit", "8", "--json"]
    ended = subprocess.run(command, env=python_environment(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    loss, *_ = json.loads(ended.stdout)["results"]
    assert (loss["task"], loss["metric"], loss["round"]) == ("validation", "loss", ROUNDS)
    assert loss["tokens"] and 0 < loss["value"] < 6


def load(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert len(transformers.AutoTokenizer.from_pretrained(folder)("def ").input_ids) == 4 and model.num_parameters()


def test_model_of_a_finished_run_is_on_its_host_when_all_trainers_have_gone(tmp_path: Path) -> None:
    with hosted_run(tmp_path, short_run(min_peers=2)) as scene:
        ada, bob = (scene.join(f"{scene.base}/run.toml", name, name) for name in ("ada", "bob"))
        for peer in (ada, bob):
            assert "model: " in wait_for_end(scene, peer)
        assert scene.state()["model"]["round"] == ROUNDS and scene.state()["model"]["is_final"]
        assert "holding the final state" in scene.output()

        late = scene.join(f"{scene.base}/run.toml", "late")
        told = wait_for_end(scene, late)
        assert f"the run is over: round {ROUNDS}" in told and "trainer" not in told
        assert f"model: {scene.base}/model" in told and not list(late.folder.glob("checkpoints/*"))
        again = wait_for_end(scene, restarted(ada))
        assert f"the run is over: round {ROUNDS}" in again.rpartition("starts at")[2]

        answer = httpx2.get(f"{scene.base}/model", timeout=120)
        assert answer.status_code == 200
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
            archive.extractall(tmp_path, filter="data")
        load(tmp_path / f"test-round-{ROUNDS}")
        link = f"murmur://{scene.swarm.manifest.run_id}@{scene.host.addresses()[0]}"
        export(link, tmp_path / "link")
        weights = (tmp_path / f"test-round-{ROUNDS}" / "model.safetensors").read_bytes()
        assert (tmp_path / "link" / "model.safetensors").read_bytes() == weights
        evaluate(f"{scene.base}/run.toml")
        last = json.loads((scene.host.folder / METRICS_FILE).read_text().splitlines()[-1])
        assert last["round"] == ROUNDS and last["loss"] > 0 and last["step"] == 0, "a host that only watches"


def restarted(peer: PeerProcess) -> PeerProcess:
    peer.start(())
    return peer


@pytest.mark.nightly
def test_last_peer_stays_until_a_host_holds_the_final_state(tmp_path: Path) -> None:
    """A host that keeps nothing does not release it; one that does, does."""
    with hosted_run(tmp_path, short_run(data=LOCAL), "--no-keep") as scene:
        scene.swarm.wait_until(lambda: bool(scene.host.addresses()), "the host has an address")
        ada = scene.join(str(scene.swarm.run), "ada", peers=scene.host.addresses()[:1])
        waiting = "waiting until 1 other machine holds the final model"
        scene.swarm.wait_until(lambda: waiting in scene.swarm.log(ada), "it waits", 120)
        [status] = scene.swarm.poll(ada)
        assert (status.phase, status.round) == ("done", ROUNDS) and waiting in status.reason
        assert scene.get("/model").status_code == 404 and scene.state()["model"] is None
        late = scene.join(str(scene.swarm.run), "late-by-file", peers=ada.addresses()[:1])
        assert "the run is over" in wait_for_end(scene, late)
        without_text = scene.join(f"{scene.base}/run.toml", "without-text")
        assert "the run is over" in wait_for_end(scene, without_text)
        assert ada.is_running, "who came too late holds nothing"

        scene.host.kill()
        keeping = DashboardProcess(scene.swarm)
        keeping.start()
        try:
            wait_for_end(scene, ada)
            assert "holding the final state" in keeping.output()
        finally:
            keeping.host.kill()


@pytest.mark.nightly
def test_run_goes_on_from_the_state_of_a_host_when_all_trainers_have_gone(tmp_path: Path) -> None:
    run = short_run(inner_steps=100)  # a state that is gone after a seventh of a second can hardly be fetched
    manifest = run.model_copy(update={"target": run.target.model_copy(update={"rounds": 10_000})})
    with hosted_run(tmp_path, manifest) as scene:
        ada = scene.join(f"{scene.base}/run.toml", "ada")
        scene.swarm.wait_until(lambda: scene.state()["model"] is not None, "the host holds a state", 120)
        held = scene.state()["model"]["round"]
        ada.kill()
        scene.swarm.peers.remove(ada)
        scene.swarm.wait_until(lambda: scene.state()["active"] == 0, "the host sees nobody", 60)
        bob = scene.join(f"{scene.base}/run.toml", "bob")
        scene.swarm.wait_for_round(held + 1, bob, seconds=120)
        log = scene.swarm.log(bob)
        assert f"round {held + 1}: 1 contribution, ours included" in log, log
        assert "round 1: 1 contribution, ours included" not in log, "it did not begin anew"
