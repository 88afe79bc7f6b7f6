"""The syncs of one peer: ask for a chain, judge it, then replay its commits or take its state. PURE.

The round loop owns it, carries out the commits that it hands out, and returns its actions. Our round goes on until the
certificates of the other chain are verified. Its state replaces ours only once more than a third of the live voters
have announced it, or the certificate of the next round names it; it is downloaded meanwhile.
"""

from node.loop import reports
from node.loop.actions import AdoptState, FetchState, FindPath, LoopAction, ReportPhase, TakeState
from node.loop.contributions import ContributionTracker
from node.loop.options import SyncOptions
from node.loop.peers.catch_up import CatchUp, Sync, SyncOffer
from node.loop.peers.state_votes import StateEvidence, StateVotes, is_state_confirmed
from node.loop.peers.swarm_snapshot import SwarmSnapshot
from protocol.consensus.chain import CertifiedCommit, Chain
from protocol.consensus.fork_choice import ChainComparison, LocalEvidence, judge
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId

CONFIRM_SECONDS = 15.0  # for something to confirm a state that is here
FORK_CONFIRM_SECONDS = 5.0  # where our own branch would go on meanwhile, and may win
ASK_AGAIN_SECONDS = 0.5  # for the next certificate


class Syncing:
    """At most one sync is active at a time: asking while our round goes on, then following.

    Args:
        peer_id: our own id.
        chain: our chain.
        contributions: our contributions, whose outcomes another chain may revise.
        options: how we follow other chains.
    """

    def __init__(self, peer_id: PeerId, chain: Chain, contributions: ContributionTracker, options: SyncOptions) -> None:
        self._peer_id = peer_id
        self._chain = chain
        self._contributions = contributions
        self._options = options
        self._trust = options.trust
        self._lacks_state = options.lacks_state
        self._catch_up = CatchUp(peer_id, chain, options.compares_states)
        self._votes = StateVotes(peer_id)
        self._snapshot = SwarmSnapshot({})
        self._sync: Sync | None = None
        self._received: SyncOffer | None = None  # not judged yet
        self._look_at = 0.0  # when to check again whether to ask

    @property
    def is_asking(self) -> bool:
        """Return whether a peer is asked for its chain while our round goes on."""
        return self._sync is not None and not self._sync.is_following

    @property
    def is_active(self) -> bool:
        """Return whether we follow another chain, so that no round of ours is open."""
        return self._sync is not None and self._sync.is_following

    def set_snapshot(self, snapshot: SwarmSnapshot) -> None:
        self._snapshot = snapshot
        self._catch_up.set_snapshot(snapshot)
        self._look_at = 0.0
        if self._sync is not None and self._options.compares_states:
            self._votes.record(snapshot)

    def on_moved(self) -> None:
        """Look again at the others, because we have a new head."""
        self._look_at = 0.0
        self._catch_up.moved()

    @property
    def lacks_state(self) -> bool:
        """Return whether we have no state yet: we cannot train or announce a head before a peer sends us one."""
        return self._lacks_state

    def is_behind(self, now: float) -> bool:
        """Return whether another peer, which we could ask, is elsewhere, or has the state that we lack."""
        return bool(self._catch_up.heads(now)) or (self._lacks_state and bool(self._catch_up.first_states(now)))

    def is_shut_out(self) -> bool:
        """Return whether all other peers are in a run under way, and none of them could show its chain."""
        others = [peer for peer in self._snapshot.peers if peer != self._peer_id]
        heads = [self._snapshot.peers[peer].head for peer in others]
        return bool(others) and all(head is not None and head.round > 0 for head in heads)

    def avoided(self, now: float) -> frozenset[PeerId]:
        """Return the peers that did not show a chain to follow, a moment ago."""
        return self._catch_up.avoided(now)

    def is_due(self, state: Digest, now: float) -> bool:
        """Return whether to ask now."""
        if self._sync is not None or now < self._look_at:
            return False
        if self._catch_up.is_due(state, now):
            return True
        self._look_at = self._catch_up.next_deadline(now) or float("inf")
        return False

    def next_deadline(self, now: float) -> float | None:
        """Return the time at which something may change without an event."""
        if self._sync is not None:
            return min(self._sync.ask_at, self._sync.confirm_until) if self._sync.is_fetched else None
        return self._catch_up.next_deadline(now)

    def stop(self) -> None:
        """Abandon the sync in progress."""
        self._sync = self._received = None

    def begin(self, state: Digest, now: float) -> list[LoopAction]:
        """Ask a peer, if one can be asked."""
        target = self._catch_up.target(state, now, self._lacks_state)
        if target is None:
            return []
        self._sync = Sync(target, self._chain.head)
        self._votes.clear()
        if self._options.compares_states:
            self._votes.record(self._snapshot)
        since = self._contributions.history_needed_since(self._chain.round)
        reported = reports.wrong_state(self._chain.round) if self._is_news(state) else []
        return [*reported, FindPath(target.peers[0], since)]

    def _is_news(self, state: Digest) -> bool:
        return self._catch_up.is_state_wrong(state) and self._catch_up.is_news(state)

    def receive(self, offer: SyncOffer) -> None:
        """Take the answer of the peer that was asked; it is judged once no commit is being applied."""
        if self._sync is not None:
            self._received = offer

    @property
    def accepted(self) -> SyncOffer | None:
        """Return the chain to follow, once its certificates are verified."""
        return self._sync.offer if self._sync is not None and self._sync.is_following else None

    @property
    def is_replay(self) -> bool:
        """Return whether we apply the commits of the chain instead of taking its state."""
        return self._sync is not None and self._sync.is_replay

    def consider(self, state: Digest, live: frozenset[PeerId], now: float) -> list[LoopAction]:
        """Judge the chain that the asked peer has shown, if it has answered.

        Args:
            state: the digest of our state.
            live: the other trainers that count in a majority.
            now: the current time.
        """
        (sync, offer), self._received = (self._sync, self._received), None
        if offer is None or sync is None:
            return []
        sync.left = self._chain.head
        judgement = self._judge(offer, live)
        is_needed = self._lacks_state or self._catch_up.is_state_wrong(state)
        is_other_state = is_needed and offer.chain.head.digest == self._chain.digest
        if judgement.relation != "ahead" and not is_other_state:
            return self._decline(judgement, now)
        if judgement.needs_person and not self._options.accepts_jumps:
            return [reports.jump_held(sync.target, judgement.lost), *self._decline(judgement, now)]
        sync.offer, sync.is_following, sync.leaves_branch = offer, True, judgement.lost > 0
        return self._replay(sync, offer) if self._may_replay(sync, offer, judgement, state) else []

    def _judge(self, offer: SyncOffer, live: frozenset[PeerId]) -> ChainComparison:
        strict = self._options.requires_trust
        return judge(self._chain, offer.chain, LocalEvidence(self._peer_id, live, self._trust, offer.word, strict))

    def _decline(self, judgement: ChainComparison, now: float) -> list[LoopAction]:
        """Leave our round as it is, and the peer alone for a while."""
        sync, self._sync = self._sync, None
        assert sync is not None
        self._look_at = 0.0
        self._catch_up.avoid(sync.target.peers[0], now)
        refusal = [reports.not_certified(sync.target, judgement.reason)] if judgement.relation == "refused" else []
        is_news = judgement.is_split and self._catch_up.is_news_of_split(sync.target.peers[0])
        return [*refusal, reports.split(sync.target)] if is_news else [*refusal]

    def _may_replay(self, sync: Sync, offer: SyncOffer, judgement: ChainComparison, state: Digest) -> bool:
        rounds = offer.chain.head.round - self._chain.round
        if judgement.common is None or judgement.common.digest != self._chain.digest or rounds < 1:
            return False
        own_state = state if self._options.compares_states else b""
        first = offer.chain.log.since(self._chain.round).commits[0]
        return first.certificate.basis.state == own_state and self._catch_up.may_replay(sync.target, rounds)

    def _replay(self, sync: Sync, offer: SyncOffer) -> list[LoopAction]:
        sync.is_replay = True
        sync.to_replay = list(offer.chain.log.since(self._chain.round).commits)
        return [ReportPhase("catching up", reports.replaying(len(sync.to_replay), self._chain.round))]

    def take_state(self, now: float) -> list[LoopAction]:
        """Return the action that downloads the state of the accepted chain, and installs it if it is confirmed."""
        assert self._sync is not None and self._sync.offer is not None
        offer, state = self._sync.offer, self._sync.offer.state
        if state is None:
            return self.fail("it does not have its state", False, now)[0]
        holders = self._votes.holders(offer.chain.head.digest, state.digest) or self._sync.target.peers
        phase = ReportPhase("catching up", reports.fetching(state, offer.chain.head.round))
        if self._is_confirmed(offer):
            return [phase, TakeState(offer, state, holders)]
        return [phase, FetchState(state, holders)]

    def on_fetched(self, now: float) -> None:
        """Begin to look for a confirmation of the state that is here now."""
        if self._sync is not None and self._sync.is_following:
            self._sync.is_fetched, self._sync.ask_at = True, now
            self._sync.confirm_until = now + (FORK_CONFIRM_SECONDS if self._sync.leaves_branch else CONFIRM_SECONDS)

    @property
    def is_confirming(self) -> bool:
        """Return whether a state is here that nothing has confirmed yet."""
        return self._sync is not None and self._sync.is_fetched

    def confirm(self, live: frozenset[PeerId], now: float) -> list[LoopAction]:
        """Install the state that is here as soon as it is confirmed; ask again, and give up after a while."""
        sync = self._sync
        assert sync is not None and sync.offer is not None and sync.offer.state is not None
        shown, self._received = self._received, None
        named = self._state_named_by(shown, sync.offer, live) if shown is not None else None
        if named not in (None, sync.offer.chain.state):
            return self.fail("the next certificate names another state", False, now)[0]
        if named is not None or self._is_confirmed(sync.offer):
            sync.is_fetched = False
            return [TakeState(sync.offer, sync.offer.state, sync.target.peers)]
        if now >= sync.confirm_until:
            return self.fail("the voters do not confirm its state", False, now)[0]
        if now >= sync.ask_at:
            sync.ask_at = now + ASK_AGAIN_SECONDS
            return [FindPath(sync.target.peers[0], self._chain.round)]
        return []

    def _state_named_by(self, shown: SyncOffer, offer: SyncOffer, live: frozenset[PeerId]) -> Digest | None:
        """Return the state at the head of `offer` that a later chain certifies; None if it goes on elsewhere."""
        if self._judge(shown, live).relation != "ahead":
            return None
        bases = {entry.body.base: entry.certificate.basis.state for entry in shown.chain.log.commits}
        return bases.get(offer.chain.head.digest)

    def _is_confirmed(self, offer: SyncOffer) -> bool:
        if not self._options.compares_states:
            return True
        if self._lacks_state and offer.chain.head.round == 0:  # the manifest has the hashes of the first weights
            return True
        assert offer.state is not None
        trainers = self._snapshot.trainers - {self._peer_id}
        evidence = StateEvidence(self._votes, trainers, self._trust, offer.word)
        return is_state_confirmed(offer.chain, offer.state.digest, evidence)

    def next_commit(self) -> CertifiedCommit | None:
        """Return the next commit to replay; without one the sync has succeeded."""
        assert self._sync is not None
        if self._sync.to_replay:
            return self._sync.to_replay.pop(0)
        self._succeed()
        return None

    def is_state_expected(self, state: Digest) -> bool:
        """Return whether our state is the one that the certificate of the next commit to replay names."""
        if self._sync is None or not self._sync.to_replay or not self._options.compares_states:
            return True
        return self._sync.to_replay[0].certificate.basis.state == state

    def _succeed(self) -> None:
        assert self._sync is not None
        self._catch_up.succeeded(self._sync.target.peers[0])
        if self._trust is not None and self._chain.round >= self._trust.round:
            self._trust = None
        self._sync = None

    def adopt(self) -> AdoptState | None:
        """Revise the outcomes of our contributions after the state of the offer is installed."""
        if self._sync is None or self._sync.offer is None:
            return None
        self._lacks_state = False
        chain, left = self._sync.offer.chain, self._sync.left
        commits = [entry.body for entry in chain.log.commits]
        fork_outcome = self._contributions.on_fork(self._peer_id, commits, chain.head.round, left)
        new_commits = tuple(commit for commit in commits if commit.round >= left.round)
        return AdoptState(new_commits, fork_outcome, max(0, chain.head.round - left.round))

    def fail(self, reason: str, has_vanished: bool, now: float) -> tuple[list[LoopAction], bool]:
        """Abandon the sync in progress, and return the report, and whether to retry at once."""
        sync, self._sync, self._received = self._sync, None, None
        if sync is None:
            return [], True
        self._look_at = 0.0
        return [reports.sync_failed(sync.target, reason)], self._catch_up.failed(sync, has_vanished, now)
