"""A peer that holds the whole model takes part in a pipelined run: its work is in the rounds of both stages."""

import re
from pathlib import Path

import pytest

from node.commands.up.peer_process import PeerProcess
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, isolated_processes

pytestmark = [pytest.mark.swarm, pytest.mark.nightly, pytest.mark.timeout(240)]

STAGES = ("0", "1", "all")
INCLUDED = 1


class StagedSwarm(ProcessSwarm):
    """Two peers with a stage each, and one with both."""

    def _make_peer(self, index: int, *more: str) -> PeerProcess:
        return super()._make_peer(index, "--verbose", "--stage", STAGES[index], *more)

    def included(self) -> list[int]:
        """Return how many contributions of the full replica the rounds of each stage have."""
        text = self.log(self.peers[2])
        heads = [set(re.findall(r"round \d+ has the digest \w+", self.log(peer))) for peer in self.peers[:2]]
        taken = re.findall(r"ours included.*\n.*?(round \d+ has the digest \w+)", text)
        return [sum(head in of_stage for head in taken) for of_stage in heads]


def manifest() -> Manifest:
    values = load_manifest(Path(__file__).parent / "pipeline.toml").model_dump(exclude_none=True)
    values["data"] |= {"source": "text", "path": "corpus.txt"}
    values["method"]["schedule"] |= {"inner_steps": 5}
    values["target"] = {"rounds": ENDLESS}
    return Manifest.model_validate(values)


def test_full_replica_contributes_to_every_stage_and_agrees_with_its_peers(tmp_path: Path) -> None:
    with isolated_processes():
        swarm = StagedSwarm(tmp_path, manifest(), len(STAGES))
        try:
            swarm.start()
            swarm.wait_until(lambda: min(swarm.included()) >= INCLUDED, "its work is in rounds of both stages")
            both = swarm.poll(swarm.peers[2])[0]
            print(f"included by stage: {swarm.included()}, microbatches: {both.microbatches}")
            assert both.microbatches["done"] > 0 and both.microbatches["replayed"] == 0
        finally:
            swarm.kill()
