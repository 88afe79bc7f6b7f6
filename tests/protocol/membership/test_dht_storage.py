import logging
from typing import Any

import pytest
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from protocol.errors import ForgedError, MalformedError
from protocol.identity import Identity
from protocol.membership.clock import SwarmClock
from protocol.membership.dht_storage import (
    EXPIRATION_OFFSET_SECONDS,
    LIFETIME_SECONDS,
    MAX_ENTRIES,
    MAX_REQUEST_BYTES,
    MAX_REQUEST_KEYS,
    AnnouncementValidator,
    BoundedStorage,
    PeerIdRoutingTable,
    RequestLimiter,
    make_announcement,
    node_id,
    parse_announcement,
    run_topic,
)
from protocol.murmur_pb2 import PeerRecord, Signed
from protocol.signing import sign

RUN = "ab" * 32
NOW = 1_800_000_000.0
IDENTITY = Identity.create()
ADDRESSES = (f"/ip4/10.0.0.1/tcp/1/p2p/{IDENTITY.peer_id}",)
ANNOUNCEMENT = make_announcement(IDENTITY, RUN, ADDRESSES, NOW)
VALUE, EXPIRATION = ANNOUNCEMENT.value, ANNOUNCEMENT.dht_expiration
TOPIC = run_topic(RUN)


class ManualClock:
    def __init__(self, time: float = NOW) -> None:
        self.time = time

    def __call__(self) -> float:
        return self.time


def entry(**changes: Any) -> DHTRecord:
    fields = {
        "key": TOPIC.key.to_bytes(),
        "subkey": MSGPackSerializer.dumps(IDENTITY.peer_id),
        "value": VALUE,
        "expiration_time": EXPIRATION,
    }
    return DHTRecord(**{**fields, **changes})


def test_an_announcement_is_read_back() -> None:
    peer, record = parse_announcement(VALUE, RUN)
    assert peer == IDENTITY.peer_id and tuple(record.addresses) == ADDRESSES
    assert record.expires == NOW + LIFETIME_SECONDS == EXPIRATION - EXPIRATION_OFFSET_SECONDS


def test_forged_announcements_are_refused() -> None:
    altered = Signed.FromString(VALUE)
    altered.body = PeerRecord(sequence=1, expires=NOW + 1, addresses=ADDRESSES).SerializeToString(deterministic=True)
    with pytest.raises(ForgedError):
        parse_announcement(altered.SerializeToString(), RUN)
    with pytest.raises(ForgedError):
        parse_announcement(VALUE, "cd" * 32)
    elsewhere = PeerRecord(expires=NOW + 1, addresses=[f"/ip4/10.0.0.2/tcp/1/p2p/{Identity.create().peer_id}"])
    gossiped = sign(IDENTITY, "peer", RUN, PeerRecord(expires=NOW + 1))  # of another kind
    for value in (
        b"\xff",
        b"",
        bytes(4000),
        sign(IDENTITY, "rendezvous", RUN, elsewhere).SerializeToString(),
        gossiped.SerializeToString(),
    ):
        with pytest.raises(MalformedError):
            parse_announcement(value, RUN)


def test_the_check_lets_only_the_peers_own_announcement_pass(caplog: pytest.LogCaptureFixture) -> None:
    check = AnnouncementValidator([TOPIC])
    assert check.validate(entry()) and check.refused_count == 0
    stranger = MSGPackSerializer.dumps(Identity.create().peer_id)
    bad = [
        entry(key=run_topic("cd" * 32).key.to_bytes()),
        entry(subkey=stranger),
        entry(subkey=b""),
        entry(value=b"\xff\xff"),
        entry(expiration_time=EXPIRATION + 1e6),  # stored once more, to stay for ever
        entry(expiration_time=float("nan")),
    ]
    assert not any(check.validate(record) for record in bad)
    assert check.refused_count == len(bad)
    assert len(caplog.records) == 3  # at 1, 2 and 4
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_an_expired_entry_does_not_spoil_the_dictionary_it_travels_in() -> None:
    _, value, expires = make_announcement(IDENTITY, RUN, ADDRESSES, 1.0)
    assert AnnouncementValidator([TOPIC]).validate(
        entry(value=value, expiration_time=EXPIRATION_OFFSET_SECONDS + expires)
    )


def filled(shelf: BoundedStorage, count: int, now: float = NOW) -> list[Identity]:
    identities = [Identity.create() for _ in range(count)]
    for identity in identities:
        notice = make_announcement(identity, RUN, (), now)
        shelf.store_subkey(TOPIC.key, notice.subkey, notice.value, notice.dht_expiration)
    return identities


def test_the_shelf_gives_what_was_stored_until_it_expires() -> None:
    watch = ManualClock()
    shelf = BoundedStorage([TOPIC], SwarmClock(watch))
    key = TOPIC.key
    assert shelf.get(key) is None and list(shelf.items()) == [] and key not in shelf
    assert shelf.store(key, VALUE, EXPIRATION, subkey=IDENTITY.peer_id)
    found = shelf.get(key)
    assert found is not None and isinstance(found.value, DictionaryDHTValue)
    assert dict(found.value.items()) == {IDENTITY.peer_id: (VALUE, EXPIRATION)} and found.expiration_time == EXPIRATION
    assert [item[0] for item in shelf.items()] == [key] and key in shelf and len(shelf) == 1
    watch.time = NOW + LIFETIME_SECONDS
    assert shelf.get(key) is None and len(shelf) == 0


