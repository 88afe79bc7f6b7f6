"""The keys of the DHT that a node keeps values for, and what may stand under each. PURE.

A value is signed by whoever it is of, and says itself until when it holds; both bind the place that it is stored at:
it cannot be kept for longer, or under another's name.

What our DHT node keeps for strangers: signed announcements of one run's peers and of public runs, and nothing else.

hivemind stores whatever any stranger sends, without limit, until a time that the stranger chose and by the clock of
this machine. Here:
- `AnnouncementCheck` lets only values pass that their board takes: a peer of the run signed them for itself, under the
  run's key, or an organiser for its own run. It says nothing about time: one expired entry would otherwise spoil the
  whole dictionary that it travels in.
- `Shelf` holds a bounded number of them until they expire by the swarm's clock. The living are not given up for
  newcomers.
- `Neighbourhood` lets a peer have one node id, the hash of its peer id; it cannot choose its place or have many.
- `Door` refuses oversized requests, because each value costs a signature check.
hivemind compares expiration times with the local clock, and a volunteer's may be hours off. So all of them are shifted
into the far future: hivemind drops nothing, its "the latest expiration wins" still holds, and we do the dropping.
"""

import logging
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
from protocol.manifest import RunId
from protocol.membership.clock import SwarmClock
from protocol.membership.peer_table import CLOCK_TOLERANCE_SECONDS, check_addresses
from protocol.murmur_pb2 import PeerRecord, Signed
from protocol.signing import open_signed, sign

EXPIRATION_OFFSET_SECONDS = 1e10  # seconds since the epoch: the year 2286, later than any wrong clock


class Announcement(NamedTuple):
    """`place`: the subkey; `expires` in swarm time, seconds since the epoch."""

    subkey: str
    value: bytes
    expires: float

    @property
    def dht_expiration(self) -> float:
        """The time to give hivemind."""
        return EXPIRATION_OFFSET_SECONDS + self.expires


def parse_envelope(value: bytes, max_bytes: int, title: str) -> Signed:
    """Nothing in it is checked yet. Raises MalformedError, which begins with `title`."""
    if len(value) > max_bytes:
        raise MalformedError(f"{title} has {len(value)} bytes")
    try:
        return Signed.FromString(value)
    except DecodeError as error:
        raise MalformedError(f"{title} does not parse") from error


@dataclass(frozen=True)
class Topic:
    """`read` gives the notice that a value is, or raises PeerFault."""

    name: str
    parse: Callable[[bytes], Announcement]

    @property
    def key(self) -> DHTID:
        return DHTID.generate(source=f"murmur/1/{self.name}")


logger = logging.getLogger(__name__)

KIND = "rendezvous"
LIFETIME_SECONDS = 300.0  # seconds
MAX_ENTRIES = 64  # of one board; a lookup carries all of them, and one that answers is enough: gossip tells of the rest
MAX_VALUE_BYTES = 3072
MAX_REQUEST_BYTES = 2 * MAX_ENTRIES * MAX_VALUE_BYTES
MAX_REQUEST_KEYS = 16


def run_topic(run_id: RunId) -> Topic:
    """Where the peers of a run announce themselves."""

    def read(value: bytes) -> Announcement:
        peer, record = parse_announcement(value, run_id)
        return Announcement(peer, value, record.expires)

    return Topic(run_id, read)


def node_id(peer: PeerID) -> DHTID:
    return DHTID.generate(source=peer.to_bytes())


def make_announcement(identity: Identity, run_id: RunId, addresses: tuple[str, ...], now: float) -> Announcement:
    record = PeerRecord(sequence=int(now * 1000), expires=now + LIFETIME_SECONDS, addresses=addresses)
    return Announcement(identity.peer_id, sign(identity, KIND, run_id, record).SerializeToString(), record.expires)


def parse_announcement(value: bytes, run_id: RunId) -> tuple[PeerId, PeerRecord]:
    """Raises MalformedError or ForgedError unless a peer signed this for itself."""
    signed = parse_envelope(value, MAX_VALUE_BYTES, "an announcement")
    record = open_signed(signed, run_id, KIND, PeerRecord, MAX_VALUE_BYTES)
    check_addresses(signed.peer, record.addresses)
    return signed.peer, record


class AnnouncementValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    def __init__(self, topics: Iterable[Topic]) -> None:
        self._topics = {board.key.to_bytes(): board for board in topics}
        self.refused_count = 0

    def validate(self, record: DHTRecord) -> bool:
        try:
            self._check(record)
        except PeerFault as fault:
            self.refused_count += 1
            if (
                self.refused_count & (self.refused_count - 1) == 0
            ):  # strangers must not fill the log: at 1, 2, 4, 8, ...
                logger.warning("%d DHT values were refused so far; the last: %s", self.refused_count, fault)
            return False
        return True

    def _check(self, record: DHTRecord) -> None:
        board = self._topics.get(record.key)
        if board is None:
            raise MalformedError("a value under a key that is not the run's")
        notice = board.parse(record.value)
        # Bound to what is signed: an old announcement cannot be stored again for ever, or under another's name.
        if record.subkey != MSGPackSerializer.dumps(notice.subkey) or record.expiration_time != notice.dht_expiration:
            raise MalformedError(
                f"an announcement of {notice.subkey} under another name or time than it was signed for"
            )


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """Stands in for both of hivemind's storages, which grow with every store and ask the local clock."""

    def __init__(self, topics: Iterable[Topic], clock: SwarmClock) -> None:
        super().__init__()
        self._clock = clock
        self._topics: dict[DHTID, dict[str, ValueWithExpiration[bytes]]] = {board.key: {} for board in topics}

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: str | None = None) -> bool:
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        self._drop_expired()
        entries = self._topics.get(key)
        left = expiration_time - EXPIRATION_OFFSET_SECONDS - self._clock.now()
        if entries is None or not 0 < left <= LIFETIME_SECONDS + CLOCK_TOLERANCE_SECONDS:
            return False
        held = entries.get(subkey)
        if held.expiration_time >= expiration_time if held else len(entries) >= MAX_ENTRIES:
            return False
        entries[subkey] = ValueWithExpiration(value, expiration_time)
        return True

    def get(self, key: DHTID) -> ValueWithExpiration[DictionaryDHTValue] | None:
        self._drop_expired()
        entries = self._topics.get(key)
        if not entries:
            return None
        dictionary = DictionaryDHTValue()
        for place, entry in entries.items():
            dictionary.store(place, entry.value, entry.expiration_time)
        return ValueWithExpiration(dictionary, dictionary.latest_expiration_time)

    def items(self) -> Iterator[tuple[DHTID, ValueWithExpiration[DictionaryDHTValue]]]:
        found = ((key, self.get(key)) for key in self._topics)
        return iter([(key, value) for key, value in found if value is not None])

    def __contains__(self, key: DHTID) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._topics.values())

    def _drop_expired(self) -> None:
        now = self._clock.now()
        for entries in self._topics.values():
            for place, entry in list(entries.items()):
                if (
                    not 0
                    < entry.expiration_time - EXPIRATION_OFFSET_SECONDS - now
                    <= LIFETIME_SECONDS + CLOCK_TOLERANCE_SECONDS
                ):
                    del entries[place]


class PeerIdRoutingTable(RoutingTable):  # type: ignore[misc]
    def add_or_update_node(self, node: DHTID, peer: PeerID) -> tuple[DHTID, PeerID] | None:
        if node != node_id(peer):
            logger.debug("%s claims a place in the DHT that is not its own", peer)
            return None
        found: tuple[DHTID, PeerID] | None = super().add_or_update_node(node, peer)
        return found


class RequestLimiter(AuthorizerBase):  # type: ignore[misc]
    """hivemind asks it before it serves a request."""

    def __init__(self) -> None:
        super().__init__()
        self.refused_count = 0

    async def validate_request(self, request: Any) -> bool:
        keys = len(request.keys) if isinstance(request, dht_pb2.StoreRequest | dht_pb2.FindRequest) else 0
        small = keys <= MAX_REQUEST_KEYS and request.ByteSize() <= MAX_REQUEST_BYTES
        if not small:
            self.refused_count += 1
            logger.warning("a DHT request with %d keys and %d bytes was refused", keys, request.ByteSize())
        return small

    async def sign_request(self, request: Any, service_public_key: Any) -> None:
        pass

    async def sign_response(self, response: Any, request: Any) -> None:
        pass

    async def validate_response(self, response: Any, request: Any) -> bool:
        return True
