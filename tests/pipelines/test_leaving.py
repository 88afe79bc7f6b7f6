"""A peer that leaves in the middle of a step finishes it: nobody makes its work again."""

from pathlib import Path

import pytest

from tests.pipelines.swarm import Peer, Setting, Start, running

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]
MICROBATCHES, PASSES = 12, 4


def test_peer_that_leaves_in_mid_step_costs_nobody_work(zygote: str, tmp_path: Path) -> None:
    """The control: a peer that leaves at once."""
    starts = Start(0), Start(1), Start(1), Start(1, naive=("leaves at once",))
    with running(zygote, tmp_path, Setting(step=3, in_flight=8, seconds=0.05), *starts) as swarm:
        owner, _, leaver, hasty = swarm.peers
        swarm.begin(MICROBATCHES, owner)
        swarm.wait(lambda: is_in_mid_step(leaver), "a step is open")
        leaver.request(drain=True)
        assert leaver.counts()["open"] == 0 == len(leaver.truth().gradient), swarm.describe()
        swarm.wait_until_ended(MICROBATCHES)
        assert swarm.total("served: computed") == PASSES * MICROBATCHES, swarm.describe()
        assert swarm.audit(owner).doubled == 0
        swarm.begin(MICROBATCHES, owner)
        swarm.wait(lambda: is_in_mid_step(hasty), "a step is open")
        hasty.request(drain=True)
        swarm.wait_until_ended(2 * MICROBATCHES)
        assert swarm.total("served: computed") > 2 * PASSES * MICROBATCHES, swarm.describe()


def is_in_mid_step(peer: Peer) -> bool:
    return bool(peer.counts()["open"] and peer.truth().gradient)
