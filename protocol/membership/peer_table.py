"""The peers of a run: a table of signed, expiring records in which the highest sequence of a peer wins. No I/O.

The caller passes the swarm time and does the gossip. Merging is commutative, associative and idempotent, so peers that
have seen the same records in any order hold the same table (anti-entropy, Demers et al. 1987). A sequence is the swarm
time in milliseconds, or the previous sequence plus one, so a peer that lost its disk still overrides its former
records. It is bounded by the clock, so nobody can claim a sequence that a later record cannot reach.

`OwnRecord` holds the fields that a peer publishes about itself, and makes dated and signed records of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from protocol.errors import LimitError, StaleError
from protocol.identity import Identity, PeerId
from protocol.manifest.run import RunId
from protocol.membership.clock import SwarmClock
from protocol.membership.record_fields import (
    MAX_ADDRESS_CHARACTERS,
    MAX_ADDRESSES,
    apply_update,
    check_addresses,
    check_fields,
    make_update,
    name_of,
)
from protocol.membership.summary import is_same_sequence
from protocol.murmur_pb2 import PeerRecord, RecordUpdate, Signed
from protocol.signing import read_unverified, sign, verify_signed

KIND = "peer"
MAX_PEERS = 4096
MAX_RECORD_BYTES = 2560
KEPT_VERSIONS = 3  # of a record before the newest one
CLOCK_TOLERANCE_SECONDS = 60.0  # by which two honest swarm times may differ


@dataclass(frozen=True, slots=True)
class PeerJoined:
    peer: PeerId
    record: PeerRecord


@dataclass(frozen=True, slots=True)
class PeerUpdated:
    peer: PeerId
    record: PeerRecord


@dataclass(frozen=True, slots=True)
class PeerLeft:
    peer: PeerId
    reason: str  # "left", "expired", "unreachable" or "ended"
    record: PeerRecord | None = field(default=None, compare=False)  # its last one, if it is still known


MembershipEvent = PeerJoined | PeerUpdated | PeerLeft


class MembershipListener(Protocol):
    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        """React to other peers that joined, left or changed their records.

        All changes of one gossip call come together, because each reaction looks at all live peers.
        """


@dataclass(frozen=True, slots=True)
class _Entry:
    signed: Signed
    record: PeerRecord
    is_suspected: bool = False
    has_ended: bool = False
    is_confirmed: bool = True  # its key has spoken to us, or somebody vouches for it
    other: "tuple[Signed, PeerRecord] | None" = None  # the last record of another process with the same key
    earlier: tuple[tuple[int, Signed], ...] = ()  # the versions before, with their sequences

    @property
    def is_live(self) -> bool:
        return self.is_confirmed and not (self.is_suspected or self.record.leaving)


class PeerTable:
    """The records of one run.

    `lifetime` is the maximum validity of a record in seconds.
    """

    def __init__(self, run_id: RunId, lifetime: float, max_peers: int = MAX_PEERS) -> None:
        self._run_id = run_id
        self._lifetime = lifetime
        self._max_peers = max_peers
        self._entries: dict[PeerId, _Entry] = {}
        self._last_sweep_at = float("-inf")
        self.protected: frozenset[PeerId] = frozenset()  # peers that no newcomer displaces

    def __len__(self) -> int:
        return len(self._entries)

    def merge(self, signed: Signed, now: float) -> PeerRecord | None:
        """Merge a record and return it, or return None if it is not newer. Raises as `read_news` and `accept` do."""
        record = self.read_news(signed, now)
        if record is not None:
            self.accept(signed, record, now)
        return record

    def read_news(self, signed: Signed, now: float) -> PeerRecord | None:
        """Return the record if it is newer than the one here, without verifying its signature.

        These checks are cheap, so that a flood does not cost an Ed25519 verification per record.

        Raises:
            StaleError: The record has expired.
            MalformedError: The record is invalid.
        """
        record = read_unverified(signed, KIND, PeerRecord, MAX_RECORD_BYTES)
        stored = self._entries.get(signed.peer)
        if stored is not None and not _is_newer(signed, record, stored):
            return None
        check_record(signed.peer, record, now, self._lifetime)
        return record

    def accept(self, signed: Signed, record: PeerRecord, now: float, is_confirmed: bool = True) -> None:
        """Verify a record that `read_news` returned, and put it into the table.

        `is_confirmed` tells whether its peer counts as live; once it does, it goes on to do so.

        Raises:
            ForgedError: The record is not signed by that peer, or for another run.
            LimitError: The table is full of peers of at least its standing; these are never dropped for a newcomer.
        """
        stored, evicted = self._entries.get(signed.peer), None
        is_confirmed = is_confirmed or (stored is not None and stored.is_confirmed)
        if stored is None and len(self._entries) >= self._max_peers:
            evicted = self._find_evictable(signed.peer, is_confirmed, now)
        verify_signed(signed, self._run_id)
        if evicted is not None:
            del self._entries[evicted]
        earlier = ((stored.record.sequence, stored.signed), *stored.earlier)[:KEPT_VERSIONS] if stored else ()
        other = _other_process(stored, record)
        self._entries[signed.peer] = _Entry(signed, record, is_confirmed=is_confirmed, other=other, earlier=earlier)

    def _find_evictable(self, newcomer: PeerId, is_confirmed: bool, now: float) -> PeerId | None:
        """Return the peer of lower standing whose record is the oldest; None if a place is free."""
        # At most once a second, so that a flood of newcomers does not cost a sweep each.
        if abs(now - self._last_sweep_at) >= 1:
            self.expire(now)
        if len(self._entries) < self._max_peers:
            return None
        standing = self._standing(newcomer, is_confirmed)
        lower = [peer for peer, entry in self._entries.items() if self._standing(peer, entry.is_confirmed) < standing]
        if not lower:
            raise LimitError(f"the table is full with {self._max_peers} peers; a newcomer must wait for one to leave")
        return min(lower, key=lambda peer: self._entries[peer].record.sequence)

    def _standing(self, peer: PeerId, is_confirmed: bool) -> int:
        return 2 if peer in self.protected else int(is_confirmed)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._entries

    def is_confirmed(self, peer: PeerId) -> bool:
        """Return whether a peer counts as live while its record lasts."""
        entry = self._entries.get(peer)
        return entry is not None and entry.is_confirmed

    def confirm(self, peer: PeerId) -> None:
        """Let a peer count as live, because its key has spoken to us."""
        entry = self._entries.get(peer)
        if entry is not None and not entry.is_confirmed:
            self._entries[peer] = replace(entry, is_confirmed=True)

    def unconfirmed(self) -> list[PeerId]:
        """Return the peers that nobody vouches for and that have not spoken to us yet."""
        return [peer for peer, entry in self._entries.items() if not (entry.is_confirmed or entry.record.leaving)]

    def live(self, now: float) -> Mapping[PeerId, PeerRecord]:
        """Return the live peers: not expired, not leaving, not suspected."""
        return {
            peer: entry.record for peer, entry in self._entries.items() if entry.is_live and entry.record.expires > now
        }

    def expire(self, now: float) -> list[PeerId]:
        """Drop and return the peers whose records have expired.

        Records in the future are dropped too; they remain when our clock was set back.
        """
        gone = [peer for peer, entry in self._entries.items() if _find_timing_fault(entry.record, now, self._lifetime)]
        for peer in gone:
            del self._entries[peer]
        self._last_sweep_at = now
        return gone

    def discard(self, peer: PeerId) -> None:
        self._entries.pop(peer, None)

    def suspect(self, peer: PeerId) -> None:
        """Treat a peer as not live until a record with a higher sequence arrives."""
        entry = self._entries.get(peer)
        if entry is not None:
            self._entries[peer] = replace(entry, is_suspected=True)

    def end(self, peer: PeerId) -> None:
        """Treat a peer as not live until another record of it arrives, because its process has ended."""
        entry = self._entries.get(peer)
        if entry is not None and not entry.record.leaving:
            self._entries[peer] = replace(entry, is_suspected=True, has_ended=True)

    def ended(self) -> frozenset[PeerId]:
        """Return the peers whose process has ended without a goodbye, as long as their records last."""
        return frozenset(peer for peer, entry in self._entries.items() if entry.has_ended)

    def reason_left(self, peer: PeerId) -> str:
        """Return why a peer is not live."""
        entry = self._entries.get(peer)
        if entry is None:
            return "expired"
        if entry.record.leaving:
            return "left"
        if entry.has_ended:
            return "ended"
        return "unreachable" if entry.is_suspected else "expired"

    def departure_of(self, peer: PeerId) -> PeerLeft:
        """Return the event that tells of a peer that is not live."""
        entry = self._entries.get(peer)
        return PeerLeft(peer, self.reason_left(peer), None if entry is None else entry.record)

    def known_sequences(self) -> dict[PeerId, int]:
        """Return the sequences of the records that are passed on.

        Those of keys that nobody vouches for stay here until the key has spoken: peers take our word for the others.
        """
        return {peer: entry.record.sequence for peer, entry in self._entries.items() if entry.is_confirmed}

    def records_of(self, peers: Iterable[PeerId]) -> list[Signed]:
        return [self._entries[peer].signed for peer in peers if peer in self._entries]

    def earlier_sequence(self, peer: PeerId) -> int:
        """Return the sequence of the version before the newest one of a record, or 0."""
        entry = self._entries.get(peer)
        return entry.earlier[0][0] if entry and entry.earlier else 0

    def updates_for(self, known: Mapping[PeerId, int]) -> tuple[list[Signed], list[RecordUpdate]]:
        """Return the newest records for a peer with these versions, as updates where we have its version too.

        Args:
            known: the sequences of a summary.
        """
        records, updates = list[Signed](), list[RecordUpdate]()
        for peer, low_half in known.items():
            entry = self._entries.get(peer)
            if entry is None:
                continue
            versions = (signed for sequence, signed in entry.earlier if is_same_sequence(sequence, low_half))
            if base := next(versions, None):
                updates.append(make_update(entry.signed, entry.record, base))
            else:
                records.append(entry.signed)
        return records, updates

    def restore(self, updates: Sequence[RecordUpdate]) -> tuple[list[Signed], list[PeerId]]:
        """Return the records that result from updates, unverified, and the peers of which we lack the version."""
        peers = {name_of(peer): peer for peer in self._entries} if updates else {}
        records, unresolved = list[Signed](), list[PeerId]()
        for update in updates:
            peer = peers.get(update.name)
            if peer is None:
                continue
            entry = self._entries[peer]
            versions = (entry.signed, *(signed for _, signed in entry.earlier))
            signed = next(filter(None, (apply_update(update, version) for version in versions)), None)
            if signed is not None:
                records.append(signed)
            elif update.fields.sequence > entry.record.sequence:
                unresolved.append(peer)
        return records, unresolved

    def other_record_of(self, peer: PeerId, now: float) -> list[Signed]:
        """Return the record that another process with the key of `peer` published lately, if any.

        Such a process is an earlier one of that peer, or a copy of it that runs elsewhere; the peer itself can tell.
        """
        entry = self._entries.get(peer)
        if entry is None or entry.other is None:
            return []
        signed, record = entry.other
        return [signed] if record.expires > now else []

    def sequence_of(self, peer: PeerId) -> int:
        """Return a peer's sequence, or -1 if it is not in the table."""
        entry = self._entries.get(peer)
        return -1 if entry is None else entry.record.sequence