def test_the_shelf_takes_nothing_else() -> None:
    shelf, key, peer = BoundedStorage([TOPIC], SwarmClock(ManualClock())), TOPIC.key, IDENTITY.peer_id
    assert not shelf.store(key, VALUE, EXPIRATION)  # a plain value would displace the dictionary
    assert not shelf.store_subkey(DHTID.generate(), peer, VALUE, EXPIRATION)
    assert not shelf.store_subkey(key, peer, VALUE, EXPIRATION_OFFSET_SECONDS + NOW)  # expired
    assert not shelf.store_subkey(key, peer, VALUE, EXPIRATION_OFFSET_SECONDS + NOW + 1e6)  # to stay for ever
    assert not shelf.store_subkey(key, peer, VALUE, float("nan"))
    assert shelf.store_subkey(key, peer, VALUE, EXPIRATION)
    assert not shelf.store_subkey(key, peer, VALUE, EXPIRATION)  # not newer
    assert not shelf.store_subkey(key, peer, VALUE, EXPIRATION - 1)
    assert len(shelf) == 1


def test_a_flood_is_bounded_and_displaces_nobody() -> None:
    shelf, key = BoundedStorage([TOPIC], SwarmClock(ManualClock())), TOPIC.key
    honest = filled(shelf, 10)
    filled(shelf, 300)
    found = shelf.get(key)
    assert found is not None and len(shelf) == MAX_ENTRIES
    kept = {peer for peer, _ in found.value.items()}
    assert {identity.peer_id for identity in honest} <= kept
    for step in range(1, 1000):  # one peer that renews and renews
        notice = make_announcement(honest[0], RUN, (), NOW + step / 100)
        assert shelf.store_subkey(key, notice.subkey, notice.value, notice.dht_expiration)
    assert len(shelf) == MAX_ENTRIES
    theirs = DHTLocalStorage()  # control: hivemind's own grows with every store
    for step in range(1000):
        theirs.store(key, VALUE, EXPIRATION_OFFSET_SECONDS + step)
    assert len(theirs.expiration_heap) == 1000


def test_two_boards_are_apart_and_each_has_its_own_room() -> None:
    other = run_topic("cd" * 32)
    shelf = BoundedStorage([TOPIC, other], SwarmClock(ManualClock()))
    filled(shelf, MAX_ENTRIES + 5)
    assert len(shelf) == MAX_ENTRIES and other.key not in shelf
    theirs = make_announcement(IDENTITY, "cd" * 32, ADDRESSES, NOW)
    assert shelf.store_subkey(other.key, theirs.subkey, theirs.value, theirs.dht_expiration), (
        "a full one fills no other"
    )
    assert len(shelf) == MAX_ENTRIES + 1 and {key for key, _ in shelf.items()} == {TOPIC.key, other.key}


@pytest.mark.parametrize("skew", [-7200.0, 7200.0])
def test_a_wrong_local_clock_does_not_matter_once_the_swarms_is_known(skew: float) -> None:
    watch = ManualClock(NOW + skew)
    clock = SwarmClock(watch)
    shelf = BoundedStorage([TOPIC], clock)
    assert not filled(shelf, 1) or len(shelf) == 0
    for number in range(3):
        clock.observe(f"peer {number}", NOW, watch.time, watch.time)
    filled(shelf, 2)
    assert len(shelf) == 2


def test_a_peer_has_one_place_in_the_table_of_neighbours() -> None:
    own, remote = (PeerID.from_base58(Identity.create().peer_id) for _ in range(2))
    table = PeerIdRoutingTable(node_id(own), 20, 5)
    for _ in range(100):
        table.add_or_update_node(DHTID.generate(), remote)
    assert table.get_nearest_neighbors(node_id(own), 100) == []
    table.add_or_update_node(node_id(remote), remote)
    assert table.get_nearest_neighbors(node_id(own), 100) == [(node_id(remote), remote)]


async def test_oversized_requests_do_not_come_through_the_door(caplog: pytest.LogCaptureFixture) -> None:
    door, key = RequestLimiter(), TOPIC.key.to_bytes()
    assert await door.validate_request(dht_pb2.PingRequest())
    assert await door.validate_request(dht_pb2.FindRequest(keys=[key]))
    assert await door.validate_request(dht_pb2.StoreRequest(keys=[key], values=[VALUE]))
    assert not caplog.records
    assert not await door.validate_request(dht_pb2.FindRequest(keys=[key] * (MAX_REQUEST_KEYS + 1)))
    assert not await door.validate_request(dht_pb2.StoreRequest(keys=[key], values=[bytes(MAX_REQUEST_BYTES)]))
    assert len(caplog.records) == door.refused_count == 2
