"""The control traffic of a peer: two KB a round for each peer of the swarm, and what it would be without briefs."""

import pytest

from benchmarks.crowd import LIMIT_BYTES, VIRTUAL_ROUND_SECONDS, exceeds, measure_virtual, table
from benchmarks.crowding import virtual_gossip
from benchmarks.crowding.virtual_round import VirtualRound
from protocol.membership.peer_table import KEPT_VERSIONS

pytestmark = pytest.mark.slow


def test_a_peer_among_twenty_sends_forty_kilobytes_at_most() -> None:
    cost = measure_virtual(20)
    assert not exceeds("20 virtual", cost), table({"20 virtual": cost})
    naive = VirtualRound(20, uses_briefs=False).run()
    assert sum(naive.sent.values()) > 2 * (sum(cost.sent.values()) - cost.sent["gossip"])


@pytest.mark.parametrize("parts", [0, 12])
def test_contributions_are_said_once(parts: int) -> None:
    brief, whole = (VirtualRound(20, parts=parts, uses_briefs=uses).run().sent for uses in (True, False))
    assert brief["contribution"] == whole["contribution"]
    assert brief["roster"] < 0.1 * brief["contribution"] < 0.5 * whole["roster"]
    assert brief["commit"] < 0.25 * whole["commit"]
    assert brief["holding"] < 0.25 * whole["holding"]
    assert brief["decision"] < 0.65 * whole["decision"]


def test_a_peer_among_sixty_sends_in_proportion() -> None:
    """The messages grow with the number of peers, not with its square; without briefs, they are more than the limit
    leaves beside gossip."""
    gossip, _ = virtual_gossip.measure(60, 2, VIRTUAL_ROUND_SECONDS)
    brief, whole = (sum(VirtualRound(60, uses_briefs=uses).run().sent.values()) for uses in (True, False))
    assert brief + gossip < LIMIT_BYTES * 60
    assert brief < 0.5 * 60 * 1000 < 0.95 * 60 * 1000 < whole


def test_gossip_among_two_hundred_keeps_up_with_the_renewals() -> None:
    sent, lag = virtual_gossip.measure(200, 2, VIRTUAL_ROUND_SECONDS)
    assert sent < 0.75 * LIMIT_BYTES * 200
    assert lag <= KEPT_VERSIONS
