"""Remember the states that this node has just shown to peers that need one. PURE.

A peer asks for our chain, judges it, and fetches the state that the answer names. Where rounds are faster than that,
the state would be gone before its first byte is asked for, at each attempt. So a state that was shown counts as
requested for a few seconds.
"""

from collections import OrderedDict
from typing import Final

from node.loop.peers.catch_up import RETAINED_ROUNDS

OFFER_SECONDS: Final = 10.0  # from the answer to the first request for the state
MAX_OFFERS: Final = 64


class OfferedStates:
    """The digests of the states, and when each was shown last."""

    def __init__(self) -> None:
        self._shown_at: OrderedDict[bytes, float] = OrderedDict()

    def show(self, digest: bytes, rounds_behind: int, now: float) -> None:
        """Remember a state that was shown to a peer, which is `rounds_behind` our head.

        One that is a few rounds behind replays them; one with more rounds than we have is on another chain.
        """
        if 0 <= rounds_behind <= RETAINED_ROUNDS:
            return
        self._shown_at[digest] = now
        self._shown_at.move_to_end(digest)
        if len(self._shown_at) > MAX_OFFERS:
            self._shown_at.popitem(last=False)

    def recent(self, now: float) -> set[bytes]:
        """Return the states that a peer may be about to fetch."""
        return {digest for digest, shown in self._shown_at.items() if now - shown < OFFER_SECONDS}
