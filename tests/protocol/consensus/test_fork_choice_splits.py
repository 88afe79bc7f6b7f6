"""Two chains of one run without a kept commit in common: the voters of the last strong head decide, or a person."""

import json
from dataclasses import replace

from node.daemon.checkpoints.checkpoint import SavedChain
from protocol.consensus.chain import MAX_KEPT_COMMITS, Chain, ChainLog
from protocol.consensus.fork_choice import ChainComparison, judge
from protocol.electorate import ABSENCES_TO_LOSE, INCLUSIONS_FOR_VOTE, OPEN, WINDOW_ROUNDS
from tests.node.small_run import RUN_ID, TERMS
from tests.protocol.consensus.test_fork_choice import ALL, LIARS, NAMES, VOTERS, founded, grow, offer, seen

LONG = MAX_KEPT_COMMITS + 16
FORK = founded()
ALONE = grow(FORK, 2 * LONG, (0,), "alone")


def forgetful(chain: Chain) -> Chain:
    """Return a chain that knows its voters from the kept commits alone."""
    return Chain(chain.head, ChainLog(chain.log.electorate, chain.log.commits))


def judged(own: Chain, other: Chain) -> ChainComparison:
    assert not any(own.has_head(head.digest) for head in offer(other).heads)
    return judge(own, offer(other), ALL)


def test_minority_follows_the_quorum_of_its_former_voters_however_long_its_own_chain_is() -> None:
    """Control: a chain that has forgotten these voters is kept for ever."""
    quorum = grow(FORK, LONG, (1, 2, 3), "quorum")
    assert quorum.round < ALONE.round
    judgement = judged(ALONE, quorum)
    assert judgement.relation == "ahead" and not judgement.needs_person
    assert judgement.lost == 2 * LONG
    assert judged(forgetful(ALONE), quorum) == ChainComparison("other", is_split=True)
    assert judged(quorum, ALONE).relation == "refused" and judged(quorum, ALONE).is_split


def test_equal_halves_are_decided_by_tokens_and_then_by_the_digest() -> None:
    first, second = grow(FORK, LONG, (0, 1), "first"), grow(FORK, LONG + 1, (2, 3), "second")
    assert judged(first, second).relation == "ahead" and not judged(first, second).needs_person
    assert judged(second, first).relation == "other" and judged(second, first).is_split
    equal = grow(FORK, LONG, (2, 3), "equal")
    lower, higher = sorted((first, equal), key=lambda chain: chain.digest)
    assert judged(higher, lower).relation == "ahead" and judged(lower, higher).relation == "other"
    assert judged(forgetful(first), second).relation != "ahead" or judged(forgetful(first), second).needs_person


def test_chain_that_too_few_of_the_former_voters_acknowledged_is_not_followed() -> None:
    """Of four voters one may lie, whatever keys without a vote it has, whatever it claims. Control: two of the four."""
    for signers in ((1,), (1, *LIARS), LIARS):
        assert judged(ALONE, grow(FORK, 3 * LONG, signers, "lie")).relation == "refused", signers
    assert judged(ALONE, grow(FORK, 3 * LONG, (1, 2), "true")).relation == "ahead"


def test_peer_that_comes_back_at_an_earlier_head_of_our_chain_is_not_followed() -> None:
    """Control: eight rounds without those that carry ours, and it is another chain."""
    for earlier in (FORK, grow(FORK, 3, (0, 1), "weak")):
        later = grow(earlier, LONG, (0,), "alone")
        assert judged(later, earlier) == ChainComparison("other")
        assert judged(later, grow(earlier, ABSENCES_TO_LOSE - 1, (1, 2, 3), "back")) == ChainComparison("other")
        assert judged(later, grow(earlier, ABSENCES_TO_LOSE, (1, 2, 3), "back")).relation == "ahead"


