import pytest

from protocol.consensus.messages import buffer as attendance_module
from protocol.consensus.messages.buffer import MAX_KEPT_DECISIONS, MessageBuffer
from protocol.consensus.messages.contributions import NO_ROSTER, Commit
from protocol.consensus.messages.kinds import Acknowledgement, Body, CommitCertificate, Inventory, ReducedPart, kind_of
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE
from tests.simulation.virtual.network import NAMES, Scenario, make_contribution, make_signer

ASKER, OTHER, LEADER = NAMES[:3]
SCENARIO = Scenario(3, "gather", 1, 1, 0, 0, 0, 0, 0)


def signed_message(sender: PeerId, body: Body) -> SignedMessage[Body]:
    return SignedMessage.of(make_signer(sender)(kind_of(body), body.to_wire()), body)


def commit_of(number: int) -> SignedMessage[Body]:
    offer = make_contribution(LEADER, number, BASE, SCENARIO)
    entry = SignedMessage.of(make_signer(LEADER)("contribution", offer.to_wire()), offer)
    return signed_message(LEADER, Commit(number, 0, BASE, (entry,), ()))


def decided(*numbers: int, told: tuple[PeerId, ...] = ()) -> MessageBuffer:
    attendance = MessageBuffer(repeat_seconds=2.0)
    for number in numbers:
        attendance.record_decision(number, (commit_of(number).signed,), told, now=10.0)
    return attendance


def test_of_each_sender_the_newest_of_each_kind_waits() -> None:
    attendance = MessageBuffer(2.0)
    blob = make_contribution(ASKER, 1, BASE, SCENARIO).parts[0]
    old, new = Inventory(1, 0, NO_ROSTER, ()), Inventory(1, 1, NO_ROSTER, ())
    parts = [ReducedPart(1, 0, NO_ROSTER, 0, number, blob, BASE) for number in (0, 1)]
    bodies: list[tuple[PeerId, Body]] = [(ASKER, old), (ASKER, new), (OTHER, old), (ASKER, parts[0]), (ASKER, parts[1])]
    for sender, body in bodies:
        attendance.buffer_early(signed_message(sender, body))
    assert {(entry.sender, entry.body) for entry in attendance.open_round(1)} == {*bodies[1:]}
    assert attendance.open_round(1) == []


def test_what_waits_for_another_round_is_dropped() -> None:
    attendance = MessageBuffer(2.0)
    attendance.buffer_early(signed_message(ASKER, Inventory(1, 0, NO_ROSTER, ())))
    assert attendance.open_round(5) == []
    attendance.buffer_early(signed_message(ASKER, Inventory(6, 0, NO_ROSTER, ())))
    attendance.clear()
    assert attendance.open_round(6) == []


def test_whoever_still_asks_is_told_once_and_later_again() -> None:
    attendance = decided(3)
    assert attendance.is_late(signed_message(ASKER, Inventory(3, 0, NO_ROSTER, ())))
    assert attendance.answer_late(3, ASKER, now=10.0) == (commit_of(3).signed,)
    assert attendance.answer_late(3, ASKER, now=11.9) == ()
    assert attendance.answer_late(3, OTHER, now=11.9) == (commit_of(3).signed,)
    assert attendance.answer_late(3, ASKER, now=12.1) == (commit_of(3).signed,)


def test_whom_the_leader_has_just_told_is_not_told_again() -> None:
    attendance = decided(3, told=(ASKER,))
    assert attendance.answer_late(3, ASKER, now=10.5) == ()
    assert attendance.answer_late(3, OTHER, now=10.5) != ()


def test_a_crowd_of_strangers_is_forgotten_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance_module, "MAX_ANSWERED_PEERS", 2)
    attendance = decided(3)
    for asker in (ASKER, OTHER, LEADER):
        assert attendance.answer_late(3, asker, now=10.0) != ()
    assert attendance.answer_late(3, LEADER, now=10.1) == ()
    assert attendance.answer_late(3, ASKER, now=10.1) != (), "it was told the longest ago"


def test_those_who_know_are_not_answered() -> None:
    """Two who have both decided would answer one another for ever."""
    attendance = decided(3)
    vote = Acknowledgement(3, 0, BASE)
    assert attendance.is_late(signed_message(ASKER, vote))
    assert not attendance.is_late(signed_message(ASKER, CommitCertificate(3, 0, BASE, (signed_message(ASKER, vote),))))  # type: ignore[arg-type]
    assert not attendance.is_late(commit_of(3))
    assert not attendance.is_late(signed_message(ASKER, Inventory(4, 0, NO_ROSTER, ())))


def test_few_decisions_are_kept_and_none_of_another_chain() -> None:
    attendance = decided(*range(MAX_KEPT_DECISIONS + 2))
    late = [
        number for number in range(10) if attendance.is_late(signed_message(ASKER, Inventory(number, 0, NO_ROSTER, ())))
    ]
    assert late == list(range(2, MAX_KEPT_DECISIONS + 2))
    attendance.open_round(3)
    assert [
        number for number in late if attendance.is_late(signed_message(ASKER, Inventory(number, 0, NO_ROSTER, ())))
    ] == [2]
