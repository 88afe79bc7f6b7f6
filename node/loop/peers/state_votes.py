"""The states that live peers announce for their heads, while we look for a state to take. PURE.

Peers move on while we ask, so the last few heads of each are remembered.
"""

from node.loop.peers.swarm_snapshot import SwarmSnapshot
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId

KEPT_HEADS = 4  # of each peer


class StateVotes:
    """The announced states by peer and head, of the peers in the last snapshot only."""

    def __init__(self, peer_id: PeerId) -> None:
        self._peer_id = peer_id
        self._states: dict[PeerId, dict[Digest, Digest]] = {}

    def clear(self) -> None:
        self._states.clear()

    def record(self, snapshot: SwarmSnapshot) -> None:
        """Record what the peers of a snapshot announce."""
        known = {peer: states for peer, states in self._states.items() if peer in snapshot.peers}
        for peer, announced in snapshot.peers.items():
            if announced.head is None or not announced.state or peer == self._peer_id:
                continue
            states = known.setdefault(peer, {})
            states[announced.head.digest] = announced.state
            if len(states) > KEPT_HEADS:
                del states[next(iter(states))]
        self._states = known

    def witnesses(self, head: Digest) -> frozenset[PeerId]:
        """Return the peers that have announced a state for a head."""
        return frozenset(peer for peer, states in self._states.items() if head in states)

    def holders(self, head: Digest, state: Digest) -> tuple[PeerId, ...]:
        """Return the peers that have announced this state for a head."""
        return tuple(peer for peer, states in self._states.items() if states.get(head) == state)
