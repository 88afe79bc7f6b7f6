"""Choose the state to fetch from the peers' records. PURE.

A record is a claim, so one alone decides nothing where there are three: a head counts if two peers report it, and its
state if more than half of those do. Trainers computed their state; hosts only repeat it, and count where no trainer is
left. A kept final state is replaced only by one that two peers report. The certificates of the chain are checked before
the state is kept (`state_keeper.py`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from protocol.consensus.history.chain import ChainHead
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId


@dataclass(frozen=True)
class StateOffer:
    """A state that enough peers report, and the peers to fetch it from."""

    head: ChainHead
    state: Digest
    holders: tuple[PeerId, ...]


@dataclass(frozen=True)
class ChoiceRules:
    """The rules of a run.

    Args:
        peer_id: our own id.
        has_one_state: whether all peers on one head must have the same state.
        is_final: returns whether a head is at the target of the run.
    """

    peer_id: PeerId
    has_one_state: bool
    is_final: Callable[[ChainHead], bool]


def choose_state(
    rules: ChoiceRules,
    snapshot: SwarmSnapshot,
    own: ChainHead | None,
    voters: frozenset[PeerId] = frozenset(),
    avoided: Collection[Digest] = (),
) -> StateOffer | None:
    """Return the best state that enough peers report; None if it does not seem better than that of `own`.

    Args:
        rules: the rules of the run.
        snapshot: the peers.
        own: the head of the state that we hold.
        voters: the voters that we know; only they are witnesses while one of them is there.
        avoided: the digests of heads that nobody could prove a moment ago.
    """
    known = {peer: state for peer, state in snapshot.peers.items() if peer != rules.peer_id and _has_state(state)}
    trainers = {peer: state for peer, state in known.items() if state.is_trainer}
    witnesses = {peer: state for peer, state in trainers.items() if peer in voters} or trainers or known
    is_safe = len(witnesses) < 3 and not (own is not None and rules.is_final(own))
    counts = Counter(state.head for state in witnesses.values() if state.head is not None)
    heads = [head for head, count in counts.items() if count >= (1 if is_safe else 2)]
    better = [head for head in heads if head.digest not in avoided and (own is None or head.tokens > own.tokens)]
    for head in sorted(better, key=lambda head: (head.tokens, head.digest), reverse=True):
        at_head = {peer: state for peer, state in witnesses.items() if state.head == head}
        if (state := _agreed_state(at_head, rules.has_one_state)) is not None:
            holders = tuple(peer for peer, other in known.items() if (other.head, other.state) == (head, state))
            return StateOffer(head, state, holders)
    return None


def _has_state(state: PeerState) -> bool:
    return state.head is not None and state.head.round > 0 and state.state != b""


def _agreed_state(at_head: Mapping[PeerId, PeerState], has_one_state: bool) -> Digest | None:
    counts = Counter(state.state for state in at_head.values())
    state = min(counts, key=lambda candidate: (-counts[candidate], candidate))
    return state if not has_one_state or 2 * counts[state] > counts.total() else None
