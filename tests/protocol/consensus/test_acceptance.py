"""A leader can leave out contributions, but not invent them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from protocol.consensus import machine as machine_module
from protocol.consensus import view_change
from protocol.consensus.events import MembershipChanged, MessageReceived
from protocol.consensus.messages.contributions import Commit, Contribution, Roster
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE, Cluster
from tests.protocol.consensus.test_knowledge import entries_of, signed_message
from tests.simulation.virtual.network import NAMES, make_contribution

INVENTED = NAMES[4:9]


def deliver(table: Cluster, sender: PeerId, body: Any) -> None:
    """Let every other peer receive a message of `sender`."""
    for name in table.names:
        if name != sender:
            table.feed_event(name, MessageReceived(signed_message(sender, body)))
    table.deliver_all()


def ordered(entries: Sequence[SignedMessage[Contribution]]) -> tuple[SignedMessage[Contribution], ...]:
    return tuple(sorted(entries, key=lambda entry: entry.sender))


def invent_contributors() -> Cluster:
    """Let the leader of view 0, which is silent otherwise, list five keys that nobody has seen."""
    table = Cluster(4, "gather")
    leader, *others = table.names
    table.drop = lambda sender, receiver, kind: sender == leader and kind != "contribution"
    table.contribute(*table.names)
    entries = ordered([*entries_of(table, table.names), *entries_of(table, INVENTED)])
    for name in INVENTED:  # the leader serves their blobs
        table.stores[leader].update(blob.digest for blob in table.blobs_of_contribution(name))
    deliver(table, leader, Roster(0, 0, BASE, entries))
    deliver(table, leader, Commit(0, 0, BASE, entries, ()))
    table.elapse(20.0)
    return table


def test_contributors_that_nobody_knows_are_refused_and_counted() -> None:
    table = invent_contributors()
    leader, *others = table.names
    assert all((leader, "unknown contributor") in table.rejections_by(name) for name in others)
    assert table.included_peers() == {tuple(sorted(table.names))}


def test_control_without_the_check_invented_contributors_are_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "unknown_contributors", lambda state, entries: ())
    assert invent_contributors().included_peers() == {tuple(sorted([*NAMES[:4], *INVENTED]))}


def locks(table: Cluster) -> list[SignedMessage[Commit]]:
    return [lock for name in table.names if (lock := table.machines[name]._state.lock) is not None]


def test_a_roster_is_followed_once_its_newcomer_is_known() -> None:
    """Gossip may be slower than the leader: the member follows the repeated roster."""
    table = Cluster(4, "gather")
    newcomer = NAMES[6]
    leader, *others = table.names
    table.stores[leader].update(blob.digest for blob in table.blobs_of_contribution(newcomer))
    table.drop = lambda sender, receiver, kind: kind == "roster"
    table.contribute(*table.names)
    entries = ordered(entries_of(table, [*table.names, newcomer]))
    roster = MessageReceived(signed_message(leader, Roster(0, 0, BASE, entries)))
    member = others[0]
    table.feed_event(member, roster)
    assert table.machines[member]._state.current_view is None
    table.feed_event(member, MembershipChanged(frozenset(table.names), trainers=frozenset({newcomer})))
    table.feed_event(member, roster)
    assert table.machines[member]._state.current_view is not None


def commit_beside_the_roster() -> Cluster:
    """Let the leader propose another contribution of its own than the one on its roster."""
    table = Cluster(4, "gather")
    leader, *others = table.names
    table.drop = lambda sender, receiver, kind: sender == leader and kind == "commit"
    table.contribute(*table.names)
    second = replace(make_contribution(leader, 0, BASE, table.scenario), tokens=7)
    entries = ordered([*entries_of(table, others), signed_message(leader, second)])
    deliver(table, leader, Commit(0, 0, BASE, entries, ()))
    return table


def test_a_commit_beside_the_roster_is_not_acknowledged_and_deposes_its_leader() -> None:
    table = commit_beside_the_roster()
    leader, *others = table.names
    assert all((leader, "false proposal") in table.rejections_by(name) for name in others)
    assert all(table.machines[name].view == 1 for name in others) and not locks(table)[1:]


def test_control_without_the_check_it_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (machine_module, view_change):
        monkeypatch.setattr(module, "proposal_fault", lambda state, proposal: None)
    assert len(locks(commit_beside_the_roster())) > 1
