"""The daemon's side of a virtual peer: rounds one after the other, blobs, the trainer kept in step.

It drives the same machine as a daemon and answers to it in the same way (see node.daemon.effects and
node.daemon.round_loop); what takes a daemon time on the network takes it virtual time here, and arithmetic takes none.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from node.daemon.chain_sync import SYNC_AFTER_SECONDS, should_sync
from node.daemon.contributions import ContributionTracker, StoredContribution
from node.daemon.outer_state import SignedContributions, blobs_to_apply
from node.from_manifest import build_pacing
from node.ipc.channel import ContributionOutcome
from node.simulation.accounting import Accounting, ContributionEnd
from node.simulation.config import SimulationConfig
from node.simulation.fake_signer import FakeSigner
from node.simulation.shared_compute import KEPT_ROUNDS, AppliedState, SharedCompute
from node.simulation.virtual_gossip import VirtualGossip
from node.simulation.virtual_network import VirtualClock, VirtualNetwork
from node.simulation.virtual_trainer import VirtualTrainer
from optim.method import Method
from optim.round_plan import RoundPlanner
from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain, ChainHead
from protocol.consensus.events import (
    Action,
    BlobAvailable,
    Event,
    Fetch,
    Finish,
    LocalContribution,
    MembershipChanged,
    MessageReceived,
    PartReduced,
    Reduce,
    Rejected,
    RequestEarlySubmit,
    Send,
    Tick,
)
from protocol.consensus.machine import RoundMachine
from protocol.consensus.message_buffer import MessageBuffer
from protocol.consensus.messages import Commit, ContributionLimits, Digest, PartBlob, SignedMessage
from protocol.consensus.settings import RoundSettings
from protocol.identity import PeerId
from protocol.manifest import RunId

REACTION_SECONDS = 0.01  # virtual seconds in which a peer gathers what came in before it looks at it
RETRY_SECONDS = 0.2  # until it asks again for a blob that nobody had


class SwarmServices(Protocol):
    """What a peer asks of the swarm that it is in, and tells it."""

    config: SimulationConfig
    method: Method
    planner: RoundPlanner
    run_id: RunId
    clock: VirtualClock
    network: VirtualNetwork
    accounting: Accounting
    gossip: VirtualGossip
    fake_signer: FakeSigner
    compute: SharedCompute
    limits: ContributionLimits
    round_settings: Callable[[int], RoundSettings]
    peers: dict[PeerId, "VirtualPeer"]

    def send(self, sender: "VirtualPeer", receivers: Iterable[PeerId], signed: wire.Signed) -> None: ...

    def new_trainer(self, peer: "VirtualPeer") -> VirtualTrainer: ...

    def steps_to_target(self, tokens: int) -> int: ...

    def on_step(self, peer: "VirtualPeer") -> None: ...

    def on_new_head(self, peer: "VirtualPeer") -> None: ...


class VirtualPeer:
    """`slot`: which machine and link it has. A peer that comes back is a new one on the old slot."""

    def __init__(self, peer_id: PeerId, slot: int, swarm: SwarmServices) -> None:
        self.peer_id = peer_id
        self.slot = slot
        self.swarm = swarm
        self.is_alive = True
        self.chain = Chain.from_genesis(swarm.run_id)
        self.applied_state: AppliedState = swarm.compute.initial
        self.held_since: dict[Digest, int] = {}  # since which round of ours
        self.contributions = ContributionTracker(swarm.planner)
        self.trainer: VirtualTrainer | None = None
        self._machine: RoundMachine | None = None
        self._last_seen: dict[PeerId, float] | None = None
        self._live: frozenset[PeerId] = frozenset()
        self._inbox: list[Event] = []
        self._message_buffer = MessageBuffer(swarm.round_settings(0).leader_timeout)
        self._pacing = build_pacing(swarm.config.manifest, swarm.planner)
        self._downloads: dict[PartBlob, tuple[PeerId, ...]] = {}
        self._pending_commit: SignedMessage[Commit] | None = None  # decided, but not all its blobs are here
        self._behind_since: float | None = None
        self._is_syncing = self._is_stepping = False
        self._unapplied_outcome: ContributionOutcome | None = None
        self._tick_at = 0.0

    @property
    def is_done(self) -> bool:
        return self.chain.tokens >= self.swarm.config.target_tokens

    def begin_round(self) -> None:
        """Open the next round on our chain, and go on training."""
        swarm, head = self.swarm, self.chain.head
        if self.is_done:
            return self.continue_training()  # adopts the last anchor
        swarm.compute.begin_round(head.round)
        self.held_since = {
            digest: since for digest, since in self.held_since.items() if since >= head.round - KEPT_ROUNDS
        }
        now = swarm.clock.now
        seen = self._last_seen if self._last_seen is not None else dict.fromkeys(swarm.gossip.peers, now)
        self._inbox.clear()
        self._live = frozenset()
        self._tick_at = 0.0
        self._machine = RoundMachine(
            swarm.round_settings(head.round),
            self.peer_id,
            head.round,
            head.digest,
            swarm.fake_signer.signer_for(self.peer_id),
            now,
            seen,
            early_submit_policy=self._pacing.early_submit_policy,
        )
        self._pacing.open_round(head.round, now)
        self.refresh()
        for statement in self._message_buffer.open_round(head.round):
            self._post(MessageReceived(statement))
        self._submit_contribution()
        self.continue_training()

    def _submit_contribution(self) -> None:
        offer = self.contributions.pending
        if offer is not None and self._machine is not None:
            fresh = offer.header.round == self.chain.round
            self._pacing.record_submit(offer.header.steps if fresh else None, self.swarm.clock.now)
            self._post(LocalContribution(offer.to_contribution(self.chain.head, self.swarm.limits)))

    def refresh(self) -> None:
        """What all know of one another has changed, or we have moved."""
        if self._machine is not None:
            last = self.chain.commits_since(max(0, self.chain.round - 1)) or ()
            near = {self.chain.digest, *(commit.body.base for commit in last)}
            live = self.swarm.gossip.peers_at(near)
            live = live if self.peer_id in live else live | {self.peer_id}
            if live != self._live:
                self._live = live
                self._post(MembershipChanged(live))
        self._sync_if_behind()

    def _post(self, event: Event) -> None:
        if not self._inbox:
            self._call_later(REACTION_SECONDS, self._drain_inbox)
        self._inbox.append(event)

    def _drain_inbox(self) -> None:
        events, self._inbox = self._inbox, []
        machine = self._machine
        if machine is None or not events:
            return
        started = time.process_time()
        actions = machine.handle_all(events, self.swarm.clock.now)
        self.swarm.accounting.logic_seconds += time.process_time() - started
        for action in actions:
            self._run_action(action)
        if machine is self._machine:
            self._schedule_tick(machine)

    def _schedule_tick(self, machine: RoundMachine) -> None:
        now = self.swarm.clock.now
        deadline = machine.next_deadline(now)
        if deadline is not None and not now < self._tick_at <= deadline:
            self._tick_at = deadline
            self._call_later(deadline - now, lambda: self._tick(machine, deadline))

    def _tick(self, machine: RoundMachine, deadline: float) -> None:
        if machine is self._machine and deadline == self._tick_at:
            self._post(Tick())

    def _run_action(self, action: Action) -> None:
        match action:
            case Send(peers, signed):
                self.swarm.send(self, peers, signed)
            case Fetch(portion, sources):
                self._download(portion, sources)
            case Reduce():
                self._reduce(action)
            case Finish(commit):
                self._on_decision(commit)
            case RequestEarlySubmit():
                self._submit_early()
            case Rejected():
                self.swarm.accounting.rejections[action.reason] += 1

    def _submit_early(self) -> None:
        self._pacing.record_early_request(self.swarm.clock.now)
        self.swarm.accounting.rejections["hurried"] += 1
        if self.trainer is not None:
            self.trainer.step_target.set(self.chain.round, 1)
            self.continue_training()

    def _reduce(self, order: Reduce) -> None:
        contributions = [contribution.body for contribution in order.contributions]
        blob = self.swarm.compute.reduce_part(self.chain.round, order.part, contributions)
        self.held_since[blob.digest] = self.chain.round
        self._post(PartReduced(order.part, order.request_id, blob))

    def _on_decision(self, commit: SignedMessage[Commit]) -> None:
        machine = self._machine
        assert machine is not None
        self._last_seen = machine.last_seen
        self._pacing.close_round(machine.arrival_times, commit.body.roster_peers)
        told = self._last_seen if commit.sender == self.peer_id else ()
        self._message_buffer.record_decision(machine.number, machine.signed_decision, told, self.swarm.clock.now)
        self._machine = None
        self._pending_commit = commit
        self.swarm.accounting.record_commit(commit.body)
        others = tuple(sorted(self.swarm.peers.keys() - {self.peer_id}))
        for place, blob in enumerate(blobs_to_apply(commit.body, self._group_contributions(commit.body))):
            if blob.digest not in self.held_since:  # a sum's part, or somebody's message, whole
                self._download(PartBlob(blob, place if commit.body.parts else 0), others)
        self._apply_when_whole()

    def _group_contributions(self, commit: Commit) -> SignedContributions:
        """What of it is for us; a partner's message that died with it is not."""
        topology = self.swarm.round_settings(commit.round).topology
        share = topology.contributions_for(commit, self.peer_id)
        if not topology.may_skip_lost:
            return share
        return tuple(entry for entry in share if self._is_available(entry.body.parts[0]))

    def _is_available(self, blob: Blob) -> bool:
        return any(peer.is_alive and blob.digest in peer.held_since for peer in self.swarm.peers.values())

    def _apply_when_whole(self) -> None:
        commit = self._pending_commit
        if commit is None:
            return
        share = self._group_contributions(commit.body)
        if not all(blob.digest in self.held_since for blob in blobs_to_apply(commit.body, share)):
            return
        self._pending_commit = None
        self.applied_state = self.swarm.compute.apply_commit(self.applied_state, commit.body, share)
        self.chain.append(commit)
        self._on_new_state(
            self.contributions.pending, self.contributions.on_commits(self.peer_id, [commit.body], self.chain.round)
        )

    def _on_new_state(self, contribution: StoredContribution | None, outcome: ContributionOutcome) -> None:
        """A new state is in place; what became of the message that was on its way."""
        self._behind_since = None
        if contribution is not None and outcome != "none":
            end: ContributionEnd = "given back" if outcome == "excluded" else outcome
            self.swarm.accounting.record_end(self.peer_id, contribution.header.round, end)
        self.swarm.on_new_head(self)
        if self.trainer is None:
            self.trainer = self.swarm.new_trainer(self)
        elif self._unapplied_outcome in (None, "none"):  # a fate that the trainer has not heard yet stays
            self._unapplied_outcome = outcome
        self.begin_round()

    def receive(self, signed: wire.Signed) -> None:
        """A statement; whoever still asks about a round that is decided is answered with the decision."""
        if not self.is_alive:
            return
        received = self.swarm.fake_signer.received_event(signed)
        statement, ahead = received.message, received.message.body.round - self.chain.head.round
        if ahead == 0 and self._machine is not None:
            self._post(received)
        elif ahead == 1:
            self._message_buffer.buffer_early(statement)
        elif self._message_buffer.is_late(statement):
            for answer in self._message_buffer.answer_late(
                statement.body.round, statement.sender, self.swarm.clock.now
            ):
                self.swarm.send(self, [statement.sender], answer)

    def _download(self, portion: PartBlob, sources: tuple[PeerId, ...]) -> None:
        if portion.blob.digest in self.held_since:
            return self._accept_blob(portion)
        fresh, self._downloads[portion] = portion not in self._downloads, sources
        if fresh:
            self._request_blob(portion)

    def _request_blob(self, portion: PartBlob) -> None:
        """Of those who have it, the one whose uplink is free first: a daemon asks several at once."""
        links, peers, blob = self.swarm.network, self.swarm.peers, portion.blob
        found = (peers[name] for name in self._downloads[portion] if name in peers)
        holders = [peer for peer in found if peer.is_alive and blob.digest in peer.held_since]
        if not holders:
            self._call_later(RETRY_SECONDS, lambda: self._request_blob(portion))
            self._apply_when_whole()
            return
        source = min(holders, key=lambda peer: links.backlog_seconds(peer.slot))
        links.send_blob(source.slot, self.slot, blob.size, self._if_alive(lambda: self._on_blob(portion, source)))

    def _on_blob(self, portion: PartBlob, source: "VirtualPeer") -> None:
        if not source.is_alive:
            return self._request_blob(portion)
        self._downloads.pop(portion, None)
        self._accept_blob(portion)

    def _accept_blob(self, portion: PartBlob) -> None:
        if self.swarm.compute.is_well_formed(portion.blob, self.chain.round, portion.part):
            self.held_since[portion.blob.digest] = self.chain.round
            self._post(BlobAvailable(portion))
            self._apply_when_whole()

    def _sync_if_behind(self) -> None:
        """Take the state over where others are ahead and the commit does not come by itself."""
        swarm = self.swarm
        head = swarm.gossip.best_head(self.chain.head)
        if head is None or self._is_syncing or self._pending_commit is not None:
            self._behind_since = None if head is None else self._behind_since
            return
        now = swarm.clock.now
        if self._behind_since is None:
            self._behind_since = now
            self._call_later(SYNC_AFTER_SECONDS, self._sync_if_behind)
        if self.trainer is None or should_sync(self.chain.head, head, now - self._behind_since):
            self._start_sync()

    def _start_sync(self) -> None:
        """From the peer that is furthest, among those the one whose uplink is free first."""
        swarm = self.swarm
        best = max((peer for peer in swarm.peers.values() if peer.is_alive), key=lambda peer: peer.chain.tokens)
        if best.chain.head == self.chain.head:
            return  # whoever was further has died
        level = [peer for peer in swarm.peers.values() if peer.is_alive and peer.chain.head == best.chain.head]
        source = min(level, key=lambda peer: swarm.network.backlog_seconds(peer.slot))
        since = self.contributions.history_needed_since(self.chain.round)
        head, applied, commits = source.chain.head, source.applied_state, source.chain.commits_since(since) or ()
        self._is_syncing = True
        self._machine = None
        self._inbox.clear()
        swarm.accounting.state_syncs += 1
        arrived = self._if_alive(lambda: self._finish_sync(source, head, commits, applied))
        swarm.network.send_blob(source.slot, self.slot, applied[1].size, arrived)

    def _finish_sync(
        self, source: "VirtualPeer", head: ChainHead, commits: Sequence[SignedMessage[Commit]], applied: AppliedState
    ) -> None:
        self._is_syncing = False
        if not source.is_alive:
            return self._sync_if_behind()
        self.applied_state = applied  # who gives it out keeps it for as long as that takes
        offer, bodies, left = self.contributions.pending, [commit.body for commit in commits], self.chain.head
        self.chain.switch_to(head, commits)
        self._on_new_state(offer, self.contributions.on_fork(self.peer_id, bodies, head.round, left).outcome)

    def continue_training(self) -> None:
        """What the trainer does next."""
        learner = self.trainer
        if learner is None or self._is_stepping or not self.is_alive:
            return
        if self._unapplied_outcome is not None and learner.may_apply_anchor():
            shared, payloads = self.applied_state[0].shared_vectors(self.swarm.method), self.swarm.compute.read_payloads
            revised = [entry for entry in self.contributions.settled if entry.previous_outcome is not None]
            learner.apply_anchor(self.chain.round, shared, self._unapplied_outcome, revised, payloads)
            learner.step_target.set(self.chain.round, self._pacing.steps_for(self.chain.round))
            self._unapplied_outcome = None
        if self.is_done:
            return
        if learner.is_contribution_due(self.swarm.steps_to_target(self.chain.tokens), self.swarm.clock.now):
            self._store_contribution(learner)
        if not learner.must_wait():
            self._is_stepping = True
            self._call_later(1 / self.swarm.config.speeds[self.slot], self._on_step)

    def _on_step(self) -> None:
        assert self.trainer is not None
        self._is_stepping = False
        self.trainer.step()
        step = self.trainer.state.counters.step
        self._pacing.record_steps(step, step / self.swarm.config.speeds[self.slot])
        self.swarm.on_step(self)
        self.continue_training()

    def _store_contribution(self, trainer: VirtualTrainer) -> None:
        message, payloads = trainer.make_contribution()
        parts = tuple(self.swarm.compute.put(payload) for payload in payloads)
        self.held_since.update((blob.digest, self.chain.round) for blob in parts)
        self.contributions.submit(StoredContribution(message, parts))
        self.swarm.accounting.record_contribution(self.peer_id, message, parts)
        self._submit_contribution()

    def _call_later(self, delay: float, action: Callable[[], None]) -> None:
        self.swarm.clock.schedule(delay, self._if_alive(action))

    def _if_alive(self, action: Callable[[], None]) -> Callable[[], None]:
        def act() -> None:
            if self.is_alive:
                action()

        return act

    def die(self) -> None:
        self.is_alive = False
        self._machine = None
        self.trainer = None
        self.swarm.accounting.record_death(self.peer_id)
        self.swarm.gossip.remove(self.peer_id)
