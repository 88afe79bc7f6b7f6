"""Decide what a peer does for a run: join, run one round after the other, catch up, stop at the target. PURE.

New peers, peers that were away and peers on the losing chain take one path: a peer that is shown a preferred chain
syncs to it; otherwise it opens the next round and applies the decided commit. It submits a contribution until a round
includes it. Events go in, actions come out; the daemon, the simulator and the tests' simulation carry them out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from node.daemon.state.outer_state import SignedContributions
from node.loop import events, reports
from node.loop.actions import (
    ActionQueue,
    AdvanceState,
    ApplyCommit,
    LeaveRun,
    LoopAction,
    PublishHead,
    ReportCatchUp,
    ReportPace,
    ReportPhase,
    RestTrainer,
    StartTrainer,
    TargetReached,
)
from node.loop.contributions import ContributionTracker
from node.loop.departure import Departure
from node.loop.exact_rounds import ExactRounds
from node.loop.options import LoopOptions
from node.loop.peers.peer_conduct import PeerConduct
from node.loop.peers.swarm_snapshot import Arrivals, SwarmSnapshot
from node.loop.peers.syncing import Syncing
from node.loop.round_session import RoundSession
from node.loop.steering import Steering
from node.trainer.ipc.channel import ContributionOutcome
from protocol.consensus.chain import CertifiedCommit, Chain
from protocol.consensus.events import BlobAvailable, MembershipChanged, MisbehaviourSeen
from protocol.consensus.messages.contributions import Adoption, Commit
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.identity import PeerId

POLL_SECONDS = 0.5  # after a failure, unless an event arrives earlier
QUIET_SECONDS = 60.0  # for the others to decide a round that we may have signed already, or to show our statement
Stage = Literal["created", "joining", "starting", "assembling", "running", "done"]


@dataclass
class Applying:
    """A commit that is being applied to our state; `counts`: it changes the state, which a void round does not."""

    commit: CertifiedCommit
    counts: bool = True
    contributions: SignedContributions = ()
    outcome: ContributionOutcome = "none"


class Holds:
    """The reasons that hold the next round of a chain; in some, the trainer rests meanwhile."""

    def __init__(self, steering: Steering, chain: Chain) -> None:
        self._steering = steering
        self._chain = chain
        self._is_resting = False

    def pause(self, snapshot: SwarmSnapshot) -> list[LoopAction]:
        """Return what to do while the organiser has paused the run.

        A stage of a pipeline goes on serving while another one has not reached the pause.
        """
        actions: list[LoopAction] = []
        is_paused = self._steering.is_paused and not self.stage_behind(snapshot)
        if is_paused != self._is_resting:
            self._is_resting = is_paused
            actions.append(RestTrainer(is_paused))
        if is_paused:
            actions.append(ReportPhase("paused", f"paused by the organiser since round {self._chain.round}"))
        return actions

    def stage_behind(self, snapshot: SwarmSnapshot) -> list[LoopAction]:
        """Return the report that another stage is behind: stages are at most one round apart."""
        others = snapshot.other_stages
        if others is None or others >= self._chain.round:
            return []
        return [ReportPhase("waiting for peers", reports.stage_behind(others))]


class SecondLife:
    """Keeps a peer quiet that may have signed more than it remembers: its folder was restored from a backup, or copied.

    Two statements of one key for one place are a proof of guilt. So it signs nothing at the head at which it finds the
    others, and begins with the next. If they do not decide that round, it goes on after a while, unless they show a
    statement of our key: then the round stays closed for us.
    """

    def __init__(self, peer_id: PeerId, was_copied: bool) -> None:
        self._peer_id = peer_id
        self._is_armed = was_copied
        self._head: Digest = b""  # at which we found the others
        self._until = 0.0

    def suspect(self) -> None:
        """Keep quiet at the next head."""
        self._is_armed, self._head = True, b""

    def listen(self, messages: Iterable[SignedMessage[Any]], chain: Chain) -> None:
        """Look for statements of our own key about the round that is closed for us."""
        if not self._is_armed:
            return
        for message in messages:
            senders = {message.sender, *(entry.sender for entry in getattr(message.body, "contributions", ()))}
            if self._peer_id in senders and (message.body.round, message.body.base) == (chain.round, self._head):
                self._until = float("inf")

    def holds(self, chain: Chain, snapshot: SwarmSnapshot, now: float) -> list[LoopAction]:
        """Return the report that our round stays closed; empty if it may open."""
        self._is_armed = self._is_armed and self._head in (b"", chain.digest)
        if not self._is_armed:
            return []
        if not self._head and not snapshot.trainers_at(frozenset([chain.digest])) - {self._peer_id}:
            is_alone = not chain.electorate.voters - {self._peer_id}
            return [] if is_alone else [ReportPhase("waiting for peers", reports.RESTORED_ALONE)]
        if not self._head:
            self._head, self._until = chain.digest, now + QUIET_SECONDS
        self._is_armed = now < self._until
        return [ReportPhase("waiting for peers", reports.RESTORED)] if self._is_armed else []

    def next_deadline(self) -> float | None:
        return self._until if self._is_armed and self._head else None


class RoundLoop:
    """Handles the events of one replica one by one. Only the loop changes its chain and contributions."""

    def __init__(
        self, options: LoopOptions, chain: Chain, state: Digest, contributions: ContributionTracker,
        session: RoundSession,
    ) -> None:  # fmt: skip
        self.chain = chain
        self.state = state  # the digest of our outer state
        self.contributions = contributions
        self.session = session
        self._options = options
        self.steering = options.steering
        self._peer_id = options.round.peer_id
        self._syncing = Syncing(self._peer_id, chain, contributions, options.sync)
        self.conduct = PeerConduct(self._peer_id, options.proofs, session.signer, options.convictions)
        self._snapshot = SwarmSnapshot({})
        self._stage: Stage = "created"
        self._applying: Applying | None = None
        self._idle_until = 0.0
        self._patience_ends: float | None = None
        self._departure = Departure(options)
        self._holds = Holds(options.steering, chain)
        self._exact = ExactRounds(options.exact)
        self._second_life = SecondLife(self._peer_id, options.was_copied)
        self._arrivals = Arrivals(self._peer_id, chain)
        self._actions = ActionQueue()

    @property
    def is_done(self) -> bool:
        return self._stage == "done"

    @property
    def is_syncing(self) -> bool:
        return self._syncing.is_active

    @property
    def lacks_state(self) -> bool:
        """Return whether no peer has sent the state yet with which we begin."""
        return self._syncing.lacks_state

    def is_known(self, peer: PeerId) -> bool:
        """Return whether messages of a peer may count: a trainer's, or those of a voter that we have just lost."""
        return peer in self._snapshot.trainers or self.session.has_member(peer)

    def handle(self, event: events.LoopEvent, now: float) -> list[LoopAction]:
        return self.handle_all((event,), now)

    def handle_all(self, given: Iterable[events.LoopEvent], now: float) -> list[LoopAction]:
        """Handle several events; the round machine gets its events together, which is cheaper."""
        for event in given:
            self._take(event, now)
        self._actions.add(self.session.advance(now))
        while self._proceed(now):
            self._actions.add(self.session.advance(now))
        self._actions.add(self.conduct.take_actions())
        return self._actions.take()

    def next_deadline(self, now: float) -> float | None:
        """Return when to send TimePassed."""
        times = [self.session.next_deadline(now), self._departure.next_deadline(), self._second_life.next_deadline()]
        if self._syncing.is_confirming:
            times.append(self._syncing.next_deadline(now))
        if self._is_free and self._stage not in ("created", "starting", "done"):
            waits = [self._idle_until, self._patience_ends, self._syncing.next_deadline(now)]
            times += [time for time in waits if time is not None and time > now]
        return min((time for time in times if time is not None), default=None)

    @property
    def _is_free(self) -> bool:
        return self._applying is None and not self._syncing.is_active

    def _take(self, event: events.LoopEvent, now: float) -> None:
        match event:
            case events.MessagesReceived(sender, messages):
                self._second_life.listen(messages, self.chain)
                counted = self.conduct.receive(messages, self.chain.round)
                self._drop_excluded(now)
                self.session.receive(sender, counted, self._snapshot.trainers, now)
            case MisbehaviourSeen() if self.conduct.accuse(event, self.chain.round):
                self.session.accuse(event)
                self._update_swarm(self.conduct.unfiltered, now)
            case events.BlobFetched(opening, part_blob):
                self.session.feed(BlobAvailable(part_blob), opening)
            case events.BlobMissing(_, owners) if self.session.drop_contributions(event):
                self.conduct.strike(owners, self.session.number)
                self._update_swarm(self.conduct.unfiltered, now)
            case events.SumReady(opening, result):
                self.session.feed(result, opening)
            case events.VotePersisted():
                self.session.vote_persisted()
            case events.ContributionReady():
                self._submit(now)
            case events.SwarmChanged(snapshot):
                self._update_swarm(snapshot, now)
            case events.TimePassed() | events.RevisionsChanged():
                self.session.tick()
            case events.Started() if self._stage == "created":
                self._stage = "joining"
            case events.TrainerStarted() if self._stage == "starting":
                self._stage = "assembling"
                self._patience_ends = now + self._options.expiry
            case events.NodeLeaving():
                self._stop()
            case _ if self._stage != "done":
                self._take_result(event, now)

    def _take_result(self, event: events.LoopEvent, now: float) -> None:
        match event:
            case events.CommitComputed():
                self._advance(event.contributions)
            case events.CommitApplied(state):
                self._publish(state, now)
            case events.ApplyFailed(reason):
                self._apply_failed(reason, now)
            case events.PathFound(offer):
                self.conduct.compare(self.chain.log, offer.chain.log)
                self._drop_excluded(now)
                self._syncing.receive(offer)
            case events.StateFetched():
                self._syncing.on_fetched(now)
            case events.StateInstalled(state):
                self._adopt(state, now)
            case events.SyncFailed(reason, has_vanished):
                self._sync_failed(reason, has_vanished, now)
            case events.HeadPublished():
                self._published(now)

    # The next step in the current state.

    def _proceed(self, now: float) -> bool:
        """Take the next step, if there is one; return whether there was."""
        if self._syncing.is_confirming:
            self._actions.add(self._syncing.confirm(self._live(now), now))
        if not self._is_free:
            return False
        if self._syncing.is_asking and self._attend_sync(now):
            return True
        if now < self._idle_until:
            return False
        if self.steering.is_target_reached and self._stage in ("joining", "assembling", "running"):
            return self._reach_target(now)
        match self._stage:
            case "joining":
                return self._join(now)
            case "assembling":
                return self._assemble(now)
            case "running":
                return self._run(now)
            case "done":
                self._actions.add(self._departure.advance(now))
        return False

    def _join(self, now: float) -> bool:
        """Let a new peer with contacts wait for an answer: work that it trains alone is of little use."""
        self._actions.report_phase("joining", "looking for the peers of the run")
        is_new = self.chain.round == 0
        if is_new and self._options.has_contacts and not self._snapshot.has_others(self._peer_id):
            return False
        if is_new and (final := self.steering.final_head(self._snapshot, self._peer_id)):
            self._stop()
            self._actions.add([ReportPhase("done", "the run is over"), TargetReached(final, is_ours=False), LeaveRun()])
            return True
        if self._syncing.is_asking:
            return False
        if self._syncing.is_behind(now):
            return self._begin_sync(now)
        if self._syncing.lacks_state:
            self._actions.report_phase("joining", reports.NO_WEIGHTS)
            return False
        if is_new and self._options.has_contacts and self._syncing.is_shut_out():
            self._actions.report_phase("joining", reports.SHUT_OUT)
            return False
        self._stage = "starting"
        self._actions.add([StartTrainer()])
        return True

    def _assemble(self, now: float) -> bool:
        """Wait for enough peers; in a run that has already begun only while we are alone, and for a limited time.

        The first round needs trainers that are ready: one that still starts would miss rounds from the first one on.
        """
        needed, here = self._options.min_peers, len(self._snapshot.trainers)
        present = here - len(self._snapshot.resting) if self.chain.round == 0 else here
        is_alone = not self._snapshot.trainers - {self._peer_id}
        is_patient = self.chain.round == 0 or is_alone and (self._patience_ends is None or now < self._patience_ends)
        if present < needed and is_patient:
            reason = reports.waiting(here, present, needed, has_begun=self.chain.round > 0)
            self._actions.report_phase("waiting for peers", reason)
            return not self._syncing.is_asking and self._syncing.is_behind(now) and self._begin_sync(now)
        self._stage, self._patience_ends = "running", None
        return True

    def _run(self, now: float) -> bool:
        if self.session.decided is not None and self._may_apply(self.session.decided.body):
            commit, self.session.decided = self.session.decided, None
            self.conduct.close_round(self.session.conduct)
            self._drop_excluded(now)
            self._apply(commit, now)
            return True
        if self._syncing.is_due(self.state, now) and self._begin_sync(now):
            return True
        if self.session.is_open or self.session.decided is not None or self._is_held():
            return False
        if quiet := self._second_life.holds(self.chain, self._snapshot, now):
            self._actions.add(quiet)
            return False
        self._open_round(now)
        return True

    def decided_commit(self) -> CertifiedCommit | None:
        """Return the commit after the head of our chain, once it is decided."""
        applying = self._applying.commit if self._applying is not None else None
        commit = self.session.decided or applying
        return commit if commit is not None and commit.body.round == self.chain.round else None

    def _may_apply(self, commit: Commit) -> bool:
        """Return whether a decided round is known to count or to be void."""
        verdict, actions = self._exact.review(commit, self._snapshot.steps)
        self._actions.add(actions)
        return verdict is not None

    def _is_held(self) -> bool:
        """Return whether the organiser has paused the run, or another stage of the pipeline is behind."""
        self._actions.add(self._holds.pause(self._snapshot))
        behind = self._holds.stage_behind(self._snapshot)
        self._actions.add(behind)
        return self.steering.is_paused or bool(behind)

    def _reach_target(self, now: float) -> bool:
        behind = self._holds.stage_behind(self._snapshot)
        if behind:  # it needs us for its last microbatches
            self._actions.add(behind)
            return False
        self._departure.begin(self.chain.head, self.state, self._stage != "running", now)
        self._stop()
        self._actions.add([TargetReached(self.chain.head, is_ours=True)])
        return True

    def _stop(self) -> None:
        self._stage, self._applying = "done", None
        self._syncing.stop()
        self.session.close()

    def _open_round(self, now: float) -> None:
        self._actions.report_phase("training")
        membership = self._membership(now)
        state = self.state if self._options.compares_states else b""
        self.session.open(self.chain, state, membership, self._snapshot.trainers, self.steering.new_revisions, now)
        self._submit(now)

    def _submit(self, now: float) -> None:
        """Give our contribution, if there is one, to the open round."""
        pending = self.contributions.pending
        if pending is not None and self.session.is_open and self.session.number == self.chain.round:
            self._actions.report_phase("exchanging")
            self.session.submit(pending, self.chain, now, self.contributions.retained_parts)

    def _update_swarm(self, snapshot: SwarmSnapshot, now: float) -> None:
        self._snapshot = self.conduct.view(snapshot)
        self._syncing.set_snapshot(self._snapshot)
        self._departure.set_snapshot(self._snapshot)
        self._idle_until = 0.0
        if self.session.is_open:
            self.session.update_membership(self._membership(now))

    def _membership(self, now: float) -> MembershipChanged:
        membership = self.conduct.membership(self.chain, self._syncing.avoided(now))
        arriving = self._arrivals.expected(self._snapshot, now) - membership.excluded - membership.set_aside
        return replace(membership, arriving=arriving)

    def _drop_excluded(self, now: float) -> None:
        if self.conduct.has_news:
            self._update_swarm(self.conduct.unfiltered, now)

    # A decided round: fetch its blobs, compute, give the state to the trainer, publish.

    def _apply(self, commit: CertifiedCommit, now: float) -> None:
        body, counts = commit.body, self._exact.verdict(commit.body, self._snapshot.steps)
        self._applying = Applying(commit, counts is True)
        settings = self._options.round.settings(body.round)
        if counts is None:
            self._apply_failed(reports.no_verdict(body.round), now)
        elif not self.steering.learn(body.adoption):
            self._apply_failed(reports.UNKNOWN_REVISIONS, now)
        elif settings.topology.accepts_commit(body):
            contributions, may_lose = self.session.contributions_for(body), settings.topology.may_skip_lost
            applied = contributions if counts else ()
            self._actions.add([ApplyCommit(commit, applied, may_lose, settings.exchange_timeout)])
        else:
            self._apply_failed(f"the commit is not valid for round {body.round} of this run", now)

    def _advance(self, contributions: SignedContributions) -> None:
        if (applying := self._applying) is None:
            return
        body = applying.commit.body
        applying.contributions = contributions
        verdict = self.contributions.on_decided(self._peer_id, body)
        applying.outcome = verdict.outcome
        self._actions.add([AdvanceState(applying.commit, verdict)])

    def _publish(self, state: Digest, now: float) -> None:
        self._set_state(state, now)
        if (applying := self._applying) is not None:
            self._actions.add(self._exact.apply(applying.commit.body, applying.counts))
            self._actions.add([PublishHead(applying.commit.body, applying.contributions, applying.outcome)])

    def _set_state(self, state: Digest, now: float) -> None:
        self.state = state
        self._arrivals.on_moved(now)
        self._actions.add([ReportPace(self.session.describe_pace(self.chain.round))])
        self._syncing.on_moved()

    def _published(self, now: float) -> None:
        """Continue with the next commit to replay, or with the next round."""
        replayed, self._applying = self._applying is not None, None
        if not self._syncing.is_active:
            return
        if replayed:
            self._actions.add([ReportCatchUp("replayed", 1)])
        self._replay_next(now)

    def _apply_failed(self, reason: str, now: float) -> None:
        applying, self._applying = self._applying, None
        if self._syncing.is_active:
            return self._sync_failed(reason, False, now)
        if applying is not None:
            self._actions.add(reports.not_applied(applying.commit.body.round, reason))
            self._idle_until = now + POLL_SECONDS

    # Catching up: find the path, then replay commits or download a state.

    def _begin_sync(self, now: float) -> bool:
        """Ask a peer for its chain while our round goes on; return whether one can be asked."""
        self._actions.add(self._syncing.begin(self.state, now))
        return self._syncing.is_asking

    def _attend_sync(self, now: float) -> bool:
        """Judge the chain that a peer has shown; if it is to be followed, end our round and return True."""
        self._actions.add(self._syncing.consider(self.state, self._live(now), now))
        if (offer := self._syncing.accepted) is None:
            return False
        self.session.close()
        later = [entry.body for entry in offer.chain.log.commits if entry.body.round >= self.chain.round]
        if self.contributions.lacks(self._peer_id, later):
            self._second_life.suspect()
        if not self.steering.learn(Adoption(offer.chain.head.revision, offer.revisions)):
            self._sync_failed(reports.UNKNOWN_REVISIONS, False, now)
        elif self._syncing.is_replay:
            self._replay_next(now)
        else:
            self._actions.add(self._syncing.take_state(now))
        return True

    def _live(self, now: float) -> frozenset[PeerId]:
        return (self._snapshot.trainers | self.session.recently_seen(now)) - {self._peer_id}

    def _replay_next(self, now: float) -> None:
        if not self._syncing.is_state_expected(self.state):
            self._sync_failed("the certificates name another state than the one after our replay", False, now)
        elif (commit := self._syncing.next_commit()) is not None:
            self._apply(commit, now)

    def _adopt(self, state: Digest, now: float) -> None:
        """Revise the outcomes of our contributions after the state of another chain or a later round is installed."""
        if (adoption := self._syncing.adopt()) is not None:
            self._set_state(state, now)
            self._actions.add([adoption])

    def _sync_failed(self, reason: str, has_vanished: bool, now: float) -> None:
        was_following, (actions, may_retry) = self._syncing.is_active, self._syncing.fail(reason, has_vanished, now)
        self._actions.add(actions)
        if was_following and not may_retry:
            self._idle_until = now + POLL_SECONDS
