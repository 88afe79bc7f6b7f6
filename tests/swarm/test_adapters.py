"""Peers train an adapter of a model that each of them has; one dies and comes back, and all hold the same bits."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from node.daemon.checkpoints.trained_weights import load_trained_weights
from node.model import shape_table
from node.model.weight_files import read_frozen
from protocol.manifest.run import Manifest
from tests.node.data.chats import write_talks
from tests.node.model.weights_folder import start_from_weights
from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, manifest_with, running_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSwarm]:
    folder = tmp_path_factory.mktemp("adapters")
    base = start_from_weights(manifest_with(target={"rounds": ENDLESS}, membership={"expiry": 6.0}), folder / "base")
    values = base.model_dump(mode="json", exclude_none=True)
    values |= {"adapter": {"rank": 4, "base": "int8"}, "method": {"recipe": "frugal", "schedule": {"inner_steps": 4}}}
    values["data"] |= {"path": "talks.jsonl", "validation_share": 0.2, "chat": {}}
    values["model"] |= {"context": 64}
    write_talks(folder / "talks.jsonl", 60)
    manifest = Manifest.model_validate_json(json.dumps(values))
    with running_swarm(folder, manifest, 3, "--base-model", str(folder / "base")) as made:
        made.start()
        made.wait_for_round(2)
        yield made


def folder_of(swarm: ProcessSwarm, index: int) -> Path:
    return swarm.peers[index].folder


def test_a_killed_peer_comes_back_and_all_agree(swarm: ProcessSwarm) -> None:
    swarm.wait_for_agreement(after=1)
    victim, *others = swarm.peers
    number = max(status.round for status in swarm.poll(*others))
    swarm.kill_peer(victim)
    swarm.wait_for_round(number + 2, *others)
    victim.start(others[0].addresses()[:1])
    swarm.wait_for_agreement(after=number + 2)


def test_a_peer_with_another_base_ends_with_one_line(swarm: ProcessSwarm) -> None:
    other = swarm.run.parent / "other"
    start_from_weights(manifest_with(model={"context": 64, "hidden": 72}), other)
    stranger = swarm.add_peer("--base-model", str(other))
    stranger.start(swarm.peers[0].addresses()[:1])
    swarm.wait_until(lambda: not stranger.is_running, "it ends")
    swarm.peers.remove(stranger)
    assert stranger.returncode not in (0, 1) and "does not have this model's weights" in swarm.log(stranger)


def test_the_adapter_has_learned_what_it_holds_alone(swarm: ProcessSwarm) -> None:
    swarm.wait_for_round(6)
    trained = load_trained_weights(folder_of(swarm, 1))
    assert trained.anchor.numel() == shape_table(trained.manifest.model).numel < 10_000
    frozen = read_frozen(trained.manifest.model, folder_of(swarm, 1))
    assert frozen is not None
    assert torch.isfinite(trained.anchor).all() and trained.anchor.any()
    statuses = swarm.poll()
    assert all(status.validation_loss and status.validation_loss < 5.5 for status in statuses)
