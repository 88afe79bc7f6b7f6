"""Lanes from the totals in records."""

from node.host.timing import KEPT_ROUNDS, LATE_SECONDS, PATIENCE, Lanes
from protocol.murmur_pb2 import PeerRecord


def record(number: int, compute: float, wait: float = 0.0, sent: int = 0) -> PeerRecord:
    return PeerRecord(round=number, compute_seconds=compute, exchange_seconds=0.5, wait_seconds=wait, bytes_sent=sent)


def test_a_lane_is_the_difference_of_two_totals() -> None:
    lanes = Lanes()
    for now, told in enumerate(
        [record(3, 1.0), record(4, 5.0, 1.0, 100), record(4, 6.0, 1.0, 150), record(5, 9.0, 3.0, 400)]
    ):
        lanes.note("a", told, float(now), known=9)
    ((number, found),) = lanes.finished(3.0, known=9)
    assert number == 4
    assert (found[0].compute, found[0].exchange, found[0].wait, found[0].sent) == (4.0, 0.0, 2.0, 300)
    assert lanes.finished(4.0, known=9) == []


def test_a_round_waits_for_all_its_peers_but_not_for_ever() -> None:
    lanes = Lanes()
    for peer in "ab":
        for number in (0, 1):
            lanes.note(peer, record(number, 0.0), 0.0, known=9)
    lanes.note("a", record(2, 1.0), 10.0, known=9)
    assert lanes.finished(10.0, known=9) == []
    assert [number for number, _ in lanes.finished(10.0 + PATIENCE + 0.1, known=9)] == [1]


def test_nothing_is_told_of_a_round_that_the_chain_does_not_have() -> None:
    lanes = Lanes()
    for number in (0, 1, 2**60):
        lanes.note("a", record(number, 0.0), 0.0, known=9)
    assert lanes.finished(99.0, known=5) == []


def test_who_left_is_not_waited_for_and_a_new_start_counts_anew() -> None:
    lanes = Lanes()
    for peer in "ab":
        lanes.note(peer, record(0, 0.0, sent=50), 0.0, known=9)
        lanes.note(peer, record(1, 0.0, sent=60), 0.0, known=9)
    lanes.forget("b")
    lanes.note("a", record(2, 1.0, sent=70), 1.0, known=9)
    assert [number for number, _ in lanes.finished(1.0, known=9)] == [1]
    lanes.note("a", record(3, 1.0, sent=5), 2.0, known=9)  # it was started again: its bytes count from zero
    assert lanes.finished(2.0, known=9) == []


def test_who_comes_when_its_round_was_given_does_not_give_it_again() -> None:
    lanes = Lanes()
    for peer in "abc":
        for number in (0, 1):
            lanes.note(peer, record(number, 0.0), 0.0, known=0)
    for peer in "ab":
        lanes.note(peer, record(2, 1.0), 10.0, known=1)
    ((number, found),) = lanes.finished(10.0 + PATIENCE + 0.1, known=1)
    assert number == 1 and [lane.peer for lane in found] == ["a", "b"]
    lanes.note("c", record(2, 1.0), 16.0, known=1)
    assert lanes.finished(30.0, known=1) == []
    lanes.finished(31.0, known=0)  # the chain was left for a shorter one
    for peer in "abc":
        lanes.note(peer, record(1, 2.0), 32.0, known=0)
        lanes.note(peer, record(2, 3.0), 40.0, known=1)
    ((number, found),) = lanes.finished(40.0, known=1)
    assert number == 1 and len(found) == 3


def test_who_claims_rounds_far_ahead_does_not_push_out_those_of_others() -> None:
    lanes = Lanes()
    for number in range(2**40, 2**40 + 2 * KEPT_ROUNDS):
        lanes.note("liar", record(number, 0.0), 0.0, known=0)
    for number in (0, 1, 2):
        lanes.note("a", record(number, 0.0), 1.0, known=0)
    assert [number for number, _ in lanes.finished(2.0 + PATIENCE, known=1)] == [1]


def test_what_one_claims_does_not_dwarf_the_others() -> None:
    """The control: what is possible is told as it is, also where a record was late."""
    lanes = Lanes()
    for peer, claimed in (("a", 40.0), ("late", 70.0), ("liar", 1e300)):
        for number, seconds in ((0, 0.0), (1, 0.0), (2, claimed)):
            lanes.note(peer, record(number, seconds, seconds), 30.0 * number, known=9)
    ((_, found),) = lanes.finished(60.0, known=9)
    told = {lane.peer: (lane.compute, lane.wait) for lane in found}
    most = 30.0 + LATE_SECONDS
    assert told == {"a": (40.0, 40.0), "late": (70.0, 70.0), "liar": (most, most)}


def test_a_flood_of_rounds_is_bounded() -> None:
    lanes = Lanes()
    for number in range(100):
        lanes.note("a", record(number, float(number)), 0.0, known=1000)
    assert len(lanes.finished(0.0, known=1000)) == KEPT_ROUNDS
