"""A pipeline of four peers, two of which are behind home routers: one at each of its two stages."""

from pathlib import Path

import pytest

from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from tests.netlab.lab.lab_swarm import LabSwarm, running_lab_swarm
from tests.netlab.lab.laboratory import Laboratory, Link
from tests.swarm.process_swarm import ENDLESS

pytestmark = [pytest.mark.netlab, pytest.mark.nightly, pytest.mark.timeout(180)]

LINK = Link(up=50, down=100, delay=0.01)
CIRCUIT_BYTES = 128 * 1024  # that a relay passes on
ROUNDS, SERVED = 3, 30


def manifest() -> Manifest:
    """The small pipeline of the tests, with activations that no circuit relay passes on."""
    values = load_manifest(Path(__file__).parents[1] / "swarm" / "stages" / "pipeline.toml").model_dump(
        exclude_none=True
    )
    values["model"] |= {"width": 64, "context": 64}
    values["train"] |= {"batch_tokens": 4 * 12 * 64}
    values["pipeline"] |= {"microbatch": 12, "memory": 16 * 2**20}
    values["method"]["schedule"] |= {"inner_steps": 3}
    values["data"] |= {"source": "text", "path": "corpus.txt"}
    values["target"] = {"rounds": ENDLESS}
    return Manifest.model_validate(values)


def has_worked(swarm: LabSwarm) -> bool:
    """Return whether each peer was in some rounds, and served more microbatches than it can have of its own."""
    statuses = swarm.poll()
    return len(statuses) == len(swarm.peers) and all(
        status.contributions_included >= ROUNDS and status.microbatches.get("served: computed", 0) >= SERVED
        for status in statuses
    )


def test_hidden_peers_of_both_stages_take_part(laboratory: Laboratory, tmp_path: Path) -> None:
    run = manifest()
    assert run.pipeline.activation_bytes(run.model.context, run.model.width) > 1.4 * CIRCUIT_BYTES
    nodes = [*(laboratory.node(LINK) for _ in range(2))]
    nodes += [laboratory.node(behind=laboratory.router(LINK)) for _ in range(2)]
    with running_lab_swarm(tmp_path, run, laboratory, nodes) as swarm:
        swarm.start()
        swarm.wait_until(lambda: has_worked(swarm), "all four work, and their work is taken")
        statuses = swarm.poll()
        print([(status.stage, status.round, status.microbatches) for status in statuses])
        assert all(status.microbatches["replayed"] == 0 for status in statuses), "no activation was out of reach"
