"""How many votes decide, and what becomes of those of peers that are gone."""

from collections.abc import Iterable

import pytest

from protocol.consensus.events import MembershipChanged
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.quorum import Election, VoteMemory, VoterSet
from protocol.electorate import NOBODY, Electorate
from protocol.manifest.sections import AdmissionSection
from tests.protocol.consensus.cluster import TRUSTED, Cluster
from tests.protocol.electorates import after_rounds, commit
from tests.simulation.bugs import asks_only_a_majority_of_the_rest

MEMORY = 10.0


def trusting(names: Iterable[str]) -> Electorate:
    rule = AdmissionSection.model_construct(mode="list", keys=tuple(names), trusted=True, founders=(), revoked=())
    return Electorate.at_genesis(rule)


def founded_by(names: Iterable[str]) -> Electorate:
    return NOBODY.after(commit(0, names))


def new_voter_set(electorate: Electorate = NOBODY) -> VoterSet:
    return VoterSet(electorate, VoteMemory(MEMORY, MEMORY), {}, 0.0)


def voter_set(present: Iterable[str], gone: Iterable[str], electorate: Electorate = NOBODY) -> VoterSet:
    """Those that are gone are forgotten."""
    members = new_voter_set(electorate)
    members.update(MembershipChanged(frozenset([*present, *gone])), 0.0)
    members.update(MembershipChanged(frozenset(present)), 1.0)
    for now in (5.0, 11.0, 12.0):
        members.advance(now)
    assert members.members == frozenset(present)
    return members


def test_nobody_decides_nothing() -> None:
    assert not new_voter_set().is_quorum([])


def lose_one(names: str, missed: str, electorate: Electorate) -> VoterSet:
    members = new_voter_set(electorate)
    members.update(MembershipChanged(frozenset(names)), 0.0)
    members.update(MembershipChanged(frozenset(names[1:]), missed=frozenset(missed)), 1.0)
    return members


def test_survivor_of_two_goes_on_when_most_of_the_run_misses_the_other() -> None:
    members = lose_one("ab", "a", founded_by("ab"))
    assert members.is_quorum("b") and members.voters == frozenset("ab")
    members.update(MembershipChanged(frozenset("ab")), 2.0)
    assert not members.is_quorum("b"), "the other is back"


def test_survivor_of_two_waits_for_the_vote_memory_when_it_alone_misses_the_other() -> None:
    members = lose_one("ab", "", founded_by("ab"))
    members.advance(MEMORY)
    assert not members.is_quorum("b")
    members.advance(MEMORY + 1.1)
    assert members.is_quorum("b")


def test_absent_voters_are_remembered_where_a_liar_is_tolerated() -> None:
    members = lose_one("abcd", "a", founded_by("abcd"))
    assert members.members == frozenset("abcd")


def lose(names: str, gone: str, ended: str, electorate: Electorate) -> VoterSet:
    members = new_voter_set(electorate)
    members.update(MembershipChanged(frozenset(names)), 0.0)
    members.update(MembershipChanged(frozenset(names) - set(gone), ended=frozenset(ended)), 1.0)
    return members


def test_nobody_waits_for_voters_whose_processes_have_ended() -> None:
    members = lose("abcdefgh", "abc", "abc", founded_by("abcdefgh"))
    assert members.is_quorum("defgh") and not members.is_quorum("defg"), "all that live are needed"
    assert members.voters == frozenset("abcdefgh"), "what the dead said counts"
    members.update(MembershipChanged(frozenset("abcdefgh")), 2.0)
    assert not members.is_quorum("defgh"), "they are back"


@pytest.mark.parametrize("ended", ["", "ab"])
def test_a_voter_that_is_merely_silent_is_waited_for(ended: str) -> None:
    """It may be on another side of a split."""
    members = lose("abcdefgh", "abc", ended, founded_by("abcdefgh"))
    for now in (5.0, MEMORY):
        members.advance(now)
        assert not members.is_quorum("defgh")
    members.advance(MEMORY + 1.1)
    assert members.is_quorum("defgh")


