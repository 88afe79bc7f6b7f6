"""Build and run one replica of a node: what it holds, its peers, its work, and the round loop that moves them."""

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from google.protobuf.message import Message

from node.daemon.effects import Effects, RoundEffects, VoteEffects
from node.daemon.inbox import Inbox
from node.daemon.node_network import NodeNetwork
from node.daemon.peers.replica_peers import ReplicaPeers
from node.daemon.replica_work import ReplicaWork
from node.daemon.state.replica_state import ReplicaState
from node.daemon.state_effects import StateEffects
from node.from_manifest import build_node_program, build_pacing, exact_options, round_settings_by_number
from node.loop.events import RevisionsChanged, SwarmChanged
from node.loop.options import LoopOptions, RoundOptions, SyncOptions
from node.loop.round_loop import RoundLoop
from node.loop.round_session import RoundSession
from node.monitoring.status import first_status
from node.monitoring.status_reporter import StatusReporter
from node.own_ticket import load_own_ticket
from node.processes.workers import RunInThread, Workers
from node.run_dir import RunDir
from optim.kernels.warmup import warm_up
from optim.method import Method
from optim.round_plan import RoundPlanner
from protocol.manifest.run import Manifest
from protocol.membership.peer_table import MembershipEvent, PeerLeft
from protocol.membership.record_fields import losses_by_source
from protocol.murmur_pb2 import Signed
from protocol.signing import sign
from protocol.tasks import cancel_and_wait

logger = logging.getLogger(__name__)

SLOW_COMPILE_SECONDS = 5.0  # a shorter warm-up found the kernels compiled


class Replica:
    """One run that this node trains, in its own folder; it shares the network of `node` with other replicas."""

    @classmethod
    async def build(cls, node: NodeNetwork, manifest: Manifest, run_dir: RunDir, workers: Workers) -> "Replica":
        """Build a replica from its folder. Raises MurmurError."""
        options = node.options
        planner = build_node_program(manifest, options.memory_mode, own_loop=options.own_loop)
        await _compile_kernels(planner.method, workers.compute)
        return cls(node, manifest, run_dir, planner, workers)

    def __init__(
        self, node: NodeNetwork, manifest: Manifest, run_dir: RunDir, planner: RoundPlanner, workers: Workers
    ) -> None:
        self.manifest = manifest
        self.run_id = manifest.run_id
        self._node = node
        self.inbox = inbox = Inbox()
        self.status_reporter = status = StatusReporter(
            first_status(manifest, node.peer_id, node.options.name), node.metrics
        )
        self.state = state = ReplicaState(node, manifest, run_dir, planner, workers, status)
        self.peers = peers = ReplicaPeers(node, state, inbox, status)
        self.loop = _build_loop(node, state)
        state.served_chain = replace(state.served_chain, decided=self.loop.decided_commit)
        self.work = ReplicaWork(node, state, peers, self.loop, inbox, status)
        votes = VoteEffects(state.store, state.vote_log, state.proof_file, state.conviction_file, inbox)
        self.effects = Effects(
            self.loop,
            inbox,
            peers.receiver,
            peers.outbox,
            RoundEffects(peers.downloads, state.compute, workers.compute, votes, inbox, status),
            StateEffects(state, peers, self.work, inbox, status),
        )
        self._finishing: asyncio.Task[None] | None = None
        status.add_source(self)
        status.set_head(state.replicated.chain.head, state.replicated.blob.digest)
        status.set_revisions(state.steering.revisions_in_force, state.replicated.chain.round)

    def announce(self) -> None:
        """Announce our head to the peers of the run and follow theirs; call it on the network."""
        if self.state.has_state:
            self.peers.swarm_view.announce_head(self.state.replicated.chain, self.state.replicated.blob.digest)
        self._node.directory.subscribe(self)
        self.work.open()
        if self._node.stage_chains is not None and self.work.stage is not None:
            self._node.stage_chains.subscribe(self)
            self._node.stage_chains.subscribe(self.work.stage)
        self.state.revisions.subscribe(self.on_revisions_changed)
        self.inbox.post(SwarmChanged(self.peers.swarm_view.snapshot()))

    async def run(self) -> None:
        """Take part until the target, and stay until nobody needs our final state any more.

        Raises the error of a trainer that cannot be restarted.
        """
        rounds = asyncio.create_task(self.effects.run())
        failure = asyncio.create_task(self.work.trainer.wait_finished())
        try:
            await asyncio.wait({rounds, failure}, return_when=asyncio.FIRST_COMPLETED)
            for task in (rounds, failure):
                if task.done():
                    await task
        finally:
            await cancel_and_wait((rounds, failure))
        await self.finish()
        await self.inbox.wait_until_left()

    async def finish(self) -> None:
        """Stop the trainer and save. May be repeated; continues if a caller is cancelled."""
        if self._finishing is None:
            self._finishing = asyncio.create_task(self._finish(), name="finish")
        await asyncio.shield(self._finishing)

    async def _finish(self) -> None:
        self.effects.stop()
        reached = self.effects.reached
        await self.work.stop(evaluates=reached is not None)
        if (reached is None or reached.is_ours) and not self.loop.lacks_state:
            await self.work.checkpointer.save_now(self.state.replicated, self.state.contributions)
        await self.peers.outbox.stop()

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        for event in events:
            if isinstance(event, PeerLeft):
                self.peers.outbox.drop_peer(event.peer)
        self.adopt_final_loss()
        self.inbox.post(SwarmChanged(self.peers.swarm_view.snapshot()))

    def adopt_final_loss(self) -> None:
        """Show the validation loss of the final model as its peer has measured it, once the run is over."""
        if (reached := self.effects.reached) is None:
            return
        record = self.peers.swarm_view.newest_validation(reached.head.round)
        if record is not None and record.validation_round > (self.status_reporter.status().validation_round or 0):
            names = [source.name for source in self.manifest.data.sources]
            by_source = losses_by_source(record.validation_by_source, names)
            self.status_reporter.adopt_validation(record.validation_round, record.validation_loss, by_source)

    def on_revisions_changed(self) -> None:
        self.inbox.post(RevisionsChanged())

    def status_fields(self) -> Mapping[str, object]:
        state, peers = self.state, self.peers
        chain = state.replicated.chain
        target = state.steering.manifest_at(chain.round).target
        return {
            "target_rounds": target.rounds,
            "target_tokens": target.tokens,
            "revisions": state.revisions.describe(),
            "bytes_carried": peers.relay.bytes_relayed,
            "alone": peers.swarm_view.is_isolated(),
            "has_vote": chain.electorate.has_vote(self._node.peer_id),
            "trust": str(state.served_chain.trust_point or ""),
            **self.work.status_fields(),
        }


