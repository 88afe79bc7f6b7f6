"""Build one replica of a node: its method, state, round loop, contributions, checkpoints and trainer."""

import asyncio
import secrets
import time
from collections.abc import Collection, Mapping, Sequence

from google.protobuf.message import Message

from node.daemon.audits.auditor import Auditor, AuditTools
from node.daemon.audits.work_keeper import WorkKeeper
from node.daemon.checkpoints.vote_log import VoteLog
from node.daemon.effects import Effects
from node.daemon.inbox import Inbox
from node.daemon.kernels import compile_kernels
from node.daemon.node_parts import NodeParts
from node.daemon.peers.blob_relay import BlobRelay, RelayOptions
from node.daemon.peers.chain_sync import ChainReader, ChainSyncClient
from node.daemon.peers.connections import Connections
from node.daemon.round_effects import RoundEffects, RoundTools
from node.daemon.run_limits import blob_memory_bytes, contribution_limits, max_store_bytes
from node.daemon.services import ServedChain
from node.daemon.stages.build import build_stage, stage_config
from node.daemon.state.checkpointer import Checkpointer, CheckpointerOptions
from node.daemon.state.offered_states import OfferedStates
from node.daemon.state.outer_state import ReplicatedState, RoundCompute, state_bytes
from node.daemon.state.outer_vectors import OuterVectors
from node.daemon.state.proof_file import ProofFile
from node.daemon.state.restoring import RestoreTargets, restore_run
from node.daemon.state_effects import StateEffects, StateTools
from node.daemon.trainer_config import build_trainer_config
from node.daemon.trainer_link import TrainerLink, TrainerTools
from node.disk_budget import choose_budget
from node.from_manifest import (
    build_node_program,
    build_pacing,
    exact_options,
    rate_of_outer_steps,
    round_settings_by_number,
    topology_class,
)
from node.loop.contributions import ContributionFile
from node.loop.events import ContributionReady, RevisionsChanged, SwarmChanged
from node.loop.options import LoopOptions, RoundOptions, SyncOptions
from node.loop.round_loop import RoundLoop
from node.loop.round_session import RoundSession
from node.loop.steering import Steering
from node.model import shapes_of
from node.monitoring.status import first_status
from node.monitoring.status_reporter import StatusReporter
from node.own_ticket import load_own_ticket
from node.processes.workers import BackgroundTasks
from node.run_dir import RunDir
from node.trainer.ipc.channel import (
    AnchorApplied,
    ContributionHeader,
    FromTrainer,
    PauseChanged,
    Ready,
    TrainerProgress,
)
from node.trainer.ipc.own_loop import OwnLoopProcess
from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
from node.trainer.ipc.trainer_process import TrainerProcess
from node.trainer.vectors import TrainerVectors
from optim.round_plan import RoundPlanner
from protocol.blobs.store import BlobStore
from protocol.manifest.run import Manifest
from protocol.membership.peer_table import MembershipEvent, PeerLeft
from protocol.membership.records.fields import MAX_TEXT_CHARACTERS
from protocol.murmur_pb2 import Signed
from protocol.signing import sign
from protocol.tasks import cancel_and_wait


