"""One of our peers without a trainer: the parts of a node that make a round, on the network as they always are.

Transport, blobs, round driver, workshop and replica are those of the daemon; gossip and checkpoints are left out, and
every peer is told who the others are. Measured is what lies between the progress of a trainer and the new anchor:
encoding, putting the parts where others can fetch them, the round, decoding, and the outer update.
"""

import argparse
import asyncio
import hashlib
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch

from benchmarks.merge.random_vectors import random_vector, relative_error
from benchmarks.merge.worker import OrderChannel, peer_parser
from node.daemon.checkpoints.vote_log import ConvictionFile, ProofFile, VoteLog
from node.daemon.effects import Effects, RoundEffects, VoteEffects
from node.daemon.inbox import InboundQuota, Inbox, MessageReceiver
from node.daemon.peers.downloads import Downloads
from node.daemon.peers.peer_rpc import Outbox, PeerRpc
from node.daemon.peers.swarm_view import SwarmView
from node.daemon.replica import Replica
from node.daemon.services import RoundsService
from node.daemon.state.outer_state import OuterState, ReplicatedState, RoundCompute
from node.daemon.state.replica_state import OfferedStates
from node.daemon.state_effects import StateEffects
from node.loop.actions import AdvanceState, ApplyCommit, PrecomputeCommit, PublishHead
from node.loop.contributions import ContributionTracker, ForkOutcome, StoredContribution
from node.loop.events import (
    CommitApplied,
    CommitComputed,
    ContributionReady,
    HeadPublished,
    Started,
    SwarmChanged,
    TrainerStarted,
)
from node.loop.options import LoopOptions, RoundOptions
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from node.loop.round_loop import RoundLoop
from node.loop.round_session import RoundSession
from node.loop.steering import unsteered
from node.monitoring.status_reporter import StatusReporter
from node.processes.process_memory import enable_frequent_gc, use_one_malloc_arena
from node.processes.workers import Workers, start_workers
from node.trainer.ipc.channel import ContributionHeader
from optim.compose import compose
from optim.exchange import ContributionEncoder
from optim.layout import Layout
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob
from protocol.blobs.download import Downloader
from protocol.blobs.server import BlobService, register_blob_service
from protocol.blobs.store import DEFAULT_MEMORY_BYTES, BlobStore
from protocol.consensus.chain import Chain
from protocol.consensus.events import Rejected
from protocol.consensus.messages.briefs import BriefCache, SeenMessages
from protocol.consensus.messages.contributions import ContributionLimits
from protocol.consensus.pacing import Pacing
from protocol.consensus.settings import RoundSettings
from protocol.consensus.topology import AllGather, Butterfly
from protocol.errors import PeerFault
from protocol.identity import Identity, PeerId
from protocol.manifest.sections import RoundSection
from protocol.murmur_pb2_grpc import add_RoundsServicer_to_server
from protocol.signing import sign
from protocol.traffic import ControlTraffic
from protocol.transport.transport import Transport, caller

RUN_ID = hashlib.sha256(b"a merge").hexdigest()
SHAPES = hashlib.sha256(b"one vector").digest()
ROUND_SECONDS = 120.0
DOWNLOAD_SECONDS = 300.0
STORE_BYTES = 1 << 34
PARTS = RoundSection().parts


