"""The fields of a peer record: their bounds, the fields that list several entries, and updates. No I/O.

One table has the bounds of every field, because anybody may write a record. Counts of 64 bits that only the page shows
have no bound here; the page clamps them.

A field that lists an entry for each of several stages is one field of bytes, because an update of a record replaces a
field as a whole. An entry names its stage from 1 on, and has the head of its chain. The record of a peer has the head
of one stage in separate fields, and the others that it trains in `served_stages`: code that asks for a stage sees the
record as if the peer served that stage alone.

An update has the fields that changed since a version that the receiver holds, because most versions of a record differ
in a few figures and its dates. A summary names the version that the other side holds, and a table keeps the last
versions of each record. What is signed does not change: the receiver applies the update to its version, and verifies
the signature over the whole record. If either side lacks that version, the record goes in full.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final, Self, TypeVar

from google.protobuf.message import DecodeError, Message

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import DIGEST_BYTES
from protocol.errors import MalformedError
from protocol.identity import PeerId
from protocol.manifest.sections import MAX_SOURCES, MAX_STAGES
from protocol.murmur_pb2 import PeerRecord, RecordUpdate, Signed
from protocol.signing import MAX_CHAIN_TOKENS, MAX_ROUND, peer_id_of

MAX_FIELD_BYTES: Final = 1024
RANDOM_BITS: Final = 22  # of a start id, below its milliseconds
Listing = TypeVar("Listing", bound=Message)
DOUBLE_BYTES: Final = 8
MAX_MORE_STAGES: Final = 7  # in one record, in addition to its own
MAX_KEPT_STATES: Final = 8  # in one record
NAME_BYTES = 8
ROLES = ("trainer", "observer", "rollout")
MAX_TEXT_CHARACTERS = 64
MAX_PORT = 65535
MAX_ADDRESSES = 8
MAX_ADDRESS_CHARACTERS = 256
DIGEST_SIZES = (0, 32)
MAX_TICKET_BYTES = 512


def read_field(listing: Listing, data: bytes) -> Listing:
    """Read a field into a message of its kind, and return it. Raises MalformedError."""
    if len(data) > MAX_FIELD_BYTES:
        raise MalformedError("a list of stages that is too long")
    try:
        listing.ParseFromString(data)
    except DecodeError as error:
        raise MalformedError("a list of stages that is not readable") from error
    return listing


def require_head(entry: wire.KeptState | wire.ServedStage) -> None:
    """Raise MalformedError unless stage, round, tokens and digests are in their ranges; both digests may be empty."""
    if not 0 < entry.stage <= MAX_STAGES or entry.round > MAX_ROUND or entry.chain_tokens > MAX_CHAIN_TOKENS:
        raise MalformedError("an entry whose stage, round or tokens are out of range")
    if len(entry.digest) not in (0, DIGEST_BYTES) or len(entry.state_digest) not in (0, DIGEST_BYTES):
        raise MalformedError("an entry of a stage with a digest of the wrong length")


def require_order(stages: Sequence[int], most: int) -> None:
    """Raise MalformedError unless there are at most `most` stages, each once and in ascending order."""
    if len(stages) > most or list(stages) != sorted(set(stages)):
        raise MalformedError("stages that are too many or not in their order")


def encode_source_losses(losses: Iterable[float]) -> bytes:
    """Return the field of the record."""
    listed = tuple(losses)
    return struct.pack(f"<{len(listed)}d", *listed)


def parse_source_losses(data: bytes) -> tuple[float, ...]:
    """Return the losses in a field. Raises MalformedError."""
    count, rest = divmod(len(data), DOUBLE_BYTES)
    if rest or count > MAX_SOURCES:
        raise MalformedError(f"losses of sources in {len(data)} bytes")
    losses = struct.unpack(f"<{count}d", data)
    if not all(math.isfinite(loss) and loss >= 0 for loss in losses):
        raise MalformedError("a loss of a source that is negative or not finite")
    return losses


def losses_by_source(data: bytes, names: Sequence[str]) -> dict[str, float]:
    """Return the losses in a field by the names of the sources; none if it has another number of them."""
    losses = parse_source_losses(data)
    return dict(zip(names, losses, strict=True)) if len(names) == len(losses) else {}


@dataclass(frozen=True)
class ServedStage:
    """A stage (counted from 0), and the fields of a record that concern it; no digest before it has a state."""

    stage: int
    stage_life: int = 0
    stage_rate: float = 0.0
    round: int = 0
    digest: bytes = b""
    chain_tokens: int = 0
    state_digest: bytes = b""

    def to_wire(self) -> wire.ServedStage:
        return wire.ServedStage(**asdict(self) | {"stage": self.stage + 1})

    @classmethod
    def from_wire(cls, body: wire.ServedStage) -> Self:
        """Check an entry. Raises MalformedError."""
        require_head(body)
        if not (math.isfinite(body.stage_rate) and body.stage_rate >= 0):
            raise MalformedError("a served stage with a rate that is negative or not finite")
        head = (body.round, body.digest, body.chain_tokens, body.state_digest)
        return cls(body.stage - 1, body.stage_life, body.stage_rate, *head)


def encode_served_stages(stages: Iterable[ServedStage]) -> bytes:
    """Return the field of the record; at most MAX_MORE_STAGES of different numbers."""
    listed = sorted(stages, key=lambda entry: entry.stage)
    return wire.ServedStages(stages=[entry.to_wire() for entry in listed]).SerializeToString(deterministic=True)


@lru_cache(maxsize=4096)
def parse_served_stages(data: bytes) -> tuple[ServedStage, ...]:
    """Return the entries of the field. Raises MalformedError."""
    listing = read_field(wire.ServedStages(), data)
    served = tuple(ServedStage.from_wire(entry) for entry in listing.stages)
    require_order([entry.stage for entry in served], MAX_MORE_STAGES)
    return served


def records_by_stage(record: PeerRecord) -> Iterator[PeerRecord]:
    """Yield the record once for each stage that it names, as if the peer served that one alone."""
    yield record
    for entry in parse_served_stages(record.more_stages) if record.more_stages else ():
        if entry.stage + 1 != record.stage:
            yield _as_of(record, entry)


def record_of_stage(record: PeerRecord, stage: int) -> PeerRecord | None:
    """Return the record of a trainer as that of one stage; None if it does not serve it."""
    if record.role != "trainer":
        return None
    return next((each for each in records_by_stage(record) if each.stage == stage + 1), None)


def _as_of(record: PeerRecord, entry: ServedStage) -> PeerRecord:
    seen = PeerRecord()
    seen.CopyFrom(record)
    seen.more_stages = b""
    for name, value in (asdict(entry) | {"stage": entry.stage + 1}).items():
        setattr(seen, name, value)
    return seen


@dataclass(frozen=True, order=True)
class KeptState:
    """A state of a stage (counted from 0) and the head of its chain; `state` is empty before the first one."""

    stage: int
    round: int
    digest: bytes
    tokens: int
    state: bytes = b""

    def to_wire(self) -> wire.KeptState:
        return wire.KeptState(
            stage=self.stage + 1,
            round=self.round,
            digest=self.digest,
            chain_tokens=self.tokens,
            state_digest=self.state,
        )

    @classmethod
    def from_wire(cls, body: wire.KeptState) -> Self:
        """Check an entry. Raises MalformedError."""
        require_head(body)
        if not body.digest:
            raise MalformedError("a kept state without the digest of its chain")
        return cls(body.stage - 1, body.round, body.digest, body.chain_tokens, body.state_digest)


def encode_kept_states(states: Iterable[KeptState]) -> bytes:
    """Return the field of the record; at most MAX_KEPT_STATES of one stage each."""
    return wire.KeptStates(states=[state.to_wire() for state in sorted(states)]).SerializeToString(deterministic=True)


@lru_cache(maxsize=4096)
def parse_kept_states(data: bytes) -> tuple[KeptState, ...]:
    """Return the entries of the field. Raises MalformedError."""
    listing = read_field(wire.KeptStates(), data)
    states = tuple(KeptState.from_wire(entry) for entry in listing.states)
    require_order([state.stage for state in states], MAX_KEPT_STATES)
    return states


@lru_cache(maxsize=4096)
def name_of(peer: PeerId) -> bytes:
    """Return the short name of a peer in updates."""
    return hashlib.blake2b(peer.encode(), digest_size=NAME_BYTES).digest()


def check_of(signed: Signed) -> int:
    """Return the hash by which an update names the version that it changes."""
    return int.from_bytes(hashlib.blake2b(signed.body, digest_size=4).digest(), "big")


def make_update(signed: Signed, record: PeerRecord, base: Signed) -> RecordUpdate:
    """Return the update that leads from an earlier version of a record to this one."""
    fields, cleared, old = PeerRecord(), [], PeerRecord.FromString(base.body)
    fields.CopyFrom(record)
    present = {field.name for field, _ in record.ListFields()}
    for field, value in old.ListFields():
        if field.name not in present:
            cleared.append(field.number)
        elif getattr(record, field.name) == value:
            fields.ClearField(field.name)
        elif field.name == "addresses":
            cleared.append(field.number)
    return RecordUpdate(
        name=name_of(signed.peer), base=check_of(base), fields=fields, cleared=cleared, signature=signed.signature
    )


def apply_update(update: RecordUpdate, base: Signed) -> Signed | None:
    """Return the record that results from an update, unverified; None if it changes another version."""
    if update.base != check_of(base):
        return None
    record = PeerRecord.FromString(base.body)
    names = {field.number: field.name for field in PeerRecord.DESCRIPTOR.fields}
    for number in update.cleared:
        if number in names:
            record.ClearField(names[number])
    record.MergeFrom(update.fields)
    body = record.SerializeToString(deterministic=True)
    return Signed(kind=base.kind, peer=base.peer, body=body, signature=update.signature)


@dataclass(frozen=True)
class Bound:
    """The values that a field may have, and the words for another one."""

    accepts: Callable[[Any], bool]
    fault: str


ANYTHING = Bound(lambda value: True, "")


# Terminals and pages show these texts, so control characters are refused.
TEXT = Bound(
    lambda text: len(text) <= MAX_TEXT_CHARACTERS and text.isprintable(), "a text that is too long or not printable"
)


AMOUNT = Bound(lambda amount: math.isfinite(amount) and amount >= 0, "an amount that is negative or not finite")


NUMBER = Bound(math.isfinite, "a number that is not finite")


SHARE = Bound(lambda share: 0 <= share <= 1, "a share that is not between 0 and 1")


ROUND = Bound(lambda number: number <= MAX_ROUND, "a round above the maximum")


DIGEST = Bound(lambda digest: len(digest) in DIGEST_SIZES, "a digest of the wrong length")


def _parses(parse: Callable[[bytes], object]) -> Callable[[bytes], bool]:
    def accepts(data: bytes) -> bool:
        try:
            parse(data)
        except MalformedError:
            return False
        return True

    return accepts


FIELD_BOUNDS: dict[str, Bound] = {
    "role": Bound(lambda role: role in ROLES, "an unknown role"),
    "device": TEXT,
    "name": TEXT,
    "version": TEXT,
    "round": ROUND,
    "step": ANYTHING,
    "start": ANYTHING,
    "other_start": ANYTHING,
    "digest": DIGEST,
    "state_digest": DIGEST,
    "revision": DIGEST,
    "ticket": Bound(lambda ticket: len(ticket) <= MAX_TICKET_BYTES, "a ticket that is too long"),
    "stage": Bound(lambda stage: stage <= MAX_STAGES, "a stage above the maximum"),
    "kept": Bound(_parses(parse_kept_states), "kept states that are not valid"),
    "more_stages": Bound(_parses(parse_served_stages), "served stages that are not valid"),
    "stage_life": ANYTHING,
    "stage_move": Bound(lambda move: move <= MAX_STAGES + 1, "a move to a stage above the maximum"),
    "stage_rate": AMOUNT,
    "microbatches_done": ANYTHING,
    "microbatches_torn": ANYTHING,
    "microbatches_lost": ANYTHING,
    "microbatches_replayed": ANYTHING,
    "microbatches_dropped": ANYTHING,
    "step_decided": Bound(lambda decided: decided <= 2 * MAX_ROUND + 2, "a round above the maximum"),
    "chain_tokens": Bound(lambda tokens: tokens <= MAX_CHAIN_TOKENS, "a token count above the maximum"),
    "tokens": ANYTHING,
    "loss": NUMBER,
    "tokens_per_second": AMOUNT,
    "bytes_sent": ANYTHING,
    "leaving": ANYTHING,
    "validation_loss": AMOUNT,
    "validation_round": ROUND,
    "validation_by_source": Bound(_parses(parse_source_losses), "losses of sources that are not valid"),
    "compute_seconds": AMOUNT,
    "exchange_seconds": AMOUNT,
    "wait_seconds": AMOUNT,
    "resting": ANYTHING,
    "bytes_carried": ANYTHING,
    "direct_port": Bound(lambda port: port <= MAX_PORT, "an invalid port"),
    "learning_rate": AMOUNT,
    "gradient_norm": AMOUNT,
    "device_use": SHARE,
    "reward": SHARE,
    "rollouts": ANYTHING,
    "device_memory": ANYTHING,
    "device_memory_total": ANYTHING,
    "bytes_received": ANYTHING,
}


def check_fields(peer: PeerId, record: PeerRecord) -> None:
    """Raise MalformedError for a field out of its bounds."""
    for name, bound in FIELD_BOUNDS.items():
        if not bound.accepts(getattr(record, name)):
            raise MalformedError(f"the record of {peer} has {bound.fault}")


def check_addresses(peer: PeerId, addresses: Iterable[str]) -> None:
    """Raise MalformedError unless these are few, short addresses of this peer."""
    listed = list(addresses)
    if len(listed) > MAX_ADDRESSES:
        raise MalformedError(f"the record of {peer} has {len(listed)} of at most {MAX_ADDRESSES} addresses")
    for address in listed:
        is_plain = address.startswith("/") and address.isascii() and address.isprintable() and " " not in address
        if not is_plain or len(address) > MAX_ADDRESS_CHARACTERS:
            raise MalformedError(f"the record of {peer} has an invalid address")
        # Otherwise one peer could make all others dial a third one.
        if peer_id_of(address) != peer:
            raise MalformedError(f"the record of {peer} has the address of another peer")
