"""The peers of the virtual network: each carries out the actions of its round loop, as the daemon does.

A peer that is killed keeps its disk: its checkpoint (written after every round), its own blobs, its last vote and the
blobs that this requires. All else is memory, and gone.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from node.daemon.state.outer_state import blobs_to_apply
from node.loop import events
from node.loop.actions import (
    AdoptState,
    AdvanceState,
    ApplyCommit,
    CloseRound,
    FetchBlob,
    FetchState,
    FindPath,
    PrecomputeCommit,
    PublishHead,
    ReducePart,
    SaveProofs,
    SendReply,
    StartTrainer,
    TakeState,
)
from node.loop.options import LoopOptions, RoundOptions, SyncOptions
from node.loop.peers.catch_up import SyncOffer
from node.loop.round_loop import RoundLoop
from node.loop.round_session import RoundSession
from node.loop.steering import Steering
from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain, ChainHead
from protocol.consensus.events import Finish, LocalContribution, PartReduced, Rejected, Send, VoteRecord
from protocol.consensus.fork_choice import ChainOffer
from protocol.consensus.messages.contributions import AppliedContributions, Commit, Contribution, PartBlob
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.pacing import Pacing
from protocol.consensus.settings import RoundSettings
from protocol.identity import PeerId
from protocol.steering import RevisionLog, SignedRevision
from tests.simulation.virtual.disk import BlobTransfers, Disk, state_of
from tests.simulation.virtual.gossip import Gossip
from tests.simulation.virtual.messenger import Messenger
from tests.simulation.virtual.network import RUN_ID, Network, fake_reduce, make_signer
from tests.simulation.virtual.organiser import MANIFEST
from tests.simulation.work_accounting import TrainerWork

if TYPE_CHECKING:
    from tests.simulation.virtual.swarm import SimulatedSwarm

HEARTBEAT = 1.0
HEARTBEATS_PER_MEASUREMENT = 4
REDUCE_SECONDS = 0.05
RPC_TIMEOUT = 2.0
KEPT_STATES = 3


class SimulatedPeer(Messenger):
    """A peer with its disk, its work and its records of the others."""

    def __init__(self, name: PeerId, network: Network, swarm: "SimulatedSwarm") -> None:
        super().__init__(name, network, swarm)
        self.progress = TrainerWork(name, network.scenario, swarm.ledger)
        genesis = Chain.from_genesis(RUN_ID, network.scenario.rule)
        self.disk = Disk(set(), genesis.head, genesis.log, self.progress.save())
        self.store: set[Digest] = set()  # blobs, in memory and on disk
        self.gossip = Gossip(self)
        self.heartbeats = 0
        self._build(genesis, None, ())

    @property
    def chain(self) -> Chain:
        return self.loop.chain

    def _build(self, chain: Chain, last_vote: VoteRecord | None, known_voters: Any) -> None:
        """Set all up that a process has in memory."""
        scenario = self.network.scenario
        settings = scenario.settings()
        self.log = RevisionLog()
        for revision in self.disk.revisions:
            self.log.add(revision)
        self.steering = Steering(MANIFEST, chain, self.log)
        options = RoundOptions(self.name, self._settings, scenario.terms())
        pacing = Pacing(settings.grace, lambda number: 10, 10)
        session = RoundSession(options, make_signer(self.name), pacing, last_vote, known_voters)
        sync = SyncOptions(scenario.settings().topology.has_shared_state)
        loop_options = LoopOptions(options, self.steering, sync=sync, proofs=self.disk.proofs)
        self.loop = RoundLoop(loop_options, chain, state_of(chain.head).digest, self.progress.offers, session)
        self.begin_loop()
        self.forget_messages()
        self.transfers = BlobTransfers(self)
        self.fetches: dict[PartBlob, FetchBlob] = {}  # of the open round
        self.newest_vote = last_vote
        self.obtaining: ApplyCommit | None = None
        self.computed: tuple[SignedMessage[Contribution], ...] = ()
        self.recent_states = deque([chain.head], KEPT_STATES)

    def _settings(self, number: int) -> RoundSettings:
        """Return the scenario's settings with the deadlines that the organiser gives the round."""
        timing, settings = self.steering.manifest_at(number).round, self.network.scenario.settings()
        return settings if timing == MANIFEST.round else replace(settings, grace=timing.grace)

    def learn(self, revisions: Iterable[SignedRevision]) -> None:
        """Take over revisions from the organiser or another peer."""
        if [revision for revision in revisions if self.log.add(revision) != "known"]:
            self._save_revisions()
            self.feed(events.RevisionsChanged())

    def _save_revisions(self) -> None:
        self.disk.revisions = self.log.revisions

    def start(self) -> None:
        """Join a run that begins: all peers are there."""
        self._build(self.chain, None, self.swarm.peers)
        self._join()
        self.after(self.network.random.uniform(0, HEARTBEAT), self.send_heartbeat)

    def restart(self) -> None:
        """Start a new process on the old disk."""
        self._life += 1
        disk = self.disk
        self.progress.restore(disk.progress, disk.head.round)
        self.store = set(disk.store)
        self.gossip.records.clear()
        # A run begins only once enough peers are there; a peer that has been in it knows of which.
        known = disk.vote.members if disk.vote else self.swarm.peers
        self._build(Chain(disk.head, disk.log), disk.last_vote(), known)
        self._join()
        self.after(HEARTBEAT, self.send_heartbeat)

    def _join(self) -> None:
        self.feed(events.SwarmChanged(self.gossip.snapshot()))
        self.feed(events.Started())
        self.gossip.broadcast()
        self._schedule_training()

    # The trainer.

    def _schedule_training(self) -> None:
        number = self.chain.round
        if number < self.network.scenario.rounds and self.name != self.swarm.conflicting_peer:
            time = self.network.random.uniform(0.3, 1.0) * self.network.scenario.training
            self.after(time, lambda: self._train(number))

    def _train(self, number: int) -> None:
        if number != self.chain.round:
            return
        self.progress.train(number)
        if (pending := self.progress.offers.pending) is not None:
            digests = {blob.digest for blob in pending.parts}
            self.store |= digests
            self.disk.store |= digests
            self.feed(events.ContributionReady())

    def copy_with_wrong_size(self, contribution: Contribution) -> None:
        """Submit the first contribution of another that comes in a round as our own, but for its sizes."""
        parts = tuple(Blob(blob.digest, blob.size - 1) for blob in contribution.parts)
        self.swarm.invented_blobs.update(parts)
        self.loop.session.feed(LocalContribution(replace(contribution, parts=parts)))
        self.feed(events.TimePassed())

    # The loop.

    def carry_out(self, action: Any) -> None:
        match action:
            case Send(peers, signed):
                for peer in peers:
                    if peer not in self.swarm.strangers:
                        self.send(peer, signed)
            case SendReply(peer, messages):
                for signed in messages:
                    self.send(peer, signed)
            case FetchBlob():
                self.fetches[action.part_blob] = action
                self.transfers.request(action.part_blob, action.sources)
            case CloseRound():
                self.fetches.clear()
                # The end of a round does not stop the downloads of its commit, which a daemon makes apart.
                self.transfers.cancel_all_but(self.swarm.needed(self.obtaining) if self.obtaining else ())
            case ReducePart():
                self._reduce(action)
            case PrecomputeCommit():
                self._check_precompute(action)
            case Rejected(peer, reason):
                self.swarm.rejections.append((self.name, peer, reason))
            case VoteRecord():
                self._write(action)
            case SaveProofs(proofs):
                self.disk.proofs = proofs
            case StartTrainer():
                self.feed(events.TrainerStarted())
            case _:
                self._change_state(action)

    def _change_state(self, action: Any) -> None:
        match action:
            case ApplyCommit():
                self._obtain(action)
            case AdvanceState():
                self._advance(action)
            case PublishHead() | AdoptState():
                self._on_new_head(action)
            case FindPath():
                self.after(self.network.random.uniform(0.02, 0.5), lambda: self._find_path(action))
            case FetchState():
                delay = self.network.random.uniform(0.02, self.network.scenario.transfer)
                self.after(delay, lambda: self.feed(events.StateFetched()))
            case TakeState():
                delay = self.network.random.uniform(0.02, self.network.scenario.transfer)
                self.after(delay, lambda: self._take_state(action))

    def hear(self, message: SignedMessage[Any]) -> None:
        is_copied = self.name == self.swarm.conflicting_peer and isinstance(message.body, Contribution)
        if is_copied and self.loop.session.is_open and message.body.round == self.loop.session.number:
            self.copy_with_wrong_size(message.body)
        self.feed(events.MessagesReceived(message.sender, (message,)))

    def _write(self, vote: VoteRecord) -> None:
        self.newest_vote = vote
        longest = self.network.scenario.disk
        if longest == 0.0:
            self._written(vote)
        else:
            self.after(self.network.random.uniform(0.0, longest), lambda: self._written(vote))

    def _written(self, vote: VoteRecord) -> None:
        self.disk.save_vote(vote, self.store)
        self.feed(events.VotePersisted())

    # Blobs.

    def _reduce(self, action: ReducePart) -> None:
        order = action.order
        if not self.swarm.invented_blobs.isdisjoint(entry.body.parts[order.part] for entry in order.contributions):
            return  # the conflicting peer's own: it keeps silent
        assert {entry.body.parts[order.part].digest for entry in order.contributions} <= self.store
        self.after(REDUCE_SECONDS, lambda: self._reduced(action))

    def sum_of(self, part: int, contributions: tuple[SignedMessage[Contribution], ...]) -> Blob:
        """Return the blob of a sum."""
        return fake_reduce(part, contributions)

    def serves(self, digest: Digest) -> bool:
        """Return whether others can fetch a blob from this peer."""
        return digest in self.store

    def _reduced(self, action: ReducePart) -> None:
        order = action.order
        blob = self.sum_of(order.part, order.contributions)
        self.swarm.ledger.sums[blob.digest] = [entry.body.parts[order.part] for entry in order.contributions]
        self.store.add(blob.digest)
        self.feed(events.SumReady(action.opening, PartReduced(order.part, order.request_id, blob)))

    def _check_precompute(self, action: PrecomputeCommit) -> None:
        self.swarm.measure_tables(self)  # a round's tables are never fuller
        vote = self.newest_vote
        if vote is not None and vote.lock is not None and vote.lock.body == action.commit:
            return  # it may lack what died with a partner
        lacking = {blob.digest for blob in blobs_to_apply(action.commit, action.contributions)} - self.store
        assert not lacking or self.name == self.swarm.conflicting_peer, "speculated without what it takes"

    def on_blob(self, part_blob: PartBlob) -> None:
        """Take a blob that is here now."""
        self.store.add(part_blob.blob.digest)
        if (action := self.fetches.pop(part_blob, None)) is not None:
            self.feed(events.BlobFetched(action.opening, part_blob))
        self._apply_when_obtained()

    def on_denial(self, part_blob: PartBlob, source: PeerId) -> None:
        """Report a source that lacks a blob, if it is one that has named it itself."""
        action = self.fetches.get(part_blob)
        if action is not None and source in action.owners:
            self.feed(events.BlobMissing(action.opening, (source,), "not served"))

    # The state.

    def _obtain(self, action: ApplyCommit) -> None:
        if not self.loop.is_syncing:
            self.swarm.on_decided(self.name, action.commit.commit, self.certificate_of(action.commit.commit))
        self.obtaining = action
        owners = tuple(entry.sender for entry in action.contributions)
        sources = owners if action.may_lose else tuple(self.swarm.peers)
        for part_blob in self.swarm.needed(action):
            if part_blob.blob.digest not in self.store:
                self.transfers.request(part_blob, tuple(peer for peer in sources if peer != self.name))
        self.after(action.seconds, lambda: self._give_up(action))
        self._apply_when_obtained()

    def certificate_of(self, commit: SignedMessage[Commit]) -> wire.Signed:
        """Return the acknowledgements by which the commit of the last round is decided."""
        machine, number = self.loop.session.machine, commit.body.round
        decision = machine.signed_decision if machine else self.loop.session._buffer._decisions[number]
        return decision[1]

    def unsaid_decisions(self) -> list[SignedMessage[Commit]]:
        """Return what is decided here, though nothing was done about it yet."""
        finished = [action.commit for action in self.loop.session.pending_actions if isinstance(action, Finish)]
        applying = [action.commit.commit for action in self.actions if isinstance(action, ApplyCommit)]
        return finished + ([] if self.loop.is_syncing else applying)

    def _apply_when_obtained(self) -> None:
        if self.obtaining is None:
            return
        needed = {part_blob.blob for part_blob in self.swarm.needed(self.obtaining)}
        if all(blob.digest in self.store for blob in needed) and needed.isdisjoint(self.swarm.invented_blobs):
            self._compute(self.obtaining)

    def _give_up(self, action: ApplyCommit) -> None:
        """What we lack cannot be had: in groups the round goes on without it; otherwise it is opened again."""
        if self.obtaining is not action:
            return
        if action.may_lose:
            self._compute(action)
        else:
            self.obtaining = None
            self.network.record(self.name, "gives up what was decided")
            self.swarm.on_given_up(self.name, action.commit.body)
            self.feed(events.ApplyFailed("it cannot be had"))

    def _compute(self, action: ApplyCommit) -> None:
        self.obtaining = None
        is_reduced = bool(action.commit.body.parts)
        held = [entry for entry in action.contributions if is_reduced or entry.body.parts[0].digest in self.store]
        self.computed = tuple(held)
        self.feed(events.CommitComputed(self.computed))

    def _advance(self, action: AdvanceState) -> None:
        commit = action.commit.body
        self.swarm.ledger.append(self.chain.head, commit)
        self.chain.append(action.commit)
        self.progress.settle(action.verdict.outcome, action.verdict.revised)
        self.feed(events.CommitApplied(state_of(self.chain.head).digest))

    def _find_path(self, action: FindPath) -> None:
        peer, link = self.swarm.peers.get(action.peer), self.network.link
        if peer is None or not (link.can_send(self.name, peer.name) and link.can_send(peer.name, self.name)):
            return self.after(RPC_TIMEOUT, lambda: self.feed(events.SyncFailed("it does not answer")))
        self.feed(events.PathFound(peer.show_chain()))

    def announced_head(self) -> ChainHead:
        """Return the head that our record names."""
        return self.chain.head

    def show_chain(self) -> SyncOffer:
        """Return the answer to another peer that asks for our chain."""
        head, state = self.chain.head, state_of(self.chain.head)
        shared = state.digest if self.network.scenario.settings().topology.has_shared_state else b""
        return SyncOffer(ChainOffer(self.chain.log, head, shared), state, self.steering.adopted)

    def _take_state(self, action: TakeState) -> None:
        link, chain = self.network.link, action.offer.chain
        sources = [self.swarm.peers[name] for name in self.swarm.peers if link.can_send(name, self.name)]
        if not any(chain.head in peer.recent_states for peer in sources if peer is not self):
            return self.feed(events.SyncFailed("nobody has it any more", has_vanished=True))
        self.network.record(self.name, f"takes over the chain at round {chain.head.round}")
        self.chain.switch_to(chain.head, chain.log)
        self.feed(events.StateInstalled(state_of(self.chain.head).digest))

    def _on_new_head(self, action: PublishHead | AdoptState) -> None:
        """Save a checkpoint, announce the head, and go on training."""
        if isinstance(action, AdoptState):
            self.progress.settle(action.verdict.outcome, action.verdict.revised)
        else:
            reported = AppliedContributions.of(action.contributions)
            self.swarm.check_applied(self.name, action.commit, reported, self.store)
        self.disk.head, self.disk.log = self.chain.head, self.chain.log
        self.disk.progress = self.progress.save()
        self._save_revisions()
        self.recent_states.append(self.chain.head)
        self.swarm.on_head_changed(self)
        if isinstance(action, AdoptState) or action.outcome != "included":
            self.gossip.broadcast()  # others see by the commit that we are about to have its head
        self._schedule_training()
        self.feed(events.SwarmChanged(self.gossip.snapshot()))
        self.feed(events.HeadPublished())

    def send_heartbeat(self) -> None:
        self.heartbeats += 1
        if self.heartbeats % HEARTBEATS_PER_MEASUREMENT == 0:
            self.swarm.measure_tables(self)
        self.gossip.broadcast()
        self.feed(events.SwarmChanged(self.gossip.snapshot()))
        if self.swarm.forks_allowed and self.chain.round >= self.network.scenario.rounds and self.gossip.knows_fork():
            self._train(self.chain.round)  # a chain without work gains no votes, and so no followers
        self.after(HEARTBEAT, self.send_heartbeat)
