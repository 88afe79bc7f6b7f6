"""What our DHT node keeps for strangers: signed announcements of one run's peers, and nothing else.

hivemind stores whatever any stranger sends, without limit, until a time that the stranger chose and by the clock of
this machine. Here:
- `AnnouncementCheck` lets only values pass that a peer of the run signed for itself, under the run's key. It says
  nothing about time: one expired entry would otherwise spoil the whole dictionary that it travels in.
- `Shelf` holds a bounded number of them until they expire by the swarm's clock. The living are not given up for
  newcomers.
- `Neighbourhood` lets a peer have one node id, the hash of its peer id; it cannot choose its place or have many.
- `Door` refuses oversized requests, because each value costs a signature check.
hivemind compares expiration times with the local clock, and a volunteer's may be hours off. So all of them are shifted
into the far future: hivemind drops nothing, its "the latest expiration wins" still holds, and we do the dropping.
"""

import logging
from collections.abc import Iterator
from typing import Any

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
from protocol.membership.clock import Clock
from protocol.membership.directory import CLOCK_TOLERANCE, check_addresses
from protocol.murmur_pb2 import PeerRecord, Signed
from protocol.records import open_signed, sign

logger = logging.getLogger(__name__)

KIND = "rendezvous"
LIFETIME = 300.0  # seconds
FAR = 1e10  # seconds since the epoch: the year 2286, later than any wrong clock
MAX_ENTRIES = 64  # a lookup carries all of them, and one that answers is enough: gossip tells of the rest
MAX_VALUE_BYTES = 3072
MAX_REQUEST_BYTES = 2 * MAX_ENTRIES * MAX_VALUE_BYTES
MAX_REQUEST_KEYS = 16


def run_key(run_id: RunId) -> DHTID:
    return DHTID.generate(source=f"murmur/1/{run_id}")


def node_id(peer: PeerID) -> DHTID:
    return DHTID.generate(source=peer.to_bytes())


def announcement(identity: Identity, run_id: RunId, addresses: tuple[str, ...], now: float) -> tuple[bytes, float]:
    """The signed value, and the expiration time to give hivemind."""
    record = PeerRecord(sequence=int(now * 1000), expires=now + LIFETIME, addresses=addresses)
    return sign(identity, KIND, run_id, record).SerializeToString(), FAR + record.expires


def read_announcement(value: bytes, run_id: RunId) -> tuple[PeerId, PeerRecord]:
    """Raises MalformedError or ForgedError unless a peer signed this for itself."""
    if len(value) > MAX_VALUE_BYTES:
        raise MalformedError(f"an announcement has {len(value)} bytes")
    try:
        signed = Signed.FromString(value)
    except DecodeError as error:
        raise MalformedError("an announcement does not parse") from error
    record = open_signed(signed, run_id, KIND, PeerRecord, MAX_VALUE_BYTES)
    check_addresses(signed.peer, record.addresses)
    return signed.peer, record


class AnnouncementCheck(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    def __init__(self, run_id: RunId) -> None:
        self._run_id = run_id
        self._key = run_key(run_id).to_bytes()
        self.refused = 0

    def validate(self, record: DHTRecord) -> bool:
        try:
            self._check(record)
        except PeerFault as fault:
            self.refused += 1
            if self.refused & (self.refused - 1) == 0:  # strangers must not fill the log: at 1, 2, 4, 8, ...
                logger.warning("%d DHT values were refused so far; the last: %s", self.refused, fault)
            return False
        return True

    def _check(self, record: DHTRecord) -> None:
        if record.key != self._key:
            raise MalformedError("a value under a key that is not the run's")
        peer, announced = read_announcement(record.value, self._run_id)
        # Bound to what is signed: an old announcement cannot be stored again for ever, or under another's name.
        if record.subkey != MSGPackSerializer.dumps(peer) or record.expiration_time != FAR + announced.expires:
            raise MalformedError(f"an announcement of {peer} under another name or time than it was signed for")


class Shelf(DHTLocalStorage):  # type: ignore[misc]
    """Stands in for both of hivemind's storages, which grow with every store and ask the local clock."""

    def __init__(self, run_id: RunId, clock: Clock) -> None:
        super().__init__()
        self._key = run_key(run_id)
        self._clock = clock
        self._entries: dict[PeerId, ValueWithExpiration[bytes]] = {}

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: PeerId | None = None) -> bool:
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: PeerId, value: bytes, expiration_time: float) -> bool:
        self._drop_expired()
        held = self._entries.get(subkey)
        left = expiration_time - FAR - self._clock.now()
        if key != self._key or not 0 < left <= LIFETIME + CLOCK_TOLERANCE:
            return False
        if held.expiration_time >= expiration_time if held else len(self._entries) >= MAX_ENTRIES:
            return False
        self._entries[subkey] = ValueWithExpiration(value, expiration_time)
        return True

    def get(self, key: DHTID) -> ValueWithExpiration[DictionaryDHTValue] | None:
        self._drop_expired()
        if key != self._key or not self._entries:
            return None
        dictionary = DictionaryDHTValue()
        for peer, entry in self._entries.items():
            dictionary.store(peer, entry.value, entry.expiration_time)
        return ValueWithExpiration(dictionary, dictionary.latest_expiration_time)

    def items(self) -> Iterator[tuple[DHTID, ValueWithExpiration[DictionaryDHTValue]]]:
        found = self.get(self._key)
        return iter([(self._key, found)] if found else [])

    def __contains__(self, key: DHTID) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return len(self._entries)

    def _drop_expired(self) -> None:
        now = self._clock.now()
        for peer, entry in list(self._entries.items()):
            if not 0 < entry.expiration_time - FAR - now <= LIFETIME + CLOCK_TOLERANCE:
                del self._entries[peer]


class Neighbourhood(RoutingTable):  # type: ignore[misc]
    def add_or_update_node(self, node: DHTID, peer: PeerID) -> tuple[DHTID, PeerID] | None:
        if node != node_id(peer):
            logger.debug("%s claims a place in the DHT that is not its own", peer)
            return None
        found: tuple[DHTID, PeerID] | None = super().add_or_update_node(node, peer)
        return found


class Door(AuthorizerBase):  # type: ignore[misc]
    """hivemind asks it before it serves a request."""

    async def validate_request(self, request: Any) -> bool:
        keys = len(request.keys) if isinstance(request, dht_pb2.StoreRequest | dht_pb2.FindRequest) else 0
        small = keys <= MAX_REQUEST_KEYS and request.ByteSize() <= MAX_REQUEST_BYTES
        if not small:
            logger.warning("a DHT request with %d keys and %d bytes was refused", keys, request.ByteSize())
        return small

    async def sign_request(self, request: Any, service_public_key: Any) -> None:
        pass

    async def sign_response(self, response: Any, request: Any) -> None:
        pass

    async def validate_response(self, response: Any, request: Any) -> bool:
        return True
