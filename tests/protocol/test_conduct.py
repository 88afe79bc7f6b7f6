"""Two statements that exclude each other exclude their key; what is not proved passes."""

from dataclasses import replace

import pytest

from node.loop.actions import SaveProofs
from node.loop.peers.peer_conduct import PeerConduct
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from protocol import conduct as conduct_module
from protocol.conduct import (
    GOOD_ROUNDS,
    LEFT_OUT_STRIKE,
    MAX_LEVEL,
    MAX_STATEMENTS_PER_PEER,
    Conduct,
    Proof,
    RoundConduct,
    Strikes,
    excludes,
)
from protocol.consensus.events import Send
from protocol.consensus.messages.contributions import Commit, Contribution, Roster
from protocol.consensus.messages.kinds import Acknowledgement, Body, ReducedPart, kind_of
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import ForgedError, MalformedError
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE, Cluster
from tests.protocol.consensus.test_knowledge import entries_of, signed_message
from tests.simulation.virtual.network import NAMES, fake_reduce, make_contribution, make_signer

ME, LIAR, *OTHERS = NAMES[:6]
TABLE = Cluster(6, "butterfly", 2)
OFFER = make_contribution(LIAR, 0, BASE, TABLE.scenario)
ENTRIES = entries_of(TABLE, NAMES[:3])
SUM, NOISE = (fake_reduce(part, ENTRIES) for part in (0, 1))
PAIRS: list[tuple[Body, Body]] = [
    (OFFER, replace(OFFER, loss=9.0)),
    (Roster(0, 1, BASE, ENTRIES), Roster(0, 1, BASE, ENTRIES[:2])),
    (Commit(0, 1, BASE, ENTRIES, ()), Commit(0, 1, BASE, ENTRIES[:2], ())),
    (ReducedPart(0, 1, BASE, 1, 0, SUM, BASE), ReducedPart(0, 2, bytes(32), 3, 0, NOISE, BASE)),
]


def both(first: Body, second: Body) -> tuple[SignedMessage[Body], SignedMessage[Body]]:
    return signed_message(LIAR, first), signed_message(LIAR, second)


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda body: kind_of(body))
def test_statements_that_exclude_each_other_are_a_proof_that_anybody_can_check(first: Body, second: Body) -> None:
    conduct = Conduct(ME)
    messages = both(first, second)
    assert not conduct.observe(messages[0], 0) and not conduct.observe(messages[0], 0)
    (proof,) = conduct.observe(messages[1], 0)
    assert conduct.excluded == {LIAR} == {proof.culprit}
    reported = TABLE.network.open(signed_message(ME, proof).signed)
    assert reported.body == proof
    other = Conduct(OTHERS[0])
    assert other.learn(reported) and not other.learn(reported) and other.excluded == {LIAR}
    assert LIAR in " ".join(other.describe(1, NAMES))


@pytest.mark.parametrize("limit", [10, 1 << 19], ids=["large", "small"])
def test_proof_that_is_too_large_to_pass_on_is_saved_too(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduct_module, "MAX_PROOF_BYTES", limit)
    peer = PeerConduct(ME, (), make_signer(ME))
    peer.view(SwarmSnapshot({name: PeerState(None) for name in NAMES[:4]}))
    peer.receive(both(*PAIRS[0]), 0)
    actions = peer.take_actions()
    (saved,) = [action for action in actions if isinstance(action, SaveProofs)]
    assert [proof.body.culprit for proof in saved.proofs] == [LIAR] and peer.excluded == {LIAR}
    assert any(isinstance(action, Send) for action in actions) == (limit > 10)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (OFFER, OFFER),
        (OFFER, replace(OFFER, round=1)),
        (OFFER, replace(OFFER, base=bytes(32), loss=9.0)),
        (Roster(0, 1, BASE, ENTRIES), Roster(0, 2, BASE, ENTRIES[:2])),
        (Commit(0, 1, BASE, ENTRIES, ()), Roster(0, 1, BASE, ENTRIES[:2])),
        (ReducedPart(0, 1, BASE, 1, 0, SUM, BASE), ReducedPart(0, 1, BASE, 1, 0, NOISE, bytes(32))),
        (ReducedPart(0, 1, BASE, 1, 0, SUM, BASE), ReducedPart(0, 1, BASE, 2, 0, SUM, BASE)),
        (Acknowledgement(0, 1, BASE), Acknowledgement(0, 1, bytes(32))),
    ],
)
def test_statements_that_an_honest_peer_may_sign_are_no_proof(first: Body, second: Body) -> None:
    conduct = Conduct(ME)
    for message in both(first, second):
        assert not conduct.observe(message, 0)
    assert not excludes(*both(first, second)) and not conduct.excluded
    false = Proof(*both(first, second))
    with pytest.raises(MalformedError):
        TABLE.network.open(signed_message(ME, false).signed)


