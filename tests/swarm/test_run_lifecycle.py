"""A run from its beginning to its target, and those who come later."""

from pathlib import Path

import pytest

from protocol.manifest import Manifest
from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, manifest_with, running_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

ROUNDS = 12
NOWHERE = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEVEvub4rCrm7Kqwv1Z4yXVKWi7Vmd7b4dsKQdTT3rVHo"  # nobody listens
SPARSE = {"recipe": "sparseloco", "schedule": {"inner_steps": 5}}


def all_have_reached_the_target(swarm: ProcessSwarm, rounds: int) -> None:
    swarm.wait_until(lambda: all(peer.returncode is not None for peer in swarm.peers), "all have ended")
    statuses = swarm.poll()
    assert [peer.returncode for peer in swarm.peers] == [0] * len(swarm.peers), swarm.describe()
    assert [status.phase for status in statuses] == ["done"] * len(swarm.peers), swarm.describe()
    assert {status.round for status in statuses} == {rounds}
    assert len({(status.digest, status.state_digest) for status in statuses}) == 1, swarm.describe()


@pytest.mark.parametrize("method", [{"recipe": "diloco"}, SPARSE], ids=["diloco", "sparseloco"])
def test_three_peers_train_to_the_target(tmp_path: Path, method: dict[str, object]) -> None:
    with running_swarm(tmp_path, manifest_with(target={"rounds": ROUNDS}, method=method)) as swarm:
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


def slow_run(min_peers: int) -> Manifest:
    """A state of a tenth of a second ago would be gone before it is fetched: rounds of the usual test are too quick."""
    method = {"schedule": {"inner_steps": 60}}
    return manifest_with(target={"rounds": ENDLESS}, run={"min_peers": min_peers}, method=method)


@pytest.mark.parametrize("introducer", [0, 2])
def test_a_late_peer_needs_one_address_of_anybody(tmp_path: Path, introducer: int) -> None:
    with running_swarm(tmp_path, slow_run(min_peers=2)) as swarm:
        swarm.start()
        swarm.wait_for_round(3)
        late = swarm.add_peer()
        late.start(swarm.peers[introducer].addresses()[:1])
        swarm.wait_until(lambda: bool(swarm.poll(late)), "it answers")
        spent = swarm.wait_until(
            lambda: any(told.contributions_included for told in swarm.poll(late)), "it contributes", 30
        )
        print(f"from the first answer to the first contribution: {spent:.1f} s")
        assert late.status is not None and late.status.contributions_included < late.status.round
        joined = late.status.round
        swarm.wait_for_agreement(after=joined + 3)


def test_a_dead_address_beside_a_good_one_delays_nobody(tmp_path: Path) -> None:
    with running_swarm(tmp_path, slow_run(min_peers=1), peers=1) as swarm:
        swarm.start()
        swarm.wait_for_round(1)
        late = swarm.add_peer()
        late.start([NOWHERE, *swarm.peers[0].addresses()[:1]])
        swarm.wait_until(lambda: bool(swarm.poll(late)), "it answers")
        spent = swarm.wait_until(lambda: any(status.peers == 2 for status in swarm.poll(late)), "it is in the run", 5)
        print(f"from the first answer to the second peer: {spent:.1f} s")
