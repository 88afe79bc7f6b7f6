"""The syncs of one peer, one after the other: find the path to another head, then replay commits or take a state. PURE.

The round loop owns it, carries out the commits that it hands out, and returns its actions.
"""

from node.loop import reports
from node.loop.catch_up import CatchUp, Sync, SyncPlan
from node.loop.contributions import ContributionTracker
from node.loop.events import AdoptState, FindPath, LoopAction, ReportPhase, TakeState
from node.loop.swarm_snapshot import SwarmSnapshot
from protocol.consensus.chain import Chain
from protocol.consensus.messages import Commit, Digest, SignedMessage
from protocol.identity import PeerId


class Syncing:
    """At most one sync is active at a time.

    Args:
        peer_id: our own id.
        chain: our chain.
        contributions: our contributions, whose outcomes another chain may revise.
        compares_states: whether all peers on one head must have the same state.
    """

    def __init__(
        self, peer_id: PeerId, chain: Chain, contributions: ContributionTracker, compares_states: bool
    ) -> None:
        self._peer_id = peer_id
        self._chain = chain
        self._contributions = contributions
        self._catch_up = CatchUp(peer_id, chain, compares_states)
        self._sync: Sync | None = None
        self._look_at = 0.0  # when to check again whether to catch up

    @property
    def is_active(self) -> bool:
        """Return whether a sync to another head is in progress."""
        return self._sync is not None

    def set_snapshot(self, snapshot: SwarmSnapshot) -> None:
        self._catch_up.set_snapshot(snapshot)
        self._look_at = 0.0

    def on_moved(self) -> None:
        """Look again at the others, because we have a new head."""
        self._look_at = 0.0
        self._catch_up.moved()

    def is_behind(self, now: float) -> bool:
        """Return whether another peer, which we could ask, is ahead."""
        return bool(self._catch_up.heads(now))

    def is_due(self, state: Digest, now: float) -> bool:
        """Return whether to sync now."""
        if now < self._look_at:
            return False
        if self._catch_up.is_due(state, now):
            return True
        self._look_at = self._catch_up.next_deadline(now) or float("inf")
        return False

    def next_deadline(self, now: float) -> float | None:
        """Return the time at which `is_due` may change without an event."""
        return self._catch_up.next_deadline(now)

    def stop(self) -> None:
        """Abandon the sync in progress."""
        self._sync = None

    def begin(self, state: Digest, now: float) -> list[LoopAction]:
        """Start a sync, if a peer can be asked."""
        actions = self._describe(state)
        target = self._catch_up.target(state, now)
        if target is not None:
            self._sync = Sync(target, self._chain.head)
            since = self._contributions.history_needed_since(self._chain.round)
            actions.append(FindPath(target.peers[0], target.replay, since))
        return actions

    def _describe(self, state: Digest) -> list[LoopAction]:
        if not self._catch_up.is_state_wrong(state):
            return [ReportPhase("catching up", "others are ahead")]
        reported = reports.wrong_state(self._chain.round) if self._catch_up.is_news(state) else []
        return [ReportPhase("catching up", "our state differs from the others'; fetching theirs"), *reported]

    def follow(self, plan: SyncPlan) -> list[LoopAction]:
        """Follow a plan; `next_commit` returns the commits to replay."""
        if self._sync is None:
            return []
        self._sync.plan = plan
        if plan.state is not None:
            return []
        self._sync.to_replay = list(plan.commits)
        return [ReportPhase("catching up", reports.replaying(len(plan.commits), self._chain.round))]

    def take_state(self, plan: SyncPlan) -> list[LoopAction]:
        """Return the actions that download and install the state of a plan."""
        assert self._sync is not None and plan.state is not None
        phase = ReportPhase("catching up", reports.fetching(plan.state, plan.head.round))
        return [phase, TakeState(plan, plan.state, self._sync.target.peers)]

    def next_commit(self) -> SignedMessage[Commit] | None:
        """Return the next commit to replay; without one the sync has succeeded."""
        assert self._sync is not None
        if self._sync.to_replay:
            return self._sync.to_replay.pop(0)
        self._sync = None
        self._catch_up.succeeded()
        return None

    def adopt(self) -> AdoptState | None:
        """Revise the outcomes of our contributions after the state of the plan is installed."""
        if self._sync is None or self._sync.plan is None:
            return None
        left, round_number = self._sync.left, self._sync.plan.head.round
        commits = [commit.body for commit in self._sync.plan.commits]
        fork_outcome = self._contributions.on_fork(self._peer_id, commits, round_number, left)
        new_commits = tuple(commit for commit in commits if commit.round >= left.round)
        return AdoptState(new_commits, fork_outcome, max(0, round_number - left.round))

    def fail(self, reason: str, has_vanished: bool, now: float) -> tuple[list[LoopAction], bool]:
        """Abandon the sync in progress, and return the report, and whether to retry at once."""
        sync, self._sync = self._sync, None
        if sync is None:
            return [], True
        self._look_at = 0.0
        return [reports.sync_failed(sync.target, reason)], self._catch_up.failed(sync.target, has_vanished, now)
