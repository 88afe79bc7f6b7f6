"""Exact steps of real processes: the weights are those of one process, bit for bit, also over faults."""

from pathlib import Path

import pytest
import torch

from benchmarks.pipelining.exact_difference import explain_difference
from benchmarks.pipelining.exact_reference import SingleProcess, read_stages
from protocol.manifest.reading import load_manifest
from tests.swarm.stages.test_pipeline import final_status, run_up

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

RUN = Path(__file__).parent / "exact.toml"
# Each trainer dies before the daemon learns of its 25th gradient; answers and outcomes are lost, tasks come twice.
FAULTS = "kill=trainer:added:25,answers=drop:31,outcomes=drop:29,tasks=copy:23"


def test_exact_steps_are_bit_equal_to_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "swarm"
    report = run_up(folder, run=RUN, faults=FAULTS)
    assert report["agreed"], report
    statuses = [final_status(peer) for peer in sorted(folder.glob("peer-*"))]
    assert sum(status["trainer_restarts"] for status in statuses) >= 2, "trainers died"
    assert sum(status["microbatches"]["served: lost"] for status in statuses) > 0, "sums died with them"
    stages = read_stages(folder)
    steps = {stage.steps for stage in stages}
    assert len(stages) == 4 and len(steps) == 1
    whole = SingleProcess(load_manifest(RUN), folder)
    weights = whole.run(min(steps))
    differing = {stage.stage: float((stage.anchor - weights[stage.stage]).abs().max()) for stage in stages}
    assert not any(differing.values()), (
        explain_difference(folder),
        differing,
        [status["microbatches"] for status in statuses],
    )
    assert not torch.equal(whole.run(1)[0], weights[0]), "control: another step gives other weights"
