"""Trainers die while their daemons live: they go on from the snapshot and its ledger, in a new life."""

from pathlib import Path

import pytest

from tests.pipelines.swarm import Setting, Start, running

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]
MICROBATCHES = 16


def test_ledger_after_a_death_is_that_of_the_snapshot(zygote: str, tmp_path: Path) -> None:
    """The control: a server that keeps the ledger of the dead trainer says that it has gradients that died."""
    starts = (
        Start(0, "kill=trainer:added:7"),
        Start(1, "kill=trainer:backward:7"),
        Start(0, "kill=trainer:forward:7"),
        Start(1, "kill=trainer:added:7", naive=("keeps the ledger of a dead trainer",)),
    )
    with running(zygote, tmp_path, Setting(step=4, snapshot_steps=1), *starts) as swarm:
        owner, *_, naive = swarm.peers
        swarm.begin(MICROBATCHES, owner)
        swarm.begin(MICROBATCHES, swarm.peers[1])
        swarm.wait_until_ended(2 * MICROBATCHES)
        swarm.wait(lambda: all(peer.counts()["trainer deaths"] == 1 for peer in swarm.peers), "all trainers died")
        for peer in swarm.peers:
            counts, truth = peer.counts(), peer.truth()
            claimed = len(set(counts["ledger"]) - truth.counted.keys())
            assert (claimed > 0) == (peer is naive), swarm.describe()
            if peer is not naive:
                assert sorted(counts["ledger"]) == sorted(truth.counted.elements()), swarm.describe()
                assert counts["microbatches"]["served: lost"] <= len(truth.lost), swarm.describe()
        audits = [swarm.audit(peer) for peer in swarm.peers[:2]]
        assert [audit.doubled for audit in audits] == [0, 0], swarm.describe()
        assert sum(audit.missing for audit in audits) <= sum(len(peer.truth().lost) for peer in swarm.peers)
