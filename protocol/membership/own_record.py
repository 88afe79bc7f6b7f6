"""What a peer says of itself: the fields, and the dated and signed record made of them."""

from collections.abc import Mapping, Sequence

from protocol.identity import Identity
from protocol.manifest import RunId
from protocol.membership.clock import SwarmClock
from protocol.membership.directory import (
    KIND,
    MAX_ADDRESS_CHARACTERS,
    MAX_ADDRESSES,
    PeerTable,
    check_record,
    next_sequence,
)
from protocol.murmur_pb2 import PeerRecord
from protocol.records import sign

MAX_CLOCK_DRIFT_SECONDS = 1.0  # seconds; when the swarm time moves by more, the record is dated anew

FieldValue = bool | int | float | str | bytes


class OwnRecord:
    """`expiry`: seconds that a record is valid for."""

    def __init__(self, identity: Identity, run_id: RunId, clock: SwarmClock, expiry: float) -> None:
        self._identity = identity
        self._run_id = run_id
        self._clock = clock
        self._expiry = expiry
        self._fields = PeerRecord(role="observer")
        self._sequence = -1
        self._signed_offset = clock.offset

    def update_fields(self, fields: Mapping[str, FieldValue]) -> None:
        """All of the fields or none. Raises MalformedError for what no peer would accept."""
        draft = PeerRecord()
        draft.CopyFrom(self._fields)
        for name, value in fields.items():
            setattr(draft, name, value)
        now = self._clock.now()
        check_record(self._identity.peer_id, self._with_dates(draft, next_sequence(-1, now), now), now, self._expiry)
        self._fields = draft

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Take the first few addresses that peers would accept."""
        short = [address for address in addresses if len(address) <= MAX_ADDRESS_CHARACTERS]
        self._fields.addresses[:] = short[:MAX_ADDRESSES]

    def is_misdated(self) -> bool:
        """Whether a wrong clock dated the record: whoever got it has refused it, or soon would."""
        return abs(self._clock.offset - self._signed_offset) > MAX_CLOCK_DRIFT_SECONDS

    def renew(self, table: PeerTable) -> None:
        """Date and sign the fields, and put them into the table above any record of ours that is there."""
        now, peer = self._clock.now(), self._identity.peer_id
        self._sequence = next_sequence(max(self._sequence, table.sequence_of(peer)), now)
        if self._sequence <= table.sequence_of(peer):
            table.discard(peer)  # made when our clock was wrong; nobody else took it
        record = self._with_dates(self._fields, self._sequence, now)
        table.merge(sign(self._identity, KIND, self._run_id, record), now)
        self._signed_offset = self._clock.offset

    def _with_dates(self, fields: PeerRecord, sequence: int, now: float) -> PeerRecord:
        record = PeerRecord(sequence=sequence, expires=now + self._expiry)
        record.MergeFrom(fields)
        return record
