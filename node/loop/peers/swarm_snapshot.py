"""Describe the known peers of a run at one moment, indexed for the round loop. PURE."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from protocol.consensus.chain import MAX_KEPT_COMMITS, Chain, ChainHead
from protocol.consensus.events import MembershipChanged
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId
from protocol.pipeline.exact import StepReports

NEAR_ROUNDS, NEAR_SECONDS = 4, 30.0  # behind our head: peers that far back are almost there


@dataclass(frozen=True)
class PeerState:
    """The state that a live peer announces.

    Args:
        head: the head of its chain; None before it announces one.
        state: the digest of its outer state; empty before it announces one.
        is_trainer: whether it trains.
        is_resting: whether its trainer is paused.
        revision: the digest of the organiser's newest revision that it knows; empty if it knows none.
        validation_round: the rounds of the model whose validation loss it measured last; 0: of none.
    """

    head: ChainHead | None
    state: Digest = b""
    is_trainer: bool = True
    is_resting: bool = False
    revision: Digest = b""
    validation_round: int = 0

    @property
    def is_keeper(self) -> bool:
        """Return whether it keeps the newest state without training, as a host does."""
        return not self.is_trainer and self.head is not None


@dataclass(frozen=True)
class SwarmSnapshot:
    """All live peers, this one included, and the peers that have left, with the state that they had.

    `other_stages` is the round that the other stages of a pipeline have all reached, None if nothing is known of them.
    `missed`: peers that vanished, as most of the run sees it. `ended`: peers whose machines say that they run no more.
    `steps` says how the stages have decided exact steps.

    Peers are asked in the order of `peers`, so a daemon shuffles it. Virtual peers of one process
    share a snapshot, and with it the indices.
    """

    peers: Mapping[PeerId, PeerState]
    left: Mapping[PeerId, PeerState] = field(default_factory=dict)
    other_stages: int | None = None
    missed: frozenset[PeerId] = frozenset()
    ended: frozenset[PeerId] = frozenset()
    steps: StepReports = StepReports(0)
    _trainers_at: dict[frozenset[Digest], frozenset[PeerId]] = field(default_factory=dict, compare=False)

    def has_others(self, peer_id: PeerId) -> bool:
        """Return whether another peer than ours is live, at any stage."""
        return self.other_stages is not None or bool(self.peers.keys() - {peer_id})

    @cached_property
    def trainers(self) -> frozenset[PeerId]:
        return frozenset(peer for peer, state in self.peers.items() if state.is_trainer)

    @cached_property
    def resting(self) -> frozenset[PeerId]:
        return frozenset(peer for peer in self.trainers if self.peers[peer].is_resting)

    @cached_property
    def peers_by_head(self) -> dict[ChainHead, list[PeerId]]:
        by_head: defaultdict[ChainHead, list[PeerId]] = defaultdict(list)
        for peer, state in self.peers.items():
            if state.head is not None:
                by_head[state.head].append(peer)
        return dict(by_head)

    @cached_property
    def departed(self) -> frozenset[PeerId]:
        return frozenset(self.left)

    def final_head(self, peer_id: PeerId, is_final: Callable[[ChainHead], bool]) -> ChainHead | None:
        """Return the head at the run's target that most of the other peers have, if there is one.

        One record alone does not end a run whose other peers still train. Newcomers have no say.
        """
        heads = [state.head for peer, state in self.peers.items() if peer != peer_id and state.head is not None]
        known = Counter(head for head in heads if head.round)
        return next((head for head, count in known.items() if 2 * count > known.total() and is_final(head)), None)

    def trainers_at(self, digests: frozenset[Digest]) -> frozenset[PeerId]:
        """Return the trainers whose chains end with one of these digests."""
        if digests not in self._trainers_at:
            at = (peers for head, peers in self.peers_by_head.items() if head.digest in digests)
            self._trainers_at[digests] = frozenset().union(*at) & self.trainers
        return self._trainers_at[digests]

    def membership(self, peer_id: PeerId, chain: Chain, avoided: frozenset[PeerId] = frozenset()) -> MembershipChanged:
        """Return the members of the round after our head: the peers on it, and those about to arrive.

        Records spread by gossip and lag behind fast rounds. So a trainer whose contribution is in the last commit is a
        member too while its record is older than our head. Where steps are exact, every trainer is one, because the
        step may lack what it has. Peers on a head that our chain does not have may have decided the round, unless they
        could not show it.
        """
        last = chain.commits_since(max(0, chain.round - 1)) or ()
        at_head = self.trainers_at(frozenset([chain.digest, *(commit.body.base for commit in last)]))
        contributors = {entry.sender for commit in last for entry in commit.body.contributions}
        late = self.trainers if self.steps.stages else contributors & self.trainers
        peers = at_head | {peer for peer in late if self._is_behind(peer, chain)}
        unknown = [head for head in self.peers_by_head if not chain.has_head(head.digest)]
        ahead = [self.peers_by_head[head] for head in unknown if head.round and head.tokens >= chain.tokens]
        return MembershipChanged(
            peers if peer_id in peers else peers | {peer_id},
            self.departed,
            self.resting & peers,
            frozenset(peer for peers_ahead in ahead for peer in peers_ahead) - avoided,
            self.trainers,
            missed=self.missed,
            ended=self.ended,
        )

    def _is_behind(self, peer: PeerId, chain: Chain) -> bool:
        head = self.peers[peer].head
        return head is not None and head.round < chain.round

    def is_outvoted(self, peer_id: PeerId, head: ChainHead, state: Digest, voters: frozenset[PeerId]) -> bool:
        """Return whether the voters on this head hold another state than this peer.

        The state with the most votes is right, if it has more than a third of all live voters; of several with equally
        many, the one with the lowest digest.

        Args:
            peer_id: our own id; our state counts too.
            head: our head.
            state: the digest of our state.
            voters: the electorate of the next round; if it is empty, every trainer votes.
        """
        live = (self.trainers & voters if voters else self.trainers) - {peer_id}
        states = [self.peers[peer].state for peer in self.trainers_at(frozenset([head.digest])) & live]
        counts = Counter([state, *(other for other in states if other)])
        right = min(counts, key=lambda candidate: (-counts[candidate], candidate))
        return right != state and 3 * counts[right] > len(live)

    def state_holders(
        self, peer_id: PeerId, head: ChainHead, own_state: Digest, voters: frozenset[PeerId]
    ) -> list[PeerId]:
        """Return the other peers on this head with the state that most voters there have, if it is not our own."""
        by_state: defaultdict[Digest, list[PeerId]] = defaultdict(list)
        for peer, state in self.peers.items():
            is_at_head = peer != peer_id and state.head is not None and state.head.digest == head.digest
            if is_at_head and state.state not in (b"", own_state):
                by_state[state.state].append(peer)
        votes = {state: len(voters.intersection(peers)) for state, peers in by_state.items()}
        ranked = min(by_state, key=lambda state: (-votes[state], -len(by_state[state]), state), default=b"")
        return by_state[ranked]


class Arrivals:
    """Knows when our chain had its last heads, and so which trainers are almost at the newest one.

    Args:
        peer_id: our own id.
        chain: our chain.
    """

    def __init__(self, peer_id: PeerId, chain: Chain) -> None:
        self._peer_id = peer_id
        self._chain = chain
        self._moved_at = deque[float](maxlen=MAX_KEPT_COMMITS)

    def on_moved(self, now: float) -> None:
        """Record that our chain has a new head."""
        self._moved_at.append(now)

    def expected(self, snapshot: SwarmSnapshot, now: float) -> frozenset[PeerId]:
        """Return the other trainers that are ready, and at our head or almost there.

        There are none where steps are exact, because these wait for all trainers anyway.
        """
        if snapshot.steps.stages:
            return frozenset()
        recent = sum(moved_at > now - NEAR_SECONDS for moved_at in self._moved_at)
        oldest = self._chain.round - max(NEAR_ROUNDS, recent)
        near = frozenset(
            head.digest for head in snapshot.peers_by_head if head.round >= oldest and self._chain.has_head(head.digest)
        )
        return snapshot.trainers_at(near) - snapshot.resting - snapshot.missed - snapshot.ended - {self._peer_id}
