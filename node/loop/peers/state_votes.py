"""Believe a state at the head of a chain if a signature, or enough of the peers that count, name it. PURE.

Newcomers, peers that take over another chain, hosts that keep the newest state and commands that fetch a model all ask
here (`is_state_confirmed`). A certificate names the state before its commit, so the newest state has none yet.
"""

from dataclasses import dataclass

from node.loop.peers.swarm_snapshot import SwarmSnapshot
from protocol.consensus.fork_choice import ChainOffer
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId
from protocol.recent import RecentTable
from protocol.signing import TrustPoint

KEPT_HEADS = 4  # of each peer, while we look for a state to take


class StateVotes:
    """The states that live peers announce for their heads, while we look for a state to take.

    Peers move on while we ask, so the last few heads of each are remembered.
    """

    def __init__(self, peer_id: PeerId) -> None:
        self._peer_id = peer_id
        self._states: dict[PeerId, RecentTable[Digest, Digest]] = {}

    def clear(self) -> None:
        self._states.clear()

    def record(self, snapshot: SwarmSnapshot) -> None:
        """Record what the peers of a snapshot announce."""
        known = {peer: states for peer, states in self._states.items() if peer in snapshot.peers}
        for peer, announced in snapshot.peers.items():
            if announced.head is None or not announced.state or peer == self._peer_id:
                continue
            known.setdefault(peer, RecentTable(KEPT_HEADS))[announced.head.digest] = announced.state
        self._states = known

    def witnesses(self, head: Digest) -> frozenset[PeerId]:
        """Return the peers that have announced a state for a head."""
        return frozenset(peer for peer, states in self._states.items() if head in states)

    def holders(self, head: Digest, state: Digest) -> tuple[PeerId, ...]:
        """Return the peers that have announced this state for a head."""
        return tuple(peer for peer, states in self._states.items() if states.get(head) == state)


@dataclass(frozen=True)
class StateEvidence:
    """The evidence for a state that no certificate names yet.

    Args:
        votes: the states that live peers announce.
        trainers: the live trainers that the run admits, without ourselves.
        trust: the trust point of this run, if there is one.
        word: whether most contacts that answer are on the chain, and name no other state; None if there is none to ask.
    """

    votes: StateVotes
    trainers: frozenset[PeerId]
    trust: TrustPoint | None = None
    word: bool | None = None


def is_state_confirmed(chain: ChainOffer, state: Digest, evidence: StateEvidence) -> bool:
    """Return whether to believe that this is the state at the head of a chain, whose certificates are checked."""
    trust, votes = evidence.trust, evidence.votes
    if trust is not None and trust.round == chain.head.round and chain.is_passed_by(trust):
        return True
    counted = chain.electorate.voters & evidence.trainers
    if not counted and evidence.word is not None:
        return evidence.word
    holders = votes.holders(chain.head.digest, state)
    if counted:
        return 3 * len(counted.intersection(holders)) > len(counted)
    return 2 * len(holders) > len(votes.witnesses(chain.head.digest))
