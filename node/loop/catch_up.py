"""Decide when a peer leaves its round to follow others, whom it follows, and how. PURE.

The loop asks a peer that is ahead for the commits after our head, and replays them if they continue our chain. If they
do not, or if the replay fails or would take long, it downloads the state itself.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from node.loop.swarm_snapshot import SwarmSnapshot
from protocol.admission.electorate import Electorate
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain, ChainHead, prefers_theirs
from protocol.consensus.messages import Commit, Digest, SignedMessage
from protocol.errors import PeerFault
from protocol.identity import PeerId
from protocol.steering.revision_log import SignedRevision

SYNC_AFTER_SECONDS = 1.5  # to wait for the next commit to arrive by itself
SYNC_NOW_GAP = 2  # rounds behind at which we sync at once
RETAINED_ROUNDS = 4  # whose blobs a late peer may still fetch, if there is room
MAX_VANISHED_STATES = 5  # in a row: states that no peer had any more when we fetched them
AVOID_SECONDS = 60.0  # a peer that could not show the path to its head


@dataclass(frozen=True)
class SyncPlan:
    """How to get from our head to another: by these commits, or by downloading a state.

    `commits` are consecutive. If `state` is None they continue our chain; otherwise they lead to `head`, or are the
    first of more, and give the outcomes of our contributions; `revisions` are those that the chain of `head` has
    adopted, oldest first, and `electorate` are the voters after it.
    """

    head: ChainHead
    commits: tuple[SignedMessage[Commit], ...]
    state: Blob | None
    revisions: tuple[SignedRevision, ...] = ()
    electorate: Electorate = field(default_factory=Electorate.at_genesis)

    @property
    def log(self) -> tuple[SignedMessage[Commit], ...]:
        """Return the commits that the chain keeps with the installed state: those that lead to its head."""
        return self.commits if self.commits and self.commits[-1].body.round == self.head.round - 1 else ()


@dataclass(frozen=True)
class SyncTarget:
    """The head to sync to, the peers on it, and whether to replay its commits if they continue our chain."""

    head: ChainHead
    peers: tuple[PeerId, ...]
    replay: bool


def best_head(heads: Mapping[ChainHead, list[PeerId]]) -> tuple[ChainHead, list[PeerId]]:
    """Return the most preferred head, and the peers on it."""
    head = max(heads, key=lambda candidate: (candidate.tokens, candidate.digest))
    return head, heads[head]


def should_sync(own: ChainHead, theirs: ChainHead, waited: float) -> bool:
    """Return whether to sync to a preferred head that we have known for `waited` seconds.

    The commit of the open round arrives by itself. A head whose round is not above ours is on another chain, and its
    commit never does.
    """
    return not 0 < theirs.round - own.round < SYNC_NOW_GAP or waited >= SYNC_AFTER_SECONDS


def plan_replay(chain: Chain, commits: tuple[SignedMessage[Commit], ...]) -> SyncPlan | None:
    """Return the plan that replays these commits, None unless they continue our chain."""
    try:
        return SyncPlan(chain.head_after(commits), commits, None) if commits else None
    except PeerFault:
        return None


def is_worth_taking(own: ChainHead, theirs: ChainHead) -> bool:
    """Return whether to download a state: that of a preferred head, or another one of our own head."""
    return theirs.digest == own.digest or prefers_theirs(own, theirs)


def plan_path(own: Chain, theirs: Chain, state: Blob, replay: bool, history_since: int) -> SyncPlan | None:
    """Return the plan to the head of a chain that we see whole, as virtual peers do; None if it is not ahead.

    Args:
        own: our chain.
        theirs: the other chain.
        state: the outer state of its head.
        replay: whether to replay commits if they continue our chain.
        history_since: the first round that may include one of our contributions.
    """
    replayed = plan_replay(own, theirs.commits_since(own.round) or ()) if replay else None
    if replayed is not None:
        return replayed
    if not is_worth_taking(own.head, theirs.head):
        return None
    commits = theirs.commits_since(history_since) or theirs.commits_since(own.round) or ()
    return SyncPlan(theirs.head, commits, state, electorate=theirs.electorate)


@dataclass
class Sync:
    """A sync to another head in progress; `left` is the head where it began."""

    target: SyncTarget
    left: ChainHead
    plan: SyncPlan | None = None
    to_replay: list[SignedMessage[Commit]] = field(default_factory=list)


class CatchUp:
    """Remembers since when other peers are ahead, which of them misled us, and which syncs failed.

    Args:
        compares_states: whether all peers on one head must have the same state.
    """

    def __init__(self, peer_id: PeerId, chain: Chain, compares_states: bool) -> None:
        self._peer_id = peer_id
        self._chain = chain
        self._compares_states = compares_states
        self._snapshot = SwarmSnapshot({})
        self._avoided_until: dict[PeerId, float] = {}
        self._ahead_since: float | None = None
        self._replay_failed = False
        self._vanished = 0
        self._reported_state: Digest | None = None

    def set_snapshot(self, snapshot: SwarmSnapshot) -> None:
        self._snapshot = snapshot

    def is_due(self, state: Digest, now: float) -> bool:
        """Return whether to sync: others are ahead and their commit did not arrive, or our state is wrong."""
        if self.is_state_wrong(state):
            return True
        heads = self.heads(now)
        if not heads:
            self._ahead_since = None
            return False
        self._ahead_since = now if self._ahead_since is None else self._ahead_since
        return should_sync(self._chain.head, best_head(heads)[0], now - self._ahead_since)

    def next_deadline(self, now: float) -> float | None:
        """Return the time at which `is_due` may change without an event."""
        times = list(self._avoided_until.values())
        if self._ahead_since is not None:
            times.append(self._ahead_since + SYNC_AFTER_SECONDS)
        return min((time for time in times if time > now), default=None)

    def is_state_wrong(self, state: Digest) -> bool:
        return self._compares_states and self._snapshot.is_outvoted(self._peer_id, self._chain.head, state)

    def heads(self, now: float) -> dict[ChainHead, list[PeerId]]:
        """Return the heads that we could sync to, with the peers that we could ask."""
        self._avoided_until = {peer: until for peer, until in self._avoided_until.items() if until > now}
        heads = self._snapshot.preferred_heads(self._chain.head)
        available = {head: self._not_avoided(peers) for head, peers in heads.items()}
        return {head: peers for head, peers in available.items() if peers}

    def _not_avoided(self, peers: Iterable[PeerId]) -> list[PeerId]:
        return [peer for peer in peers if peer not in self._avoided_until and peer != self._peer_id]

    def target(self, state: Digest, now: float) -> SyncTarget | None:
        """Return the head to sync to, None if no peer can be asked."""
        own, heads = self._chain.head, self.heads(now)
        if self.is_state_wrong(state):
            holders = self._not_avoided(self._snapshot.state_holders(self._peer_id, own, state))
            return SyncTarget(own, tuple(holders), replay=False) if holders else None
        if not heads:
            return None
        head, peers = best_head(heads)
        # Old blobs are gone, hosts have none, and one state costs no more than many rounds.
        has_blobs = not self._snapshot.trainers.isdisjoint(peers)
        replay = not self._replay_failed and has_blobs and head.round - own.round <= RETAINED_ROUNDS
        return SyncTarget(head, tuple(peers), replay)

    def is_news(self, state: Digest) -> bool:
        """Return whether to report a wrong state; each of our states is reported once."""
        is_news = self._reported_state != state
        self._reported_state = state
        return is_news

    def succeeded(self) -> None:
        self._replay_failed = False
        self._vanished = 0

    def moved(self) -> None:
        """Reset the time since which others are ahead: we have a new head."""
        self._ahead_since = None

    def failed(self, target: SyncTarget, has_vanished: bool, now: float) -> bool:
        """Record a failed sync. Return whether to retry at once, because the peers moved on meanwhile."""
        self._vanished = self._vanished + 1 if has_vanished and not target.replay else 0
        if 0 < self._vanished < MAX_VANISHED_STATES:
            return True
        self._replay_failed = target.replay
        if not target.replay:
            self._avoided_until[target.peers[0]] = now + AVOID_SECONDS
        return False
