"""All parts of one node, put together."""

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from importlib.metadata import version

from node.arena import Arena, Contents
from node.channel import Adopted, Config, FromTrainer, Message, Pausing, Progress, Ready
from node.checkpoints.checkpoint import Checkpoint, load_newest
from node.config import NodeSettings, threads_each
from node.daemon.background import Background
from node.daemon.calls import ask_to_carry, deliver
from node.daemon.carrying import MESSAGES, Carrying, Surroundings
from node.daemon.catch_up import Scout
from node.daemon.deliveries import Deliveries
from node.daemon.keeper import Keeper
from node.daemon.membership import Members
from node.daemon.metrics import Metrics
from node.daemon.offer_file import OfferFile
from node.daemon.participant import Participant
from node.daemon.post import Post
from node.daemon.replica import OuterState, Replica, Workshop, state_bytes
from node.daemon.resumption import restore_inner, restored_offers
from node.daemon.rounds import Hooks, RoundDriver
from node.daemon.rounds_service import RoundsService
from node.daemon.runs_service import RunsService
from node.daemon.standing import Standing
from node.daemon.trainer_link import TrainerLink
from node.daemon.trainer_process import TrainerProcess
from node.daemon.usual_port import usual_listen
from node.daemon.vows import VowFile
from node.daemon.wishes import Porters, Wishes
from node.daemon.workers import Workers
from node.folder import RunFolder
from node.model import initial_weights, shape_table
from node.program import decay_of, pacing_of, program_of, round_settings
from node.status import AT_THE_MODEL, NodeStatus, spent
from optim.method import Method
from optim.program import Program
from optim.rehearsal import rehearse
from protocol.blobs.fetch import Fetcher
from protocol.blobs.service import BlobService, CallerLimits, add_blobs
from protocol.blobs.store import HELD_BYTES, BlobStore
from protocol.identity import Identity, PeerId
from protocol.membership.clock import Clock
from protocol.membership.directory import MAX_TEXT_CHARACTERS, Event, Left
from protocol.membership.gossip import Directory
from protocol.membership.own_record import FieldValue
from protocol.membership.rendezvous import Rendezvous
from protocol.murmur_pb2 import Signed
from protocol.murmur_pb2_grpc import (
    add_CarriersServicer_to_server,
    add_RoundsServicer_to_server,
    add_RunsServicer_to_server,
)
from protocol.network.dial_back import DialBack
from protocol.network.reach import own_address, relays_for
from protocol.network.transport import Transport, caller
from protocol.network.tunnel import TunnelLimits
from protocol.rounds.chain import Chain, Head
from protocol.rounds.grouping import group_of
from protocol.rounds.statements import Terms

logger = logging.getLogger(__name__)

VALIDATION_TOKENS = 16_384
COMPILED_SECONDS = 5.0  # a start that takes no longer found its loops compiled
STORE_STATES = 16  # how many states' worth of blobs may lie in the store
STORE_EXTRA_BYTES = 1 << 30
MAX_TOKENS = 1 << 40  # of one contribution


