"""A run from its beginning to its target, and those who come later."""

from pathlib import Path

import pytest

from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, manifest_with, running_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

ROUNDS = 12
NOWHERE = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEVEvub4rCrm7Kqwv1Z4yXVKWi7Vmd7b4dsKQdTT3rVHo"  # nobody listens


def all_have_reached_the_target(swarm: ProcessSwarm, rounds: int) -> None:
    swarm.wait_until(lambda: all(peer.returncode is not None for peer in swarm.peers), "all have ended")
    statuses = swarm.poll()
    assert [peer.returncode for peer in swarm.peers] == [0] * len(swarm.peers), swarm.describe()
    assert [status.phase for status in statuses] == ["done"] * len(swarm.peers), swarm.describe()
    assert {status.round for status in statuses} == {rounds}
    assert len({(status.digest, status.state_digest) for status in statuses}) == 1, swarm.describe()


def test_three_peers_train_to_the_target(tmp_path: Path) -> None:
    patient = {"grace": 60.0, "leader_timeout": 20.0, "exchange_timeout": 60.0}  # as long as a busy machine needs
    with running_swarm(tmp_path, manifest_with(target={"rounds": ROUNDS}, round=patient)) as swarm:
        swarm.start()
        losses: dict[int, float] = {}

        def over() -> bool:
            for status in swarm.poll():
                if status.validation_loss is not None and status.validation_round is not None:
                    losses[status.validation_round] = status.validation_loss
            return all(peer.returncode is not None for peer in swarm.peers)

        swarm.wait_until(over, "all have ended")
        all_have_reached_the_target(swarm, ROUNDS)
        assert losses[max(losses)] < 5.545 - 0.8, f"{losses}, from ln 256 on"
        for status in swarm.poll():
            assert status.contributions_included >= ROUNDS - 2, swarm.describe()
            assert status.bytes_sent > 0


@pytest.mark.nightly  # one such peer joins in test_dashboard.py
def test_late_peers_need_one_address_of_anybody(tmp_path: Path) -> None:
    """A state of a tenth of a second ago would be gone before it is fetched: the usual rounds are too quick."""
    slow = manifest_with(target={"rounds": ENDLESS}, run={"min_peers": 2}, method={"schedule": {"inner_steps": 60}})
    with running_swarm(tmp_path, slow) as swarm:
        swarm.start()
        swarm.wait_for_round(3)
        first, *_, last = swarm.peers
        ways = [first.addresses()[:1], [NOWHERE, *last.addresses()[:1]]]
        late = [swarm.add_peer() for _ in ways]
        for peer, contacts in zip(late, ways, strict=True):
            peer.start(contacts)
        swarm.wait_until(
            lambda: len(told := swarm.poll(*late)) == 2 and all(status.contributions_included for status in told),
            "both contribute",
        )
        told = swarm.poll(*late)
        assert all(status.contributions_included < status.round for status in told)
        swarm.wait_for_agreement(after=max(status.round for status in told) + 3)
