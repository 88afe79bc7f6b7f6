"""Decide when a peer asks others for their chain, which peers it asks, and which it avoids. PURE.

The claims of a record are only a hint where to ask. A peer is asked while the open round goes on; only a chain whose
certificates are verified (`protocol.consensus.fork_choice`) ends the round. A peer that could not show one is
avoided with growing pauses.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from node.loop.peers.swarm_snapshot import SwarmSnapshot
from protocol.blobs.blob import Blob
from protocol.consensus.chain import CertifiedCommit, Chain, ChainHead
from protocol.consensus.fork_choice import ChainOffer
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId
from protocol.recent import RecentTable
from protocol.steering import SignedRevision

SYNC_AFTER_SECONDS = 1.5  # to wait for the next commit to arrive by itself
SYNC_NOW_GAP = 2  # rounds behind at which we ask at once
RETAINED_ROUNDS = 4  # whose blobs a late peer may still fetch, if there is room
MAX_VANISHED_STATES = 5  # in a row: states that no peer had any more when we fetched them
MIN_AVOID_SECONDS, MAX_AVOID_SECONDS = 4.0, 256.0  # a peer that did not show a chain to follow
MAX_AVOIDED = 4096


@dataclass(frozen=True)
class SyncOffer:
    """The answer of a peer that was asked for its chain; its signatures are checked.

    Args:
        chain: its chain, with at least the commits after our head, if it keeps them.
        state: the blob of the outer state at its head; None if it has none.
        revisions: those that the chain has adopted, oldest first.
        word: whether most of the contacts that answered are on this chain; None if there is none to ask.
    """

    chain: ChainOffer
    state: Blob | None
    revisions: tuple[SignedRevision, ...] = ()
    word: bool | None = None


@dataclass(frozen=True)
class SyncTarget:
    """The head to sync to, the peers that claim it, and whether to replay its commits if they continue our chain."""

    head: ChainHead
    peers: tuple[PeerId, ...]
    replay: bool


@dataclass
class Sync:
    """A sync to another head.

    Args:
        target: the head, and the peers to ask.
        left: our head when it began.
        offer: the chain that a peer has shown, once we have judged that we should follow it.
        is_following: whether our round has ended for it.
        leaves_branch: whether rounds of ours get lost.
        is_fetched: whether its state is in our store, but nothing has confirmed it yet.
        confirm_until: how long to wait for voters that confirm the state.
        ask_at: when to ask again for the next certificate, which names the state.
        is_replay: whether we apply its commits instead of taking its state.
        to_replay: those that are left to apply.
    """

    target: SyncTarget
    left: ChainHead
    offer: SyncOffer | None = None
    is_following: bool = False
    leaves_branch: bool = False
    is_fetched: bool = False
    confirm_until: float = 0.0
    ask_at: float = 0.0
    is_replay: bool = False
    to_replay: list[CertifiedCommit] = field(default_factory=list)


def best_head(
    heads: Mapping[ChainHead, list[PeerId]], voters: frozenset[PeerId] = frozenset()
) -> tuple[ChainHead, list[PeerId]]:
    """Return the head to ask about first, and its peers: that of the most voters, then the one with most tokens."""

    def rank(head: ChainHead) -> tuple[int, int, Digest]:
        return len(voters.intersection(heads[head])), head.tokens, head.digest

    head = max(heads, key=rank)
    return head, sorted(heads[head], key=lambda peer: peer not in voters)


def should_ask(own: ChainHead, theirs: ChainHead, waited: float) -> bool:
    """Return whether to ask about another head that we have known for `waited` seconds.

    The commit of the open round arrives by itself. A head whose round is not above ours is on another chain, and its
    commit never does.
    """
    return not 0 < theirs.round - own.round < SYNC_NOW_GAP or waited >= SYNC_AFTER_SECONDS


class CatchUp:
    """Remembers since when other peers are elsewhere, which of them did not help us, and which syncs failed.

    Args:
        peer_id: our own id.
        chain: our chain.
        compares_states: whether all peers on one head must have the same state.
    """

    def __init__(self, peer_id: PeerId, chain: Chain, compares_states: bool) -> None:
        self._peer_id = peer_id
        self._chain = chain
        self._compares_states = compares_states
        self._snapshot = SwarmSnapshot({})
        self._avoided = RecentTable[PeerId, tuple[float, float]](MAX_AVOIDED)  # until when; length of the pause
        self._ahead_since: float | None = None
        self._replay_failed = False
        self._vanished = 0
        self._reported_state: Digest | None = None
        self._reported_splits: set[PeerId] = set()

    def set_snapshot(self, snapshot: SwarmSnapshot) -> None:
        self._snapshot = snapshot

    def is_due(self, state: Digest, now: float) -> bool:
        """Return whether to ask: others are elsewhere and their commit did not arrive, or our state is wrong."""
        if self.is_state_wrong(state):
            return bool(self._state_holders(state, now))
        heads = self.heads(now)
        if not heads:
            self._ahead_since = None
            return False
        self._ahead_since = now if self._ahead_since is None else self._ahead_since
        waited = now - self._ahead_since
        return any(should_ask(self._chain.head, head, waited) for head in heads)

    def next_deadline(self, now: float) -> float | None:
        """Return the time at which `is_due` may change without an event."""
        times = [until for until, _ in self._avoided.values()]
        if self._ahead_since is not None:
            times.append(self._ahead_since + SYNC_AFTER_SECONDS)
        return min((time for time in times if time > now), default=None)

    def is_state_wrong(self, state: Digest) -> bool:
        """Return whether the voters on our head have another state than we."""
        voters = self._chain.electorate.voters
        return self._compares_states and self._snapshot.is_outvoted(self._peer_id, self._chain.head, state, voters)

    def heads(self, now: float) -> dict[ChainHead, list[PeerId]]:
        """Return the heads that are not in our chain, with the peers that we could ask."""
        chain = self._chain
        heads = {head: peers for head, peers in self._snapshot.peers_by_head.items() if not chain.has_head(head.digest)}
        available = {head: self._available(peers, now) for head, peers in heads.items() if head.round}
        return {head: peers for head, peers in available.items() if peers}

    def avoided(self, now: float) -> frozenset[PeerId]:
        """Return the peers that are not asked for now."""
        return frozenset(peer for peer, (until, _) in self._avoided.items() if until > now)

    def _available(self, peers: Iterable[PeerId], now: float) -> list[PeerId]:
        avoided = self.avoided(now)
        return [peer for peer in peers if peer not in avoided and peer != self._peer_id]

    def _state_holders(self, state: Digest, now: float) -> list[PeerId]:
        voters = self._chain.electorate.voters
        holders = self._snapshot.state_holders(self._peer_id, self._chain.head, state, voters)
        return self._available(holders, now)

    def first_states(self, now: float) -> list[PeerId]:
        """Return the peers that have the state with which the run begins."""
        peers = self._snapshot.peers
        holders = self._snapshot.peers_by_head.get(self._chain.head, ()) if self._chain.round == 0 else ()
        return self._available([peer for peer in holders if peers[peer].state], now)

    def target(self, state: Digest, now: float, lacks_state: bool = False) -> SyncTarget | None:
        """Return the head to ask about, None if no peer can be asked. A peer that lacks a state cannot replay."""
        own, heads = self._chain.head, self.heads(now)
        if lacks_state and not heads and (holders := self.first_states(now)):
            return SyncTarget(own, tuple(holders), replay=False)
        if self.is_state_wrong(state) and (holders := self._state_holders(state, now)):
            return SyncTarget(own, tuple(holders), replay=False)
        if not heads:
            return None
        head, peers = best_head(heads, self._chain.electorate.voters)
        return SyncTarget(head, tuple(peers), not self._replay_failed and not lacks_state)

    def may_replay(self, target: SyncTarget, rounds: int) -> bool:
        """Return whether to replay that many commits; old blobs are gone, and hosts have none."""
        return target.replay and rounds <= RETAINED_ROUNDS and not self._snapshot.trainers.isdisjoint(target.peers)

    def is_news(self, state: Digest) -> bool:
        """Return whether to report a wrong state; each of our states is reported once."""
        is_news = self._reported_state != state
        self._reported_state = state
        return is_news

    def is_news_of_split(self, peer: PeerId) -> bool:
        """Return whether to report that a peer is on another chain; each peer is reported once."""
        is_news = peer not in self._reported_splits and len(self._reported_splits) < MAX_AVOIDED
        if is_news:
            self._reported_splits.add(peer)
        return is_news

    def succeeded(self, peer: PeerId) -> None:
        self._replay_failed = False
        self._vanished = 0
        self._avoided.pop(peer, None)

    def moved(self) -> None:
        """Reset the time since which others are elsewhere: we have a new head."""
        self._ahead_since = None

    def avoid(self, peer: PeerId, now: float) -> None:
        """Do not ask a peer for a while, which doubles each time."""
        _, pause = self._avoided.get(peer, (0.0, MIN_AVOID_SECONDS / 2))
        pause = min(2 * pause, MAX_AVOID_SECONDS)
        self._avoided[peer] = now + pause, pause

    def failed(self, sync: Sync, has_vanished: bool, now: float) -> bool:
        """Record a failed sync. Return whether to retry at once, because the peers moved on meanwhile."""
        self._vanished = self._vanished + 1 if has_vanished and not sync.is_replay else 0
        if 0 < self._vanished < MAX_VANISHED_STATES:
            return True
        self._replay_failed = sync.is_replay
        if not sync.is_replay:
            self.avoid(sync.target.peers[0], now)
        return False
