"""The examples in swarms: a plain loop and transformers' Trainer beside an ordinary peer, and models of their own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import murmuration
from examples.custom_model import build_model
from node.monitoring.status import NodeStatus
from node.monitoring.training_log.file import METRICS_FILE
from node.options import LISTEN_ON_LOOPBACK
from node.run_dir import read_json_if_whole
from tests.swarm.process_swarm import isolated_processes, manifest_with, running_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
ROUNDS = 6
PATIENT = {"grace": 30.0, "leader_timeout": 20.0, "exchange_timeout": 60.0}


class Script:
    """An example in a process of its own, and the folder of its node."""

    def __init__(self, name: str, run: Path, peers: Sequence[str] = (), folder: str = "") -> None:
        self.home = run.parent / (folder or name)
        self._log = self.home.with_suffix(".log")
        contacts = [word for address in peers for word in ("--peer", address)]
        options = ["--listen", LISTEN_ON_LOOPBACK, "--threads", "1", *contacts]
        self._command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(run), "--dir", str(self.home), *options]
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, cwd=self._log.parent
            )

    @property
    def text(self) -> str:
        return self._log.read_text()

    @property
    def daemon_log(self) -> str:
        log = self.home / "daemon.log"
        return log.read_text() if log.exists() else ""

    def last_loss(self) -> float:
        """Return the loss that the script printed when it left; the lines of its node follow."""
        return float(re.findall(r"^left at .*loss ([\d.]+)$", self.text, re.MULTILINE)[-1])

    def addresses(self) -> list[str]:
        return list(read_json_if_whole(self.home / "node.json").get("addresses", []))[:1]

    def describe(self) -> str:
        return f"{self.text[-2000:]}\n{self.daemon_log[-2000:]}"

    def final_status(self) -> NodeStatus | None:
        path = self.home / "status.json"
        return NodeStatus.model_validate(json.loads(path.read_text())) if path.exists() else None


def wait_until(condition: Callable[[], bool], describe: Callable[[], str], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.05)


@pytest.mark.nightly
def test_loops_of_the_user_train_beside_an_ordinary_peer(tmp_path: Path) -> None:
    manifest = manifest_with(
        run={"min_peers": 3}, target={"rounds": ROUNDS}, round=PATIENT, method={"schedule": {"inner_steps": 8}}
    )
    with running_swarm(tmp_path, manifest, 1) as swarm:
        swarm.start_first()
        contacts = swarm.peers[0].addresses()[:1]
        plain, callback = (Script(name, swarm.run, contacts) for name in ("own_loop", "hugging_face"))
        for script in (plain, callback):  # both import transformers first
            code = script.process.wait(240)
            assert code == 0, script.describe()
            assert f"left at round {ROUNDS}" in script.text
        swarm.wait_until(lambda: all(each.final_status() for each in (plain, callback)), "both nodes have ended")
        [ordinary] = swarm.poll()
        told = [status for each in (plain, callback) if (status := each.final_status())]
        assert {status.digest for status in told} == {ordinary.digest}
        assert all(status.contributions_included >= 2 for status in told), told
        for home in (plain.home, callback.home, swarm.peers[0].folder):
            last = json.loads((home / METRICS_FILE).read_text().splitlines()[-1])
            assert last["round"] == ROUNDS and last["step"] >= 8 and last["loss"] > 0, "each kind of node has metrics"


CUSTOM = """
[run]
name = "patterns"
min_peers = 2
[model]
kind = "custom"
tensors = "shapes.json"
[data]
source = "own"
[train]
batch_tokens = 64
learning_rate = 0.05
[round]
grace = 30.0
leader_timeout = 20.0
[method]
recipe = "diloco"
schedule = { inner_steps = 200 }
[target]
rounds = 30
"""


def test_loops_train_a_model_of_their_own_and_survive_a_kill(tmp_path: Path) -> None:
    murmuration.describe(build_model(), tmp_path / "shapes.json")
    (tmp_path / "run.toml").write_text(CUSTOM)
    with isolated_processes():
        first = Script("custom_model", tmp_path / "run.toml", folder="first")
        wait_until(lambda: bool(first.addresses()), first.describe)
        second = Script("custom_model", tmp_path / "run.toml", first.addresses(), folder="second")
        wait_until(lambda: "round 2:" in second.daemon_log, second.describe)
        second.process.send_signal(signal.SIGKILL)
        second.process.wait()
        wait_until(lambda: "this node stays in the run" in second.daemon_log, second.describe)
        wait_until(lambda: "round 6:" in first.daemon_log, first.describe)  # which needs the votes of both nodes
        second.start()
        for script in (first, second):
            assert script.process.wait(240) == 0, script.describe()
            assert "left at round 30" in script.text and script.last_loss() < 0.1, "of ln 8 = 2.1 at the start"
        wait_until(lambda: bool(first.final_status() and second.final_status()), second.describe)
        told = [status for each in (first, second) if (status := each.final_status())]
        assert len({status.digest for status in told}) == 1
        assert all(status.contributions_included >= 2 for status in told), told
        assert not any("Traceback" in script.daemon_log for script in (first, second))
