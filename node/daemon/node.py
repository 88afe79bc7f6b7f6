"""All parts of one node, put together."""

import asyncio
import logging
import random
import time
from importlib.metadata import version

from google.protobuf.message import Message

from node.checkpoints.checkpoint import Checkpoint, load_newest
from node.checkpoints.vote_log import VoteLog
from node.daemon.blob_relay import MAX_CONTRIBUTIONS, BlobRelayService, RelayContext
from node.daemon.chain_sync import ChainSyncClient
from node.daemon.checkpointer import Checkpointer, restore_contributions, restore_trainer_snapshot
from node.daemon.contributions import ContributionFile
from node.daemon.downloads import BlobRelays, Downloads
from node.daemon.effects import Effects
from node.daemon.inbox import Inbox, MessageReceiver
from node.daemon.outer_state import OuterState, ReplicatedState, RoundCompute, state_bytes
from node.daemon.peer_rpc import Outbox, deliver, request_relay
from node.daemon.round_effects import RoundEffects, RoundTools
from node.daemon.services import InboundQuota, RoundsService, RunsService
from node.daemon.state_effects import StateEffects, StateTools
from node.daemon.swarm_view import SwarmView
from node.daemon.trainer_link import TrainerLink
from node.from_manifest import (
    build_pacing,
    build_program,
    learning_rate_decay,
    round_settings_by_number,
    topology_class,
)
from node.ipc.channel import (
    AnchorApplied,
    ContributionHeader,
    FromTrainer,
    PauseChanged,
    Ready,
    TrainerConfig,
    TrainerProgress,
)
from node.ipc.shared_memory import SharedLayout, SharedMemory
from node.ipc.trainer_process import TrainerProcess
from node.loop.events import ContributionReady, SwarmChanged
from node.loop.options import LoopOptions, RoundOptions
from node.loop.round_loop import RoundLoop
from node.loop.round_session import RoundSession
from node.model import initial_weights, shape_table
from node.monitoring.metrics import Metrics
from node.monitoring.status import COMPUTE_ACTIVITIES, NodeStatus, sum_seconds
from node.monitoring.status_reporter import StatusReporter
from node.options import NodeOptions
from node.run_dir import RunDir, reuse_last_port
from node.workers import BackgroundTasks, Workers
from optim.kernels.warmup import warm_up
from optim.method import Method
from optim.round_plan import RoundPlanner
from protocol.blobs.download import Downloader
from protocol.blobs.server import BlobService, CallerLimits, register_blob_service
from protocol.blobs.store import DEFAULT_MEMORY_BYTES, BlobStore
from protocol.consensus.chain import Chain, ChainHead
from protocol.consensus.messages import ContributionLimits
from protocol.identity import Identity
from protocol.membership.clock import SwarmClock
from protocol.membership.directory import DirectoryOptions, PeerDirectory
from protocol.membership.peer_table import MAX_TEXT_CHARACTERS, FieldValue, MembershipEvent, PeerLeft
from protocol.membership.rendezvous import Rendezvous
from protocol.murmur_pb2 import Signed
from protocol.murmur_pb2_grpc import (
    add_CarriersServicer_to_server,
    add_RoundsServicer_to_server,
    add_RunsServicer_to_server,
)
from protocol.signing import sign
from protocol.transport.connection_supervisor import ConnectionLimits
from protocol.transport.nat import DialBackResponder, choose_relays, find_own_ip
from protocol.transport.transport import Transport, caller

logger = logging.getLogger(__name__)

VALIDATION_TOKENS = 16_384
SLOW_COMPILE_SECONDS = 5.0  # a start that takes no longer found its loops compiled
STORE_STATES = 16  # how many states' worth of blobs may lie in the store
STORE_EXTRA_BYTES = 1 << 30
MAX_TOKENS = 1 << 40  # of one contribution


