"""Nodes die at each point of a computation: no gradient counts twice, and what is lost is counted."""

from pathlib import Path

import pytest

from tests.pipelines.swarm import Setting, Start, running

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]
MICROBATCHES = 24


def test_deaths_lose_what_is_counted_and_double_nothing(zygote: str, tmp_path: Path) -> None:
    """The control: an owner that trusts the acknowledgements of dead servers counts no loss."""
    starts = (
        Start(0, "kill=node:forward:6"),
        Start(0, "kill=node:backward:6"),
        Start(1, "kill=node:added:6"),
        Start(1, "kill=node:told:6"),
        Start(0),
        Start(1, naive=("trusts acknowledgements of the dead",)),
    )
    with running(zygote, tmp_path, Setting(), *starts) as swarm:
        *victims, owner, naive = swarm.peers
        swarm.begin(MICROBATCHES, owner, naive)
        swarm.wait(lambda: all(victim.has_died() for victim in victims), "all victims have died")
        swarm.wait_until_ended(2 * MICROBATCHES)
        swarm.wait(lambda: all(peer.counts()["live"] == 2 for peer in swarm.live), "the dead are known to be dead")
        audit, fooled = swarm.audit(owner), swarm.audit(naive)
        assert (audit.done, audit.doubled, fooled.doubled) == (MICROBATCHES, 0, 0), swarm.describe()
        assert audit.missing == owner.last["microbatches"]["lost"] > 0, swarm.describe()
        assert fooled.missing > naive.last["microbatches"]["lost"] == 0, swarm.describe()
