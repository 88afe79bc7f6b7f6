"""Lanes from the totals in peer records."""

from node.dashboard.round_timeline import MAX_OPEN_ROUNDS, MAX_RECORD_DELAY_SECONDS, WAIT_SECONDS, RoundTimeline
from protocol.murmur_pb2 import PeerRecord


def record(number: int, compute: float, wait: float = 0.0, sent: int = 0) -> PeerRecord:
    return PeerRecord(round=number, compute_seconds=compute, exchange_seconds=0.5, wait_seconds=wait, bytes_sent=sent)


def test_lane_is_the_difference_of_two_totals() -> None:
    lanes = RoundTimeline()
    for now, peer_record in enumerate(
        [record(3, 1.0), record(4, 5.0, 1.0, 100), record(4, 6.0, 1.0, 150), record(5, 9.0, 3.0, 400)]
    ):
        lanes.record("a", peer_record, float(now), chain_round=9)
    ((number, found),) = lanes.pop_finished(3.0, chain_round=9)
    assert number == 4
    assert (found[0].compute, found[0].exchange, found[0].wait, found[0].sent) == (4.0, 0.0, 2.0, 300)
    assert lanes.pop_finished(4.0, chain_round=9) == []


def test_round_waits_for_all_its_peers_for_a_limited_time() -> None:
    lanes = RoundTimeline()
    for peer in "ab":
        for number in (0, 1):
            lanes.record(peer, record(number, 0.0), 0.0, chain_round=9)
    lanes.record("a", record(2, 1.0), 10.0, chain_round=9)
    assert lanes.pop_finished(10.0, chain_round=9) == []
    assert [number for number, _ in lanes.pop_finished(10.0 + WAIT_SECONDS + 0.1, chain_round=9)] == [1]


def test_rounds_beyond_the_chain_are_not_returned() -> None:
    lanes = RoundTimeline()
    for number in (0, 1, 2**60):
        lanes.record("a", record(number, 0.0), 0.0, chain_round=9)
    assert lanes.pop_finished(99.0, chain_round=5) == []


def test_departed_peer_is_not_awaited_and_a_restart_resets_totals() -> None:
    lanes = RoundTimeline()
    for peer in "ab":
        lanes.record(peer, record(0, 0.0, sent=50), 0.0, chain_round=9)
        lanes.record(peer, record(1, 0.0, sent=60), 0.0, chain_round=9)
    lanes.forget("b")
    lanes.record("a", record(2, 1.0, sent=70), 1.0, chain_round=9)
    assert [number for number, _ in lanes.pop_finished(1.0, chain_round=9)] == [1]
    lanes.record("a", record(3, 1.0, sent=5), 2.0, chain_round=9)  # the peer restarted: its bytes count from zero
    assert lanes.pop_finished(2.0, chain_round=9) == []


def test_late_lane_does_not_return_a_finished_round_again() -> None:
    lanes = RoundTimeline()
    for peer in "abc":
        for number in (0, 1):
            lanes.record(peer, record(number, 0.0), 0.0, chain_round=0)
    for peer in "ab":
        lanes.record(peer, record(2, 1.0), 10.0, chain_round=1)
    ((number, found),) = lanes.pop_finished(10.0 + WAIT_SECONDS + 0.1, chain_round=1)
    assert number == 1 and [lane.peer for lane in found] == ["a", "b"]
    lanes.record("c", record(2, 1.0), 16.0, chain_round=1)
    assert lanes.pop_finished(30.0, chain_round=1) == []
    lanes.pop_finished(31.0, chain_round=0)  # switch to a shorter chain
    for peer in "abc":
        lanes.record(peer, record(1, 2.0), 32.0, chain_round=0)
        lanes.record(peer, record(2, 3.0), 40.0, chain_round=1)
    ((number, found),) = lanes.pop_finished(40.0, chain_round=1)
    assert number == 1 and len(found) == 3


def test_claims_of_far_rounds_do_not_displace_open_rounds() -> None:
    lanes = RoundTimeline()
    for number in range(2**40, 2**40 + 2 * MAX_OPEN_ROUNDS):
        lanes.record("liar", record(number, 0.0), 0.0, chain_round=0)
    for number in (0, 1, 2):
        lanes.record("a", record(number, 0.0), 1.0, chain_round=0)
    assert [number for number, _ in lanes.pop_finished(2.0 + WAIT_SECONDS, chain_round=1)] == [1]


def test_false_claims_do_not_dwarf_other_lanes() -> None:
    """Control: possible values are kept unchanged, also if a record was late."""
    lanes = RoundTimeline()
    for peer, claimed in (("a", 40.0), ("late", 70.0), ("liar", 1e300)):
        for number, seconds in ((0, 0.0), (1, 0.0), (2, claimed)):
            lanes.record(peer, record(number, seconds, seconds), 30.0 * number, chain_round=9)
    ((_, found),) = lanes.pop_finished(60.0, chain_round=9)
    lanes_by_peer = {lane.peer: (lane.compute, lane.wait) for lane in found}
    max_seconds = 30.0 + MAX_RECORD_DELAY_SECONDS
    assert lanes_by_peer == {"a": (40.0, 40.0), "late": (70.0, 70.0), "liar": (max_seconds, max_seconds)}


def test_number_of_open_rounds_is_bounded() -> None:
    lanes = RoundTimeline()
    for number in range(100):
        lanes.record("a", record(number, float(number)), 0.0, chain_round=1000)
    assert len(lanes.pop_finished(0.0, chain_round=1000)) == MAX_OPEN_ROUNDS
