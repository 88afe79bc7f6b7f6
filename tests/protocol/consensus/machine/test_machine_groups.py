import pytest

from protocol.consensus.events import Fetch
from protocol.consensus.topology import Groups
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import Cluster


def partner_of(table: Cluster, name: PeerId, commit_of: PeerId) -> set[PeerId]:
    commit = table.commit(commit_of)
    assert commit is not None
    return {entry.sender for entry in table.scenario.settings().topology.contributions_for(commit, name)} - {name}


@pytest.mark.parametrize("peers", [1, 2, 5, 8])
def test_everybody_is_included_and_fetches_of_its_partner_alone(peers: int) -> None:
    table = Cluster(peers, "groups")
    table.contribute(*table.names)
    assert table.included_peers() == {tuple(sorted(table.names))} and table.now == 0
    for name in table.names:
        wanted = {action.part_blob.blob for who, action in table.log if who == name and isinstance(action, Fetch)}
        partners = partner_of(table, name, name)
        assert wanted == {table.blobs_of_contribution(partner)[0] for partner in partners} and len(partners) <= 1


def _with_a_stuck_transfer() -> tuple[Cluster, PeerId, PeerId]:
    """Of six peers one cannot get what its partner offers."""
    probe = Cluster(6, "groups")
    probe.contribute(*probe.names)
    giver = probe.names[1]
    (taker,) = partner_of(probe, giver, giver)
    table = Cluster(6, "groups")
    stuck = table.blobs_of_contribution(giver)[0].digest
    table.is_slow = lambda peer, digest: digest == stuck
    table.contribute(*table.names)
    return table, giver, taker


def test_what_its_group_cannot_get_is_left_out_for_all() -> None:
    table, giver, taker = _with_a_stuck_transfer()
    table.elapse(table.scenario.settings().grace - 0.3)
    assert table.included_peers() == set()
    table.elapse(0.6)
    assert table.included_peers() == {tuple(sorted({*table.names} - {giver}))}
    commit = table.commit(taker)
    assert commit is not None and commit.left_out == (giver,)
    assert (giver, "left out") in table.rejections_by(giver)
    assert partner_of(table, taker, taker) == set(), "its partner goes on alone"


def test_without_that_rule_a_commit_names_what_nobody_can_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Groups, "ready_contributions", lambda self, status: status.contributions)
    table, giver, taker = _with_a_stuck_transfer()
    table.elapse(3)
    assert partner_of(table, taker, table.names[0]) == {giver}
    assert table.blobs_of_contribution(giver)[0].digest not in table.stores[taker]


def test_a_dead_partner_is_no_loss_to_the_others() -> None:
    probe = Cluster(6, "groups")
    probe.contribute(*probe.names)
    victim = probe.names[2]
    table = Cluster(6, "groups")
    table.is_slow = lambda peer, digest: digest == table.blobs_of_contribution(victim)[0].digest
    table.contribute(*table.names)
    table.kill(victim)
    assert table.included_peers() == {tuple(sorted({*table.names} - {victim}))}
    assert table.now == 0
