"""What follows from findings: one auditor decides nothing, a majority of three everything, and misses only strikes."""

import pytest

from protocol.audits import KEPT_ROUNDS, MAX_MISSES, Audit, AuditTracker, PeerLied, PeerStruck, RepeatWork
from protocol.errors import StaleError
from tests.node.small_run import PEERS
from tests.protocol.audits.panel import audits_of, finding_of

AUDIT = audits_of()[0]
STRANGER = next(peer.peer_id for peer in PEERS if peer.peer_id not in (*AUDIT.auditors, AUDIT.contribution.sender))


def tracker_of(peer: str, audit: Audit = AUDIT) -> AuditTracker:
    tracker = AuditTracker(peer)
    tracker.open(0, [audit])
    return tracker


def test_first_auditor_repeats_and_the_others_wait() -> None:
    first, second, _ = AUDIT.auditors
    assert AuditTracker(first).open(0, [AUDIT]) == [RepeatWork(AUDIT)]
    assert AuditTracker(second).open(0, [AUDIT]) == []
    assert AuditTracker(STRANGER).open(0, [AUDIT]) == []


def test_same_round_twice_gives_no_second_repetition() -> None:
    tracker = tracker_of(AUDIT.auditors[0])
    assert tracker.open(0, [AUDIT]) == []


def test_difference_lets_the_other_auditors_repeat_once() -> None:
    tracker = tracker_of(AUDIT.auditors[1])
    assert tracker.learn(finding_of(AUDIT, 0, "different")) == [RepeatWork(AUDIT, is_disputed=True)]
    assert tracker.learn(finding_of(AUDIT, 0, "different")) == []
    assert tracker_of(STRANGER).learn(finding_of(AUDIT, 0, "different")) == []


@pytest.mark.parametrize("count", [1, 2])
def test_two_of_three_auditors_decide_and_one_does_not(count: int) -> None:
    tracker = tracker_of(STRANGER)
    consequences = [tracker.learn(finding_of(AUDIT, place, "different")) for place in range(count)]
    lied = [found for each in consequences for found in each if isinstance(found, PeerLied)]
    assert [found.peer for found in lied] == [AUDIT.contribution.sender] * (count - 1)
    assert all(len(found.findings) == 2 for found in lied)


def test_auditor_that_invents_a_difference_is_struck_and_excludes_nobody() -> None:
    tracker = tracker_of(STRANGER)
    assert tracker.learn(finding_of(AUDIT, 0, "different")) == []
    assert tracker.learn(finding_of(AUDIT, 1, "equal")) == []
    assert tracker.learn(finding_of(AUDIT, 2, "equal")) == [PeerStruck(AUDIT.auditors[0], "audit: false finding")]


def test_finding_of_a_peer_that_was_not_drawn_is_refused() -> None:
    for peer in (STRANGER, AUDIT.contribution.sender):
        with pytest.raises(StaleError):
            tracker_of(AUDIT.auditors[1]).learn(finding_of(AUDIT, peer, "different"))


def test_finding_on_another_contribution_is_refused() -> None:
    other = Audit(audits_of(peers=5)[1].contribution, AUDIT.chain, AUDIT.auditors)
    with pytest.raises(StaleError):
        tracker_of(AUDIT.auditors[1]).learn(finding_of(other, 0, "different"))


def test_early_findings_wait_for_their_round_and_old_ones_are_refused() -> None:
    tracker = AuditTracker(AUDIT.auditors[1])
    assert tracker.learn(finding_of(AUDIT, 0, "different")) == []
    assert tracker.open(0, [AUDIT]) == [RepeatWork(AUDIT, is_disputed=True)]
    tracker.open(KEPT_ROUNDS + 1, [])
    with pytest.raises(StaleError):
        tracker.learn(finding_of(AUDIT, 2, "different"))


def test_early_findings_of_strangers_come_to_nothing() -> None:
    tracker = AuditTracker(AUDIT.auditors[1])
    tracker.learn(finding_of(AUDIT, STRANGER, "different"))
    assert tracker.open(0, [AUDIT]) == []


def test_misses_in_a_row_are_a_strike_and_a_good_audit_resets_them() -> None:
    tracker = tracker_of(AUDIT.auditors[0])
    for _ in range(2):
        for _ in range(MAX_MISSES - 1):
            assert tracker.note_verdict(AUDIT, "not served") == []
        assert tracker.note_verdict(AUDIT, "equal") == []
    for _ in range(MAX_MISSES - 1):
        tracker.note_verdict(AUDIT, "not auditable")
    assert tracker.note_verdict(AUDIT, "not served") == [PeerStruck(AUDIT.contribution.sender, "audit: not served")]


def test_agreement_is_published_only_as_an_answer() -> None:
    tracker = tracker_of(AUDIT.auditors[1])
    assert tracker.is_published(AUDIT, "different")
    assert not tracker.is_published(AUDIT, "equal")
    tracker.learn(finding_of(AUDIT, 0, "different"))
    assert tracker.is_published(AUDIT, "equal")