def test_acknowledgements_from_before_the_last_strong_head_do_not_count() -> None:
    """Voters of a chain that was left vouch for it no more. Control: a chain that is as long as that head."""
    left = grow(FORK, ABSENCES_TO_LOSE + 2, (2, 3), "left")
    healed = grow(grow(FORK, LONG, (0, 1, 2, 3), "healed"), 2 * LONG, (0,), "alone")
    assert judged(healed, left) == ChainComparison("other", is_split=True)
    assert judged(healed, grow(left, LONG, (2, 3), "left")).relation == "ahead"


def test_voters_that_vanished_have_no_say_once_as_many_others_vote() -> None:
    """Control: before that they do."""
    ours = founded(2)
    returning = grow(ours, 4 * LONG, (1, 2, 3), "returning")
    for entering in (4, 5, 1):
        ours = grow(ours, WINDOW_ROUNDS + INCLUSIONS_FOR_VOTE, (0,), "renewed", given=(0, entering))
    assert len(ours.electorate.voters) < len(VOTERS) and judged(ours, returning).relation == "ahead"
    everybody = (0, 1, 4, 5)
    while len(ours.electorate.voters) < len(VOTERS):
        ours = grow(ours, 1, everybody, "renewed")
        assert ours.round < 10 * LONG
    ours = grow(ours, 2, everybody, "renewed")
    assert not ours.is_weak
    assert judged(ours, returning).relation != "ahead"


def test_weak_streak_outlives_checkpoints_and_a_change_of_chain() -> None:
    quorum = grow(FORK, LONG, (1, 2, 3), "quorum")
    saved = SavedChain.of(ALONE.head, ALONE.log)
    restored = SavedChain(json.loads(json.dumps(dict(saved.table))), saved.log).restore(OPEN, TERMS)
    assert judged(restored, quorum).relation == "ahead"
    half, moved = grow(FORK, LONG, (0, 1), "half"), Chain(ALONE.head, ALONE.log)
    moved.switch_to(half.head, offer(half).log)
    assert moved.is_weak and judged(moved, quorum).relation == "ahead"
    moved.switch_to(quorum.head, offer(quorum).log)
    assert not moved.is_weak and moved.strong_electorate == quorum.electorate


def test_voters_that_a_shown_chain_invents_are_not_remembered() -> None:
    """A liar may forge what nobody verifies: the voters long ago, and the certificates of common commits.

    Control: from our own disk they would be remembered, and no later quorum would ever certify the chain.
    """
    ours = grow(Chain.from_genesis(RUN_ID), 40, VOTERS)
    longer = grow(ours, 3, VOTERS)
    true = longer.log_since(10)
    assert true is not None
    many = frozenset((*NAMES, *(f"false {number}" for number in range(50))))
    forged = replace(true, electorate=replace(true.electorate, voters=many), strong=true.electorate)
    assert forged.electorates[-1].digest == longer.electorate.digest, "absent voters have lost their votes"
    for chain in (ours, Chain.from_genesis(RUN_ID)):
        moved = Chain(chain.head, chain.log)
        moved.switch_to(longer.head, forged)
        assert moved.strong_electorate == longer.electorate and not moved.is_weak
    assert Chain(longer.head, replace(forged, strong=None)).strong_electorate.voters == many


def test_only_one_side_of_a_split_jumps() -> None:
    """Whatever the sides are, both never follow each other at once, and two sides of a quorum always become one."""
    sides = [(0,), (1,), (0, 1), (1, 2), (2, 3), (1, 2, 3), (0, 1, 2), (3,)]
    for left in sides:
        for right in sides:
            if set(left) & set(right):
                continue
            for rounds in (LONG, LONG + 9):
                first, second = grow(FORK, LONG, left, "left"), grow(FORK, rounds, right, "right")
                relations = judged(first, second).relation, judged(second, first).relation
                assert relations.count("ahead") <= 1, (left, right, rounds)
                if max(len(left), len(right)) >= 2:
                    assert relations.count("ahead") == 1, (left, right, rounds)


def test_one_live_peer_of_three_has_no_say_against_two() -> None:
    witnesses = seen(2, me=1)
    pair = grow(FORK, LONG, (1, 2), "pair")
    assert judge(pair, offer(ALONE), witnesses).relation in ("other", "refused")
