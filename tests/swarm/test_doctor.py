"""`murmur doctor` against a live run: real peers dial it back, tell their time and give it a piece of the state."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from node.options import LISTEN_ON_LOOPBACK
from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, manifest_with, running_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]


def findings(swarm: ProcessSwarm, home: Path) -> dict[str, dict[str, Any]]:
    link = f"murmur://{swarm.manifest.run_id}@{swarm.peers[0].addresses()[0]}"
    words = ["doctor", link, "--dir", str(home), "--listen", LISTEN_ON_LOOPBACK, "--json"]
    done = subprocess.run([sys.executable, "-m", "node.cli", *words], capture_output=True, text=True, timeout=100)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == int(any(finding["level"] == "fail" for finding in found.values())), done.stderr
    return found


def test_the_peers_of_a_run_tell_what_a_newcomer_wants_to_know(tmp_path: Path) -> None:
    manifest = manifest_with(
        run={"min_peers": 2}, data={"source": "python-stdlib", "path": ""}, target={"rounds": ENDLESS}
    )
    with running_swarm(tmp_path, manifest, peers=2) as swarm:
        swarm.start()
        swarm.wait_for_round(2)
        found = findings(swarm, tmp_path / "newcomer")
        assert found["peers"]["level"] == "ok" and found["peers' version"]["level"] == "ok"
        assert found["clock"]["level"] == "ok" and "the run's peers" in found["clock"]["found"]
        assert "2 of 2 peers could connect" in found["ports"]["found"], "each dialled back"
        assert found["nat"]["level"] == "ok" and found["bandwidth"]["level"] == "ok"
        # All of them are on this machine: nobody can say how the internet sees it, and that is said.
        assert "cannot tell" in found["public peers"]["found"]
        assert not (tmp_path / "newcomer").exists()
        # Whoever is left tells as much.
        swarm.peers[1].kill()
        again = findings(swarm, tmp_path / "newcomer")
        assert again["bandwidth"]["level"] == "ok"
