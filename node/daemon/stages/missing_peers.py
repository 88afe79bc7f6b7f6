"""Tell which peers of a pipeline vanished for the whole run, not for us alone. PURE.

A stage of two has no quorum once one of them has died, and the other cannot tell its death from a broken link. But
records spread through the peers of all stages. So a peer that sees most of the run, and for `expiry` no record of
another one, knows that this one is dead or on the smaller side of a split; and peers on that side wait for longer.
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
        """Take over who came and went."""
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
        """Return the peers that most of the run misses; nobody if we do not see most of it."""
        expiry, limit = self._timing.expiry, self._timing.expiry + self._timing.vote_memory
        self._silent_since = {peer: since for peer, since in self._silent_since.items() if now - since <= limit}
        if live_trainers <= len(self._silent_since):
            return frozenset()
        return frozenset(peer for peer, since in self._silent_since.items() if now - since >= expiry)
