"""One process dies or sleeps; the run goes on. One swarm for all tests of this file, whole again after each.

It trains a mixture of experts from weights of which the first peer alone has a copy.
"""

import os
from collections.abc import Iterator

import pytest

from node.commands.up.peer_process import PeerProcess
from protocol.consensus.quorum import Election
from protocol.manifest.reading import load_manifest
from tests.node.model.weights_folder import start_from_weights
from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, daemon_pid, manifest_with, running_swarm
from tests.swarm.processes import find_p2pd, find_trainer, process_tree

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

EXPERTS = {"kind": "qwen3-moe", "hidden": 16, "experts": 4, "experts_per_token": 2}
INNER_STEPS = 60  # a round takes long enough that who leads it can be told, and killed


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSwarm]:
    method = {"schedule": {"inner_steps": INNER_STEPS}}
    manifest = manifest_with(target={"rounds": ENDLESS}, method=method, membership={"expiry": 3.0}, model=EXPERTS)
    folder = tmp_path_factory.mktemp("deaths")
    with running_swarm(folder, start_from_weights(manifest, folder / "weights")) as made:
        made.start()
        made.wait_for_round(1)
        yield made


@pytest.fixture(autouse=True)
def whole(swarm: ProcessSwarm) -> Iterator[None]:
    """Before and after each test all three are there."""
    wait_until_whole(swarm)
    yield
    wait_until_whole(swarm)


def wait_until_whole(swarm: ProcessSwarm) -> None:
    def met() -> bool:
        statuses = swarm.poll()
        return len(statuses) == 3 and all(
            status.peers == 3 and status.describe_contributing() == "yes" for status in statuses
        )

    swarm.wait_until(met, "all three are there and contribute")


def highest(swarm: ProcessSwarm, *peers: PeerProcess) -> int:
    return max(status.round for status in swarm.poll(*peers))


def test_peers_without_the_weights_got_them_from_the_first(swarm: ProcessSwarm) -> None:
    manifests = [load_manifest(peer.folder / "run.toml") for peer in swarm.peers]
    assert manifests[0].model.from_ and not any(manifest.model.from_ for manifest in manifests[1:])
    assert len({manifest.run_id for manifest in manifests}) == 1
    swarm.wait_for_agreement(after=1)


def test_a_trainer_dies_and_its_peer_stays(swarm: ProcessSwarm) -> None:
    victim, *others = swarm.peers
    [before] = swarm.poll(victim)
    trainer = find_trainer(daemon_pid(victim))
    assert trainer is not None
    trainer.kill()
    present: set[int] = set()

    def back() -> bool:
        present.update(status.peers for status in swarm.poll(*others))
        [now] = swarm.poll(victim)
        return now.trainer_restarts == before.trainer_restarts + 1 and now.step > before.step + 2 * INNER_STEPS

    swarm.wait_until(back, "the trainer is back, and its steps are counted on")
    assert present == {3}
    assert find_trainer(daemon_pid(victim)) not in (None, trainer)
    assert victim.status is not None and victim.status.contributions_excluded == before.contributions_excluded


def test_p2pd_dies_and_the_peer_recovers(swarm: ProcessSwarm) -> None:
    victim, *others = swarm.peers
    dead = find_p2pd(daemon_pid(victim))
    assert dead is not None
    addresses = swarm.poll(victim)[0].addresses
    dead.kill()
    swarm.wait_until(lambda: find_p2pd(daemon_pid(victim)) not in (None, dead), "p2pd is started again", 20)
    swarm.wait_for_round(highest(swarm, *others) + 3)
    wait_until_whole(swarm)
    assert swarm.poll(victim)[0].addresses == addresses


def test_a_frozen_peer_is_not_waited_for_and_catches_up(swarm: ProcessSwarm) -> None:
    first, second, sleeper = swarm.peers
    began = highest(swarm, first, second)
    asleep = process_tree(daemon_pid(sleeper))
    assert len(asleep) == 3, "the daemon, its trainer and its p2pd"
    for process in asleep:
        process.suspend()
    try:
        swarm.wait_until(
            lambda: all(status.peers == 2 for status in swarm.poll(first, second)), "it counts as gone", 30
        )
        swarm.wait_for_round(max(began, highest(swarm, first, second)) + 3, first, second)
    finally:
        for process in asleep:
            process.resume()
    missed = highest(swarm, first, second)
    swarm.wait_for_round(missed, sleeper)
    swarm.wait_for_agreement(after=missed)


def test_the_leader_of_a_round_dies(swarm: ProcessSwarm) -> None:
    round_number = highest(swarm) + 1
    swarm.wait_until(lambda: highest(swarm) >= round_number, "a round begins")
    ids = {peer.status.peer_id: peer for peer in swarm.peers if peer.status}
    newest = max((peer.status for peer in swarm.peers if peer.status), key=lambda status: status.round)
    number, leader = newest.round, Election(bytes.fromhex(newest.digest)).leader(0, frozenset(ids))
    assert leader is not None
    victim = ids[leader]
    victim.kill()
    others = [peer for peer in swarm.peers if peer is not victim]
    swarm.wait_for_round(number + 3, *others, seconds=30)
    victim.start(others[0].addresses()[:1])


def test_the_peer_that_introduced_the_others_dies(swarm: ProcessSwarm) -> None:
    first, *others = swarm.peers
    number = highest(swarm)
    first.kill()
    swarm.wait_for_round(number + 3, *others, seconds=30)
    first.start(())  # nobody is named: it knows them from before
    swarm.wait_for_agreement(after=number + 3)


def test_a_damaged_checkpoint_is_passed_over_and_counted(swarm: ProcessSwarm) -> None:
    victim, *others = swarm.peers
    number, [before] = highest(swarm), swarm.poll(victim)
    assert "checkpoint skipped" not in before.setbacks
    victim.kill()
    newest = max((victim.folder / "checkpoints").iterdir(), key=lambda saved: saved.name)
    os.truncate(newest / "anchor.safetensors", 100)
    victim.start(others[0].addresses()[:1])
    swarm.wait_until(lambda: bool(swarm.poll(victim)), "it answers")
    assert victim.status is not None and victim.status.setbacks["checkpoint skipped"] == 1, swarm.describe()
    assert any("checkpoint skipped 1" in line for line in victim.status.reason_lines())
    assert str(newest) in victim.log.read_text(), "the line says which"
    swarm.wait_for_agreement(after=number)
