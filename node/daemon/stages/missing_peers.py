"""Find the peers of a pipeline that the whole run misses, not only this peer. PURE.

A stage of two peers loses its quorum when one of them crashes, and the other cannot distinguish a crash from a broken
link. But records spread through the peers of all stages. So a peer that sees most of the run, and no record of a
certain peer for `expiry`, knows that this peer is down or on the smaller side of a partition. Peers on the smaller side
wait longer.
"""

from collections.abc import Iterable

from protocol.identity import PeerId
from protocol.manifest.sections import MembershipSection
from protocol.membership.peer_table import MembershipEvent, PeerJoined, PeerLeft


class MissingPeers:
    """The trainers of a run that vanished without a goodbye, as long as absent peers have votes."""

    def __init__(self, timing: MembershipSection) -> None:
        self._timing = timing
        self._silent_since: dict[PeerId, float] = {}  # since when no record of it has counted

    def observe(self, events: Iterable[MembershipEvent], now: float) -> None:
        """Update the table from membership events."""
        for event in events:
            if isinstance(event, PeerJoined):
                self._silent_since.pop(event.peer, None)
            elif isinstance(event, PeerLeft) and event.record is not None and event.record.role == "trainer":
                self._lose(event, now)

    def _lose(self, event: PeerLeft, now: float) -> None:
        if event.reason == "expired":
            self._silent_since[event.peer] = now - self._timing.expiry
        elif event.reason == "unreachable":  # for us; a record that others pass on brings it back
            self._silent_since[event.peer] = now

    def missed_by_most(self, live_trainers: int, now: float) -> frozenset[PeerId]:
        """Return the peers that most of the run misses; empty if we do not see most of it."""
        expiry, limit = self._timing.expiry, self._timing.expiry + self._timing.vote_memory
        self._silent_since = {peer: since for peer, since in self._silent_since.items() if now - since <= limit}
        if live_trainers <= len(self._silent_since):
            return frozenset()
        return frozenset(peer for peer, since in self._silent_since.items() if now - since >= expiry)
