"""Bytes of calls by kind of message: they add up to the encoded sizes, and a label is never a word of a peer."""

from protocol.murmur_pb2 import DeliverReply, DeliverRequest, GossipRequest, Signed
from protocol.traffic import UNKNOWN_KIND, ControlTraffic, bytes_by_kind

ROSTER = Signed(kind="roster", body=b"r" * 300, signature=b"s" * 64)


def test_kinds_add_up_to_the_encoded_bytes() -> None:
    request = DeliverRequest(run=b"x" * 32, statements=[ROSTER, ROSTER, Signed(kind="commit", body=b"c" * 500)])
    counts = bytes_by_kind("deliver", request)
    assert sum(counts.values()) == request.ByteSize()
    assert counts["roster"] == 2 * (ROSTER.ByteSize() + 3)
    assert counts["deliver"] == 34  # the run


def test_words_of_a_peer_are_no_labels() -> None:
    counts = bytes_by_kind("deliver", DeliverReply(statements=[Signed(kind="anything", body=b"x" * 200)]))
    assert set(counts) == {UNKNOWN_KIND, "deliver"}


def test_both_directions_are_counted_apart() -> None:
    traffic = ControlTraffic()
    traffic.record_sent("gossip", GossipRequest(run=b"x" * 32))
    traffic.record_sent("gossip", GossipRequest(run=b"x" * 32))
    traffic.record_received("deliver", DeliverReply())
    assert traffic.sent == {"gossip": 68}
    assert traffic.received == {"deliver": 0}
