"""The leader after one that made two proposals: it repeats the one that may have been decided, or waits."""

from typing import Any

import pytest

from protocol.consensus import leader as leader_module
from protocol.consensus.events import MembershipChanged, MessageReceived
from protocol.consensus.knowledge import RoundKnowledge
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.kinds import Acknowledgement
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.quorum import (
    BoundProposal,
    Election,
    RepeatedProposal,
    VoteMemory,
    VoterSet,
    choose_repeated_proposal,
)
from protocol.electorate import NOBODY
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE, Cluster
from tests.protocol.consensus.test_knowledge import entries_of, signed_message
from tests.simulation.virtual.network import NAMES

LIAR, *HONEST = NAMES[:4]
ENTRIES = entries_of(Cluster(4, "gather"), NAMES[:4])


def commit_of(count: int, view: int = 0, author: PeerId = LIAR) -> SignedMessage[Commit]:
    body = Commit(0, view, BASE, ENTRIES[:count], ())
    return SignedMessage.of(signed_message(author, body).signed, body)


def choose(joined: str, votes: dict[int, str], names: list[PeerId], liars: int = 1) -> tuple[int, bool]:
    """Return how many contributions the repeated proposal has, and whether the leader waits.

    Args:
        joined: the places of the voters that joined.
        votes: by the contributions of a proposal, the places of the voters that acknowledged it.
        names: all keys; the first ones are proved liars, and do not count as voters any more.
    """
    voter_set = VoterSet(NOBODY, VoteMemory(12.0, 1.5), {}, 0.0)
    voter_set.update(MembershipChanged(frozenset(names[liars:])), 0.0)
    ballot = Election(BASE).ballot(0, LIAR)
    bound = [BoundProposal(ballot, commit_of(size), {names[int(at)] for at in by}) for size, by in votes.items()]
    found = choose_repeated_proposal(bound, voter_set, {names[int(at)] for at in joined}, set(names[:liars]))
    assert found is not None
    return len(found.proposal.body.contributions), found.is_doubtful


@pytest.mark.parametrize(
    ("joined", "votes", "expected"),
    [
        ("123", {4: "12", 3: "3"}, (4, False)),
        ("123", {4: "1", 3: "23"}, (3, False)),
        ("23", {4: "2", 3: "3"}, (4, True)),  # 1 may have made three of either, with the liar
        ("23", {4: "23"}, (4, False)),
        ("23", {3: "2"}, (3, False)),
    ],
)
def test_one_of_four_lies_and_the_others_tell_what_was_decided(
    joined: str, votes: dict[int, str], expected: tuple[int, bool]
) -> None:
    assert choose(joined, votes, NAMES[:4]) == expected


def test_second_liar_among_seven_cannot_hide_a_decision_once_all_honest_voters_have_joined() -> None:
    """Key 1 lies as well: it has acknowledged both proposals, and reports the one that was not decided."""
    assert choose("123456", {4: "234", 3: "156"}, NAMES[:7])[1] is False
    assert choose("23456", {4: "234", 3: "56"}, NAMES[:7], liars=2) == (4, False)
    assert choose("3456", {4: "34", 3: "56"}, NAMES[:7], liars=2)[1] is True


def two_proposals() -> tuple[Cluster, Commit, tuple[PeerId, ...]]:
    """Let a leader show the next leader another proposal than the rest; a peer that is cut off knows the decision."""
    table = Cluster(4, "gather")
    liar, *honest = table.names
    later = Election(BASE).leader(1, frozenset(honest))
    assert later is not None
    other, away = (name for name in honest if name != later)
    table.drop = lambda sender, receiver, kind: (
        (kind == "commit" and receiver == later) or (kind == "decision" and receiver != away)
    )
    table.contribute(*table.names)
    decided = table.commit(away)
    assert decided is not None
    second = Commit(0, 0, BASE, decided.contributions[:3], ())
    table.feed_event(later, MessageReceived(signed_message(liar, second)))
    table.drop = lambda sender, receiver, kind: away in (sender, receiver)
    table.kill(liar, noticed=False)
    gone = frozenset({liar})
    for name in honest:
        table.feed_event(name, MembershipChanged(frozenset(honest), gone, excluded=gone))
    table.deliver_all()
    return table, decided, (other, later)


def test_leader_waits_for_a_silent_voter_that_may_know_of_another_decision() -> None:
    table, decided, waiting = two_proposals()
    table.elapse(5.0)
    assert [table.commit(name) for name in waiting] == [None, None]
    (away,) = set(table.names[1:]) - {*waiting}
    for name in waiting:
        for signed in table.machines[away].signed_decision:
            table.feed_event(name, MessageReceived(table.network.open(signed)))
    for name in waiting:
        commit = table.commit(name)
        assert commit is not None and commit.content_digest == decided.content_digest


def test_proposal_of_an_excluded_key_binds_whoever_acknowledged_it() -> None:
    knowledge, commit = RoundKnowledge(HONEST[0]), commit_of(3)
    assert not knowledge.is_lock(commit.digest)
    vote = Acknowledgement(0, 0, commit.digest)
    knowledge.learn_acknowledgement(SignedMessage.of(signed_message(HONEST[1], vote).signed, vote))
    assert knowledge.is_lock(commit.digest)


def test_leader_does_not_wait_for_ever() -> None:
    table, _, waiting = two_proposals()
    table.elapse(20.0)
    assert None not in [table.commit(name) for name in waiting]


def test_control_without_the_wait_the_round_is_decided_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def hastily(*given: Any) -> RepeatedProposal | None:
        found = choose_repeated_proposal(*given)
        return found._replace(is_doubtful=False) if found else None

    monkeypatch.setattr(leader_module, "choose_repeated_proposal", hastily)
    table, decided, waiting = two_proposals()
    table.elapse(5.0)
    commit = table.commit(waiting[0])
    assert commit is not None and commit.content_digest != decided.content_digest
