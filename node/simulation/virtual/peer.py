"""Carry out the actions of a round loop in virtual time, with a virtual trainer.

The loop is the daemon's own; blobs and messages take their time on virtual links, and arithmetic takes none.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from node.daemon.state.outer_state import blobs_to_apply
from node.from_manifest import build_pacing
from node.loop import events
from node.loop.actions import (
    AdoptState,
    AdvanceState,
    ApplyCommit,
    CloseRound,
    FetchBlob,
    FindPath,
    LoopAction,
    PublishHead,
    ReducePart,
    SendReply,
    StartTrainer,
    TakeState,
    TargetReached,
)
from node.loop.contributions import ContributionTracker, StoredContribution
from node.loop.options import LoopOptions, RoundOptions, SyncOptions
from node.loop.peers.catch_up import SyncOffer
from node.loop.round_loop import RoundLoop
from node.loop.round_session import RoundSession
from node.loop.steering import Steering
from node.simulation.accounting import ContributionEnd
from node.simulation.shared_compute import KEPT_ROUNDS, AppliedState
from node.simulation.virtual.audits import PeerAudits
from node.simulation.virtual.downloads import VirtualDownloads
from node.simulation.virtual.trainer import VirtualTrainer
from node.step_settings import step_settings
from node.trainer.ipc.channel import ContributionOutcome
from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain
from protocol.consensus.events import PartReduced, Rejected, RequestEarlySubmit, Send, VoteRecord
from protocol.consensus.fork_choice import ChainOffer
from protocol.consensus.messages.contributions import PartBlob
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId
from protocol.recent import RecentTable
from protocol.steering import RevisionLog

if TYPE_CHECKING:
    from node.simulation.swarm import VirtualSwarm

MAX_SHOWN_STATES = 4


class VirtualPeer:
    """A peer on one machine and link, its slot. A peer that comes back is a new one on the old slot."""

    def __init__(self, peer_id: PeerId, slot: int, swarm: "VirtualSwarm") -> None:
        self.peer_id = peer_id
        self.slot = slot
        self.swarm = swarm
        self.is_alive = True
        self._reaction = swarm.config.reaction_seconds(slot)
        self.chain = Chain.from_genesis(swarm.run_id, swarm.config.manifest.admission)
        self.applied_state: AppliedState = swarm.compute.initial
        self.audits = None if swarm.audits is None else PeerAudits(swarm.audits, peer_id)
        self.held_since: dict[Digest, int] = {}  # by round of ours
        self.shown_states = RecentTable[Blob, AppliedState](MAX_SHOWN_STATES)  # kept for peers that fetch them
        self.contributions = ContributionTracker(swarm.planner)
        self.trainer: VirtualTrainer | None = None
        self._pacing = build_pacing(swarm.config.manifest, swarm.planner)
        self.loop = self._build_loop()
        self._inbox: list[events.LoopEvent] = []
        self._results: list[events.LoopEvent] = []  # of what takes no time
        self._is_handling = False
        self._downloads = VirtualDownloads(self)
        self._fetches: dict[PartBlob, FetchBlob] = {}  # of the open round
        self._obtaining: ApplyCommit | None = None
        self._computed: AppliedState | None = None
        self._is_stepping = False
        self._unapplied_outcome: ContributionOutcome | None = None
        self._tick_at = 0.0

    def _build_loop(self) -> RoundLoop:
        swarm = self.swarm
        options = RoundOptions(self.peer_id, swarm.round_settings, swarm.limits)
        session = RoundSession(options, swarm.fake_signer.signer_for(self.peer_id), self._pacing, None)
        return RoundLoop(
            LoopOptions(
                options,
                Steering(swarm.manifest_with_target, self.chain, RevisionLog()),
                has_contacts=swarm.config.peers > 1,
                sync=SyncOptions(compares_states=False),
            ),
            self.chain,
            self.applied_state[1].digest,
            self.contributions,
            session,
        )

    @property
    def is_done(self) -> bool:
        return self.loop.steering.is_target_reached or self.loop.is_done

    @property
    def kept_states(self) -> dict[Blob, AppliedState]:
        """Return the states that other peers may fetch, by blob."""
        return {**self.shown_states, self.applied_state[1]: self.applied_state}

    def start(self) -> None:
        """Join the run."""
        if self.is_alive:
            self._handle([events.SwarmChanged(self.swarm.gossip.snapshot), events.Started()])

    def receive(self, signed: wire.Signed) -> None:
        if self.is_alive:
            self.post(self.swarm.fake_signer.received_event(signed))

    def post(self, event: events.LoopEvent) -> None:
        """Hand an event to the loop, together with what else comes in at that time."""
        if not self._inbox:
            self.call_later(self._reaction, self._drain_inbox)
        self._inbox.append(event)

    def _drain_inbox(self) -> None:
        batch, self._inbox = self._inbox, []
        self._handle(batch)

    def _result(self, event: events.LoopEvent) -> None:
        """Hand an event to the loop at once."""
        self._results.append(event)
        if not self._is_handling:
            self._handle([])

    def _handle(self, batch: list[events.LoopEvent]) -> None:
        self._is_handling = True
        batch, self._results = [*batch, *self._results], []
        started = time.process_time()
        actions = self.loop.handle_all(batch, self.swarm.clock.now)
        self.swarm.accounting.logic_seconds += time.process_time() - started
        self._run_all(actions)
        while self._results:
            batch, self._results = self._results, []
            self._run_all(self.loop.handle_all(batch, self.swarm.clock.now))
        self._is_handling = False
        self._schedule_tick()

    def _run_all(self, actions: list[LoopAction]) -> None:
        for action in actions:
            self._run_action(action)

    def _schedule_tick(self) -> None:
        now = self.swarm.clock.now
        deadline = self.loop.next_deadline(now)
        if deadline is not None and not now < self._tick_at <= deadline:
            self._tick_at = deadline
            self.call_later(deadline - now, partial(self._tick, deadline))

    def _tick(self, deadline: float) -> None:
        if deadline == self._tick_at:
            self.post(events.TimePassed())

    def _run_action(self, action: LoopAction) -> None:
        match action:
            case Send(peers, signed):
                self.swarm.send(self, peers, signed)
            case SendReply(peer, messages):
                for signed in messages:
                    self.swarm.send(self, [peer], signed)
            case FetchBlob():
                self._fetch(action)
            case ReducePart():
                self._reduce(action)
            case VoteRecord():
                self._results.append(events.VotePersisted())
            case CloseRound():
                self._fetches.clear()
            case Rejected():
                self.swarm.accounting.rejections[action.reason] += 1
            case RequestEarlySubmit():
                self._submit_early()
            case TargetReached(_, is_ours) if not is_ours:
                self.swarm.check_end()
            case StartTrainer() | TargetReached():
                self._start_trainer()
            case _:
                self._change_state(action)

    def _change_state(self, action: LoopAction) -> None:
        match action:
            case ApplyCommit():
                self._obtain(action)
            case AdvanceState():
                self._advance(action)
            case PublishHead():
                self._on_new_head()
            case FindPath():
                self.call_later(2 * self.swarm.network.latency, partial(self._find_path, action))
            case TakeState():
                self._take_state(action)
            case AdoptState(_, verdict):
                self._settle(verdict.outcome)
                self._on_new_head()

    def _fetch(self, action: FetchBlob) -> None:
        self._fetches[action.part_blob] = action
        if action.part_blob.blob.digest in self.held_since:
            return self._on_held(action.part_blob)
        self._downloads.request(action.part_blob, action.sources)

    def on_blob(self, part_blob: PartBlob) -> None:
        """Take a blob that has arrived."""
        if self.swarm.compute.is_well_formed(part_blob.blob, self.chain.round, part_blob.part):
            self.held_since[part_blob.blob.digest] = self.chain.round
            self._on_held(part_blob)
        elif action := self._fetches.get(part_blob):
            self.post(events.BlobMissing(action.opening, action.owners, "does not decode"))
        self._apply_when_obtained()

    def on_no_holder(self, part_blob: PartBlob) -> bool:
        """Return whether to ask again later for a blob that nobody has: while its round is open."""
        if part_blob in self._fetches:
            return True
        self._apply_when_obtained()
        return False

    def _on_held(self, part_blob: PartBlob) -> None:
        action = self._fetches.pop(part_blob, None)
        if action and self.swarm.compute.is_well_formed(part_blob.blob, action.round, part_blob.part):
            self.post(events.BlobFetched(action.opening, part_blob))

    def _reduce(self, action: ReducePart) -> None:
        order = action.order
        bodies = [contribution.body for contribution in order.contributions]
        blob = self.swarm.compute.reduce_part(action.round, order.part, bodies)
        self.held_since[blob.digest] = self.chain.round
        self.post(events.SumReady(action.opening, PartReduced(order.part, order.request_id, blob)))

    # The state.

    def _obtain(self, action: ApplyCommit) -> None:
        self.swarm.accounting.replays += self.loop.is_syncing
        others = tuple(sorted(self.swarm.peers.keys() - {self.peer_id}))
        commit = action.commit.body
        for place, blob in enumerate(blobs_to_apply(commit, action.contributions)):
            if blob.digest not in self.held_since:  # a reduced part, or a whole contribution
                self._downloads.request(PartBlob(blob, place if commit.parts else 0), others)
        self._obtaining = action
        self._apply_when_obtained()

    def _apply_when_obtained(self) -> None:
        """Compute the next state, if all that it takes is here; a partner's contribution may have died with it."""
        action = self._obtaining
        if action is None:
            return
        contributions, awaited = action.contributions, self._downloads.awaited
        if action.may_lose:
            here = awaited | self.held_since.keys()
            contributions = tuple(entry for entry in contributions if entry.body.parts[0].digest in here)
        lacking = {blob.digest for blob in blobs_to_apply(action.commit.body, contributions)} - self.held_since.keys()
        if lacking & awaited:
            return
        self._obtaining = None
        if lacking:
            return self._result(events.ApplyFailed("nobody has it any more"))
        self._computed = self.swarm.compute.apply_commit(
            self.applied_state, action.commit.body, contributions, self.chain.tokens
        )
        self._result(events.CommitComputed(contributions))

    def _advance(self, action: AdvanceState) -> None:
        assert self._computed is not None
        self.applied_state, self._computed = self._computed, None
        self.chain.append(action.commit)
        self.swarm.record_commit(action.commit.body)
        self._settle(action.verdict.outcome)
        self._results.append(events.CommitApplied(self.applied_state[1].digest))

    def _find_path(self, action: FindPath) -> None:
        peer = self.swarm.peers.get(action.peer)
        if peer is None or not peer.is_alive:
            return self._result(events.SyncFailed("it does not answer"))
        chain = ChainOffer(peer.chain.log, peer.chain.head)
        peer.shown_states[peer.applied_state[1]] = peer.applied_state
        # A newcomer has a contact, which is on this chain.
        self._result(events.PathFound(SyncOffer(chain, peer.applied_state[1], word=True)))

    def _take_state(self, action: TakeState) -> None:
        """Take the state from the holder whose uplink is free first."""
        network, peers = self.swarm.network, self.swarm.peers.values()
        holders = [peer for peer in peers if peer.is_alive and action.state in peer.kept_states]
        if not holders:
            return self._results.append(events.SyncFailed("nobody has it any more", has_vanished=True))
        source = min(holders, key=lambda peer: network.backlog_seconds(peer.slot))
        applied = source.kept_states[action.state]  # the source keeps it for as long as that takes

        def install() -> None:
            if not source.is_alive:
                return self._result(events.SyncFailed("its source has died"))
            self.applied_state = applied
            self.chain.switch_to(action.offer.chain.head, action.offer.chain.log)
            self.swarm.accounting.state_syncs += 1
            self._result(events.StateInstalled(applied[1].digest))

        network.send_blob(source.slot, self.slot, action.state.size, self.if_alive(install))

    def _settle(self, outcome: ContributionOutcome) -> None:
        """Note what became of our contribution; the trainer hears of it with the next anchor."""
        if outcome != "none":
            settled = self.contributions.settled[-1].contribution
            end: ContributionEnd = "given back" if outcome == "excluded" else outcome
            self.swarm.accounting.record_end(self.peer_id, settled.header.round, end)
        if self._unapplied_outcome in (None, "none"):  # an outcome that the trainer has not heard yet stays
            self._unapplied_outcome = outcome

    def _on_new_head(self) -> None:
        number = self.chain.round
        self.swarm.compute.begin_round(number)
        self.held_since = {digest: since for digest, since in self.held_since.items() if since >= number - KEPT_ROUNDS}
        self.swarm.on_new_head(self)
        if self.audits is not None:
            self.audits.on_new_head(self.chain, self.applied_state[0])
        self._results.append(events.HeadPublished())
        self.continue_training()

    # The trainer.

    def _start_trainer(self) -> None:
        if self.trainer is None:
            self.trainer = self.swarm.new_trainer(self)
            self._unapplied_outcome = None
        self._results.append(events.TrainerStarted())
        self.continue_training()

    def continue_training(self) -> None:
        """Do what the trainer does next."""
        trainer = self.trainer
        if trainer is None or self._is_stepping or not self.is_alive:
            return
        if self._unapplied_outcome is not None and trainer.may_apply_anchor():
            self._apply_anchor(trainer, self._unapplied_outcome)
        if self.is_done:
            return
        if trainer.is_contribution_due(self.swarm.steps_to_target(self.chain.tokens), self.swarm.clock.now):
            self._store_contribution(trainer)
        if not trainer.must_wait():
            self._is_stepping = True
            self.swarm.begin_step(self)

    def _apply_anchor(self, trainer: VirtualTrainer, outcome: ContributionOutcome) -> None:
        shared = self.applied_state[0].shared_vectors(self.swarm.method)
        revised = [entry for entry in self.contributions.settled if entry.previous_outcome is not None]
        trainer.apply_anchor(self.chain.round, shared, outcome, revised, self.swarm.compute.read_payloads)
        trainer.use_settings(step_settings(self.swarm.manifest_with_target, self.chain.round, self.chain.tokens))
        trainer.step_target.set(self.chain.round, self._pacing.steps_for(self.chain.round))
        self._unapplied_outcome = None
        self.swarm.on_anchor(self)

    def on_step(self) -> None:
        """Make the inner step that `begin_step` began."""
        assert self.trainer is not None
        self._is_stepping = False
        self.trainer.step()
        step = self.trainer.state.counters.step
        self._pacing.record_steps(step, self.swarm.training_seconds(self, step))
        self.swarm.on_step(self)
        self.continue_training()

    def _submit_early(self) -> None:
        self.swarm.accounting.rejections["hurried"] += 1
        if self.trainer is not None:
            self.trainer.step_target.set(self.chain.round, 1)
            self.swarm.hurry(self)
            self.continue_training()

    def _store_contribution(self, trainer: VirtualTrainer) -> None:
        header, payloads = trainer.make_contribution()
        parts = tuple(self.swarm.compute.put(payload) for payload in payloads)
        self.held_since.update((blob.digest, self.chain.round) for blob in parts)
        work = None if self.audits is None else self.audits.record_work(trainer, header)
        self.contributions.submit(StoredContribution(header, parts, work))
        self.swarm.on_contribution(self, header.round)
        self.swarm.accounting.record_contribution(self.peer_id, header, parts)
        self.post(events.ContributionReady())

    def call_later(self, delay: float, action: Callable[[], None]) -> None:
        self.swarm.clock.schedule(delay, self.if_alive(action))

    def if_alive(self, action: Callable[[], None]) -> Callable[[], None]:
        def act() -> None:
            if self.is_alive:
                action()

        return act

    def die(self) -> None:
        self.is_alive = False
        self.swarm.on_death(self)
        self.trainer = None
