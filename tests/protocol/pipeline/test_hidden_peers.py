"""Half of the servers are behind routers, so no activation passes from one of them to another."""

from collections.abc import Collection

import pytest

from protocol.pipeline.routing import Router
from tests.protocol.pipeline.virtual.scenario import Scenario
from tests.protocol.pipeline.virtual.virtual_swarm import VirtualSwarm

STAGES, PEERS = 3, 4
HIDDEN = frozenset(f"server-{stage}-{index}" for stage in range(STAGES) for index in (0, 1))


def run_for_a_minute(quota: int, hidden: Collection[str] = HIDDEN) -> tuple[VirtualSwarm, int]:
    """Return the swarm, and how many microbatches its two owners have had done."""
    swarm = VirtualSwarm(Scenario(((1.0,) * PEERS,) * STAGES, in_flight=16, quota=quota, hidden=frozenset(hidden)), 1)
    swarm.run(60.0)
    owners = [peer.owner for peer in swarm.peers.values() if peer.owner is not None]
    assert all(owner.counts.replayed == 0 for owner in owners)
    return swarm, sum(owner.counts.done for owner in owners)


def test_hidden_peers_work_beside_reachable_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    _, unhidden = run_for_a_minute(10_000, ())
    swarm, done = run_for_a_minute(10_000)
    served = [swarm.peers[peer].served for peer in HIDDEN]
    assert done > 0.9 * unhidden
    choose = Router.choose
    assert min(served) > 0.8 * sum(peer.served for peer in swarm.peers.values()) / (STAGES * PEERS)
    monkeypatch.setattr(Router, "choose", lambda self, now, excluded, _: choose(self, now, excluded))
    _, control = run_for_a_minute(10_000)
    print(f"done in a minute: {unhidden} if all can be called, {done}, and {control} over any peers")
    assert control < 0.5 * done