def _other_process(stored: _Entry | None, record: PeerRecord) -> tuple[Signed, PeerRecord] | None:
    """Return the last record of another process than the one that signed `record`."""
    if stored is None:
        return None
    return stored.other if stored.record.start == record.start else (stored.signed, stored.record)


def _is_newer(signed: Signed, record: PeerRecord, stored: _Entry) -> bool:
    # If a lying peer gave two records one sequence, the body decides, so that all keep the same one.
    return (record.sequence, signed.body) > (stored.record.sequence, stored.signed.body)


def next_sequence(previous: int, now: float) -> int:
    """Return a sequence above the previous one and near the clock.

    A previous sequence that a wrong clock made is dropped.
    """
    clock_sequence = max(1, int(now * 1000))
    return (
        previous + 1
        if clock_sequence <= previous <= clock_sequence + CLOCK_TOLERANCE_SECONDS * 1000
        else clock_sequence
    )


def check_record(peer: PeerId, record: PeerRecord, now: float, lifetime: float) -> None:
    """Check a record of a peer.

    Raises MalformedError if the peer may never publish it, StaleError if it may not publish it now.
    """
    fault = _find_timing_fault(record, now, lifetime)
    if fault is not None:
        raise StaleError(f"the record of {peer} {fault}")
    check_addresses(peer, record.addresses)
    check_fields(peer, record)


