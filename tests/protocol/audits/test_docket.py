"""What follows from findings: one auditor decides nothing, a majority of three everything, and misses only strikes."""

import pytest

from protocol.audits.docket import KEPT_ROUNDS, MAX_MISSES, Docket, PeerLied, PeerStruck, RepeatWork
from protocol.audits.draw import Audit
from protocol.errors import StaleError
from tests.node.small_run import PEERS
from tests.protocol.audits.panel import audits_of, finding_of

AUDIT = audits_of()[0]
STRANGER = next(peer.peer_id for peer in PEERS if peer.peer_id not in (*AUDIT.auditors, AUDIT.contribution.sender))


def docket_of(peer: str, audit: Audit = AUDIT) -> Docket:
    docket = Docket(peer)
    docket.open(0, [audit])
    return docket


def test_first_auditor_repeats_and_the_others_wait() -> None:
    first, second, _ = AUDIT.auditors
    assert Docket(first).open(0, [AUDIT]) == [RepeatWork(AUDIT)]
    assert Docket(second).open(0, [AUDIT]) == []
    assert Docket(STRANGER).open(0, [AUDIT]) == []


def test_same_round_twice_gives_no_second_repetition() -> None:
    docket = docket_of(AUDIT.auditors[0])
    assert docket.open(0, [AUDIT]) == []


def test_difference_lets_the_other_auditors_repeat_once() -> None:
    docket = docket_of(AUDIT.auditors[1])
    assert docket.learn(finding_of(AUDIT, 0, "different")) == [RepeatWork(AUDIT, is_disputed=True)]
    assert docket.learn(finding_of(AUDIT, 0, "different")) == []
    assert docket_of(STRANGER).learn(finding_of(AUDIT, 0, "different")) == []


@pytest.mark.parametrize("count", [1, 2])
def test_two_of_three_auditors_decide_and_one_does_not(count: int) -> None:
    docket = docket_of(STRANGER)
    consequences = [docket.learn(finding_of(AUDIT, place, "different")) for place in range(count)]
    lied = [found for each in consequences for found in each if isinstance(found, PeerLied)]
    assert [found.peer for found in lied] == [AUDIT.contribution.sender] * (count - 1)
    assert all(len(found.findings) == 2 for found in lied)


def test_auditor_that_invents_a_difference_is_struck_and_excludes_nobody() -> None:
    docket = docket_of(STRANGER)
    assert docket.learn(finding_of(AUDIT, 0, "different")) == []
    assert docket.learn(finding_of(AUDIT, 1, "equal")) == []
    assert docket.learn(finding_of(AUDIT, 2, "equal")) == [PeerStruck(AUDIT.auditors[0], "audit: false finding")]


def test_finding_of_a_peer_that_was_not_drawn_is_refused() -> None:
    for peer in (STRANGER, AUDIT.contribution.sender):
        with pytest.raises(StaleError):
            docket_of(AUDIT.auditors[1]).learn(finding_of(AUDIT, peer, "different"))


def test_finding_on_another_contribution_is_refused() -> None:
    other = Audit(audits_of(peers=5)[1].contribution, AUDIT.chain, AUDIT.auditors)
    with pytest.raises(StaleError):
        docket_of(AUDIT.auditors[1]).learn(finding_of(other, 0, "different"))


def test_early_findings_wait_for_their_round_and_old_ones_are_refused() -> None:
    docket = Docket(AUDIT.auditors[1])
    assert docket.learn(finding_of(AUDIT, 0, "different")) == []
    assert docket.open(0, [AUDIT]) == [RepeatWork(AUDIT, is_disputed=True)]
    docket.open(KEPT_ROUNDS + 1, [])
    with pytest.raises(StaleError):
        docket.learn(finding_of(AUDIT, 2, "different"))


def test_early_findings_of_strangers_come_to_nothing() -> None:
    docket = Docket(AUDIT.auditors[1])
    docket.learn(finding_of(AUDIT, STRANGER, "different"))
    assert docket.open(0, [AUDIT]) == []


def test_misses_in_a_row_are_a_strike_and_a_good_audit_resets_them() -> None:
    docket = docket_of(AUDIT.auditors[0])
    for _ in range(2):
        for _ in range(MAX_MISSES - 1):
            assert docket.note_verdict(AUDIT, "not served") == []
        assert docket.note_verdict(AUDIT, "equal") == []
    for _ in range(MAX_MISSES - 1):
        docket.note_verdict(AUDIT, "not auditable")
    assert docket.note_verdict(AUDIT, "not served") == [PeerStruck(AUDIT.contribution.sender, "audit: not served")]


def test_agreement_is_published_only_as_an_answer() -> None:
    docket = docket_of(AUDIT.auditors[1])
    assert docket.is_published(AUDIT, "different")
    assert not docket.is_published(AUDIT, "equal")
    docket.learn(finding_of(AUDIT, 0, "different"))
    assert docket.is_published(AUDIT, "equal")
