"""The gate of a run: which keys take part, by the manifest, the organiser's tickets and revocations."""

from collections import Counter
from collections.abc import Set
from typing import Literal

from google.protobuf.message import DecodeError

from protocol import murmur_pb2 as wire
from protocol.admission.ticket import Ticket, open_ticket
from protocol.errors import PeerFault
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.recent import RecentTable

Refusal = Literal["no ticket", "ticket expired", "not on the list", "revoked"]
CLOCK_MARGIN_SECONDS = 120.0
MAX_REMEMBERED = 4096


class Gate:
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
