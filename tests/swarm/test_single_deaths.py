"""One process dies or sleeps; the run goes on. One flock for all tests of this file, whole again after each."""

import os
from collections.abc import Iterator

import pytest

from node.local.peer_process import PeerProcess
from protocol.rounds.election import Election
from tests.swarm.flock import ENDLESS, ProcessSwarm, running_swarm, manifest_with, daemon_pid
from tests.swarm.processes import process_tree, find_p2pd, find_trainer

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

INNER_STEPS = 60  # a round takes long enough that who leads it can be told, and killed


@pytest.fixture(scope="module")
def flock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSwarm]:
    method = {"schedule": {"inner_steps": INNER_STEPS}}
    manifest = manifest_with(target={"rounds": ENDLESS}, method=method, membership={"expiry": 3.0})
    with running_swarm(tmp_path_factory.mktemp("deaths"), manifest) as made:
        made.start()
        made.wait_for_round(1)
        yield made


@pytest.fixture(autouse=True)
def whole(flock: ProcessSwarm) -> Iterator[None]:
    """Before and after each test all three are there."""
    wait_until_whole(flock)
    yield
    wait_until_whole(flock)


def wait_until_whole(flock: ProcessSwarm) -> None:
    def met() -> bool:
        statuses = flock.poll()
        return len(statuses) == 3 and all(status.peers == 3 and status.describe_contributing() == "yes" for status in statuses)

    flock.wait_until(met, "all three are there and contribute")


def highest(flock: ProcessSwarm, *peers: PeerProcess) -> int:
    return max(status.round for status in flock.poll(*peers))


def test_a_trainer_dies_and_its_peer_stays(flock: ProcessSwarm) -> None:
    victim, *others = flock.peers
    [before] = flock.poll(victim)
    trainer = find_trainer(daemon_pid(victim))
    assert trainer is not None
    trainer.kill()
    present: set[int] = set()

    def back() -> bool:
        present.update(status.peers for status in flock.poll(*others))
        [now] = flock.poll(victim)
        return now.trainer_restarts == before.trainer_restarts + 1 and now.step > before.step + 2 * INNER_STEPS

    flock.wait_until(back, "the trainer is back, and its steps are counted on")
    assert present == {3}
    assert find_trainer(daemon_pid(victim)) not in (None, trainer)
    assert victim.status is not None and victim.status.contributions_excluded == before.contributions_excluded


def test_p2pd_dies_and_the_peer_recovers(flock: ProcessSwarm) -> None:
    victim, *others = flock.peers
    dead = find_p2pd(daemon_pid(victim))
    assert dead is not None
    addresses = flock.poll(victim)[0].addresses
    dead.kill()
    flock.wait_until(lambda: find_p2pd(daemon_pid(victim)) not in (None, dead), "p2pd is started again", 20)
    flock.wait_for_round(highest(flock, *others) + 3)
    wait_until_whole(flock)
    assert flock.poll(victim)[0].addresses == addresses


def test_a_frozen_peer_is_not_waited_for_and_catches_up(flock: ProcessSwarm) -> None:
    first, second, sleeper = flock.peers
    began = highest(flock, first, second)
    asleep = process_tree(daemon_pid(sleeper))
    assert len(asleep) == 3, "the daemon, its trainer and its p2pd"
    for process in asleep:
        process.suspend()
    try:
        flock.wait_until(lambda: all(status.peers == 2 for status in flock.poll(first, second)), "it counts as gone", 30)
        flock.wait_for_round(max(began, highest(flock, first, second)) + 3, first, second)
    finally:
        for process in asleep:
            process.resume()
    missed = highest(flock, first, second)
    flock.wait_for_round(missed, sleeper)
    flock.wait_for_agreement(after=missed)


def test_the_leader_of_a_round_dies(flock: ProcessSwarm) -> None:
    round_number = highest(flock) + 1
    flock.wait_until(lambda: highest(flock) >= round_number, "a round begins")
    number = highest(flock)
    ids = {peer.status.peer_id: peer for peer in flock.peers if peer.status}
    leader = Election(flock.manifest.run_id, number).leader(0, frozenset(ids))
    assert leader is not None
    victim = ids[leader]
    victim.kill()
    others = [peer for peer in flock.peers if peer is not victim]
    flock.wait_for_round(number + 3, *others, seconds=30)
    victim.start(others[0].addresses()[:1])


def test_the_peer_that_introduced_the_others_dies(flock: ProcessSwarm) -> None:
    first, *others = flock.peers
    number = highest(flock)
    first.kill()
    flock.wait_for_round(number + 3, *others, seconds=30)
    first.start(())  # nobody is named: it knows them from before
    flock.wait_for_agreement(after=number + 3)


def test_a_damaged_checkpoint_is_passed_over_and_counted(flock: ProcessSwarm) -> None:
    victim, *others = flock.peers
    number, [before] = highest(flock), flock.poll(victim)
    assert "checkpoint skipped" not in before.setbacks
    victim.kill()
    newest = max((victim.folder / "checkpoints").iterdir(), key=lambda saved: saved.name)
    os.truncate(newest / "anchor.safetensors", 100)
    victim.start(others[0].addresses()[:1])
    flock.wait_until(lambda: bool(flock.poll(victim)), "it answers")
    assert victim.status is not None and victim.status.setbacks["checkpoint skipped"] == 1, flock.describe()
    assert any("checkpoint skipped 1" in line for line in victim.status.reason_lines())
    assert str(newest) in victim.log.read_text(), "the line says which"
    flock.wait_for_agreement(after=number)
