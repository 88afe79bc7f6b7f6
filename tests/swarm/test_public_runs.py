"""A host that announces its run, and somebody who has never heard of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.swarm.process_swarm import running_swarm
from tests.swarm.test_dashboard import DashboardProcess, open_run

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]


def listed(address: str) -> list[dict[str, Any]]:
    words = [sys.executable, "-m", "node.cli", "runs", "--peer", address, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("public", [True, False])
def test_a_run_is_listed_if_its_host_asks_for_it(tmp_path: Path, public: bool) -> None:
    """The control asks for nothing, and is on no list."""
    with running_swarm(tmp_path, open_run(), peers=0) as swarm:
        scene = DashboardProcess(swarm, *(["--public"] if public else []))
        try:
            scene.start()
            swarm.wait_until(lambda: bool(scene.host.addresses()), "where the host is")
            address = scene.host.addresses()[0]
            found = listed(address)
            if not public:
                assert found == []
                return
            while not found:  # it announces itself a moment after it has opened; the test has a deadline
                found = listed(address)
            assert [run["run_id"] for run in found] == [swarm.manifest.run_id]
            assert found[0]["organiser"] == scene.state()["organiser"]
            # The link is one that leads there: the doctor takes it.
            words = [sys.executable, "-m", "node.cli", "doctor", found[0]["link"], "--json"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=90, cwd=tmp_path)
            checks = {finding["check"]: finding["level"] for finding in json.loads(done.stdout)}
            assert checks["run"] == checks["peers"] == "ok"
        finally:
            scene.host.kill()
