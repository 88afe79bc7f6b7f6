from node.daemon.stages.stage_peers import MissingPeers
from protocol.manifest.sections import MembershipSection
from protocol.membership.peer_table import MembershipEvent, PeerJoined, PeerLeft
from protocol.murmur_pb2 import PeerRecord

TIMING = MembershipSection(heartbeat=1.0, expiry=10.0)
RECORD = PeerRecord(role="trainer")


def left(peer: str, reason: str, record: PeerRecord = RECORD) -> PeerLeft:
    return PeerLeft(peer, reason, record)


def missing(*events: MembershipEvent) -> MissingPeers:
    """Events at the time 100."""
    peers = MissingPeers(TIMING)
    peers.observe(events, 100.0)
    return peers


def test_most_of_a_run_misses_a_peer_whose_record_expired() -> None:
    assert missing(left("a", "expired")).missed_by_most(7, 100.0) == {"a"}
    assert missing(left("a", "ended")).missed_by_most(7, 100.0) == {"a"}, "its machine says so"


def test_the_halves_of_a_split_run_miss_nobody() -> None:
    peers = missing(*(left(peer, "expired") for peer in "abcd"))
    assert peers.missed_by_most(4, 100.0) == frozenset()
    assert peers.missed_by_most(5, 100.0) == frozenset("abcd")


def test_a_peer_that_we_alone_cannot_reach_gets_time_to_be_heard_of_through_others() -> None:
    peers = missing(left("a", "unreachable"))
    assert peers.missed_by_most(7, 109.0) == frozenset()
    peers.observe([PeerJoined("a", RECORD)], 109.5)
    assert peers.missed_by_most(7, 111.0) == frozenset()
    assert missing(left("a", "unreachable")).missed_by_most(7, 110.0) == {"a"}, "the control"


def test_goodbyes_and_observers_do_not_count() -> None:
    peers = missing(left("a", "left"), left("b", "expired", PeerRecord(role="observer")))
    assert peers.missed_by_most(7, 100.0) == frozenset()


def test_the_dead_count_as_long_as_their_votes() -> None:
    peers = missing(left("a", "expired"), left("b", "expired"))
    assert peers.missed_by_most(2, 100.0 + TIMING.vote_memory) == frozenset()
    assert peers.missed_by_most(2, 101.0 + TIMING.vote_memory) == frozenset()
    assert not peers._silent_since