class Replica:
    """One run that this node trains, in its own folder; it shares `node` with other replicas."""

    @classmethod
    async def build(cls, node: NodeParts, manifest: Manifest, run_dir: RunDir) -> "Replica":
        """Build a replica from its folder. Raises MurmurError."""
        options = node.options
        planner = build_node_program(manifest, options.memory_mode, own_loop=options.own_loop)
        await compile_kernels(planner.method, node.workers.compute)
        return cls(node, manifest, run_dir, planner)

    def __init__(self, node: NodeParts, manifest: Manifest, run_dir: RunDir, planner: RoundPlanner) -> None:
        self.manifest = manifest
        self.run_id = manifest.run_id
        self._node = node
        self._run_dir = run_dir
        self._planner = planner
        self._shapes = shapes_of(manifest)
        self._limits = contribution_limits(manifest, planner)
        self._state_bytes = state_bytes(planner.numel, planner.method)
        self.inbox = Inbox()
        self.offered_states = OfferedStates()
        self._background = BackgroundTasks(self.inbox)
        self._finishing: asyncio.Task[None] | None = None
        self.status_reporter = StatusReporter(
            first_status(manifest, node.identity.peer_id, node.options.name), node.metrics
        )
        self._disk_budget = choose_budget(run_dir.path, node.options.disk)
        self._max_store_bytes = min(max_store_bytes(planner), self._disk_budget // 2)
        self.store = BlobStore(run_dir.blobs, self._max_store_bytes, blob_memory_bytes(planner))
        self.shared_memory = SharedMemory.create(SharedLayout.of(planner), run_dir.path)
        self._outer_vectors = OuterVectors(run_dir.path, planner)
        self._restore()
        self._connect()
        self._build_loop()
        self._build_audits()
        self.stage = build_stage(manifest, run_dir, node.stages, node.transport, self._background, self.inbox)
        self._build_trainer()
        self._build_effects()
        self.status_reporter.add_source(self)
        self.status_reporter.set_head(self.replicated.chain.head, self.replicated.blob.digest)
        self.status_reporter.set_revisions(self.steering.revisions_in_force, self.replicated.chain.round)
        node.revisions.adopted = self.replicated.chain.head.revision

    def _restore(self) -> None:
        """Restore the state and the pending contribution from the newest checkpoint."""
        self._contribution_file = ContributionFile(self._run_dir.contribution_file)
        restored = restore_run(
            self.manifest,
            self._planner,
            self._run_dir.checkpoints,
            self._node.options.base,
            RestoreTargets(
                self.shared_memory, self._outer_vectors, self.store, self._contribution_file, self.status_reporter
            ),
        )
        self._contributions, self._has_state = restored.contributions, restored.has_state
        self.steering = Steering(self.manifest, restored.chain, self._node.revisions.log)
        self._compute = RoundCompute(self._planner, self.store, rate_of_outer_steps(self.steering, self._planner))
        workers, method, number = self._node.workers, self._planner.method, restored.chain.round
        shared = restored.state.shared_vectors(method)
        self.shared_memory.write_anchor(number, shared)
        state = restored.state.in_memory(self.shared_memory.anchor_vectors(number, len(shared)), method)
        state = self._outer_vectors.place(number, state)
        self.replicated = ReplicatedState(restored.chain, state, self._compute, workers.compute, workers.low_priority)

    def _connect(self) -> None:
        """Build the components that communicate with the peers of the run, and fetch blobs for them."""
        self.peers = Connections(self._node, self.manifest, self._limits, self.inbox, self.store, self.status_reporter)
        self.blob_relay = BlobRelay(
            RelayOptions(
                run_id=self.run_id,
                limits=self._limits,
                contribution_bytes=self._planner.max_contribution_bytes,
                fetch_seconds=self.manifest.round.exchange_timeout,
            ),
            self.peers.downloader,
            self.store,
            self.replicated.chain,
            self.peers.swarm_view,
        )

    def _build_loop(self) -> None:
        manifest, identity, given = self.manifest, self._node.identity, self._node.options
        shares_state = topology_class(self._planner.method).has_shared_state
        self._pacing = build_pacing(manifest, self._planner)
        self._vote_log = VoteLog(self._run_dir.vote_log, self.run_id, self._limits)
        settings = round_settings_by_number(self.steering, self._planner)
        self._proof_file = ProofFile(self._run_dir.proofs, self.run_id, self._limits)
        ticket = load_own_ticket(manifest, RunDir(self._node.options.folder), identity.peer_id)
        options = RoundOptions(identity.peer_id, settings, self._limits, secrets.token_bytes(32), ticket)

        def sign_message(kind: str, body: Message) -> Signed:
            return sign(identity, kind, manifest.run_id, body)

        self.loop = RoundLoop(
            LoopOptions(
                options,
                self.steering,
                min_peers=max(1, manifest.run.min_peers // manifest.pipeline.stages),
                expiry=manifest.membership.expiry,
                has_contacts=self._node.has_contacts,
                sync=SyncOptions(
                    shares_state, given.trust, given.requires_trust, given.accept_jump, not self._has_state
                ),
                state_bytes=self._state_bytes,
                stays=given.stays,
                proofs=tuple(self._proof_file.load()),
                exact=exact_options(manifest),
            ),
            self.replicated.chain,
            self.replicated.blob.digest,
            self._contributions,
            RoundSession(options, sign_message, self._pacing, self._vote_log.load()),
        )

    def _build_audits(self) -> None:
        self.auditor: Auditor | None = None
        if not self.manifest.audits.share:
            return
        tools = AuditTools(
            identity=self._node.identity,
            planner=self._planner,
            steering=self.steering,
            store=self.store,
            keeper=WorkKeeper(self.store, self.shared_memory),
            fetcher=self.peers.downloads,
            outbox=self.peers.outbox,
            swarm=self.peers.swarm_view,
            conduct=self.loop.conduct.conduct,
            base=self._node.options.base,
            device=self._node.options.device,
        )
        self.auditor = self.peers.receiver.auditor = Auditor(tools, self.inbox)
        self._node.metrics.add_refusal_counter(self.auditor)

    def _build_trainer(self) -> None:
        options, me, number = self._node.options, self._node.identity.peer_id, self.replicated.chain.round
        stage = stage_config(self.stage) if self.stage else None
        trainer_config = build_trainer_config(self.manifest, options, self._run_dir, me, number, stage)
        activations = self.stage.memory if self.stage else None
        self._process = (
            OwnLoopProcess(self.shared_memory, trainer_config, self._run_dir.path)
            if options.own_loop
            else TrainerProcess(self.shared_memory, trainer_config, activations)
        )
        tools = TrainerTools(
            process=self._process,
            shared_memory=self.shared_memory,
            store=self.store,
            contribution_file=self._contribution_file,
            run_in_thread=self._node.workers.compute,
            work_keeper=self.auditor.work_keeper if self.auditor else None,
            stage=self.stage,
            vectors=TrainerVectors(self.shared_memory, self._planner),
        )
        self.trainer = TrainerLink(tools, self._contributions, self._pacing, self, self.status_reporter)
        self.checkpointer = Checkpointer(
            CheckpointerOptions(
                directory=self._run_dir.checkpoints,
                run_id=self.run_id,
                shapes=self._shapes,
                schedule=self.steering.manifest_at(self.replicated.chain.round).checkpoint,
                max_blob_bytes=self._max_store_bytes // 2,
                disk_budget=self._disk_budget,
            ),
            self.store,
            self.shared_memory,
            self.trainer,
            self,
            self.status_reporter,
        )

    def _build_effects(self) -> None:
        method, transport = self._planner.method, self._node.transport
        round_tools = RoundTools(
            store=self.store,
            downloads=self.peers.downloads,
            compute=self._compute,
            run_in_thread=self._node.workers.compute,
            vote_log=self._vote_log,
            proof_file=self._proof_file,
        )
        state_tools = StateTools(
            method=method,
            replicated=self.replicated,
            outer_vectors=self._outer_vectors,
            run_in_thread=self._node.workers.compute,
            trainer=self.trainer,
            checkpointer=self.checkpointer,
            downloads=self.peers.downloads,
            sync_client=ChainSyncClient(
                ChainReader(self.run_id, self._limits, transport.channel, self.manifest.admission),
                self.replicated.chain,
                self._node.options.contact_ids,
                self.peers.swarm_view,
                self._state_bytes,
                topology_class(method).has_shared_state,
            ),
            swarm_view=self.peers.swarm_view,
            steering=self.steering,
            revisions=self._node.revisions,
            auditor=self.auditor,
        )
        self.effects = Effects(
            self.loop,
            self.inbox,
            self.peers.receiver,
            self.peers.outbox,
            RoundEffects(self.inbox, self.status_reporter, round_tools),
            StateEffects(self.inbox, self.status_reporter, state_tools),
            self.stage,
        )

    @property
    def served_chain(self) -> ServedChain:
        """Return the chain as other peers are shown it."""
        has_shared_state = topology_class(self._planner.method).has_shared_state
        return ServedChain(self.replicated, self.steering, has_shared_state)

    def announce(self) -> None:
        """Announce our head to the peers of the run and follow theirs; call it on the network."""
        if self._has_state:
            self.peers.swarm_view.announce_head(self.replicated.chain, self.replicated.blob.digest)
        self._node.directory.subscribe(self)
        if self.stage is not None:
            self.stage.start(self._process.send)
        self._node.revisions.subscribe(self)
        self.inbox.post(SwarmChanged(self.peers.swarm_view.snapshot()))

    async def run(self) -> None:
        """Take part until the target, and stay until nobody needs our final state any more.

        Raises the error of a trainer that cannot be restarted.
        """
        rounds = asyncio.create_task(self.effects.run())
        failure = asyncio.create_task(self.trainer.wait_finished())
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
        if self.stage is not None:
            self.stage.stop()
        if self.auditor is not None:
            self.auditor.stop()
        await self.trainer.stop(self.replicated.chain.round, evaluates=self.effects.reached is not None)
        await self._node.workers.compute(TrainerVectors(self.shared_memory, self._planner).read)
        if (self.effects.reached is None or self.effects.reached.is_ours) and not self.loop.lacks_state:
            await self.checkpointer.save_now(self.replicated, self._contributions)
        await self.peers.outbox.stop()

    def on_trainer_message(self, message: FromTrainer) -> None:
        directory = self._node.directory
        self.status_reporter.on_trainer_message(message)
        match message:
            case TrainerProgress():
                # A peer of a pipeline that waits for work is as slow as one that computes.
                seconds = message.seconds.get("compute", 0.0) + message.seconds.get("idle", 0.0)
                self._pacing.record_steps(message.step, seconds)
            case Ready():
                directory.publish(device=message.device[:MAX_TEXT_CHARACTERS], resting=False)
            case ContributionHeader():
                if self.auditor is not None:
                    self.auditor.conditions = message.conditions
                self.inbox.post(ContributionReady())
            case PauseChanged():
                directory.publish(urgent=True, resting=bool(message.reason))
            case AnchorApplied() if self._is_to_be_evaluated(message):
                self.trainer.expect_evaluation()
                self._background.spawn(self.trainer.request_evaluation())

    def _is_to_be_evaluated(self, applied: AnchorApplied) -> bool:
        is_affordable = self.trainer.affords_evaluation(applied, is_last=self.steering.is_target_reached)
        return is_affordable and self.peers.swarm_view.is_our_turn_to_evaluate(applied.round)

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        for event in events:
            if isinstance(event, PeerLeft):
                self.peers.outbox.drop_peer(event.peer)
        self.inbox.post(SwarmChanged(self.peers.swarm_view.snapshot()))

    def on_revisions_changed(self) -> None:
        self.inbox.post(RevisionsChanged())

    def requested_digests(self) -> Collection[bytes]:
        return self._node.blob_service.recently_requested() | self.offered_states.recent(time.monotonic())

    def held_digests(self) -> Collection[bytes]:
        audits = self.auditor.held_digests if self.auditor else ()
        return [*self.blob_relay.held_digests(), *self.loop.session.left_out, *audits]

    def status_fields(self) -> Mapping[str, object]:
        target = self.steering.manifest_at(self.replicated.chain.round).target
        return {
            "target_rounds": target.rounds,
            "target_tokens": target.tokens,
            "revisions": self._node.revisions.describe(),
            "bytes_carried": self.blob_relay.bytes_relayed,
            "alone": self.peers.swarm_view.is_isolated(),
            "has_vote": self.replicated.chain.electorate.has_vote(self._node.identity.peer_id),
            "trainer_restarts": self.trainer.crash_count,
            "trainer_trouble": self.trainer.not_running_reason,
            "unsaved": self.checkpointer.last_error,
            "trust": str(self.served_chain.trust_point or ""),
            **(self.stage.status_fields() if self.stage else {}),
            "audits": dict(self.auditor.counts) if self.auditor else {},
        }
