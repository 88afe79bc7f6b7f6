"""`murmur up` trains a model that no peer holds: stages, random routes, a peer that dies and comes back."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from node.dashboard.event_log import EventLog, read_events
from node.injected_faults import VARIABLE
from node.processes.process import python_environment

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(900)]

RUN = Path(__file__).parent / "pipeline.toml"
PEERS, STAGES = 4, 2
ROUNDS, FALL = 10, 0.4
DRILL_ROUNDS, DRILL_FALL = 26, 1.0  # who dies half-way comes back in the other half, also if a start takes a minute
FAULTS = "answers=drop:401,outcomes=drop:301,tasks=copy:211"  # some messages are lost or come again


def run_up(folder: Path, *options: str, run: Path = RUN, faults: str = FAULTS) -> dict[str, Any]:
    words = ["up", str(run), "--dir", str(folder), "--peers", str(PEERS), "--json", *options]
    command = [sys.executable, "-m", "node.cli", *words]
    ended = subprocess.run(
        command, env={**python_environment(), VARIABLE: faults}, capture_output=True, text=True, timeout=800
    )
    assert ended.returncode == 0, ended.stderr + _logs(folder)
    return dict(json.loads(ended.stdout))


def _logs(folder: Path) -> str:
    return "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("peer-*/log")))


def final_status(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "status.json").read_text()))


def require_learned(folder: Path, report: dict[str, Any], fall: float) -> None:
    """Both stages agree, all peers worked, and the page has the losses of the last stage."""
    assert report["validation_loss"] < report["initial_validation_loss"] - fall, report
    assert report["agreed"] and sorted(report["stages"].values()) == sorted([*range(STAGES)] * 2)
    digests = {(report["stages"][peer], digest) for peer, digest in report["digests"].items()}
    assert len(digests) == STAGES, "one digest for each stage, and another for each"
    statuses = [final_status(peer) for peer in sorted(folder.glob("peer-*"))]
    # A peer that came back counts from its second start, which a slow machine makes in the last rounds.
    counts = [status["microbatches"] for status in statuses]
    assert sum(count["done"] > 0 for count in counts) >= PEERS - 1, "each sends microbatches of its own text"
    assert sum(count["served: computed"] > 0 for count in counts) >= PEERS - 1
    page = EventLog(None, read_events(folder / "page" / "events.jsonl")).state
    losses = [row.loss for row in page.rows]
    assert len(losses) > report["rounds"] / 2 and losses[-1] < losses[0] - fall, losses
    assert page.rows.last is not None and page.rows.last.tokens > 0 and not page.missing_rounds


def test_pipeline_learns_and_exports_the_whole_model(tmp_path: Path) -> None:
    folder = tmp_path / "swarm"
    report = run_up(folder, "--rounds", str(ROUNDS), "--http", "127.0.0.1:0")
    require_learned(folder, report, FALL)
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(report["export"])
    assert model.num_parameters() == report["parameters"]


@pytest.mark.nightly
def test_pipeline_learns_over_a_death(tmp_path: Path) -> None:
    folder = tmp_path / "swarm"
    report = run_up(folder, "--drill", "--rounds", str(DRILL_ROUNDS), "--http", "127.0.0.1:0")
    assert (report["peers_lost"], report["peers_rejoined"]) == (1, 1)
    require_learned(folder, report, DRILL_FALL)
