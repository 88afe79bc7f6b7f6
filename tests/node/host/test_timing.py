"""Lanes from the totals in records."""

from node.host.timing import KEPT_ROUNDS, PATIENCE, Lanes
from protocol.murmur_pb2 import PeerRecord


def record(number: int, compute: float, wait: float = 0.0, sent: int = 0) -> PeerRecord:
    return PeerRecord(round=number, compute_seconds=compute, exchange_seconds=0.5, wait_seconds=wait, bytes_sent=sent)


def test_a_lane_is_the_difference_of_two_totals() -> None:
    lanes = Lanes()
    for now, told in enumerate(
        [record(3, 1.0), record(4, 5.0, 1.0, 100), record(4, 6.0, 1.0, 150), record(5, 9.0, 3.0, 400)]
    ):
        lanes.note("a", told, float(now))
    ((number, found),) = lanes.finished(3.0, known=9)
    assert number == 4
    assert (found[0].compute, found[0].exchange, found[0].wait, found[0].sent) == (4.0, 0.0, 2.0, 300)
    assert lanes.finished(4.0, known=9) == []


def test_a_round_waits_for_all_its_peers_but_not_for_ever() -> None:
    lanes = Lanes()
    for peer in "ab":
        for number in (0, 1):
            lanes.note(peer, record(number, 0.0), 0.0)
    lanes.note("a", record(2, 1.0), 10.0)
    assert lanes.finished(10.0, known=9) == []
    assert [number for number, _ in lanes.finished(10.0 + PATIENCE + 0.1, known=9)] == [1]


def test_nothing_is_told_of_a_round_that_the_chain_does_not_have() -> None:
    lanes = Lanes()
    for number in (0, 1, 2**60):
        lanes.note("a", record(number, 0.0), 0.0)
    assert lanes.finished(99.0, known=5) == []


def test_who_left_is_not_waited_for_and_a_new_start_counts_anew() -> None:
    lanes = Lanes()
    for peer in "ab":
        lanes.note(peer, record(0, 0.0, sent=50), 0.0)
        lanes.note(peer, record(1, 0.0, sent=60), 0.0)
    lanes.forget("b")
    lanes.note("a", record(2, 1.0, sent=70), 1.0)
    assert [number for number, _ in lanes.finished(1.0, known=9)] == [1]
    lanes.note("a", record(3, 1.0, sent=5), 2.0)  # it was started again: its bytes count from zero
    assert lanes.finished(2.0, known=9) == []


def test_a_flood_of_rounds_is_bounded() -> None:
    lanes = Lanes()
    for number in range(100):
        lanes.note("a", record(number, float(number)), 0.0)
    assert len(lanes.finished(0.0, known=1000)) == KEPT_ROUNDS
