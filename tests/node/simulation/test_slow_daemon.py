"""A newcomer whose daemon is ten times slower than the others' comes into the rounds of a fast run, and stays."""

from dataclasses import replace
from functools import partial
from itertools import groupby

import pytest

from node.simulation.swarm import VirtualSwarm, simulated_peer_id
from tests.node.simulation.virtual_swarm import make_config, make_corpus, make_method

PERIOD, SPEED = 2, 8.0  # a round of a peer alone takes a quarter of a second
REACTION = 0.02
ARRIVAL_SECONDS = 3.0
MAX_GAP_ROUNDS = 4  # in a row without the newcomer, once it is in
FIRST_SECONDS, WATCHED_SECONDS = 6.0, 12.0  # after the arrival


class GrowingSwarm(VirtualSwarm):
    """A swarm of peers that train, which one more peer joins later."""

    def start(self) -> None:
        """Let all peers but the last join now."""
        last = self.config.peers - 1
        peers = [self._new_peer(slot) for slot in range(last)]
        self.gossip.start_with({peer.peer_id: peer.chain.head for peer in peers})
        for peer in peers:
            peer.start()
        self.clock.schedule(ARRIVAL_SECONDS, partial(self._join, last))

    def _join(self, slot: int) -> None:
        self._new_peer(slot).start()


def watch(peers: int, slowness: float) -> list[tuple[float, bool]]:
    """Return the time after the arrival of each round, and whether it includes the newcomer."""
    given = make_config(peers, 100_000, speeds=(SPEED,) * peers)
    timing = given.manifest.round.model_copy(update={"grace": 1.0})
    reactions = (REACTION,) * (peers - 1) + (slowness * REACTION,)
    config = replace(
        given, manifest=given.manifest.model_copy(update={"round": timing}), reactions=reactions, latency=0.005
    )
    swarm = GrowingSwarm(config, make_method("diloco", PERIOD), make_corpus(), lambda *_: None, lambda: None)
    swarm.start()
    newcomer, found, seen = simulated_peer_id(peers - 1, 1), list[tuple[float, bool]](), set[int]()

    def is_over() -> bool:
        chain = swarm.peers[simulated_peer_id(0, 1)].chain
        for entry in chain.log.commits[-2:]:
            if entry.body.round not in seen:
                seen.add(entry.body.round)
                found.append((swarm.clock.now - ARRIVAL_SECONDS, newcomer in entry.body.by_sender))
        return swarm.clock.now > ARRIVAL_SECONDS + WATCHED_SECONDS

    swarm.clock.run(is_over)
    return found


@pytest.mark.slow
def test_slow_daemon_is_included_soon_and_stays() -> None:
    rounds = watch(3, 10.0)
    included = [at for at, has_newcomer in rounds if has_newcomer]
    assert included and included[0] < FIRST_SECONDS
    after_first = [has_newcomer for at, has_newcomer in rounds if at >= included[0]]
    gaps = [len(list(gap)) for has_newcomer, gap in groupby(after_first) if not has_newcomer]
    assert max(gaps, default=0) <= MAX_GAP_ROUNDS