def test_statements_of_two_keys_and_forged_ones_prove_nothing() -> None:
    first, second = PAIRS[0]
    pair = Proof(signed_message(LIAR, first), signed_message(OTHERS[0], second))
    with pytest.raises(MalformedError):
        TABLE.network.open(signed_message(ME, pair).signed)
    forged = both(first, second)
    forged[1].signed.signature = forged[0].signed.signature
    with pytest.raises(ForgedError):
        TABLE.network.open(signed_message(ME, Proof(*forged)).signed)


def test_a_second_contribution_is_found_in_the_roster_of_a_leader() -> None:
    conduct = Conduct(ME)
    conduct.observe(signed_message(LIAR, replace(OFFER, loss=9.0)), 0)
    entries = entries_of(TABLE, [LIAR, OTHERS[0]])
    (proof,) = conduct.observe(signed_message(OTHERS[1], Roster(0, 0, BASE, entries)), 0)
    assert proof.culprit == LIAR


def test_two_commits_of_one_view_are_found_in_two_chains() -> None:
    """Each was decided elsewhere, so nobody has seen both; contributions inside them are compared as well."""
    ours, theirs, later = (signed_commit(LIAR, view, ENTRIES[:count]) for view, count in ((1, 3), (1, 2), (2, 2)))
    conduct = Conduct(ME)
    assert not conduct.compare([ours], [ours, later]) and not conduct.compare([], [theirs])
    (proof,) = conduct.compare([ours], [later, theirs])
    assert proof.is_valid and conduct.excluded == {LIAR}
    assert not conduct.compare([ours], [theirs]), "it is known"
    assert not Conduct(LIAR).compare([ours], [theirs])
    offers = (SignedMessage.of(signed_message(LIAR, body).signed, body) for body in (OFFER, replace(OFFER, loss=9.0)))
    first, second = (signed_commit(OTHERS[0], view, (entry,)) for view, entry in enumerate(offers))
    assert [proof.culprit for proof in Conduct(ME).compare([first], [second])] == [LIAR]


def signed_commit(name: PeerId, view: int, entries: tuple[SignedMessage[Contribution], ...]) -> SignedMessage[Commit]:
    body = Commit(0, view, BASE, entries, ())
    return SignedMessage.of(signed_message(name, body).signed, body)


def test_the_table_of_statements_is_bounded_and_forgets() -> None:
    conduct = Conduct(ME)
    for view in range(5 * MAX_STATEMENTS_PER_PEER):
        conduct.observe(signed_message(LIAR, Roster(0, view, BASE, ENTRIES)), 0)
    conduct.observe(signed_message(LIAR, replace(OFFER, round=50)), 0)
    assert sum(map(len, conduct._statements.values())) <= MAX_STATEMENTS_PER_PEER + len(NAMES)
    conduct.forget(9)
    assert not conduct._statements


def test_strikes_double_and_good_rounds_take_them_back() -> None:
    strikes, live = Strikes(), NAMES[:6]
    spans, number = [], 0
    for _ in range(MAX_LEVEL + 2):
        strikes.strike(LIAR, number, "silent")
        strikes.strike(LIAR, number, "again in the same round")
        assert strikes.struck(number + 1, live) == {LIAR: "silent"}
        spans.append(strikes.until(LIAR) - number - 1)
        number = strikes.until(LIAR)
        assert strikes.struck(number, live) == {}
    assert spans == [2, 4, 8, 16, 32, 64, 64, 64]
    for _ in range(MAX_LEVEL * GOOD_ROUNDS):
        strikes.forgive([LIAR])
    strikes.strike(LIAR, number, "silent")
    assert strikes.until(LIAR) - number - 1 == 2, "as after the first one"


