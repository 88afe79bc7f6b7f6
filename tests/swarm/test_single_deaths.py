"""One process dies or sleeps; the run goes on. One flock for all tests of this file, whole again after each."""

import os
from collections.abc import Iterator

import pytest

from node.local.peer_process import PeerProcess
from protocol.rounds.election import Election
from tests.swarm.flock import ENDLESS, Flock, flying, manifest_with, pid_of
from tests.swarm.processes import family, p2pd_of, trainer_of

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

INNER_STEPS = 60  # a round takes long enough that who leads it can be told, and killed


@pytest.fixture(scope="module")
def flock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flock]:
    method = {"schedule": {"inner_steps": INNER_STEPS}}
    manifest = manifest_with(target={"rounds": ENDLESS}, method=method, membership={"expiry": 3.0})
    with flying(tmp_path_factory.mktemp("deaths"), manifest) as made:
        made.start()
        made.wait_for_round(1)
        yield made


@pytest.fixture(autouse=True)
def whole(flock: Flock) -> Iterator[None]:
    """Before and after each test all three are there."""
    wait_until_whole(flock)
    yield
    wait_until_whole(flock)


def wait_until_whole(flock: Flock) -> None:
    def met() -> bool:
        statuses = flock.look()
        return len(statuses) == 3 and all(status.peers == 3 and status.contributing() == "yes" for status in statuses)

    flock.wait(met, "all three are there and contribute")


def highest(flock: Flock, *peers: PeerProcess) -> int:
    return max(status.round for status in flock.look(*peers))


def test_a_trainer_dies_and_its_peer_stays(flock: Flock) -> None:
    victim, *others = flock.peers
    [before] = flock.look(victim)
    trainer = trainer_of(pid_of(victim))
    assert trainer is not None
    trainer.kill()
    present: set[int] = set()

    def back() -> bool:
        present.update(status.peers for status in flock.look(*others))
        [now] = flock.look(victim)
        return now.trainer_restarts == before.trainer_restarts + 1 and now.step > before.step + 2 * INNER_STEPS

    flock.wait(back, "the trainer is back, and its steps are counted on")
    assert present == {3}
    assert trainer_of(pid_of(victim)) not in (None, trainer)
    assert victim.status is not None and victim.status.contributions_excluded == before.contributions_excluded


def test_p2pd_dies_and_the_peer_recovers(flock: Flock) -> None:
    victim, *others = flock.peers
    dead = p2pd_of(pid_of(victim))
    assert dead is not None
    addresses = flock.look(victim)[0].addresses
    dead.kill()
    flock.wait(lambda: p2pd_of(pid_of(victim)) not in (None, dead), "p2pd is started again", 20)
    flock.wait_for_round(highest(flock, *others) + 3)
    wait_until_whole(flock)
    assert flock.look(victim)[0].addresses == addresses


def test_a_frozen_peer_is_not_waited_for_and_catches_up(flock: Flock) -> None:
    first, second, sleeper = flock.peers
    began = highest(flock, first, second)
    asleep = family(pid_of(sleeper))
    assert len(asleep) == 3, "the daemon, its trainer and its p2pd"
    for process in asleep:
        process.suspend()
    try:
        flock.wait(lambda: all(status.peers == 2 for status in flock.look(first, second)), "it counts as gone", 30)
        flock.wait_for_round(max(began, highest(flock, first, second)) + 3, first, second)
    finally:
        for process in asleep:
            process.resume()
    missed = highest(flock, first, second)
    flock.wait_for_round(missed, sleeper)
    flock.wait_for_agreement(after=missed)


def test_the_leader_of_a_round_dies(flock: Flock) -> None:
    round_number = highest(flock) + 1
    flock.wait(lambda: highest(flock) >= round_number, "a round begins")
    number = highest(flock)
    ids = {peer.status.peer_id: peer for peer in flock.peers if peer.status}
    leader = Election(flock.manifest.run_id, number).leader(0, frozenset(ids))
    assert leader is not None
    victim = ids[leader]
    victim.kill()
    others = [peer for peer in flock.peers if peer is not victim]
    flock.wait_for_round(number + 3, *others, seconds=30)
    victim.start(others[0].addresses()[:1])


def test_the_peer_that_introduced_the_others_dies(flock: Flock) -> None:
    first, *others = flock.peers
    number = highest(flock)
    first.kill()
    flock.wait_for_round(number + 3, *others, seconds=30)
    first.start(())  # nobody is named: it knows them from before
    flock.wait_for_agreement(after=number + 3)


def test_a_damaged_checkpoint_is_passed_over_and_counted(flock: Flock) -> None:
    victim, *others = flock.peers
    number, [before] = highest(flock), flock.look(victim)
    assert "checkpoint skipped" not in before.setbacks
    victim.kill()
    newest = max((victim.folder / "checkpoints").iterdir(), key=lambda saved: saved.name)
    os.truncate(newest / "anchor.safetensors", 100)
    victim.start(others[0].addresses()[:1])
    flock.wait(lambda: bool(flock.look(victim)), "it answers")
    assert victim.status is not None and victim.status.setbacks["checkpoint skipped"] == 1, flock.story()
    assert any("checkpoint skipped 1" in line for line in victim.status.reasons())
    assert str(newest) in victim.log.read_text(), "the line says which"
    flock.wait_for_agreement(after=number)