def _find_timing_fault(record: PeerRecord, now: float, lifetime: float) -> str | None:
    if not now < record.expires <= now + lifetime + CLOCK_TOLERANCE_SECONDS:  # also refuses NaN
        return f"expires in {record.expires - now:.1f} s"
    if not 0 < record.sequence <= (now + CLOCK_TOLERANCE_SECONDS) * 1000:
        return f"has the sequence {record.sequence}, which no clock gives at {now:.0f}"
    return None


# News reach n peers in about log7(n) heartbeats, so a record is renewed long before it expires anywhere.
RENEWAL_SHARE = 0.25  # of its validity
MAX_CLOCK_DRIFT_SECONDS = 1.0  # when the swarm time moves by more, the record is dated again

FieldValue = bool | int | float | str | bytes


class OwnRecord:
    """Our own record in a run.

    `expiry` is the validity of each signed version in seconds, `start` the id of this process (see `key_conflict`).
    """

    def __init__(self, identity: Identity, run_id: RunId, clock: SwarmClock, expiry: float, start: int = 0) -> None:
        self._identity = identity
        self._run_id = run_id
        self._clock = clock
        self._expiry = expiry
        self._fields = PeerRecord(role="observer", start=start)
        self._sequence = -1
        self._signed_offset = clock.offset
        self._signed_at = float("-inf")

    @property
    def start(self) -> int:
        """Return the id of this process."""
        return self._fields.start

    def update_fields(self, fields: Mapping[str, FieldValue]) -> None:
        """Set all of the fields, or none and raise MalformedError.

        Peers must accept all of them.
        """
        draft = PeerRecord()
        draft.CopyFrom(self._fields)
        for name, value in fields.items():
            setattr(draft, name, value)
        now = self._clock.now()
        check_record(self._identity.peer_id, self._with_dates(draft, next_sequence(-1, now), now), now, self._expiry)
        self._fields = draft

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Use the first few addresses that peers would accept."""
        accepted = [address for address in addresses if len(address) <= MAX_ADDRESS_CHARACTERS][:MAX_ADDRESSES]
        if list(self._fields.addresses) != accepted:
            self._fields.addresses[:] = accepted
            self._signed_at = float("-inf")

    def is_due(self) -> bool:
        """Return whether to sign the record again: its addresses have changed, or its validity has shrunk."""
        return not 0 <= self._clock.now() - self._signed_at < RENEWAL_SHARE * self._expiry

    def is_misdated(self) -> bool:
        """Return whether a wrong clock dated the record.

        Peers refuse such a record now or soon.
        """
        return abs(self._clock.offset - self._signed_offset) > MAX_CLOCK_DRIFT_SECONDS

    def renew(self, table: PeerTable) -> None:
        """Date and sign the fields, and put the record into the table.

        Its sequence is above that of any record of ours that is there.
        """
        now, peer = self._clock.now(), self._identity.peer_id
        self._sequence = next_sequence(max(self._sequence, table.sequence_of(peer)), now)
        if self._sequence <= table.sequence_of(peer):
            table.discard(peer)  # made when our clock was wrong; no other peer accepted it
        record = self._with_dates(self._fields, self._sequence, now)
        table.merge(sign(self._identity, KIND, self._run_id, record), now)
        self._signed_offset, self._signed_at = self._clock.offset, now

    def _with_dates(self, fields: PeerRecord, sequence: int, now: float) -> PeerRecord:
        record = PeerRecord(sequence=sequence, expires=now + self._expiry)
        record.MergeFrom(fields)
        return record