class Peer:
    def __init__(self, words: argparse.Namespace, folder: Path, at_work: Workers) -> None:
        self._words = words
        self._work = at_work.compute
        self.program = RoundPlanner(compose(words.recipe, overrides(words)), Layout(((words.numel,),)), PARTS)
        self.identity = Identity.load_or_create(folder / "key")
        self._own = random_vector(words.rank, words.numel)
        self._progress = self._own
        self._residual = torch.zeros(words.numel)
        self._weights = random_vector(words.peers, words.numel)  # as of one peer more
        self._terms = ContributionLimits(
            words.recipe, SHAPES, self.program.max_parts, 1 << 40, self.program.max_part_bytes
        )
        self._store = BlobStore(folder / "blobs", STORE_BYTES, DEFAULT_MEMORY_BYTES)
        self._workshop = RoundCompute(self.program, self._store, lambda *_: 1.0)
        self._replica = ReplicatedState(
            Chain.from_genesis(RUN_ID), self._begun(), self._workshop, self._work, at_work.low_priority
        )
        self.transport = Transport.create(folder / "key", folder)
        self._blobs = BlobService(self._store, caller)
        fetcher = Downloader(self._store, self.transport.bulk, random.Random(words.rank))
        self._others: list[PeerId] = []
        self._wishes = Downloads(fetcher, cast(SwarmView, self), PeerRpc(RUN_ID, self.transport), LoggedStatus())
        self.inbox = Inbox()
        self._contributions = ContributionTracker(self.program)
        self._state = MergeState(self.inbox, self._replica, self._wishes)
        self._proof_file = ProofFile(folder / "proofs", RUN_ID, self._terms)
        self._conviction_file = ConvictionFile(folder / "convictions.json", RUN_ID, self._terms)
        self._build_loop(VoteLog(folder / "vow.json", RUN_ID, self._terms))

    def _build_loop(self, vote_log: VoteLog) -> None:
        identity, status = self.identity, cast(StatusReporter, LoggedStatus())
        options = RoundOptions(identity.peer_id, self._settings, self._terms)
        session = RoundSession(
            options,
            lambda kind, body: sign(identity, kind, RUN_ID, body),
            Pacing(self._settings(0).grace, lambda number: 1, 1),
            vote_log.load(),
        )
        self.loop = RoundLoop(LoopOptions(options, unsteered()), self._replica.chain, b"", self._contributions, session)
        seen = SeenMessages()
        self._receiver = MessageReceiver(RUN_ID, self._terms, seen, self.inbox, status)
        rpc = PeerRpc(RUN_ID, self.transport, BriefCache(seen))
        outbox = Outbox(rpc, self._receiver.receive, self.suspect, self.inbox, status)
        votes = VoteEffects(self._store, vote_log, self._proof_file, self._conviction_file, self.inbox)
        round_effects = RoundEffects(self._wishes, self._workshop, self._work, votes, self.inbox, status)
        state_effects = cast(StateEffects, self._state)
        self.effects = Effects(self.loop, self.inbox, self._receiver, outbox, round_effects, state_effects)

    def suspect(self, peer: PeerId, reason: str) -> None:
        log_failure(peer, reason)

    def other_trainers(self) -> list[PeerId]:
        return self._others

    def live_peers(self, chosen: Sequence[PeerId]) -> list[PeerId]:
        return [peer for peer in chosen if peer in self._others]

    def unreachable_peers(self) -> frozenset[PeerId]:
        return frozenset()

    def relay_candidates(self, owner: PeerId) -> list[PeerId]:
        return []

    async def open(self, conversation: OrderChannel) -> None:
        deliveries = InboundQuota(self._terms.parts, RoundSection().leader_timeout)
        peers = SimpleNamespace(receiver=self._receiver, quota=deliveries, traffic=ControlTraffic())
        served = SimpleNamespace(loop=self.loop, peers=peers, state=SimpleNamespace(offered_states=OfferedStates()))
        rounds = RoundsService({RUN_ID: cast(Replica, served)}, {}, LoggedStatus().record_refusal)
        services = [
            lambda server: register_blob_service(self._blobs, server),
            lambda server: add_RoundsServicer_to_server(rounds, server),
        ]
        await self.transport.open(services, listen=[f"/ip4/{self._words.address}/tcp/0"], direct=0)
        door = self.transport.direct_port
        conversation.send(address=[self.identity.peer_id, door, *await self.transport.addresses()])
        for peer, direct_port, *addresses in (await asyncio.to_thread(conversation.receive))["addresses"]:
            if peer != self.identity.peer_id:
                self.transport.introduce(peer, addresses, direct_port)
                self._others.append(peer)
        conversation.send()

    async def prepare(self) -> None:
        """Open a round, from an anchor that has all bits, like weights."""
        self._residual.zero_()
        self._progress = self._own.clone()  # a trainer measures it into memory that it has
        self._replica.state = self._begun()
        self._store.retain(set())  # a state that comes out the same as in the turn before would not be written
        head = PeerState(self._replica.chain.head)
        self.inbox.post(SwarmChanged(SwarmSnapshot(dict.fromkeys([self.identity.peer_id, *self._others], head))))
        self._state.begin_turn()

    async def go(self) -> int:
        """How many took part."""
        parts = await self._work(self._encode)
        sizes = tuple(blob.size for blob in parts)
        header = ContributionHeader(round=self._replica.chain.round, sizes=sizes, tokens=1, steps=1, loss=0.0)
        self._contributions.submit(StoredContribution(header, parts))
        self.inbox.post(ContributionReady())
        async with asyncio.timeout(ROUND_SECONDS):
            return await self._state.computed

    async def download(self) -> int:
        """Forget the state and get it from the others, check it and read it; its size."""
        blob = self._replica.blob
        self._store.discard(blob.digest)
        await self._wishes.download_from_anyone(DOWNLOAD_SECONDS, blob)
        await self._work(self._workshop.load_state, blob)
        return blob.size

    async def settle(self) -> None:
        """The new state is named, and stored for newcomers."""
        await self._state.named.wait()

    def check(self) -> float:
        return relative_error(self._weights - self._replica.state.anchor, self._words.peers)

    def _encode(self) -> tuple[Blob, ...]:
        sender = ContributionEncoder(self.program)
        number = self._replica.chain.round
        payloads = sender.encode(number, self._progress, self._residual)
        sender.keep_remainder(number, self._progress, self._residual)
        return tuple(self._store.put(payload) for payload in payloads)

    def _begun(self) -> OuterState:
        return OuterState.initial(self._weights.clone(), self.program.method)

    def _settings(self, number: int) -> RoundSettings:
        plan, timing = self.program.plan(number), RoundSection()
        parts = len(plan.part_spans)
        reduces = plan.method.topology.reduces_parts
        topology = Butterfly(RUN_ID, parts, self._words.reducers) if reduces else AllGather(RUN_ID, parts)
        return RoundSettings(topology, timing.grace, timing.leader_timeout, ROUND_SECONDS)


