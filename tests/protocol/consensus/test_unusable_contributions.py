"""A contribution that its sender denies or that does not decode delays no round; a slow one is waited for."""

import pytest

from protocol.consensus import view_change
from protocol.consensus.events import ContributionFaulty
from protocol.consensus.leader import Leader
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import Cluster

PARTS = {"gather": 1, "butterfly": 4}
GRACE = Cluster(4, "gather").scenario.settings().grace


def with_stuck(exchange: str, *positions: int, peers: int = 4) -> tuple[Cluster, list[PeerId]]:
    """Return a cluster after all have contributed, and the peers of which no blob arrives."""
    table = Cluster(peers, exchange, PARTS[exchange])
    stuck = [table.names[position] for position in positions]
    digests = {blob.digest for name in stuck for blob in table.blobs_of_contribution(name)}
    table.is_slow = lambda peer, digest: digest in digests
    table.contribute(*table.names)
    assert table.included_peers() == set() and table.now == 0.0
    return table, stuck


def report(table: Cluster, culprits: list[PeerId]) -> None:
    for name in table.names:
        for culprit in culprits:
            table.feed_event(name, ContributionFaulty(culprit, "not served"))
    table.deliver_all()


@pytest.mark.parametrize("exchange", PARTS)
@pytest.mark.parametrize("position", [0, 3], ids=["leader", "member"])
def test_round_goes_on_at_once_without_an_unusable_contribution(exchange: str, position: int) -> None:
    table, (ghost,) = with_stuck(exchange, position)
    report(table, [ghost])
    table.elapse(GRACE / 4)
    others = tuple(sorted(name for name in table.names if name != ghost))
    assert table.included_peers() == {others}
    assert all((ghost, "not served") in table.rejections_by(name) for name in others)
    conduct = [table.machines[name].conduct for name in others]
    assert all(seen is not None and seen.withheld == {ghost} for seen in conduct)


@pytest.mark.parametrize("exchange", PARTS)
def test_control_without_the_rules_all_wait(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_change, "_leads_with_ghost", lambda *given: False)
    monkeypatch.setattr(Leader, "unusable", property(lambda self: frozenset(), lambda self, value: None), raising=False)
    for position in (0, 3):
        table, stuck = with_stuck(exchange, position)
        report(table, stuck)
        table.elapse(GRACE / 4)
        assert table.included_peers() == set()


@pytest.mark.parametrize("exchange", PARTS)
def test_slow_honest_contribution_is_waited_for_and_included(exchange: str) -> None:
    table, _ = with_stuck(exchange, 3)
    table.elapse(GRACE - 0.4)
    assert table.included_peers() == set()
    table.is_slow = lambda peer, digest: False
    table.deliver_all()
    table.elapse(0.4)
    assert table.included_peers() == {tuple(sorted(table.names))}
    seen = [table.machines[name].conduct for name in table.names]
    assert not any(conduct.withheld for conduct in seen if conduct)


@pytest.mark.parametrize("exchange", PARTS)
def test_leader_to_which_many_seem_unusable_waits_for_them(exchange: str) -> None:
    """The fault may be with this leader: it may not leave the others out."""
    table, (ghost, second) = with_stuck(exchange, 2, 3)
    leader = table.names[0]
    for culprit in (ghost, second):
        table.feed_event(leader, ContributionFaulty(culprit, "not served"))
    table.deliver_all()
    assert table.included_peers() == set()
    table.is_slow = lambda peer, digest: False
    table.deliver_all()
    table.elapse(0.4)
    assert table.included_peers() == {tuple(sorted(table.names))}


def test_no_peer_finds_fault_with_its_own_contribution() -> None:
    table, _ = with_stuck("gather", 3)
    table.feed_event(table.names[0], ContributionFaulty(table.names[0], "not served"))
    assert not table.machines[table.names[0]]._state.unusable
