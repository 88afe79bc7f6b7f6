"""How many votes decide, and what becomes of those of peers that are gone."""

from collections.abc import Iterable

import pytest

from protocol.consensus.events import MembershipChanged
from protocol.consensus.messages import Commit
from protocol.consensus.quorum import VoterSet
from tests.protocol.consensus.cluster import Cluster
from tests.simulation.bugs import asks_only_a_majority_of_the_rest

MEMORY = 10.0


def voter_set(present: Iterable[str], gone: Iterable[str]) -> VoterSet:
    """Those that are gone are forgotten."""
    members = VoterSet(MEMORY, MEMORY, {}, 0.0)
    members.update(MembershipChanged(frozenset([*present, *gone])), 0.0)
    members.update(MembershipChanged(frozenset(present)), 1.0)
    for now in (5.0, 11.0, 12.0):
        members.advance(now)
    assert members.members == frozenset(present)
    return members


def test_nobody_decides_nothing() -> None:
    assert not VoterSet(MEMORY, MEMORY, {}, 0.0).is_quorum([])


def test_a_few_deaths_let_no_straggler_hold_up_a_round() -> None:
    members = voter_set("abcdefg", "xyz")
    assert members.is_quorum("bcdefg") and members.is_quorum("abcde") and not members.is_quorum("bcdef")


def test_what_a_forgotten_peer_said_still_counts() -> None:
    members = voter_set("abc", "x")
    assert members.is_quorum("abx") and members.is_voter("x") and not members.is_voter("y")


def test_where_no_majority_is_left_all_have_to_agree() -> None:
    members = voter_set("ab", "xyz")
    assert members.is_quorum("ab") and not members.is_quorum("a")


def test_half_are_enough_if_they_are_all() -> None:
    members = voter_set("xy", "ab")
    assert members.is_quorum("xy") and not members.is_quorum("x")


def test_who_comes_back_is_asked_again() -> None:
    members = voter_set("ab", "xyz")
    members.update(MembershipChanged(frozenset("abx")), 13.0)
    assert members.is_quorum("abx") and not members.is_quorum("ab")


@pytest.mark.parametrize("known", [True, False])
def test_who_is_ahead_keeps_its_vote(known: bool) -> None:
    """Cut off for a while, three of eight meet the others again, who have passed the round."""
    members = VoterSet(MEMORY, MEMORY, {}, 0.0)
    members.update(MembershipChanged(frozenset("abcdefgh")), 0.0)
    members.update(MembershipChanged(frozenset("abc")), 1.0)
    for now in (5.0, 10.0):
        members.advance(now)
    members.update(MembershipChanged(frozenset("abc"), ahead=frozenset("defgh") if known else frozenset()), 10.5)
    for now in (15.0, 20.0):
        members.advance(now)
    assert members.is_quorum("abc") != known
    assert members.awaited == frozenset("abc"), "nobody waits for a contribution of theirs"


def test_who_is_seen_ahead_after_it_was_forgotten_votes_again() -> None:
    members = voter_set("abc", "defgh")
    members.update(MembershipChanged(frozenset("abc"), ahead=frozenset("defgh")), 13.0)
    members.advance(14.0)
    assert not members.is_quorum("abc")


def _half_decides() -> tuple[Cluster, Commit, str, list[str]]:
    """The leader and one more decide as the half with the lowest id; the leader dies unheard and is forgotten.

    Nothing passes between the one that is bound by it and the two others, although they know that it lives.
    """
    table = Cluster(4, "gather")
    leader = table.names[0]
    bound = min(name for name in table.names[1:])
    half = {leader, bound}
    assert min(table.names) in half
    table.drop = lambda sender, receiver, kind: kind == "decision" or (sender in half) != (receiver in half)
    table.contribute(*table.names)
    table.elapse(2.4)
    decided = table.commit(leader)
    assert decided and table.commit(bound) is None
    table.kill(leader)
    table.drop = lambda sender, receiver, kind: bound in (sender, receiver)
    table.elapse(table.scenario.vote_memory + 30)
    return table, decided, bound, [name for name in table.names if name not in half]


def test_who_may_be_bound_by_a_forgotten_vote_is_asked() -> None:
    table, decided, bound, others = _half_decides()
    assert not table.included_peers(), "they wait as long as it lives"
    table.drop = lambda sender, receiver, kind: False
    table.elapse(30)
    assert {commit.content_digest for name in (bound, *others) if (commit := table.commit(name))} == {
        decided.content_digest
    }
    assert len(table.included_peers()) == 1


@pytest.mark.parametrize("remembers", [True, False], ids=["remembers", "control"])
def test_a_round_that_is_opened_again_waits_for_it_too(remembers: bool) -> None:
    table, decided, bound, others = _half_decides()
    for name in others:
        machine = table.machines[name]
        seen = machine.last_seen if remembers else machine._state.voter_set.last_seen
        table.machines[name] = table.new_machine(name, seen)
        table.feed_event(name, MembershipChanged(frozenset([bound, *others])))
    table.contribute(*others)
    table.elapse(table.scenario.vote_memory + 30)
    commits = [commit for name in others if (commit := table.commit(name))]
    assert all(commit.content_digest != decided.content_digest for commit in commits)
    assert bool(commits) is not remembers, "without the memory of the forgotten, a second commit of the round"


def test_who_waits_for_a_bound_peer_goes_on_once_it_is_gone() -> None:
    table, _, bound, others = _half_decides()
    table.kill(bound)
    table.elapse(table.scenario.vote_memory + 30)
    assert all(table.commit(name) for name in others)


def test_if_a_majority_of_the_rest_were_enough_two_commits_came_about(monkeypatch: pytest.MonkeyPatch) -> None:
    asks_only_a_majority_of_the_rest(monkeypatch)
    table, decided, _, others = _half_decides()
    assert all(commit and commit.content_digest != decided.content_digest for commit in map(table.commit, others))
