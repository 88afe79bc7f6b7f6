"""A peer without a trainer follows the run bit for bit, and no round needs it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from node.commands.up.peer_process import PeerProcess
from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, daemon_pid, manifest_with, running_swarm
from tests.swarm.processes import find_trainer

LATER = {"task": "reverse", "start_round": 100_000, "answer_tokens": 8}  # until then it only follows
LONG = 280.0  # seconds
pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSwarm]:
    """A trainer, whose quorum would be two if the rollout peer counted, and a rollout peer."""
    method = {"schedule": {"inner_steps": 60}}
    manifest = manifest_with(run={"min_peers": 1}, target={"rounds": ENDLESS}, method=method, rl=LATER)
    with running_swarm(tmp_path_factory.mktemp("rollouts"), manifest, 1) as made:
        made.start()
        made.wait_for_round(2)
        made.add_peer("--role", "rollout").start(made.peers[0].addresses()[:1])
        yield made


def applied(swarm: ProcessSwarm, peer: PeerProcess) -> int:
    return sum(status.rollouts.get("rounds applied", 0) for status in swarm.poll(peer))


def test_rollout_peer_applies_the_commits_bit_for_bit_and_has_no_trainer(swarm: ProcessSwarm) -> None:
    follower = swarm.peers[-1]
    swarm.wait_until(lambda: applied(swarm, follower) >= 2, "it has applied commits")
    [status] = swarm.poll(follower)
    swarm.wait_for_agreement(after=status.round)
    [status] = swarm.poll(follower)
    assert status.rollouts["states fetched"] == 1, "later rounds need the commits alone"
    assert status.phase == "rolling out" and find_trainer(daemon_pid(follower)) is None
    assert status.bytes_received_by_kind["blobs"] > 0 and status.contributions_included == 0


def test_rounds_go_on_while_a_rollout_peer_is_dead_and_it_comes_back(swarm: ProcessSwarm) -> None:
    *trainers, follower = swarm.peers
    swarm.kill_peer(follower)
    before = max(status.round for status in swarm.poll(*trainers))
    swarm.wait_for_round(before + 2, *trainers, seconds=30)
    assert all(not status.absences for status in swarm.poll(*trainers)), "nobody waited for it"
    follower.start(swarm.peers[0].addresses()[:1])
    swarm.wait_until(lambda: applied(swarm, follower) >= 1, "it follows again")
    swarm.wait_for_agreement(after=before + 2)


def taken(swarm: ProcessSwarm, peer: PeerProcess) -> int:
    return sum(status.rollouts.get("groups taken", 0) for status in swarm.poll(peer))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_run_learns_from_rollouts_over_the_deaths_of_both_roles(tmp_path: Path) -> None:
    """After a warm-up on right answers; groups are taken before and after each death, and none is refused."""
    rl = {"task": "reverse", "start_round": 2, "answer_tokens": 8, "group": 4, "groups": 4, "wait_seconds": 20.0}
    manifest = manifest_with(
        run={"min_peers": 1}, target={"rounds": ENDLESS}, method={"schedule": {"inner_steps": 3}}, rl=rl,
        membership={"expiry": 10.0}, data={"source": "questions", "path": "reverse"},
    )  # fmt: skip
    with running_swarm(tmp_path, manifest, 1) as swarm:
        [trainer], follower = list(swarm.peers), swarm.add_peer("--role", "rollout")
        swarm.start()
        swarm.wait_until(lambda: taken(swarm, follower) >= 12, "groups are taken", LONG)
        swarm.kill_peer(follower)
        follower.start(trainer.addresses()[:1])
        swarm.wait_until(lambda: taken(swarm, follower) >= 12, "groups are taken after its death", LONG)
        before = max(status.round for status in swarm.poll(trainer))
        swarm.kill_peer(trainer)
        trainer.start(follower.addresses()[:1])
        swarm.wait_for_round(before + 2, trainer, seconds=LONG)
        swarm.wait_for_agreement(LONG, after=before)
        [status] = swarm.poll(follower)
        assert status.rollouts["groups refused"] == 0 and status.describe_contributing() == "yes"