class MergeState:
    """In the place of StateEffects: no trainer, no checkpoint, and the next round begins when the turn does."""

    def __init__(self, inbox: Inbox, replica: ReplicatedState, downloads: Downloads) -> None:
        self._inbox = inbox
        self._replica = replica
        self._downloads = downloads
        self._next: OuterState | None = None
        self._has_begun = False
        self.computed: asyncio.Future[int]  # how many contributions the new state has
        self.named = asyncio.Event()

    def begin_turn(self) -> None:
        self.computed = asyncio.get_running_loop().create_future()
        self.named.clear()
        self._inbox.post(HeadPublished() if self._has_begun else Started())
        self._has_begun = True

    async def start_trainer(self) -> None:
        self._inbox.post(TrainerStarted())

    def precompute(self, action: PrecomputeCommit) -> None:
        self._replica.speculate(action.commit, action.contributions)

    async def apply_commit(self, action: ApplyCommit) -> None:
        await self._downloads.download_from_anyone(ROUND_SECONDS, *action.commit.body.blobs)
        self._next = await self._replica.compute_next(action.commit, action.contributions)
        self.computed.set_result(len(action.contributions))
        self._inbox.post(CommitComputed(action.contributions))

    def record_revised(self, verdict: ForkOutcome) -> None:
        """There is no trainer whose outcomes change."""

    async def advance_state(self, action: AdvanceState) -> None:
        assert self._next is not None
        await self._replica.advance(action.commit, self._next)  # a trainer has begun at it
        self._inbox.post(CommitApplied(self._replica.blob.digest))

    async def publish_head(self, action: PublishHead) -> None:
        self.named.set()

    async def request_early_submit(self) -> None:
        """There is no trainer to ask."""

    def report(self, action: object) -> None:
        if isinstance(action, Rejected):
            log_failure(action.peer or "", action.reason)


class LoggedStatus:
    """In the place of StatusReporter."""

    def record_refusal(self, peer: PeerId, first: PeerFault, *_: PeerFault) -> None:
        log_failure(peer, str(first))

    def record_recovered(self, reason: str, line: str) -> None:
        log_failure(reason, line)


def log_failure(subject: str, reason: str) -> None:
    """Important messages are repeated; a peer that is left out in the end is missing from the members."""
    sys.stderr.write(f"{subject}: {reason}\n")


def overrides(words: argparse.Namespace) -> dict[str, dict[str, str]]:
    return {"codec": {"kind": words.codec}} if words.codec else {}


async def serve(words: argparse.Namespace, folder: Path, conversation: OrderChannel) -> None:
    with start_workers() as at_work:
        peer = Peer(words, folder, at_work)
        await peer.open(conversation)
        enable_frequent_gc()
        try:
            while True:
                match next(iter(await asyncio.to_thread(conversation.receive))):
                    case "prepare":
                        await peer.prepare()
                        conversation.send()
                    case "go":
                        conversation.send(members=await peer.go())
                    case "settle":
                        await peer.settle()
                        conversation.send()
                    case "download":
                        conversation.send(bytes=await peer.download())
                    case "check":
                        conversation.send(relative_error=peer.check())
        finally:
            await peer.transport.stop()


def main() -> None:
    parser = peer_parser()
    parser.add_argument("--numel", type=int)
    parser.add_argument("--recipe")
    parser.add_argument("--reducers", type=int, default=2, help="peers that sum each part; 1: they trust one another")
    parser.add_argument("--codec", help="another one than the recipe's")
    words = parser.parse_args()
    conversation = OrderChannel()
    torch.set_num_threads(1)
    use_one_malloc_arena()
    with suppress(EOFError):
        asyncio.run(serve(words, Path(tempfile.gettempdir()), conversation))


if __name__ == "__main__":
    main()
