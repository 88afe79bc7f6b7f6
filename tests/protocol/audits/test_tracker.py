"""What follows from findings: few words set aside, two thirds of the votes exclude, and misses only strike."""

import pytest

from protocol.audit_tracker import (
    GROWTH_ROUNDS,
    HELD_BY_OTHERS,
    HELD_ROUNDS,
    KEPT_ROUNDS,
    MAX_MISSES,
    AuditTracker,
    Consequence,
    PeerCleared,
    PeerStruck,
    RepeatWork,
    votes_to_convict,
)
from protocol.audits import Audit, Verdict
from protocol.conduct import PeerConvicted
from protocol.errors import StaleError
from tests.protocol.audits.panel import audits_of, finding_of

AUDIT = audits_of()[0]  # by five others, four of whom convict
AUDITED = AUDIT.contribution.sender
LAST = AUDIT.auditors[4]
DIFFERENT: list[Verdict] = ["different"] * 5
OUTSIDER = "12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD"


def tracker_of(peer: str, audit: Audit = AUDIT) -> AuditTracker:
    tracker = AuditTracker(peer)
    tracker.open(0, [audit])
    return tracker


def test_first_auditor_repeats_and_the_others_wait() -> None:
    first, second, *_ = AUDIT.auditors
    assert AuditTracker(first).open(0, [AUDIT]) == [RepeatWork(AUDIT)]
    assert AuditTracker(second).open(0, [AUDIT]) == []
    assert AuditTracker(LAST).open(0, [AUDIT]) == []


def test_same_round_twice_gives_no_second_repetition() -> None:
    tracker = tracker_of(AUDIT.auditors[0])
    assert tracker.open(0, [AUDIT]) == []


def test_difference_lets_the_other_auditors_repeat_once() -> None:
    tracker = tracker_of(AUDIT.auditors[1])
    assert tracker.learn(finding_of(AUDIT, 0, "different")) == [RepeatWork(AUDIT, is_disputed=True)]
    assert tracker.learn(finding_of(AUDIT, 0, "different")) == []
    assert tracker_of(LAST).learn(finding_of(AUDIT, 0, "different")) == []


def learned(peer: str, *verdicts: Verdict, audit: Audit = AUDIT) -> list[Consequence]:
    """Return what follows from the verdicts of the auditors in their order, for this peer."""
    tracker = tracker_of(peer, audit)
    findings = (finding_of(audit, place, verdict) for place, verdict in enumerate(verdicts))
    return [found for finding in findings for found in tracker.learn(finding) if not isinstance(found, RepeatWork)]


def test_two_of_three_set_a_peer_aside_and_exclude_nobody() -> None:
    assert learned(LAST, "different") == []
    assert learned(LAST, "different", "different") == [PeerStruck(AUDITED, "audit: doubted")]
    assert learned(LAST, "different", "different", "different") == [PeerStruck(AUDITED, "audit: doubted")]


def test_two_thirds_of_the_votes_exclude_with_their_findings() -> None:
    assert [votes_to_convict(voters) for voters in range(8)] == [0, 1, 2, 2, 3, 4, 4, 5]
    *_, convicted = learned(LAST, *DIFFERENT[:4])
    findings = tuple(finding_of(AUDIT, place, "different").signed for place in range(4))
    proof = findings, AUDIT.voters, AUDIT.contribution.signed
    assert convicted == PeerConvicted(AUDITED, "audit: lied", 0, *proof)


def test_larger_panel_clears_the_peer_that_two_set_aside_and_excludes_both_accusers() -> None:
    doubted, *others = learned(LAST, "different", "different", "equal", "equal", "equal")
    assert doubted == PeerStruck(AUDITED, "audit: doubted")
    convicted = [found.peer for found in others if isinstance(found, PeerConvicted)]
    assert convicted == list(AUDIT.auditors[:2]) and PeerCleared(AUDITED) in others


def test_auditor_that_invents_a_difference_is_set_aside_by_its_panel_and_excluded_by_two_thirds() -> None:
    accuser = AUDIT.auditors[0]
    assert learned(LAST, "different", "equal") == []
    assert learned(LAST, "different", "equal", "equal") == [PeerStruck(accuser, "audit: false finding")]
    *_, convicted = learned(LAST, "different", "equal", "equal", "equal")  # and the audited peer signed its work
    assert isinstance(convicted, PeerConvicted)
    assert (convicted.peer, convicted.offence, len(convicted.findings)) == (accuser, "audit: false finding", 4)


