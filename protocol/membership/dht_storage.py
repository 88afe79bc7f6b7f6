"""The topics that our DHT node stores values for, and the checks and limits of their announcements.

A value is signed by the peer that it describes and contains its own expiry. Both bind its subkey and expiration time,
so nobody can keep it for longer or store it under another name. For strangers the node stores signed announcements of
peers of one run and of public runs, and nothing else.

hivemind itself stores anything that any stranger sends, without limit, until a time that the stranger chose and by this
machine's clock. The classes here restrict that:
- `AnnouncementValidator` accepts only values that their topic takes: signed by a peer of the run for itself under the
  run's key, or by an organiser for its own run. It ignores time, because one expired entry would otherwise spoil the
  whole dictionary that it travels in.
- `BoundedStorage` holds a bounded number of them until they expire by the swarm's clock. Entries that are still valid
  of peers that this node knows are not dropped for strangers; strangers displace one another at random.
- `PeerIdRoutingTable` accepts one node id per peer, the hash of its peer id, so a peer can neither choose its position
  nor occupy several.
- `RequestLimiter` refuses oversized requests, because each value costs a signature check.

hivemind compares expiration times with the local clock, which may be hours off at a volunteer's machine. All of them
are therefore shifted into the far future: hivemind drops nothing, its rule "the latest expiration wins" still holds,
and this module drops expired entries.
"""

import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.auth import AuthorizerBase
from hivemind.utils.timed_storage import ValueWithExpiration

from protocol.errors import MalformedError, PeerFault
from protocol.identity import Identity, PeerId
from protocol.manifest.run import RunId
from protocol.membership.clock import SwarmClock
from protocol.membership.peer_table import CLOCK_TOLERANCE_SECONDS
from protocol.membership.record_fields import check_addresses
from protocol.murmur_pb2 import PeerRecord, Signed
from protocol.signing import open_signed, sign

EXPIRATION_OFFSET_SECONDS = 1e10  # seconds since the epoch: the year 2286, later than any wrong clock


class Announcement(NamedTuple):
    """A value to store under a subkey.

    `expires` is in swarm time, seconds since the epoch.
    """

    subkey: str
    value: bytes
    expires: float

    @property
    def dht_expiration(self) -> float:
        """Return the expiration time for hivemind."""
        return EXPIRATION_OFFSET_SECONDS + self.expires


def parse_envelope(value: bytes, max_bytes: int, title: str) -> Signed:
    """Parse a value without checking it.

    Raises MalformedError, whose text begins with `title`.
    """
    if len(value) > max_bytes:
        raise MalformedError(f"{title} has {len(value)} bytes")
    try:
        return Signed.FromString(value)
    except DecodeError as error:
        raise MalformedError(f"{title} does not parse") from error


@dataclass(frozen=True)
class Topic:
    """A key of the DHT.

    `parse` turns its values into announcements, or raises PeerFault.
    """

    name: str
    parse: Callable[[bytes], Announcement]

    @property
    def key(self) -> DHTID:
        return DHTID.generate(source=f"murmur/1/{self.name}")


logger = logging.getLogger(__name__)

KIND = "rendezvous"
LIFETIME_SECONDS = 300.0
MAX_STRANGERS = 48  # of the entries of a topic: those of peers that this node does not know to be live
MAX_ENTRIES = 64  # per topic; a lookup returns all, and one peer that answers is enough, as gossip does the rest
MAX_VALUE_BYTES = 3072
MAX_REQUEST_BYTES = 2 * MAX_ENTRIES * MAX_VALUE_BYTES
MAX_REQUEST_KEYS = 16


def run_topic(run_id: RunId) -> Topic:
    """Return the topic under which the peers of a run announce themselves."""

    def parse(value: bytes) -> Announcement:
        peer, record = parse_announcement(value, run_id)
        return Announcement(peer, value, record.expires)

    return Topic(run_id, parse)


def node_id(peer: PeerID) -> DHTID:
    return DHTID.generate(source=peer.to_bytes())


def make_announcement(identity: Identity, run_id: RunId, addresses: tuple[str, ...], now: float) -> Announcement:
    record = PeerRecord(sequence=int(now * 1000), expires=now + LIFETIME_SECONDS, addresses=addresses)
    return Announcement(identity.peer_id, sign(identity, KIND, run_id, record).SerializeToString(), record.expires)


def parse_announcement(value: bytes, run_id: RunId) -> tuple[PeerId, PeerRecord]:
    """Return the peer and its record.

    Raises MalformedError or ForgedError unless the peer signed it for itself.
    """
    signed = parse_envelope(value, MAX_VALUE_BYTES, "an announcement")
    record = open_signed(signed, run_id, KIND, PeerRecord, MAX_VALUE_BYTES)
    check_addresses(signed.peer, record.addresses)
    return signed.peer, record


class AnnouncementValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Accepts only values that their topic accepts.

    The subkey and expiry must be those that were signed.
    """

    def __init__(self, topics: Iterable[Topic]) -> None:
        self._topics = {topic.key.to_bytes(): topic for topic in topics}
        self.refused_count = 0

    def validate(self, record: DHTRecord) -> bool:
        try:
            self._check(record)
        except PeerFault as fault:
            self.refused_count += 1
            # Strangers must not fill the log, so only refusal 1, 2, 4, 8, ... is logged.
            if self.refused_count & (self.refused_count - 1) == 0:
                logger.warning("%d DHT values refused so far; the last: %s", self.refused_count, fault)
            return False
        return True

    def _check(self, record: DHTRecord) -> None:
        topic = self._topics.get(record.key)
        if topic is None:
            raise MalformedError("a value is stored under an unknown key")
        announcement = topic.parse(record.value)
        # Both are bound to the signed values, so an old announcement cannot be stored for ever or under another name.
        subkey = MSGPackSerializer.dumps(announcement.subkey)
        if record.subkey != subkey or record.expiration_time != announcement.dht_expiration:
            raise MalformedError(
                f"an announcement of {announcement.subkey} has another subkey or expiry than it was signed for"
            )


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """Replaces both of hivemind's storages.

    Those grow with every store and use the local clock.
    """

    def __init__(self, topics: Iterable[Topic], clock: SwarmClock, rng: random.Random | None = None) -> None:
        super().__init__()
        self._clock = clock
        self._rng = rng or random.Random(os.urandom(16))  # nobody can foresee which entries are dropped
        self._topics: dict[DHTID, dict[str, ValueWithExpiration[bytes]]] = {topic.key: {} for topic in topics}
        self.known: frozenset[str] = frozenset()  # subkeys that no stranger displaces: live peers of our run

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: str | None = None) -> bool:
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        self._drop_expired()
        entries = self._topics.get(key)
        remaining = expiration_time - EXPIRATION_OFFSET_SECONDS - self._clock.now()
        if entries is None or not 0 < remaining <= LIFETIME_SECONDS + CLOCK_TOLERANCE_SECONDS:
            return False
        stored = entries.get(subkey)
        if stored is not None and stored.expiration_time >= expiration_time:
            return False
        if stored is None and not self._make_room(entries, subkey):
            return False
        entries[subkey] = ValueWithExpiration(value, expiration_time)
        return True

    def _make_room(self, entries: dict[str, ValueWithExpiration[bytes]], subkey: str) -> bool:
        """Drop a random entry of a stranger if there are too many; return whether there is a place for one more.

        If the first entries stayed, as many keys of one person would hide everybody who comes later.
        """
        strangers = [entry for entry in entries if entry not in self.known]
        if subkey not in self.known and len(strangers) >= MAX_STRANGERS or len(entries) >= MAX_ENTRIES:
            if not strangers:
                return False
            del entries[self._rng.choice(strangers)]
        return True

    def get(self, key: DHTID) -> ValueWithExpiration[DictionaryDHTValue] | None:
        self._drop_expired()
        entries = self._topics.get(key)
        if not entries:
            return None
        dictionary = DictionaryDHTValue()
        for subkey, entry in entries.items():
            dictionary.store(subkey, entry.value, entry.expiration_time)
        return ValueWithExpiration(dictionary, dictionary.latest_expiration_time)

    def items(self) -> Iterator[tuple[DHTID, ValueWithExpiration[DictionaryDHTValue]]]:
        values = ((key, self.get(key)) for key in self._topics)
        return iter([(key, value) for key, value in values if value is not None])

    def __contains__(self, key: DHTID) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._topics.values())

    def _drop_expired(self) -> None:
        now = self._clock.now()
        for entries in self._topics.values():
            for subkey, entry in list(entries.items()):
                if (
                    not 0
                    < entry.expiration_time - EXPIRATION_OFFSET_SECONDS - now
                    <= LIFETIME_SECONDS + CLOCK_TOLERANCE_SECONDS
                ):
                    del entries[subkey]


class PeerIdRoutingTable(RoutingTable):  # type: ignore[misc]
    """A routing table with exactly one node id per peer, the hash of its peer id."""

    def add_or_update_node(self, node: DHTID, peer: PeerID) -> tuple[DHTID, PeerID] | None:
        if node != node_id(peer):
            logger.debug("%s claims a DHT node id that is not its own", peer)
            return None
        replaced: tuple[DHTID, PeerID] | None = super().add_or_update_node(node, peer)
        return replaced


class RequestLimiter(AuthorizerBase):  # type: ignore[misc]
    """Refuses oversized requests; hivemind asks it before it serves a request."""

    def __init__(self) -> None:
        super().__init__()
        self.refused_count = 0

    async def validate_request(self, request: Any) -> bool:
        keys = len(request.keys) if isinstance(request, dht_pb2.StoreRequest | dht_pb2.FindRequest) else 0
        is_small = keys <= MAX_REQUEST_KEYS and request.ByteSize() <= MAX_REQUEST_BYTES
        if not is_small:
            self.refused_count += 1
            logger.warning("refusing a DHT request with %d keys and %d bytes", keys, request.ByteSize())
        return is_small

    async def sign_request(self, request: Any, service_public_key: Any) -> None:
        pass

    async def sign_response(self, response: Any, request: Any) -> None:
        pass

    async def validate_response(self, response: Any, request: Any) -> bool:
        return True
