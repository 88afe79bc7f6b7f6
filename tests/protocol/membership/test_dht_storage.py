import logging
import random
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
    MAX_STRANGERS,
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


def test_announcement_survives_a_round_trip() -> None:
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


def test_validator_accepts_only_the_peers_own_announcement(caplog: pytest.LogCaptureFixture) -> None:
    validator = AnnouncementValidator([TOPIC])
    assert validator.validate(entry()) and validator.refused_count == 0
    stranger = MSGPackSerializer.dumps(Identity.create().peer_id)
    bad = [
        entry(key=run_topic("cd" * 32).key.to_bytes()),
        entry(subkey=stranger),
        entry(subkey=b""),
        entry(value=b"\xff\xff"),
        entry(expiration_time=EXPIRATION + 1e6),  # stored again to stay for ever
        entry(expiration_time=float("nan")),
    ]
    assert not any(validator.validate(record) for record in bad)
    assert validator.refused_count == len(bad)
    assert len(caplog.records) == 3  # for refusals 1, 2 and 4
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_validator_accepts_an_expired_entry() -> None:
    _, value, expires = make_announcement(IDENTITY, RUN, ADDRESSES, 1.0)
    assert AnnouncementValidator([TOPIC]).validate(
        entry(value=value, expiration_time=EXPIRATION_OFFSET_SECONDS + expires)
    )


def add_announcements(storage: BoundedStorage, count: int, now: float = NOW) -> list[Identity]:
    identities = [Identity.create() for _ in range(count)]
    for identity in identities:
        announcement = make_announcement(identity, RUN, (), now)
        storage.store_subkey(TOPIC.key, announcement.subkey, announcement.value, announcement.dht_expiration)
    return identities


def test_storage_returns_entries_until_they_expire() -> None:
    local_clock = ManualClock()
    storage = BoundedStorage([TOPIC], SwarmClock(local_clock))
    key = TOPIC.key
    assert storage.get(key) is None and list(storage.items()) == [] and key not in storage
    assert storage.store(key, VALUE, EXPIRATION, subkey=IDENTITY.peer_id)
    stored = storage.get(key)
    assert stored is not None and isinstance(stored.value, DictionaryDHTValue)
    assert (
        dict(stored.value.items()) == {IDENTITY.peer_id: (VALUE, EXPIRATION)} and stored.expiration_time == EXPIRATION
    )
    assert [item[0] for item in storage.items()] == [key] and key in storage and len(storage) == 1
    local_clock.time = NOW + LIFETIME_SECONDS
    assert storage.get(key) is None and len(storage) == 0


def test_storage_refuses_other_entries() -> None:
    storage, key, peer = BoundedStorage([TOPIC], SwarmClock(ManualClock())), TOPIC.key, IDENTITY.peer_id
    assert not storage.store(key, VALUE, EXPIRATION)  # a plain value would displace the dictionary
    assert not storage.store_subkey(DHTID.generate(), peer, VALUE, EXPIRATION)
    assert not storage.store_subkey(key, peer, VALUE, EXPIRATION_OFFSET_SECONDS + NOW)  # expired
    assert not storage.store_subkey(key, peer, VALUE, EXPIRATION_OFFSET_SECONDS + NOW + 1e6)  # to stay for ever
    assert not storage.store_subkey(key, peer, VALUE, float("nan"))
    assert storage.store_subkey(key, peer, VALUE, EXPIRATION)
    assert not storage.store_subkey(key, peer, VALUE, EXPIRATION)  # not newer
    assert not storage.store_subkey(key, peer, VALUE, EXPIRATION - 1)
    assert len(storage) == 1


def test_strangers_that_come_first_hide_nobody() -> None:
    storage = BoundedStorage([TOPIC], SwarmClock(ManualClock()), random.Random(0))
    add_announcements(storage, MAX_ENTRIES)  # as many keys of one person
    assert len(storage) == MAX_STRANGERS
    honest = add_announcements(storage, 10)
    stored = storage.get(TOPIC.key)
    assert stored is not None
    found = {peer for peer, _ in stored.value.items()} & {identity.peer_id for identity in honest}
    assert len(found) >= 5  # the control: if the first entries stayed, there would be none


