"""Remember the states that this node has just shown to peers that need one. PURE.

A peer asks for our chain, judges it, and fetches the state that the answer names. Where rounds are faster than that,
the state would be gone before its first byte is asked for, at each attempt. So a state that was shown counts as
requested for a few seconds.
"""

from collections.abc import Set
from typing import Final

from node.loop.peers.catch_up import RETAINED_ROUNDS
from protocol.recent import RecentSet

OFFER_SECONDS: Final = 10.0  # from the answer to the first request for the state
MAX_OFFERS: Final = 64


class OfferedStates:
    """The digests of the states, and when each was shown last."""

    def __init__(self) -> None:
        self._shown = RecentSet[bytes](OFFER_SECONDS, MAX_OFFERS)

    def show(self, digest: bytes, rounds_behind: int, now: float) -> None:
        """Remember a state that was shown to a peer, which is `rounds_behind` our head.

        One that is a few rounds behind replays them; one with more rounds than we have is on another chain.
        """
        if not 0 <= rounds_behind <= RETAINED_ROUNDS:
            self._shown.add(digest, now)

    def recent(self, now: float) -> Set[bytes]:
        """Return the states that a peer may be about to fetch."""
        return self._shown.members(now)