def test_dead_voters_are_remembered_where_they_may_have_decided_without_the_others() -> None:
    """Six of eight decide: of three that live, one has voted with them; of two, perhaps none."""
    assert lose("abcdefgh", "abcde", "abcde", founded_by("abcdefgh")).is_quorum("fgh")
    assert not lose("abcdefgh", "abcdef", "abcdef", founded_by("abcdefgh")).is_quorum("gh")


def test_dead_voters_are_remembered_while_a_quorum_is_left() -> None:
    members = lose("abcdefgh", "ab", "ab", founded_by("abcdefgh"))
    assert members.members == frozenset("abcdefgh") and members.is_quorum("cdefgh")


def test_a_few_deaths_let_no_straggler_hold_up_a_round() -> None:
    members = voter_set("abcdefg", "xyz", trusting("abcdefgxyz"))
    assert members.is_quorum("bcdefg") and members.is_quorum("bcdefa") and not members.is_quorum("bcdef")
    members = voter_set("abcdefghi", "xyz")  # nine of twelve where some may lie: eight
    assert members.is_quorum("bcdefghi") and not members.is_quorum("bcdefgh")


def test_what_a_forgotten_peer_said_still_counts() -> None:
    members = voter_set("abc", "x")
    assert members.is_quorum("abx") and members.is_known("x") and not members.is_known("y")


def test_where_no_majority_is_left_all_have_to_agree() -> None:
    members = voter_set("ab", "xyz")
    assert members.is_quorum("ab") and not members.is_quorum("a")


def test_who_comes_back_is_asked_again() -> None:
    members = voter_set("ab", "xyz")
    members.update(MembershipChanged(frozenset("abx")), 13.0)
    assert members.is_quorum("abx") and not members.is_quorum("ab")


@pytest.mark.parametrize("known", [True, False])
def test_who_is_ahead_keeps_its_vote(known: bool) -> None:
    """Cut off for a while, three of eight meet the others again, who have passed the round."""
    members = new_voter_set()
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


def test_only_entitled_keys_count() -> None:
    members = new_voter_set(founded_by("abcd"))
    members.update(MembershipChanged(frozenset(["a", "b", "c", "d", *"123456789"])), 0.0)
    assert members.is_quorum("abc") and not members.is_quorum("ab123456789")
    assert members.electable == members.awaited == frozenset("abcd"), "strangers do not lead, and nobody waits for them"
    control = new_voter_set()
    control.update(MembershipChanged(frozenset(["a", "b", "c", "d", *"123456789"])), 0.0)
    assert not control.is_quorum("abcd"), "where they counted, announcements alone stopped the rounds"


def test_nobody_waits_for_a_voter_that_is_not_there() -> None:
    members = voter_set("ab", "", founded_by("abcdef"))
    assert members.is_quorum("ab") and not members.is_quorum("a")


def test_newcomers_go_on_once_no_voter_is_left() -> None:
    electorate = after_rounds(founded_by("a"), 3, "axy")
    members = new_voter_set(electorate)
    members.update(MembershipChanged(frozenset("axyz")), 0.0)
    members.update(MembershipChanged(frozenset("xyz")), 1.0)
    members.advance(5.0)
    assert not members.is_quorum("xyz"), "as long as the voter may come back"
    members.advance(12.0)
    assert members.is_quorum("xy") and not members.is_quorum("xz"), "those that contributed before the others"
    members.update(MembershipChanged(frozenset("z")), 13.0)
    for now in (18.0, 24.0):
        members.advance(now)
    assert members.is_quorum("z"), "and all where none of them is left"


def test_a_key_that_contributes_is_waited_for_and_a_silent_one_is_not() -> None:
    electorate = after_rounds(founded_by("abc"), 3, "abcx")
    members = new_voter_set(electorate)
    members.update(MembershipChanged(frozenset("abcxy")), 0.0)
    assert members.awaited == frozenset("abcx")


