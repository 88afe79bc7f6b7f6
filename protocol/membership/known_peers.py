"""Keep the knowledge about the peers of a run: the table of records, its own record, and the contacts. No I/O.

The directory (`directory.py`) gossips it. Times are in seconds, monotonic, unless they are the swarm's.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol.errors import ForgedError, LimitError, MalformedError, NewcomerError, PeerFault, StaleError
from protocol.identity import Identity, PeerId
from protocol.membership.clock import SwarmClock
from protocol.membership.contacts import Contacts
from protocol.membership.gossip_interface import DirectoryOptions, MembershipChanges, describe_event
from protocol.membership.key_conflict import KeyConflict, make_start_id
from protocol.membership.newcomers import CheckQuota, NewcomerQuota, Origin
from protocol.membership.peer_table import (
    KIND,
    MAX_RECORD_BYTES,
    FieldValue,
    MembershipListener,
    OwnRecord,
    PeerTable,
    PeerUpdated,
)
from protocol.membership.records.fields import check_addresses
from protocol.murmur_pb2 import PeerRecord, Signed
from protocol.signing import open_signed

logger = logging.getLogger(__name__)

MAX_FALSE_RECORDS = 4  # in one call


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
        events = self._changes.since_last(live, self.table.departure_of)
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
