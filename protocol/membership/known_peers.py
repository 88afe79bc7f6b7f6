"""Keep the knowledge about the peers of a run: the table of records, our own record, and the contacts. No I/O.

The directory (`directory.py`) gossips it. Times are in seconds, monotonic, unless they are the swarm's.

*Newcomers.* Creating a key costs nothing, and each new peer costs every other peer work for as long as its record
lasts. So beyond the first few keys the directory takes 8 a minute from one connection and 4 a second from all
connections together. Keys that speak for themselves, keys that a voucher passes on, and keys that anybody else passes
on do not compete for these places, so a flood of one kind delays no other. A record proves only that somebody has a
key. The key counts as live once it has spoken to us on an authenticated stream, or once a voucher has passed its record
on: a voter, or a peer that the user or the manifest names. While nobody has a vote yet, each peer that has spoken to us
vouches.

*Another node with our key*, such as one in a copied folder. Each process names itself by a start id in its peer record,
and echoes there the start id of any other process that publishes records under the same key. A record of our key that
echoes our start id was signed by a process that runs now. An earlier process of ours cannot have signed it, however
wrong the clocks are: it ended before our start id existed. Nobody without the key can sign such a record either. The
process with the lower start id, which started earlier, continues. The other one waits until the first has had time to
notice it too, and then stops.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from protocol.errors import ForgedError, KeyInUseError, LimitError, MalformedError, NewcomerError, PeerFault, StaleError
from protocol.identity import Identity, PeerId
from protocol.membership.clock import SwarmClock
from protocol.membership.contacts import Contacts
from protocol.membership.gossip import DirectoryOptions, MembershipChanges, describe_event
from protocol.membership.peer_table import (
    KIND,
    MAX_RECORD_BYTES,
    FieldValue,
    MembershipListener,
    OwnRecord,
    PeerTable,
    PeerUpdated,
)
from protocol.membership.record_fields import RANDOM_BITS, check_addresses
from protocol.murmur_pb2 import PeerRecord, Signed
from protocol.signing import open_signed
from protocol.transport.rate_limit import SharedTokenBuckets, TokenBuckets

logger = logging.getLogger(__name__)

UNLIMITED_KEYS = 64  # known keys below which every newcomer is taken
KEYS_PER_MINUTE = 8  # from one connection
KEYS_PER_SECOND = 4.0  # from all connections together
KEY_BURST = 8
Origin = Literal["itself", "voucher", "other"]  # who passed a record on
RECENT_SECONDS = 60.0  # after its last record the other node counts as gone
MAX_PROCESSES = 16  # that are remembered
YIELD_SECONDS = 10.0  # from the proof until the later node stops
MAX_FALSE_RECORDS = 4  # in one call


class NewcomerQuota:
    """The places for unknown keys; times are in seconds, monotonic."""

    def __init__(self) -> None:
        self._buckets: dict[Origin, SharedTokenBuckets] = {
            origin: SharedTokenBuckets(
                TokenBuckets(KEYS_PER_MINUTE, KEYS_PER_MINUTE / 60), TokenBuckets(KEY_BURST, KEYS_PER_SECOND)
            )
            for origin in ("itself", "voucher", "other")
        }

    def try_take(self, sender: PeerId, origin: Origin, known_count: int, now: float) -> bool:
        """Return whether one more unknown key may be learned from this sender, given `known_count` known ones."""
        return known_count < UNLIMITED_KEYS or self._buckets[origin].charge(sender, now) is None


@dataclass(frozen=True)
class CheckLimits:
    """Signatures that may be verified at once and a second, for one sender and for all; each takes 0.1 ms."""

    burst: float
    rate: float
    all_burst: float
    all_rate: float


CHECK_LIMITS: dict[Origin, CheckLimits] = {
    "itself": CheckLimits(256, 64, 2048, 1024),
    "voucher": CheckLimits(8192, 1024, 16384, 2048),
    "other": CheckLimits(512, 64, 2048, 512),
}


class CheckQuota:
    """Limits the signatures of records that are verified for each sender."""

    def __init__(self) -> None:
        self._buckets = {
            origin: SharedTokenBuckets(
                TokenBuckets(limits.burst, limits.rate), TokenBuckets(limits.all_burst, limits.all_rate)
            )
            for origin, limits in CHECK_LIMITS.items()
        }

    def try_take(self, sender: PeerId, origin: Origin, now: float) -> bool:
        """Return whether a signature that this sender passed on may be verified."""
        return self._buckets[origin].charge(sender, now) is None


def make_start_id(now: float, rng: random.Random) -> int:
    """Return an id for a process that starts now; ids of later processes are higher."""
    return (max(1, int(now * 1000)) << RANDOM_BITS) | rng.getrandbits(RANDOM_BITS)


@dataclass(frozen=True, slots=True)
class OtherNode:
    """The other node that uses our key, as its newest record describes it."""

    started_earlier: bool
    name: str
    version: str
    address: str

    def describe(self) -> str:
        described = (self.name, self.version and f"version {self.version}", self.address and f"at {self.address}")
        return f"another node uses this node's key: {' '.join(filter(None, described)) or 'its address is unknown'}"


class KeyConflict:
    """Collects the evidence in the records of our own key; times are in seconds, monotonic."""

    def __init__(self, start: int) -> None:
        self._start = start
        self.echo = 0  # the start id of the last foreign record, for our own record
        self._sequences: dict[int, int] = {}  # the newest one of each other process
        self._proved: PeerRecord | None = None  # the newest record of a process that runs now
        self._proved_since = self._seen_at = 0.0
        self._is_reported = False

    def observe(self, record: PeerRecord, now: float) -> bool:
        """Take in a verified record of our key; return whether `echo` has changed."""
        if record.start == self._start or record.sequence <= self._sequences.get(record.start, 0):
            return False  # our own, or repeated: no sign of life
        self._sequences[record.start] = record.sequence
        if len(self._sequences) > MAX_PROCESSES:
            del self._sequences[min(self._sequences)]
        has_proof = record.other_start == self._start
        if has_proof and self.other(now) is None:
            self._proved_since = now
        if has_proof or (self._proved is not None and self._proved.start == record.start):
            self._proved, self._seen_at = record, now
        is_new, self.echo = self.echo != record.start, record.start
        return is_new

    def other(self, now: float) -> OtherNode | None:
        """Return the other node that uses our key, or None if none is known to run."""
        record = self._proved
        if record is None or now - self._seen_at > RECENT_SECONDS:
            return None
        address = record.addresses[0].partition("/p2p/")[0] if record.addresses else ""
        return OtherNode(record.start < self._start, record.name, record.version, address)

    def check(self, now: float) -> None:
        """Warn once of another node with our key.

        Raises KeyInUseError if that one started earlier and has had time to notice this one.
        """
        other = self.other(now)
        if other is not None and not self._is_reported:
            end = "this one stops soon" if other.started_earlier else "that one started later and stops"
            logger.warning("%s; %s", other.describe(), end)
        self._is_reported = other is not None
        if other is not None and self.must_stop(now):
            raise KeyInUseError(
                f"{other.describe()}, and started earlier; stop that one, or give this one a folder of its own (--dir)"
            )

    def must_stop(self, now: float) -> bool:
        """Return whether this node must stop, because the other one started earlier and has had time to notice."""
        other = self.other(now)
        return other is not None and other.started_earlier and now - self._proved_since >= YIELD_SECONDS


@dataclass(slots=True)
class MergedRecords:
    """The outcome of merging the records of one call."""

    news: dict[PeerId, PeerRecord] = field(default_factory=dict)  # of other peers
    faults: list[PeerFault] = field(default_factory=list)
    is_own_record_urgent: bool = False  # whether peers should get our own record at once


class KnownPeers:
    """The table, our own record and the contacts of one directory, and the listeners to changes of the table."""

    def __init__(self, options: DirectoryOptions, identity: Identity, clock: SwarmClock, rng: random.Random) -> None:
        self.peer_id = identity.peer_id
        self._run_id = options.run_id
        self._clock = clock
        self.table = PeerTable(options.run_id, options.expiry)
        self.contacts = Contacts(options.bootstrap, rng)
        start = make_start_id(clock.now(), rng)
        self.own = OwnRecord(identity, options.run_id, clock, options.expiry, start)
        self.key_conflict = KeyConflict(start)
        self._voters: frozenset[PeerId] = frozenset()
        self._newcomers = NewcomerQuota()
        self._checks = CheckQuota()
        self._changes = MembershipChanges()
        self._listeners: list[MembershipListener] = []

    def publish(self, fields: Mapping[str, FieldValue]) -> None:
        """Change fields of our own record. Raises MalformedError if peers would refuse them."""
        self.own.update_fields(fields)
        self.renew()

    def update(self, fields: Mapping[str, FieldValue]) -> None:
        """Change fields of our own record, which its next renewal will carry. Raises MalformedError as `publish`."""
        self.own.update_fields(fields)

    def renew_if_due(self) -> None:
        """Renew our own record if it is a while old or our addresses have changed."""
        if self.own.is_due():
            self.renew()

    def own_version_at(self, peer: PeerId) -> dict[PeerId, int]:
        """Return the version of our own record that a peer most likely has (0: none), to send it an update.

        A peer that has another one says so in its reply.
        """
        return {self.peer_id: self.table.earlier_sequence(self.peer_id) if peer in self.table else 0}

    def renew(self) -> None:
        """Date and sign our own record again."""
        self.own.renew(self.table)

    def renew_if_misdated(self) -> bool:
        """Renew our own record if a wrong clock dated it; return whether that was so."""
        is_misdated = self.own.is_misdated()
        if is_misdated:
            logger.info("our clock is %.1f s from the swarm's; dating our record again", -self._clock.offset)
            self.renew()
        return is_misdated

    def live(self) -> Mapping[PeerId, PeerRecord]:
        """Return the live peers, including ourselves."""
        return self.table.live(self._clock.now())

    def other_live_peers(self) -> list[PeerId]:
        return [peer for peer in self.live() if peer != self.peer_id]

    def subscribe(self, listener: MembershipListener) -> None:
        """Report every other peer that joins, leaves or changes its record to `listener`."""
        self._listeners.append(listener)

    def notify_listeners(self) -> None:
        """Report the changes since the last call to the listeners."""
        live = {peer: record for peer, record in self.live().items() if peer != self.peer_id}
        events = self._changes.since_last(live, self.table.departure_of, self.table.ended())
        if not events:
            return
        for listener in self._listeners:
            listener.on_membership_changed(events)
        for event in events:
            if not isinstance(event, PeerUpdated):
                logger.info("%s", describe_event(event))

    def set_voters(self, voters: frozenset[PeerId]) -> None:
        """Set the peers that have a vote: they vouch for others, and no stranger displaces them.

        The set is empty while nobody has a vote yet.
        """
        self._voters = self.table.protected = self.contacts.protected = voters

    def confirm(self, peer: PeerId) -> None:
        """Count a peer as live from now on, because its key has spoken to us on an authenticated stream."""
        self.table.confirm(peer)

    def is_voucher(self, peer: PeerId) -> bool:
        """Return whether peers that this one passes on count as live."""
        if peer in self._voters or self.contacts.is_permanent(peer):
            return True
        return not self._voters and self.table.is_confirmed(peer)

    def merge(self, records: Sequence[Signed], sender: PeerId, now: float) -> MergedRecords:
        """Merge the records of a call of `sender`, or of a reply, into the table.

        An honest sender has verified what it passes on, so the rest is dropped after a few false records.
        """
        merged, false_count = MergedRecords(), 0
        self.confirm(sender)
        for signed in sorted(records, key=lambda signed: signed.peer != sender):  # its own record first
            try:
                self._merge_record(signed, sender, now, merged)
            except StaleError as fault:
                self._learn_from_untimely_record(signed, now)
                merged.faults.append(fault)
            except PeerFault as fault:
                merged.faults.append(fault)
                false_count += isinstance(fault, ForgedError | MalformedError)
            if false_count >= MAX_FALSE_RECORDS:
                break
        return merged

    def _merge_record(self, signed: Signed, sender: PeerId, now: float, merged: MergedRecords) -> None:
        origin = self._origin_of(signed, sender)
        if signed.peer == self.peer_id:
            self._charge_check(sender, origin, now)
            merged.is_own_record_urgent |= self._observe_own_key(signed, now)
        record = self.table.read_news(signed, self._clock.now())
        if record is None:
            if origin != "other":
                self.table.confirm(signed.peer)
            return
        if signed.peer not in self.table and not self._newcomers.try_take(sender, origin, len(self.table), now):
            raise NewcomerError(f"{sender} names more new peers than are taken now")
        self._charge_check(sender, origin, now)
        self.table.accept(signed, record, self._clock.now(), is_confirmed=origin != "other")
        if signed.peer == self.peer_id:
            logger.debug("overriding a record of our own key from another machine or an earlier start")
            self.renew()
            return
        merged.news[signed.peer] = record
        self.contacts.record_news(signed.peer, record.addresses, now, has_left=record.leaving)

    def _origin_of(self, signed: Signed, sender: PeerId) -> Origin:
        if signed.peer == sender:
            return "itself"
        return "voucher" if self.is_voucher(sender) else "other"

    def _charge_check(self, sender: PeerId, origin: Origin, now: float) -> None:
        if not self._checks.try_take(sender, origin, now):
            raise LimitError(f"{sender} sends more records than may be verified now")

    def _observe_own_key(self, signed: Signed, now: float) -> bool:
        """Look for another process in a record of our key; return whether that process should learn of us."""
        record = open_signed(signed, self._run_id, KIND, PeerRecord, MAX_RECORD_BYTES)
        if record.expires <= self._clock.now() or not self.key_conflict.observe(record, now):
            return False
        self.publish({"other_start": self.key_conflict.echo})
        return True

    def _learn_from_untimely_record(self, signed: Signed, now: float) -> None:
        """Remember the peer of an expired record while no peer is live.

        The fault may be our own clock, and this peer can help to correct it.
        """
        if signed.peer == self.peer_id or self.other_live_peers():
            return
        try:
            record = open_signed(signed, self._run_id, KIND, PeerRecord, MAX_RECORD_BYTES)
            check_addresses(signed.peer, record.addresses)
        except PeerFault as fault:
            logger.debug("cannot use an expired record as a contact either: %s", fault)
        else:
            self.contacts.add(signed.peer, record.addresses, now)