def test_exact_steps_wait_for_all_that_contributed_lately_and_for_no_key_that_only_announces() -> None:
    electorate = after_rounds(founded_by("abc"), 1, "abcx")
    shown = MembershipChanged(frozenset(["a", "b", "c", "x", *"123"]))
    exact = VoterSet(electorate, VoteMemory(MEMORY, MEMORY), {}, 0.0, awaits_standing=True)
    for members, awaited in ((exact, "abcx"), (new_voter_set(electorate), "abc")):
        members.update(shown, 0.0)
        assert members.awaited == frozenset(awaited)
    fresh = VoterSet(NOBODY, VoteMemory(MEMORY, MEMORY), {}, 0.0, awaits_standing=True)
    fresh.update(shown, 0.0)
    assert fresh.awaited == shown.peers, "where nobody has standing, the sums of all count"


@pytest.mark.parametrize("trusted", [False, True])
def test_silent_liar_does_not_hold_up_a_round_in_which_an_honest_voter_died(trusted: bool) -> None:
    members = voter_set("abl", "d", trusting("abld") if trusted else founded_by("abld"))
    assert not members.is_quorum("ab") and members.is_quorum("abd")
    for now in (15.0, 20.0, 22.5):
        members.advance(now)
    assert members.is_quorum("ab") != trusted, "where nobody lies, the vote of the dead counts to the end"


def test_no_key_can_be_ground_to_lead() -> None:
    """A key that leads one round after the digest is known leads others as rarely as any key."""
    bases = [bytes([number]) * 32 for number in range(1, 251)]
    names = [f"key {number}" for number in range(200)]
    voters = frozenset("abcd")
    ground = next(name for name in names if Election(bases[0]).leader(0, voters | {name}) == name)
    led = sum(Election(base).leader(0, voters | {ground}) == ground for base in bases[1:])
    assert 25 < led < 80, "one round of five"
    assert Election(bases[0]).leader(0, voters) in voters


def _three_decide() -> tuple[Cluster, Commit, str, list[str]]:
    """The leader and two more decide; the leader and one of the two die unheard and are forgotten.

    Nothing passes between the one that is bound by it and the two others, although they know that it lives.
    """
    table = Cluster(5, "gather", electorate=TRUSTED)
    leader, bound, doomed = table.names[:3]
    table.drop = lambda sender, receiver, kind: (
        kind == "decision" or (sender in table.names[:3]) != (receiver in table.names[:3])
    )
    table.contribute(*table.names)
    table.elapse(2.4)
    decided = table.commit(leader)
    assert decided and table.commit(bound) is None
    table.kill(leader, doomed)
    table.drop = lambda sender, receiver, kind: bound in (sender, receiver)
    table.elapse(table.scenario.vote_memory + 30)
    return table, decided, bound, table.names[3:]


def test_who_may_be_bound_by_a_forgotten_vote_is_asked() -> None:
    table, decided, bound, others = _three_decide()
    assert not table.included_peers(), "they wait as long as it lives"
    table.drop = lambda sender, receiver, kind: False
    table.elapse(30)
    assert {commit.content_digest for name in (bound, *others) if (commit := table.commit(name))} == {
        decided.content_digest
    }
    assert len(table.included_peers()) == 1


@pytest.mark.parametrize("remembers", [True, False], ids=["remembers", "control"])
def test_a_round_that_is_opened_again_waits_for_it_too(remembers: bool) -> None:
    table, decided, bound, others = _three_decide()
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
    table, _, bound, others = _three_decide()
    table.kill(bound)
    table.elapse(table.scenario.vote_memory + 30)
    assert all(table.commit(name) for name in others)


def test_if_a_majority_of_the_rest_were_enough_two_commits_came_about(monkeypatch: pytest.MonkeyPatch) -> None:
    asks_only_a_majority_of_the_rest(monkeypatch)
    table, decided, _, others = _three_decide()
    assert all(commit and commit.content_digest != decided.content_digest for commit in map(table.commit, others))
