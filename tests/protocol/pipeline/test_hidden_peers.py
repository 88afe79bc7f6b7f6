"""Half of the servers are behind routers, so no activation passes from one of them to another."""

from collections.abc import Collection

import pytest

from protocol.pipeline.routing import Router
from protocol.pipeline.server_events import Drain
from tests.protocol.pipeline.virtual.faulty_world import FaultyWorld
from tests.protocol.pipeline.virtual.scenario import Scenario

STAGES, PEERS, OWNERS = 3, 4, 2
HIDDEN = frozenset(f"server-{stage}-{index}" for stage in range(STAGES) for index in (0, 1))


def run_for_a_minute(quota: int, hidden: Collection[str] = HIDDEN) -> tuple[FaultyWorld, int]:
    """Return the world, and how many microbatches its two owners have had done."""
    speeds = ((1.0,) * PEERS,) * (STAGES - 1) + ((1.0,) * (PEERS + OWNERS),)
    world = FaultyWorld(Scenario(speeds, in_flight=16, quota=quota, owners=OWNERS, hidden=frozenset(hidden)), 1)
    world.run(0.5)
    for peer in world.peers.values():
        if peer.draws and peer.process.loop.server is not None:
            peer.process.loop.server.handle(Drain(), world.clock.now)  # it only owns microbatches
    world.publish()
    world.run(60.0)
    owners = [peer.owner for peer in world.peers.values()]
    assert all(owner.counts.replayed == 0 for owner in owners)
    return world, sum(owner.counts.done for owner in owners)


def test_hidden_peers_work_beside_reachable_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    _, unhidden = run_for_a_minute(10_000, ())
    world, done = run_for_a_minute(10_000)
    served = [world.peers[peer].served for peer in HIDDEN]
    assert done > 0.9 * unhidden
    choose = Router.choose
    working = [peer.served for peer in world.peers.values() if not peer.draws]
    assert min(served) > 0.75 * sum(working) / len(working)
    monkeypatch.setattr(Router, "choose", lambda self, now, excluded, _: choose(self, now, excluded))
    _, control = run_for_a_minute(10_000)
    print(f"done in a minute: {unhidden} if all can be called, {done}, and {control} over any peers")
    assert control < 0.5 * done
