"""`murmur up --http`: a page from before the first round to the last sample."""

import re
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from node.dashboard.event_log import EventLog, read_events
from node.dashboard.json_views import run_status
from node.processes.process import python_environment

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
START_SECONDS = 90.0


def test_local_swarm_has_a_page_and_keeps_its_events(tmp_path: Path) -> None:
    folder, output = tmp_path / "swarm", tmp_path / "output"
    words = [sys.executable, "-m", "node.cli", "up", str(ROOT / "configs" / "test.toml"), "--dir", str(folder)]
    with output.open("w") as file:
        process = subprocess.Popen(
            [*words, "--http", "127.0.0.1:0"], stdout=file, stderr=file, cwd=tmp_path, env=python_environment()
        )
    try:
        state = httpx2.get(f"{wait_for_page(process, output)}api/v1/state", timeout=10).json()
        assert (state["run"], state["round"]) == ("test", 0), "the page is there before the first round"
        assert process.wait(200) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    recorded = EventLog(None, read_events(folder / "page" / "events.jsonl")).state
    assert run_status(recorded)[0] == "done" and recorded.sample is not None and recorded.sample.round == 8
    assert sorted(peer.report.name for peer in recorded.peers.values()) == ["peer-0", "peer-1", "peer-2"]
    assert "murmur replay" in output.read_text()


def wait_for_page(process: subprocess.Popen[bytes], output: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        found = re.search(r"^page: (\S+)$", output.read_text(), re.MULTILINE)
        if found:
            return found[1]
        time.sleep(0.1)
    raise AssertionError(output.read_text())