async def _compile_kernels(method: Method, run_in_thread: RunInThread) -> None:
    """Compile the kernels of a method in a thread, and log it if it takes long."""
    text = "compiling the kernels of this run, once for this machine; it may take a minute"
    notice = asyncio.get_running_loop().call_later(SLOW_COMPILE_SECONDS, logger.info, text)
    try:
        await run_in_thread(warm_up, method)
    finally:
        notice.cancel()


def _build_loop(node: NodeNetwork, state: ReplicaState) -> RoundLoop:
    manifest, identity, given = state.manifest, node.identity, node.options
    settings = round_settings_by_number(state.steering, state.planner)
    ticket = load_own_ticket(manifest, RunDir(given.folder), identity.peer_id)
    options = RoundOptions(identity.peer_id, settings, state.limits, secrets.token_bytes(32), ticket)

    def sign_message(kind: str, body: Message) -> Signed:
        return sign(identity, kind, state.run_id, body)

    pacing = build_pacing(manifest, state.planner)
    return RoundLoop(
        LoopOptions(
            options,
            state.steering,
            min_peers=max(1, manifest.run.min_peers // manifest.pipeline.stages),
            expiry=manifest.membership.expiry,
            has_contacts=bool(given.contacts),
            sync=SyncOptions(
                state.has_shared_state, given.trust, given.requires_trust, given.accept_jump, not state.has_state
            ),
            state_bytes=state.state_bytes,
            stays=given.stays,
            proofs=tuple(state.proof_file.load()),
            convictions=tuple(state.conviction_file.load()),
            exact=exact_options(manifest),
            was_copied=RunDir(given.folder).was_copied(),
        ),
        state.replicated.chain,
        state.replicated.blob.digest,
        state.contributions,
        RoundSession(options, sign_message, pacing, state.vote_log.load()),
    )