def test_honest_auditor_among_liars_is_set_aside_until_the_panel_has_grown() -> None:
    """Two liars of six answer for a third one."""
    honest = AUDIT.auditors[0]
    found = learned(LAST, "different", "equal", "equal", "different", "different")
    assert found == [PeerStruck(honest, "audit: false finding"), *found[1:]]
    assert not [each for each in found if isinstance(each, PeerConvicted)]


def test_finding_off_the_panel_counts_once_the_panel_has_grown() -> None:
    tracker = tracker_of(LAST)
    assert tracker.learn(finding_of(AUDIT, 4, "different")) == []
    assert tracker.learn(finding_of(AUDIT, 0, "different")) == []
    found = tracker.learn(finding_of(AUDIT, 1, "different"))
    assert found == [PeerStruck(AUDITED, "audit: doubted"), RepeatWork(AUDIT, is_disputed=True)]
    *_, convicted = tracker.learn(finding_of(AUDIT, 2, "different"))
    assert isinstance(convicted, PeerConvicted) and len(convicted.findings) == 4


def test_panel_grows_without_those_that_keep_silent() -> None:
    tracker = tracker_of(LAST)
    assert tracker.learn(finding_of(AUDIT, 0, "different")) == []
    for number in range(1, GROWTH_ROUNDS):
        assert tracker.open(number, []) == []
    assert tracker.open(GROWTH_ROUNDS, []) == [RepeatWork(AUDIT, is_disputed=True)]


def test_nobody_is_excluded_before_there_are_votes() -> None:
    audit = audits_of(votes=False)[0]
    found = learned(audit.auditors[4], *DIFFERENT, audit=audit)
    assert found == [PeerStruck(AUDITED, "audit: doubted")]


def test_findings_of_a_convicted_accuser_are_forgotten_elsewhere() -> None:
    accuser = AUDIT.auditors[0]
    other = next(audit for audit in audits_of() if audit.auditors[0] != accuser and accuser in audit.auditors[:3])
    tracker = AuditTracker(OUTSIDER)
    tracker.open(0, [AUDIT, other])
    tracker.learn(finding_of(other, accuser, "different"))
    tracker.learn(finding_of(AUDIT, 0, "different"))
    for place in range(1, 4):
        tracker.learn(finding_of(AUDIT, place, "equal"))
    assert tracker.open(GROWTH_ROUNDS, []) == []
    assert not tracker._cases[other.key].findings


def test_first_panel_and_disputes_keep_what_a_repetition_needs() -> None:
    first, last, disputed = tracker_of(AUDIT.auditors[0]), tracker_of(LAST), tracker_of(LAST)
    disputed.learn(finding_of(AUDIT, 0, "different"))
    for tracker, rounds in ((first, HELD_ROUNDS), (last, HELD_BY_OTHERS)):
        tracker.open(rounds - 1, [])
        assert tracker.our_audits == {AUDIT.key}
        tracker.open(rounds, [])
        assert not tracker.our_audits
    disputed.open(HELD_BY_OTHERS, [])
    assert disputed.our_audits == {AUDIT.key}
    disputed.open(HELD_BY_OTHERS + HELD_ROUNDS, [])
    assert not disputed.our_audits


def test_finding_of_a_peer_that_does_not_audit_is_refused() -> None:
    few = AUDIT._replace(auditors=AUDIT.auditors[:4])
    for peer in (LAST, AUDITED):
        with pytest.raises(StaleError):
            tracker_of(AUDIT.auditors[1], few).learn(finding_of(AUDIT, peer, "different"))


def test_finding_on_another_contribution_is_refused() -> None:
    other = AUDIT._replace(contribution=audits_of(peers=5)[1].contribution)
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
    tracker.learn(finding_of(AUDIT, LAST, "different"))
    assert tracker.open(0, [AUDIT._replace(auditors=AUDIT.auditors[:4])]) == []


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