class Node:
    """One node. `build` loads what the disk has; `open` goes on the network."""

    @classmethod
    async def build(cls, settings: NodeOptions, folder: RunDir, workers: Workers, rng: random.Random) -> "Node":
        identity, program = Identity.load_or_create(folder.key), build_program(settings.manifest)
        began = time.monotonic()
        await workers.compute(warm_up, program.method)
        if time.monotonic() - began > SLOW_COMPILE_SECONDS:
            logger.info("compiled what rounds compute with, once for this machine")
        return cls(settings, folder, identity, program, rng, workers)

    def __init__(
        self,
        settings: NodeOptions,
        folder: RunDir,
        identity: Identity,
        program: RoundPlanner,
        rng: random.Random,
        workers: Workers,
    ) -> None:
        manifest = settings.manifest
        self._settings = settings
        self._folder = folder
        self._identity = identity
        self._workers = workers
        self.inbox = Inbox()
        self._background = BackgroundTasks(self.inbox.fail)
        self._finishing: asyncio.Task[None] | None = None
        self.peer_id = identity.peer_id
        self._shapes = shape_table(manifest.model)
        self._program, method, numel = program, program.method, program.numel
        self._terms = ContributionLimits(
            manifest.method.recipe, self._shapes.hash(), program.max_parts, MAX_TOKENS, program.max_part_bytes
        )
        self.shared_memory = SharedMemory.create(SharedLayout.of(program))
        room = (
            STORE_STATES * state_bytes(numel, method)
            + MAX_CONTRIBUTIONS * program.max_contribution_bytes
            + STORE_EXTRA_BYTES
        )
        self.store = BlobStore(folder.blobs, room, DEFAULT_MEMORY_BYTES)
        self._room = room
        self._workshop = RoundCompute(program, self.store, learning_rate_decay(manifest.train))
        self.metrics = Metrics()
        self.status_reporter = StatusReporter(self._first_status(), self.metrics, self._traffic)
        saved = self._load()
        self._sent = ContributionFile(folder.contribution_file)
        self._offers = restore_contributions(
            saved, program, self.shared_memory, self.store, self._sent, self.status_reporter.record_recovered
        )
        self.replica = self._first_replica(method, saved)
        self._rng = rng
        self._build_network()
        self._build_round(method)

    def _load(self) -> Checkpoint | None:
        saved, skipped = load_newest(self._folder.checkpoints, self._settings.run_id, self._shapes)
        for line in skipped:
            self.status_reporter.record_recovered("checkpoint skipped", line)
        if saved is not None:
            logger.info("resuming from the checkpoint of round %d", saved.round)
            restore_trainer_snapshot(saved, self.shared_memory)
        return saved

    def _first_replica(self, method: Method, saved: Checkpoint | None) -> ReplicatedState:
        manifest = self._settings.manifest
        if saved is not None:
            chain, state = Chain(ChainHead.from_json(saved.chain["head"])), OuterState(saved.anchor, saved.outer)
        else:
            chain = Chain.from_genesis(manifest.run_id)
            state = OuterState.initial(initial_weights(manifest.model, manifest.run.seed), method)
        return ReplicatedState(chain, state, self._workshop, self._workers.compute, self._workers.low_priority)

    def _build_network(self) -> None:
        settings, manifest = self._settings, self._settings.manifest
        limits = ConnectionLimits(upload=settings.upload, download=settings.download)
        self.transport = Transport.create(self._folder.key, self._folder.path, limits)
        self._clock = SwarmClock()
        self._contacts = (*settings.peers, *manifest.run.bootstrap)
        self.directory = PeerDirectory(
            DirectoryOptions(
                run_id=manifest.run_id,
                heartbeat=manifest.membership.heartbeat,
                expiry=manifest.membership.expiry,
                bootstrap=self._contacts,
                addresses_file=self._folder.peers,
            ),
            self._identity,
            self.transport,
            self._clock,
            self._rng,
        )
        self._members = SwarmView(
            self.directory, bool(self._contacts), self._rng, lambda: self._progress()
        )
        self._receiver = MessageReceiver(manifest.run_id, self._terms, self.inbox, self.status_reporter)
        self._post = Outbox(
            lambda peer, statements, seconds: deliver(manifest.run_id, self.transport, peer, statements, seconds),
            self._receiver.receive,
            self.directory.suspect,
            self.inbox.fail,
            self.status_reporter.record_recovered,
        )
        self.blobs = BlobService(self.store, caller, CallerLimits.at_rate(settings.upload))
        self._fetcher = Downloader(self.store, self.transport.bulk, self._rng)
        self._wishes = Downloads(
            self._fetcher,
            self._members.other_trainers,
            BlobRelays(
                self._members.unreachable_peers,
                self._members.relay_candidates,
                lambda *asked: request_relay(manifest.run_id, self.transport.channel, *asked),
                self.status_reporter.record_recovered,
            ),
        )
        self.blob_relay = BlobRelayService(
            manifest.run_id,
            self._terms,
            self._program.max_contribution_bytes,
            manifest.round.exchange_timeout,
            self._fetcher,
            self.store,
            RelayContext(
                round=lambda: self.replica.chain.round,
                is_member=self._members.is_trainer,
                record_refusal=self.status_reporter.record_refusal,
                record_recovered=self.status_reporter.record_recovered,
            ),
        )

    def _build_round(self, method: Method) -> None:
        manifest, work = self._settings.manifest, self._workers.compute
        process = TrainerProcess(self.shared_memory, self._trainer_config())
        self._pacing = build_pacing(manifest, self._program)
        self.loop = self._build_loop(method)
        self.trainer = TrainerLink(
            process,
            self.shared_memory,
            self.store,
            self._offers,
            self._sent,
            work,
            self._heard,
            self._pacing.steps_for,
            self.status_reporter.record_recovered,
        )
        # Not in the worker thread: no round is to wait while a checkpoint is written.
        self.checkpointer = Checkpointer(
            self._folder,
            manifest,
            self._shapes,
            self.store,
            self.shared_memory,
            asyncio.to_thread,
            self.trainer.wait_until_applied,
            self.blobs.recently_requested,
            lambda: [*self.blob_relay.relayed_digests(), *self.loop.session.left_out],
            self.status_reporter.record_recovered,
            self._room // 2,
        )
        self.status_reporter.set_head(self.replica.chain.head, self.replica.blob.digest)
        self._build_effects(method)

    def _build_loop(self, method: Method) -> RoundLoop:
        manifest, identity = self._settings.manifest, self._identity
        self._vote_log = VoteLog(self._folder.vote_log, manifest.run_id, self._terms)
        options = RoundOptions(self.peer_id, round_settings_by_number(manifest, self._program), self._terms)

        def sign_message(kind: str, body: Message) -> Signed:
            return sign(identity, kind, manifest.run_id, body)

        return RoundLoop(
            LoopOptions(
                options,
                target_rounds=manifest.target.rounds,
                target_tokens=manifest.target.tokens,
                min_peers=manifest.run.min_peers,
                expiry=manifest.membership.expiry,
                has_contacts=bool(self._contacts),
                compares_states=topology_class(method).has_shared_state,
            ),
            self.replica.chain,
            self.replica.blob.digest,
            self._offers,
            RoundSession(options, sign_message, self._pacing, self._vote_log.load()),
        )

    def _build_effects(self, method: Method) -> None:
        manifest, expected = self._settings.manifest, state_bytes(self._shapes.numel, method)
        round_tools = RoundTools(
            store=self.store,
            downloads=self._wishes,
            compute=self._workshop,
            run_in_thread=self._workers.compute,
            vote_log=self._vote_log,
        )
        state_tools = StateTools(
            method=method,
            replicated=self.replica,
            trainer=self.trainer,
            checkpointer=self.checkpointer,
            downloads=self._wishes,
            sync_client=ChainSyncClient(
                manifest.run_id, self._terms, self.replica.chain, self.transport.channel, expected
            ),
            swarm_view=self._members,
        )
        self.effects = Effects(
            self.loop,
            self.inbox,
            self._receiver,
            self._post,
            RoundEffects(self.inbox, self.status_reporter, round_tools),
            StateEffects(self.inbox, self.status_reporter, state_tools),
        )

    async def open(self) -> None:
        """Go on the network and say where we stand."""
        settings = self._settings
        deliveries = InboundQuota(self._terms.parts, settings.manifest.round.leader_timeout)
        rounds = RoundsService(
            settings.run_id, self.loop, self._receiver, self.replica, deliveries, self.status_reporter.record_refusal
        )
        dial_back = DialBackResponder(self.transport.remote_addresses)
        runs = RunsService(settings.manifest, dial_back, self.status_reporter.record_refusal)
        await self.transport.open(
            [
                self.directory.register,
                lambda server: register_blob_service(self.blobs, server),
                lambda server: add_CarriersServicer_to_server(self.blob_relay, server),
                lambda server: add_RoundsServicer_to_server(rounds, server),
                lambda server: add_RunsServicer_to_server(runs, server),
            ],
            listen=await reuse_last_port(self._folder, settings.listen),
            direct=settings.direct,
            relays=choose_relays(settings.listen, self._contacts, find_own_ip()),
        )
        self.rendezvous = Rendezvous(self._identity, self.transport, self._clock, self.directory, self._rng)
        self.metrics.read_other_refusals_from(
            lambda: (
                self.directory.refusals,
                self.blobs.refusals,
                rounds.refusals,
                self.transport.refusals,
                self.rendezvous.refusals,
                self._fetcher.refusals,
            )
        )
        self.directory.publish(
            role="trainer",
            name=self._settings.name,
            version=version("murmuration"),
            direct_port=self.transport.direct_port,
        )
        self._members.announce_head(self.replica.chain.head, self.replica.blob.digest)
        self.directory.subscribe(self)
        self.inbox.post(SwarmChanged(self._members.snapshot()))

    async def finish(self) -> None:
        """Stop the trainer and save; the network stays. May be repeated, and goes on when a caller is cancelled."""
        if self._finishing is None:
            self._finishing = asyncio.create_task(self._finish(), name="finish")
        await asyncio.shield(self._finishing)

    async def _finish(self) -> None:
        self.effects.stop()
        await self.trainer.stop(self.replica.chain.round)
        await self.checkpointer.save_now(self.replica, self._offers)
        await self._post.stop()

    def all_arrived(self) -> bool:
        """Whether every live trainer has as many rounds as we."""
        trainers = [record for record in self._members.other_records().values() if record.role == "trainer"]
        return all(record.round >= self.replica.chain.round for record in trainers)

    def publish_progress(self) -> None:
        self.directory.publish(urgent=False, **self._progress())

    def _progress(self) -> dict[str, FieldValue]:
        """What our record says of our work. It goes out with each new head too: then it adds up round by round."""
        status = self.status_reporter.status()
        return {
            "step": status.step,
            "tokens": status.tokens,
            "loss": status.loss or 0.0,
            "tokens_per_second": status.tokens_per_second,
            "bytes_sent": status.bytes_sent,
            "bytes_carried": status.bytes_carried,
            "validation_loss": status.validation_loss or 0.0,
            "validation_round": status.validation_round or 0,
            "compute_seconds": sum_seconds(status.seconds, *COMPUTE_ACTIVITIES),
            "exchange_seconds": sum_seconds(status.seconds, "encode", "adopt", "snapshot"),
            "wait_seconds": sum_seconds(status.seconds, "wait"),
        }

    async def trainer_failure(self) -> None:
        """Ends when the trainer fails for good: raises its reason."""
        await self.trainer.wait_finished()

    def _trainer_config(self) -> TrainerConfig:
        settings = self._settings
        return TrainerConfig(
            manifest=settings.manifest.to_toml(),
            base=str(settings.base),
            blobs=str(self._folder.blobs),
            peer_id=self.peer_id,
            options=settings.for_trainer,
            round=self.replica.chain.round,
            validation_tokens=VALIDATION_TOKENS,
        )

    def _heard(self, message: FromTrainer) -> None:
        self.status_reporter.on_trainer_message(message)
        match message:
            case TrainerProgress():
                self._pacing.record_steps(message.step, message.seconds.get("compute", 0.0))
            case Ready():
                self.directory.publish(device=message.device[:MAX_TEXT_CHARACTERS], resting=False)
            case ContributionHeader():
                self.inbox.post(ContributionReady())
            case PauseChanged():
                self.directory.publish(urgent=True, resting=bool(message.reason))
            case AnchorApplied() if self._members.is_our_turn_to_evaluate(message.round):
                self._background.spawn(self.trainer.request_evaluation())

    def on_membership_event(self, event: MembershipEvent) -> None:
        if isinstance(event, PeerLeft):
            self._post.drop_peer(event.peer)
        self.inbox.post(SwarmChanged(self._members.snapshot()))

    def _first_status(self) -> NodeStatus:
        manifest = self._settings.manifest
        return NodeStatus(
            peer_id=self.peer_id,
            run=manifest.run.name,
            run_id=manifest.run_id,
            name=self._settings.name,
            target_rounds=manifest.target.rounds,
            target_tokens=manifest.target.tokens,
        )

    def _traffic(self) -> dict[str, object]:
        """What the status reads at the moment it is asked."""
        self.metrics.blobs, self.metrics.blob_bytes = len(self.store), self.store.size
        return {
            "peers": len(self.directory.live()),
            "bytes_sent": self.transport.bytes_sent,
            "bytes_received": self.transport.bytes_received,
            "bytes_carried": self.blob_relay.bytes_relayed,
            "bytes_sent_by_kind": {"blobs": self.blobs.total_bytes_served},
            "bytes_received_by_kind": {"blobs": self._fetcher.bytes_received},
            "alone": self._members.is_isolated(),
            "direct_port": self.transport.direct_port,
            "paths": self.transport.bulk.describe_paths(),
            "bytes_fetched_by_path": dict(self.transport.bulk.bytes_received),
            "direct_refusals": dict(self.transport.direct_refusals),
            "trainer_restarts": self.trainer.crash_count,
            "trainer_trouble": self.trainer.not_running_reason,
            "unsaved": self.checkpointer.last_error,
            "addresses": tuple(self.directory.live()[self.peer_id].addresses)
            if self.peer_id in self.directory.live()
            else (),
        }