class Assembly:
    """One node. `build` loads what the disk has; `open` goes on the network."""

    @classmethod
    async def build(
        cls, settings: NodeSettings, folder: RunFolder, workers: Workers, rng: random.Random
    ) -> "Assembly":
        identity, program = Identity.load_or_create(folder.key), program_of(settings.manifest)
        began = time.monotonic()
        await workers.arithmetic(rehearse, program.method)
        if time.monotonic() - began > COMPILED_SECONDS:
            logger.info("compiled what rounds compute with, once for this machine")
        return cls(settings, folder, identity, program, rng, workers)

    def __init__(
        self, settings: NodeSettings, folder: RunFolder, identity: Identity, program: Program, rng: random.Random,
        workers: Workers,
    ) -> None:  # fmt: skip
        manifest = settings.manifest
        self._settings = settings
        self._folder = folder
        self._identity = identity
        self._workers = workers
        self._background = Background(lambda error: self.participant.broken(error))
        self._finishing: asyncio.Task[None] | None = None
        self.peer_id = identity.peer_id
        self._shapes = shape_table(manifest.model)
        self._program, method, numel = program, program.method, program.numel
        self._terms = Terms(
            manifest.method.recipe, self._shapes.hash(), program.max_parts, MAX_TOKENS, program.max_part_bytes
        )
        self.arena = Arena.create(Contents.of(program))
        room = STORE_STATES * state_bytes(numel, method) + MESSAGES * program.max_message_bytes + STORE_EXTRA_BYTES
        self.store = BlobStore(folder.blobs, room, HELD_BYTES)
        self._room = room
        self._workshop = Workshop(program, self.store, decay_of(manifest.train))
        self.metrics = Metrics()
        self.standing = Standing(self._first_status(), self.metrics, self._traffic)
        saved = self._load()
        self._sent = OfferFile(folder.offer)
        self._offers = restored_offers(saved, program, self.arena, self.store, self._sent, self.standing.set_back)
        self.replica = self._first_replica(method, saved)
        self._rng = rng
        self._build_network()
        self._build_round(method)

    def _load(self) -> Checkpoint | None:
        saved, skipped = load_newest(self._folder.checkpoints, self._settings.run_id, self._shapes)
        for line in skipped:
            self.standing.set_back("checkpoint skipped", line)
        if saved is not None:
            logger.info("resuming from the checkpoint of round %d", saved.round)
            restore_inner(saved, self.arena)
        return saved

    def _first_replica(self, method: Method, saved: Checkpoint | None) -> Replica:
        manifest = self._settings.manifest
        if saved is not None:
            chain, state = Chain(Head.from_json(saved.chain["head"])), OuterState(saved.anchor, saved.outer)
        else:
            chain = Chain.begin(manifest.run_id)
            state = OuterState.initial(initial_weights(manifest.model, manifest.run.seed), method)
        return Replica(chain, state, self._workshop, self._workers.arithmetic, self._workers.aside)

    def _build_network(self) -> None:
        settings, manifest = self._settings, self._settings.manifest
        limits = TunnelLimits(upload=settings.upload, download=settings.download)
        self.transport = Transport.create(self._folder.key, self._folder.path, limits)
        self._clock = Clock()
        self._contacts = (*settings.peers, *manifest.run.bootstrap)
        self.directory = Directory(
            self._identity, manifest.run_id, self.transport, self._clock,
            manifest.membership.heartbeat, manifest.membership.expiry, self._rng, self._contacts, self._folder.peers,
        )  # fmt: skip
        self._members = Members(
            self.directory, self.replica.chain, bool(self._contacts), self._rng, lambda: self._progress()
        )
        self._post = Post(
            lambda peer, statements, seconds: deliver(manifest.run_id, self.transport, peer, statements, seconds),
            lambda peer, statements: self._take(peer, statements),
            self.directory.suspect,
            lambda error: self.participant.broken(error),
            self.standing.set_back,
        )
        self.blobs = BlobService(self.store, caller, CallerLimits.at_rate(settings.upload))
        self._fetcher = Fetcher(self.store, self.transport.bulk, self._lied, self._rng)
        self._wishes = Wishes(
            self._fetcher, self._members.other_trainers,
            Porters(
                self._members.beyond,
                self._members.between,
                lambda *asked: ask_to_carry(manifest.run_id, self.transport.channel, *asked),
                self.standing.set_back,
            ),
        )  # fmt: skip
        self.carrying = Carrying(
            manifest.run_id, self._terms, self._program.max_message_bytes, manifest.round.exchange_timeout,
            self._fetcher, self.store,
            Surroundings(
                round=lambda: self.replica.chain.round,
                is_member=self._members.is_trainer,
                refused=self.standing.refused,
                set_back=self.standing.set_back,
            ),
        )  # fmt: skip

    def _build_round(self, method: Method) -> None:
        manifest, work = self._settings.manifest, self._workers.arithmetic
        process = TrainerProcess(self.arena, self._trainer_config)
        self._pacing = pacing_of(manifest, self._program)
        self.trainer = TrainerLink(
            self.peer_id, process, self.arena, self.store, self._offers, self._sent, work, self._heard,
            self._pacing.steps, self.standing.set_back,
        )  # fmt: skip
        # Not in the worker thread: no round is to wait while a checkpoint is written.
        self.keeper = Keeper(
            self._folder, manifest, self._shapes, self.store, self.arena, asyncio.to_thread, self.trainer.has_adopted,
            self.blobs.being_fetched, lambda: [*self.carrying.held(), *self.driver.left_out],
            self.standing.set_back, self._room // 2,
        )  # fmt: skip
        self.standing.stands_at(self.replica.chain.head, self.replica.blob.digest)
        driver_settings = round_settings(manifest, self._program)
        hooks = Hooks(
            send=self._post.send,
            work=work,
            members=self._members.at_this_round,
            trains=self._members.is_trainer,
            refused=lambda peer, faults: self.standing.refused(peer, *faults),
            skipped=self.standing.skipped,
            set_back=self.standing.set_back,
            foreseen=lambda commit: self.participant.foreseen(commit),
            decided=lambda commit: self.participant.decided(commit),
            hurry=self._hurry,
            broken=lambda error: self.participant.broken(error),
        )
        self.driver = RoundDriver(
            self._identity, driver_settings, self._terms, self.store, self._workshop, self._wishes,
            VowFile(self._folder.vow, self._settings.run_id, self._terms), hooks, self._pacing,
        )  # fmt: skip
        expected = state_bytes(self._shapes.numel, method)
        chain = self.replica.chain
        self.participant = Participant(
            manifest=manifest,
            method=method,
            terms=self._terms,
            members=self._members,
            driver=self.driver,
            wishes=self._wishes,
            scout=Scout(manifest.run_id, self._terms, chain, self.transport.channel, expected),
            trainer=self.trainer,
            keeper=self.keeper,
            standing=self.standing,
            replica=self.replica,
            share=lambda commit: group_of(commit, self.peer_id, driver_settings(commit.round)),
            pacing=self._pacing,
        )

    async def open(self) -> None:
        """Go on the network and say where we stand."""
        settings = self._settings
        deliveries = Deliveries(self._terms.parts, settings.manifest.round.leader_timeout)
        rounds = RoundsService(settings.run_id, self.driver, self.replica, deliveries, self.standing.refused)
        dial_back = DialBack(self.transport.remote_addresses)
        runs = RunsService(settings.manifest, dial_back, self.standing.refused)
        await self.transport.open(
            [
                self.directory.register,
                lambda server: add_blobs(self.blobs, server),
                lambda server: add_CarriersServicer_to_server(self.carrying, server),
                lambda server: add_RoundsServicer_to_server(rounds, server),
                lambda server: add_RunsServicer_to_server(runs, server),
            ],
            listen=await usual_listen(self._folder, settings.listen),
            direct=settings.direct,
            relays=relays_for(settings.listen, self._contacts, own_address()),
        )
        self.rendezvous = Rendezvous(
            self._identity, self._settings.run_id, self.transport, self._clock, self.directory.neighbours,
            self.directory.remember, self._rng,
        )  # fmt: skip
        self.metrics.add_refusals(
            lambda: (
                self.directory.refusals,
                self.blobs.refusals,
                rounds.refusals,
                self.transport.refusals,
                {"dht": self.rendezvous.refused},
            )
        )
        self.directory.publish(
            role="trainer", name=self._settings.name, version=version("murmuration"),
            direct_port=self.transport.direct_port,
        )  # fmt: skip
        self._members.announce_head(self.replica.chain.head, self.replica.blob.digest)
        self.directory.subscribe(self._membership_changed)

    async def finish(self) -> None:
        """Stop the trainer and save; the network stays. May be repeated, and goes on when a caller is cancelled."""
        if self._finishing is None:
            self._finishing = asyncio.create_task(self._finish(), name="finish")
        await asyncio.shield(self._finishing)

    async def _finish(self) -> None:
        self.driver.close()
        await self.trainer.stop(self.replica.chain.round)
        await self.keeper.save_now(self.replica, self._offers)
        await self._post.stop()

    def all_arrived(self) -> bool:
        """Whether every live trainer has as many rounds as we."""
        trainers = [record for record in self._members.records().values() if record.role == "trainer"]
        return all(record.round >= self.replica.chain.round for record in trainers)

    def publish_progress(self) -> None:
        self.directory.publish(urgent=False, **self._progress())

    def _progress(self) -> dict[str, FieldValue]:
        """What our record says of our work. It goes out with each new head too: then it adds up round by round."""
        status = self.standing.status()
        return {
            "step": status.step,
            "tokens": status.tokens,
            "loss": status.loss or 0.0,
            "tokens_per_second": status.tokens_per_second,
            "bytes_sent": status.bytes_sent,
            "bytes_carried": status.bytes_carried,
            "validation_loss": status.validation_loss or 0.0,
            "validation_round": status.validation_round or 0,
            "compute_seconds": spent(status.seconds, *AT_THE_MODEL),
            "exchange_seconds": spent(status.seconds, "encode", "adopt", "snapshot"),
            "wait_seconds": spent(status.seconds, "wait"),
        }

    async def trainer_failure(self) -> None:
        """Ends when the trainer fails for good: raises its reason."""
        await self.trainer.finished()

    def _trainer_config(self) -> Config:
        settings = self._settings
        return Config(
            manifest=settings.manifest.to_toml(), base=str(settings.base), blobs=str(self._folder.blobs),
            peer_id=self.peer_id, device=settings.device, threads=settings.threads or threads_each(1),
            memory=settings.memory, pause_when_busy=settings.pause_when_busy, round=self.trainer.round,
            validation_tokens=VALIDATION_TOKENS,
        )  # fmt: skip

    def _heard(self, message: FromTrainer) -> None:
        self.standing.heard(message)
        match message:
            case Progress():
                self._pacing.trained(message.step, message.seconds.get("compute", 0.0))
            case Ready():
                self.directory.publish(device=message.device[:MAX_TEXT_CHARACTERS], resting=False)
            case Message():
                self.participant.offer()
            case Pausing():
                self.directory.publish(urgent=True, resting=bool(message.reason))
            case Adopted() if self._members.evaluates(message.round):
                self._background.spawn(self.trainer.evaluate())

    def _hurry(self) -> None:
        self.standing.hurried()
        self._background.spawn(self.trainer.hurry())

    def _take(self, peer: PeerId, statements: Iterable[Signed]) -> None:
        self.driver.take(peer, statements)

    def _membership_changed(self, event: Event) -> None:
        if isinstance(event, Left):
            self._post.forget(event.peer)
        self.driver.members_changed()
        self.participant.wake.set()

    def _lied(self, peer: str, reason: str) -> None:
        self.metrics.refused("wrong blob")
        logger.warning("%s served a wrong blob: %s", peer, reason)

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
            "bytes_carried": self.carrying.bytes_carried,
            "bytes_sent_by_kind": {"blobs": self.blobs.total_bytes_served},
            "bytes_received_by_kind": {"blobs": self._fetcher.bytes_received},
            "alone": self._members.is_alone(),
            "direct_port": self.transport.direct_port,
            "paths": self.transport.bulk.paths(),
            "bytes_fetched_by_path": dict(self.transport.bulk.bytes_received),
            "direct_refusals": dict(self.transport.direct_refusals),
            "trainer_restarts": self.trainer.deaths,
            "trainer_trouble": self.trainer.trouble,
            "unsaved": self.keeper.trouble,
            "addresses": tuple(self.directory.live()[self.peer_id].addresses)
            if self.peer_id in self.directory.live()
            else (),
        }
