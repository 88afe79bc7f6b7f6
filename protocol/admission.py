"""Decide which keys take part in a run: tickets of its organiser, and the rules of `[admission]`.

A ticket is the organiser's permission for one key to take part until a time, verified offline. It is a signed message,
so it holds for one run only. Its holder shows it in its peer record and in its contributions until it has a vote: so
the commit that first includes the holder carries the ticket, and all that read the chain can check it. As a file or in
a mail it is one line of text.
"""

import base64
import binascii
import math
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal, Self

from google.protobuf.message import DecodeError

from protocol import murmur_pb2 as wire
from protocol.errors import ForgedError, MalformedError, PeerFault
from protocol.identity import Identity, PeerId, public_key
from protocol.manifest.run import Manifest, RunId
from protocol.membership.record_fields import MAX_TICKET_BYTES
from protocol.recent import RecentTable
from protocol.signing import open_signed, read_unverified, sign

TICKET_KIND = "ticket"
TEXT_PREFIX = "murmur-ticket:"
MAX_NOTE_CHARACTERS = 64
MAX_TIME = 2.0**40
Refusal = Literal["no ticket", "ticket expired", "not on the list", "revoked"]
CLOCK_MARGIN_SECONDS = 120.0
MAX_REMEMBERED = 4096


@dataclass(frozen=True)
class Ticket:
    """The right of a key to take part until a time, in seconds since the epoch; `note` is for the organiser."""

    key: PeerId
    until: float
    note: str = ""

    def to_wire(self) -> wire.Ticket:
        return wire.Ticket(key=self.key, until=self.until, note=self.note)

    @classmethod
    def from_wire(cls, body: wire.Ticket) -> Self:
        """Check a ticket. Raises MalformedError."""
        public_key(body.key)
        if not math.isfinite(body.until) or not 0 < body.until <= MAX_TIME:
            raise MalformedError("a ticket whose end is out of range")
        if len(body.note) > MAX_NOTE_CHARACTERS or not body.note.isprintable():
            raise MalformedError("a ticket whose note is too long or not printable")
        return cls(body.key, body.until, body.note)


def issue_ticket(organiser: Identity, run_id: RunId, ticket: Ticket) -> wire.Signed:
    """Sign a ticket as the organiser."""
    return sign(organiser, TICKET_KIND, run_id, ticket.to_wire())


def open_ticket(signed: wire.Signed, run_id: RunId, organiser: PeerId) -> Ticket:
    """Return the checked ticket in an envelope.

    Raises:
        ForgedError: the organiser of the run has not signed it.
        MalformedError: it is invalid.
    """
    if signed.peer != organiser or not organiser:  # before the signature, which takes time to verify
        raise ForgedError("a ticket that the organiser of the run has not signed")
    return Ticket.from_wire(open_signed(signed, run_id, TICKET_KIND, wire.Ticket, MAX_TICKET_BYTES))


def read_ticket(signed: wire.Signed) -> Ticket:
    """Return the ticket in an envelope that this program verified before. Raises MalformedError."""
    return Ticket.from_wire(read_unverified(signed, TICKET_KIND, wire.Ticket, MAX_TICKET_BYTES))


def ticket_to_text(signed: wire.Signed) -> str:
    """Return a ticket as one line of text."""
    return TEXT_PREFIX + base64.urlsafe_b64encode(signed.SerializeToString(deterministic=True)).decode()


def ticket_from_text(text: str) -> wire.Signed:
    """Read a ticket that `ticket_to_text` wrote; its signature is not verified. Raises MalformedError."""
    line = text.strip()
    if not line.startswith(TEXT_PREFIX) or len(line) > 4 * MAX_TICKET_BYTES:
        raise MalformedError(f"a ticket is one line that begins with {TEXT_PREFIX}")
    try:
        return wire.Signed.FromString(base64.b64decode(line.removeprefix(TEXT_PREFIX), b"-_", validate=True))
    except (binascii.Error, DecodeError, ValueError) as error:
        raise MalformedError("the line of a ticket is damaged; copy all of it") from error


class AdmissionPolicy:
    """Decides for each key whether it takes part; `refusals` counts each refused key once for each reason.

    `revoked` are the revoked keys, as the chain has adopted them.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self.revoked: Set[PeerId] = frozenset(manifest.admission.revoked)
        self.refusals: Counter[str] = Counter()
        self._refused = RecentTable[PeerId, Refusal](MAX_REMEMBERED)
        self._tickets = RecentTable[PeerId, tuple[bytes, Ticket | None]](
            MAX_REMEMBERED
        )  # by holder: bytes shown, ticket

    def admits(self, peer: PeerId, ticket: bytes, now: float) -> bool:
        """Return whether a key takes part, and count the refusal if not.

        Args:
            ticket: the ticket that the peer shows; empty if it shows none.
            now: the time in seconds since the epoch.
        """
        refusal = self._refusal_of(peer, ticket, now)
        if refusal is None:
            self._refused.pop(peer, None)
        elif self._refused.get(peer) != refusal:
            self._refused[peer] = refusal
            self.refusals[refusal] += 1
        return refusal is None

    def _refusal_of(self, peer: PeerId, shown: bytes, now: float) -> Refusal | None:
        rule = self._manifest.admission
        if peer in self.revoked:
            return "revoked"
        if rule.mode == "list" and peer not in rule.keys:
            return "not on the list"
        if rule.mode != "tickets":
            return None
        ticket = self._ticket_of(peer, shown)
        if ticket is None:
            return "no ticket"
        return "ticket expired" if ticket.until + CLOCK_MARGIN_SECONDS < now else None

    def _ticket_of(self, peer: PeerId, shown: bytes) -> Ticket | None:
        """Return the valid ticket that a peer shows; each one is verified once."""
        known = self._tickets.get(peer)
        if known is None or known[0] != shown:
            known = self._tickets[peer] = shown, self._open(peer, shown)
        return known[1]

    def _open(self, peer: PeerId, shown: bytes) -> Ticket | None:
        manifest = self._manifest
        try:
            ticket = open_ticket(wire.Signed.FromString(shown), manifest.whole_run_id, manifest.run.organiser_key)
        except (DecodeError, PeerFault):
            return None
        return ticket if ticket.key == peer else None