def test_flood_is_bounded_and_displaces_no_known_peer() -> None:
    storage, key = BoundedStorage([TOPIC], SwarmClock(ManualClock()), random.Random(0)), TOPIC.key
    honest = add_announcements(storage, 10)
    storage.known = frozenset(identity.peer_id for identity in honest)
    add_announcements(storage, 300)
    stored = storage.get(key)
    assert stored is not None and len(storage) == MAX_STRANGERS + 10
    stored_peers = {peer for peer, _ in stored.value.items()}
    assert {identity.peer_id for identity in honest} <= stored_peers
    for step in range(1, 1000):  # one peer renews repeatedly
        announcement = make_announcement(honest[0], RUN, (), NOW + step / 100)
        assert storage.store_subkey(key, announcement.subkey, announcement.value, announcement.dht_expiration)
    assert len(storage) == MAX_STRANGERS + 10
    hivemind_storage = DHTLocalStorage()  # control: it grows with every store
    for step in range(1000):
        hivemind_storage.store(key, VALUE, EXPIRATION_OFFSET_SECONDS + step)
    assert len(hivemind_storage.expiration_heap) == 1000


def test_topics_are_separate_and_each_has_its_own_limit() -> None:
    other = run_topic("cd" * 32)
    storage = BoundedStorage([TOPIC, other], SwarmClock(ManualClock()))
    add_announcements(storage, MAX_ENTRIES + 5)
    assert len(storage) == MAX_STRANGERS and other.key not in storage
    theirs = make_announcement(IDENTITY, "cd" * 32, ADDRESSES, NOW)
    assert storage.store_subkey(other.key, theirs.subkey, theirs.value, theirs.dht_expiration), (
        "a full topic does not fill another"
    )
    assert len(storage) == MAX_STRANGERS + 1 and {key for key, _ in storage.items()} == {TOPIC.key, other.key}


@pytest.mark.parametrize("skew", [-7200.0, 7200.0])
def test_wrong_local_clock_does_not_matter_once_swarm_time_is_known(skew: float) -> None:
    local_clock = ManualClock(NOW + skew)
    clock = SwarmClock(local_clock)
    storage = BoundedStorage([TOPIC], clock)
    assert not add_announcements(storage, 1) or len(storage) == 0
    for index in range(3):
        clock.observe(f"peer {index}", NOW, local_clock.time, local_clock.time)
    add_announcements(storage, 2)
    assert len(storage) == 2


def test_each_peer_has_one_entry_in_the_routing_table() -> None:
    own, remote = (PeerID.from_base58(Identity.create().peer_id) for _ in range(2))
    table = PeerIdRoutingTable(node_id(own), 20, 5)
    for _ in range(100):
        table.add_or_update_node(DHTID.generate(), remote)
    assert table.get_nearest_neighbors(node_id(own), 100) == []
    table.add_or_update_node(node_id(remote), remote)
    assert table.get_nearest_neighbors(node_id(own), 100) == [(node_id(remote), remote)]


async def test_oversized_requests_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    limiter, key = RequestLimiter(), TOPIC.key.to_bytes()
    assert await limiter.validate_request(dht_pb2.PingRequest())
    assert await limiter.validate_request(dht_pb2.FindRequest(keys=[key]))
    assert await limiter.validate_request(dht_pb2.StoreRequest(keys=[key], values=[VALUE]))
    assert not caplog.records
    assert not await limiter.validate_request(dht_pb2.FindRequest(keys=[key] * (MAX_REQUEST_KEYS + 1)))
    assert not await limiter.validate_request(dht_pb2.StoreRequest(keys=[key], values=[bytes(MAX_REQUEST_BYTES)]))
    assert len(caplog.records) == limiter.refused_count == 2
