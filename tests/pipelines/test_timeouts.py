"""Answers and outcomes that are lost or late, copies of tasks, and a peer that is cut off: nothing counts twice."""

import time
from pathlib import Path

import pytest

from tests.pipelines.swarm import Audit, Setting, Start, running

# The seeds of tests/protocol/pipeline find the same bugs for each change.
pytestmark = [pytest.mark.swarm, pytest.mark.nightly, pytest.mark.timeout(240)]
MICROBATCHES, MANY = 6, 1000
LOSSES = "answers=drop:4,answers=late:9,outcomes=drop:5,tasks=copy:3"
MANY_LOSSES = "answers=drop:2"
CUT_SECONDS = 1.5  # less than a peer may be silent


def test_lost_answers_double_nothing(zygote: str, tmp_path: Path) -> None:
    """The controls: an owner that asks another peer at a timeout, and a server that steps at any time."""
    starts = (
        Start(0, LOSSES),
        Start(1, MANY_LOSSES, naive=("asks elsewhere at a timeout",)),
        Start(0, "outcomes=drop:5", naive=("steps while microbatches are under way",)),
        Start(1, "outcomes=drop:5"),
    )
    with running(zygote, tmp_path, Setting(), *starts) as swarm:
        owner, naive, stale, server = swarm.peers
        swarm.begin(MICROBATCHES, owner)
        swarm.begin(MANY, naive)
        swarm.wait(lambda: len(owner.counts()["ended"]) == MICROBATCHES, "the owner's microbatches have ended")
        assert swarm.audit(owner) == Audit(MICROBATCHES, missing=0, doubled=0), swarm.describe()
        swarm.wait(lambda: swarm.total("served: duplicates") > 0, "peers are asked again")
        swarm.wait(lambda: swarm.audit(naive).doubled > 0, "the control: a stage counts a microbatch twice")
        swarm.wait(lambda: stale.truth().stale > 0, "the control: a step between both passes of a microbatch")
        swarm.begin(MICROBATCHES, owner)
        server.freeze()
        time.sleep(CUT_SECONDS)
        server.thaw()
        swarm.wait(lambda: len(owner.counts()["ended"]) == 2 * MICROBATCHES, "they end after the cut")
        assert swarm.audit(owner) == Audit(2 * MICROBATCHES, missing=0, doubled=0), swarm.describe()
        assert not any(peer.truth().stale for peer in swarm.peers if peer is not stale), swarm.describe()
