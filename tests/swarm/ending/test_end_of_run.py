"""The end of a run at its host: three real peers, one killed on the way; the end screen, the report, the receipts."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from node.commands.status import status_lines
from node.commands.up.peer_process import PeerProcess
from node.dashboard.run_report import RunReport
from tests.swarm.process_swarm import manifest_with, running_swarm
from tests.swarm.test_dashboard import DashboardProcess, browser_page, screenshots

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

ROUNDS = 12
OVER = re.compile(r"the run is over: round (\d+), ([\d,]+) tokens, validation loss ([\d.]+)$", re.MULTILINE)


def murmur(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "node.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def last_measured_round(scene: DashboardProcess) -> int:
    points = scene.get("/api/v1/history?series=validation").json()["points"]
    return int(points[-1][0]) if points else -1


def require_one_figure_of_each(scene: DashboardProcess, report: RunReport, nodes: Sequence[PeerProcess]) -> None:
    """Compare the page, the state, the report's file, the last lines of the nodes and their status with the report."""
    assert report.validation_loss is not None and report.validation_round in (None, ROUNDS)
    loss, tokens = f"{report.validation_loss:.3f}", f"{report.tokens:,}"
    state = scene.state()
    assert (state["round"], state["tokens"], f"{state['validation']:.3f}") == (ROUNDS, report.tokens, loss)
    for text in (scene.get("/").text, scene.get("/report.md").text, (scene.host.folder / "report.md").read_text()):
        assert loss in text and tokens in text
    for node in nodes:
        last = OVER.search(scene.swarm.log(node))
        assert last and last.groups() == (str(ROUNDS), tokens, loss), scene.swarm.log(node)
        status, *_ = status_lines(node.folder, as_json=False, check=False)
        assert f"when it ended: round {ROUNDS}/{ROUNDS}" in status and "the target was reached" in status, status


def test_end_screen_report_and_receipts_of_a_real_run(tmp_path: Path) -> None:
    manifest = manifest_with(
        run={"min_peers": 2},
        data={"source": "python-stdlib", "path": ""},  # there is nothing but the link
        method={"recipe": "diloco", "schedule": {"inner_steps": 30}},
        target={"rounds": ROUNDS},
    )
    with running_swarm(tmp_path, manifest, peers=0) as swarm:
        scene = DashboardProcess(swarm)
        try:
            scene.start()
            for name in ("ada", "bob", "eve"):
                scene.join(f"{scene.base}/run.toml", name, name)
            scene.wait_for_round(4, 90)
            swarm.peers[2].kill()
            swarm.wait_until(lambda: bool(scene.state()["end_version"]), "the run is over", 120)
            swarm.wait_until(lambda: last_measured_round(scene) == ROUNDS - 1, "the last round is measured", 60)
            folder = scene.host.folder
            swarm.wait_until(lambda: (folder / "report.md").exists(), "the host has written its report")
            report = RunReport.model_validate(scene.get("/report.json").json())
            assert (report.outcome, report.rounds, report.missing_rounds) == ("done", ROUNDS, 0)
            assert {one.name for one in report.contributors} == {"ada", "bob", "eve"}
            assert sum(one.tokens for one in report.contributors) == report.tokens

            survivors = swarm.peers[:2]
            swarm.wait_until(
                lambda: all(peer.returncode is not None for peer in survivors), "the others have ended", 60
            )
            require_one_figure_of_each(scene, report, survivors)

            overview = scene.get("/receipts.json").json()
            counted = {one["peer"]: (one["tokens"], one["rounds"]) for one in overview["peers"]}
            assert counted == {one.peer: (one.tokens, one.rounds) for one in report.contributors}
            files = [tmp_path / f"{name}.json" for name in ("ada", "bob", "eve")]
            for one, file in zip(overview["peers"], files, strict=True):
                file.write_bytes(scene.get(f"/receipts/{one['peer']}.json").content)
            (tmp_path / "commits.log").write_bytes(scene.get("/commits.log").content)
            verified = murmur("verify", *files, tmp_path / "commits.log")
            assert verified.returncode == 0, verified.stderr
            assert f"together {report.tokens:,} of {report.tokens:,} tokens of the run, exactly" in verified.stdout

            forged = json.loads(files[0].read_text())
            forged["tokens"] += 1
            files[0].write_text(json.dumps(forged))
            refused = murmur("verify", files[0], tmp_path / "commits.log")
            assert (
                refused.returncode == 15 and refused.stderr.count("\n") == 1 and "changed, or forged" in refused.stderr
            )

            with browser_page(viewport={"width": 1400, "height": 1000}) as page:
                page.goto(scene.base)
                page.wait_for_selector("#end tbody tr")
                page.wait_for_selector("#end a[href='/model']", timeout=60_000)
                page.wait_for_selector("#end pre", timeout=60_000)
                assert "is complete" in page.text_content("#end h2") and page.locator("#end tbody tr").count() == 3
                page.screenshot(path=screenshots(tmp_path) / "end-of-a-real-run.png", full_page=True)
                assert page.faults == []
            own = murmur("receipt", swarm.peers[0].folder)
            assert own.returncode == 0 and "together" in own.stdout, own.stderr
        finally:
            scene.host.kill()