def test_no_more_than_a_third_is_set_aside() -> None:
    strikes = Strikes()
    for peer in NAMES[:5]:
        strikes.strike(peer, 0, "silent")
    assert len(strikes.struck(1, NAMES[:7])) == 2 and not strikes.struck(1, NAMES[:3])


def test_an_honest_peer_is_back_soon_after_its_link_is_repaired() -> None:
    conduct, number = Conduct(ME), 0
    while number < 40:  # its bulk path is broken
        conduct.close_round(RoundConduct(number, OTHERS[0], withheld=frozenset({LIAR})))
        number += 1
    waited = sum(LIAR in conduct.serving.struck(later, NAMES[:6]) for later in range(number, number + 100))
    assert waited <= 64
    conduct.close_round(RoundConduct(number, OTHERS[0], served=frozenset({LIAR})))
    assert LIAR not in conduct.serving.struck(number + 1, NAMES[:6]), "a leader that had its work included it"


def test_a_leader_that_leaves_out_ready_work_again_and_again_does_not_lead() -> None:
    conduct = Conduct(ME)
    for number in range(LEFT_OUT_STRIKE):
        assert not conduct.leading.struck(number, NAMES[:6])
        conduct.close_round(RoundConduct(number, LIAR, left_out=frozenset({ME})))
    assert LIAR in conduct.leading.struck(LEFT_OUT_STRIKE, NAMES[:6])
    assert conduct.left_out_by() == {LIAR: (LEFT_OUT_STRIKE, LEFT_OUT_STRIKE)}
    assert f"left out by {LIAR} {LEFT_OUT_STRIKE} times of {LEFT_OUT_STRIKE}" in conduct.describe(9, NAMES)


def test_control_a_leader_that_leaves_out_rarely_goes_on_leading() -> None:
    conduct = Conduct(ME)
    for number in range(20):
        conduct.close_round(RoundConduct(number, OTHERS[0], left_out=frozenset({ME} if number % 4 == 0 else ())))
    assert not conduct.leading.struck(20, NAMES[:6])


def test_nobody_strikes_or_excludes_itself() -> None:
    conduct = Conduct(ME)
    conduct.close_round(RoundConduct(0, ME, withheld=frozenset({ME}), failed_leaders={ME: "leader silent"}))
    for body in (OFFER, replace(OFFER, loss=9.0)):
        assert not conduct.observe(signed_message(ME, body), 0)
    assert not conduct.excluded and not conduct.serving.struck(1, NAMES[:6]) and not conduct.leading.struck(1, NAMES)


def test_contributions_have_no_place_apart_from_their_round_and_chain() -> None:
    bodies: list[Contribution] = [OFFER, replace(OFFER, tokens=7), replace(OFFER, age=1)]
    assert all(excludes(*both(OFFER, body)) for body in bodies[1:])


def test_a_peer_that_makes_up_sums_is_excluded_unless_many_disagree_with_us() -> None:
    conduct, few, many = Conduct(ME), frozenset({LIAR}), frozenset(NAMES[1:5])
    conduct.close_round(RoundConduct(0, OTHERS[0], false_reducers=few, members=6))
    assert conduct.excluded == few and "made up a sum" in " ".join(conduct.describe(1, NAMES))
    doubtful = Conduct(ME)
    doubtful.close_round(RoundConduct(0, OTHERS[0], false_reducers=many, members=6))
    assert not doubtful.excluded


def test_only_what_cannot_be_passed_on_is_doubted() -> None:
    """A wrong sum of our own reckoning convinces nobody else; a proof does."""
    conduct = Conduct(ME)
    conduct.close_round(RoundConduct(3, OTHERS[1], false_reducers=frozenset({LIAR}), members=6))
    assert conduct.excluded == {LIAR} == conduct.doubted
    conduct.learn(signed_message(ME, Proof(*both(*PAIRS[0]))))
    assert not conduct.doubted
