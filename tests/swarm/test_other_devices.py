"""A node that is stopped and started with another number of devices goes on from its checkpoint on disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from node.commands.up.peer_process import PeerProcess
from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, isolated_processes, join_command, manifest_with

pytestmark = [pytest.mark.swarm, pytest.mark.nightly, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    with isolated_processes():
        yield


def test_checkpoint_of_two_ranks_is_resumed_by_one_and_the_reverse(tmp_path: Path) -> None:
    """Control: a node in a new folder begins with its first steps."""
    swarm = ProcessSwarm(tmp_path, manifest_with(run={"min_peers": 1}, target={"rounds": ENDLESS}), 1)
    made, rounds = 0, 0
    for devices, folder in (("cpu,cpu", "a"), ("cpu", "a"), ("cpu,cpu", "a"), ("cpu", "b")):
        first, last = train_a_round(swarm, tmp_path / folder, devices)
        is_resumed = first[1] >= made and first[0] >= rounds
        assert is_resumed is (folder == "a"), (devices, first, made, rounds)
        rounds, made = last


def train_a_round(swarm: ProcessSwarm, folder: Path, devices: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Let a node with these devices train for two rounds; return rounds and steps at its first step and at its end."""
    command = join_command(swarm.run, folder, "--devices", devices)
    del command[(at := command.index("--device")) : at + 2]
    swarm.peers[0] = peer = PeerProcess(folder.name, folder, command)
    seen: list[tuple[int, int]] = []

    def has_trained() -> bool:
        for status in swarm.poll(peer):
            if status.step and status.ranks == len(devices.split(",")):
                assert not status.setbacks
                seen.append((status.round, status.step))
        return bool(seen) and seen[-1][0] > seen[0][0]

    swarm.start_first()
    swarm.wait_until(has_trained, f"a round with {devices}")
    swarm.leave()
    return seen[0], seen[-1]
