"""An owner dies; a stage loses all of its peers; a peer leaves in the middle of a step."""

from pathlib import Path

import pytest

from tests.pipelines.swarm import Peer, PipelineSwarm, Setting, Start, running

# The seeds of tests/protocol/pipeline find the same bugs for each change.
pytestmark = [pytest.mark.swarm, pytest.mark.nightly, pytest.mark.timeout(240)]
MICROBATCHES = 8


def test_stages_go_on_without_an_owner_and_wait_for_a_stage(zygote: str, tmp_path: Path) -> None:
    """The controls: a server that waits for dead owners, and an owner that does not wait for an empty stage."""
    starts = (
        Start(0),
        Start(1),
        Start(0, naive=("waits for dead owners",)),
        Start(0, naive=("drops microbatches of an empty stage",)),
        Start(0),
    )
    with running(zygote, tmp_path, Setting(step=3, in_flight=8, seconds=0.1), *starts) as swarm:
        owner, last, waiting, hasty, doomed = swarm.peers
        swarm.begin(500, doomed)
        swarm.wait(lambda: freezes_in_mid_step(swarm, doomed, owner, waiting), "steps wait for it")
        doomed.kill()
        swarm.wait(lambda: all(peer.counts()["live"] == 4 for peer in swarm.live), "its death is known")
        assert owner.counts()["open"] == 0 < waiting.counts()["open"], swarm.describe()
        assert last.counts()["microbatches"]["served: partly counted"] > 0, swarm.describe()
        swarm.begin(MICROBATCHES, owner)
        swarm.wait(lambda: len(owner.counts()["ended"]) == MICROBATCHES, "stage 0 makes steps again")
        last.kill()
        swarm.wait(lambda: owner.counts()["live"] == 3, "the death of stage 1 is known")
        swarm.begin(1, hasty)
        swarm.wait(lambda: "refused" in hasty.counts()["ended"].values(), "the control drops a microbatch")
        swarm.begin(MICROBATCHES, owner)
        swarm.wait(lambda: "nobody serves stage 1, and " in owner.log(), "the log says so")
        swarm.introduce(swarm.add(Start(1)))
        swarm.wait(lambda: len(owner.counts()["ended"]) == 2 * MICROBATCHES, "it goes on")
        assert set(owner.last["ended"].values()) == {"done"}
        assert swarm.audit(owner).doubled == 0


def freezes_in_mid_step(swarm: PipelineSwarm, owner: Peer, *first: Peer) -> bool:
    """Stop an owner if steps of stage 0 wait for it, and stage 1 alone counts one of its microbatches."""
    owner.freeze()
    if swarm.copies(1).keys() - swarm.copies(0).keys() and all(server.counts()["open"] for server in first):
        return True
    owner.thaw()
    return False
