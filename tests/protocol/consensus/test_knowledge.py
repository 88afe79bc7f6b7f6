"""What one peer says of others, or of itself, takes up no more memory than an honest one's words."""

from collections.abc import Sequence
from typing import Any

import pytest

from protocol.consensus import acceptance
from protocol.consensus import knowledge as knowledge_module
from protocol.consensus.events import Fetch, MembershipChanged, MessageReceived
from protocol.consensus.knowledge import MAX_PROPOSALS_PER_PEER, RoundKnowledge
from protocol.consensus.messages.contributions import NO_ROSTER, Commit, Contribution, Roster
from protocol.consensus.messages.kinds import Inventory, kind_of
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.state import MIN_HELD_BLOBS
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE, Cluster
from tests.simulation.virtual.network import NAMES, make_contribution, make_signer

STRANGERS = NAMES[4:16]  # not members


def signed_message(peer: PeerId, body: Any) -> SignedMessage[Any]:
    return SignedMessage.of(make_signer(peer)(kind_of(body), body.to_wire()), body)


def entries_of(table: Cluster, peers: Sequence[PeerId]) -> tuple[SignedMessage[Contribution], ...]:
    return tuple(signed_message(name, make_contribution(name, 0, BASE, table.scenario)) for name in sorted(peers))


def knowledge_of(table: Cluster, name: PeerId) -> RoundKnowledge:
    return table.machines[name]._state.knowledge


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """A roster holds so many contributions."""
    for module in (knowledge_module, acceptance):
        monkeypatch.setattr(module, "MAX_CONTRIBUTIONS", 5)
    return 5


@pytest.mark.parametrize("leads", [False, True])
def test_contributions_are_taken_from_commits_of_leaders_alone(leads: bool) -> None:
    table = Cluster(3, "gather")
    leader, me, other = table.names
    table.feed_event(me, MembershipChanged(frozenset(table.names), departed=frozenset(STRANGERS)))
    commit = Commit(0, 0, BASE, entries_of(table, STRANGERS), ())
    table.feed_event(me, MessageReceived(signed_message(leader if leads else other, commit)))
    assert len(knowledge_of(table, me).contributions) == (len(STRANGERS) if leads else 0)


def test_those_who_are_no_members_fill_one_roster_and_crowd_out_nobody(small: int) -> None:
    table = Cluster(3, "gather")
    leader, me, _ = table.names
    table.feed_event(me, MembershipChanged(frozenset(table.names), departed=frozenset(STRANGERS)))
    for view in range(3):
        names = [*STRANGERS[4 * view : 4 * view + 4], leader]
        table.feed_event(
            me, MessageReceived(signed_message(leader, Commit(0, view, BASE, entries_of(table, names), ())))
        )
    table.contribute(*table.names)
    contributions = knowledge_of(table, me).contributions
    assert {*table.names} < contributions.keys() and len(contributions) == len(table.names) + small


def test_a_roster_lists_no_more_than_it_may_and_members_first(small: int) -> None:
    table = Cluster(3, "gather")
    _, me, liar = table.names
    state = table.machines[me]._state
    state.known_trainers.update(STRANGERS)
    entries = entries_of(table, STRANGERS)
    state.knowledge.learn_contributions(Roster(0, 0, BASE, entries), state.voter_set.voters)
    blobs = sorted(blob.digest for entry in entries for blob in entry.body.parts)
    table.feed_event(
        me, MessageReceived(signed_message(liar, Inventory(0, 0, NO_ROSTER, tuple(blobs))))
    )  # so that none seems to be lost
    table.contribute(*table.names)
    listed = [entry.sender for entry in acceptance.build_roster(state).contributions]
    assert len(listed) == small and {*table.names} <= {*listed}


def test_what_strangers_are_said_to_offer_is_fetched_while_a_roster_lists_it() -> None:
    table = Cluster(3, "gather")
    leader, me, other = table.names
    table.feed_event(me, MembershipChanged(frozenset(table.names), departed=frozenset(STRANGERS)))
    table.feed_event(me, MessageReceived(signed_message(leader, Roster(0, 0, BASE, entries_of(table, STRANGERS)))))
    wanted = {action.part_blob for name, action in table.log if name == me and isinstance(action, Fetch)}
    assert len(wanted) == len(STRANGERS)
    table.set_live(me, other)
    assert table.machines[me].view == 1 and table.machines[me]._state.missing_parts() == {}


def test_a_peer_is_not_believed_to_hold_more_than_there_is() -> None:
    table = Cluster(3, "gather")
    me, liar = table.names[:2]
    for turn in range(50):
        blobs = tuple((1000 * turn + number).to_bytes(32, "big") for number in range(200 if turn < 49 else 2000))
        table.feed_event(me, MessageReceived(signed_message(liar, Inventory(0, turn, NO_ROSTER, blobs))))
    evidence = knowledge_of(table, me)
    assert len(evidence.held_digests(liar)) == len(evidence._holders) <= MIN_HELD_BLOBS
    assert evidence.inventories[liar] == Inventory(0, 49, NO_ROSTER, ()), "where it is, it tells all the same"


def test_of_the_proposals_of_one_peer_a_few_are_kept_and_those_that_bind_others() -> None:
    table = Cluster(4, "gather")
    leader, me, voter, _ = table.names
    commits = [signed_message(leader, Commit(0, view, BASE, entries_of(table, [leader]), ())) for view in range(20)]
    table.feed_event(me, MessageReceived(commits[0]))
    table.feed_event(me, MessageReceived(signed_message(voter, Inventory(0, 1, NO_ROSTER, (), commits[0].digest))))
    for commit in commits[1:]:
        table.feed_event(me, MessageReceived(commit))
    kept = [commits[0], *commits[-MAX_PROPOSALS_PER_PEER:]]
    assert knowledge_of(table, me).proposals.keys() == {commit.digest for commit in kept}
