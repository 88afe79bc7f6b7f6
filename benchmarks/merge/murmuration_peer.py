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
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.merge.random_vectors import random_vector, relative_error
from benchmarks.merge.worker import OrderChannel, peer_parser
from node.checkpoints.vote_log import VoteLog
from node.daemon.downloads import Downloads
from node.daemon.effects import Effects, Hooks
from node.daemon.outer_state import OuterState, ReplicatedState, RoundCompute
from node.daemon.peer_rpc import Outbox, deliver
from node.daemon.services import InboundQuota, RoundsService
from node.process_memory import enable_frequent_gc, use_one_malloc_arena
from node.workers import Workers, start_workers
from optim.compose import compose
from optim.exchange import ContributionEncoder
from optim.layout import Layout
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob
from protocol.blobs.download import Downloader
from protocol.blobs.server import BlobService, register_blob_service
from protocol.blobs.store import DEFAULT_MEMORY_BYTES, BlobStore
from protocol.consensus.chain import Chain
from protocol.consensus.events import MembershipChanged
from protocol.consensus.messages import Commit, Contribution, ContributionLimits, SignedMessage
from protocol.consensus.pacing import Pacing
from protocol.consensus.settings import RoundSettings
from protocol.consensus.topology import AllGather, Butterfly
from protocol.identity import Identity, PeerId
from protocol.manifest import RoundSection
from protocol.murmur_pb2_grpc import add_RoundsServicer_to_server
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
        self._residual = torch.zeros(words.numel)
        self._weights = random_vector(words.peers, words.numel)  # as of one peer more
        self._terms = ContributionLimits(
            words.recipe, SHAPES, self.program.max_parts, 1 << 40, self.program.max_part_bytes
        )
        self._store = BlobStore(folder / "blobs", STORE_BYTES, DEFAULT_MEMORY_BYTES)
        self._workshop = RoundCompute(self.program, self._store, lambda step: 1.0)
        self._replica = ReplicatedState(
            Chain.from_genesis(RUN_ID), self._begun(), self._workshop, self._work, at_work.low_priority
        )
        self.transport = Transport.create(folder / "key", folder)
        self._blobs = BlobService(self._store, caller)
        fetcher = Downloader(self._store, self.transport.bulk, random.Random(words.rank))
        self._wishes = Downloads(fetcher, lambda: self._others)
        self._others: list[PeerId] = []
        self._decided: asyncio.Future[SignedMessage[Commit]]
        self._naming: asyncio.Task[None]
        self._driver = self._made_driver(VoteLog(folder / "vow.json", RUN_ID, self._terms))

    def _made_driver(self, vows: VoteLog) -> Effects:
        post = Outbox(
            lambda peer, statements, seconds: deliver(RUN_ID, self.transport, peer, statements, seconds),
            lambda peer, statements: self._ignore(self._driver.take(peer, statements)),
            self._failed,
            self._broken,
            self._failed,
        )
        hooks = Hooks(
            send=post.send,
            work=self._work,
            members=lambda: MembershipChanged(frozenset([self.identity.peer_id, *self._others])),
            trains=lambda peer: peer in self._others,
            refused=lambda peer, faults: self._failed(peer, str(faults[0])),
            skipped=lambda peer, reason: self._failed(peer or "", reason),
            set_back=self._failed,
            foreseen=lambda commit: self._replica.speculate(commit, commit.contributions),
            decided=lambda commit: self._decided.set_result(commit),
            hurry=lambda: None,
            broken=self._broken,
        )
        return Effects(
            self.identity, self._settings, self._terms, self._store, self._workshop, self._wishes, vows, hooks,
            Pacing(self._settings(0).grace, lambda number: 1, 1),
        )  # fmt: skip

    async def open(self, conversation: OrderChannel) -> None:
        deliveries = InboundQuota(self._terms.parts, RoundSection().leader_timeout)
        rounds = RoundsService(
            RUN_ID, self._driver, self._replica, deliveries, lambda peer, fault: self._failed(peer, str(fault))
        )
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
        self._replica.state = self._begun()
        self._store.retain(set())  # a state that comes out the same as in the turn before would not be written
        self._decided = asyncio.get_running_loop().create_future()
        chain = self._replica.chain
        self._driver.begin(chain.round, chain.digest, [self.identity.peer_id, *self._others])

    async def go(self) -> int:
        """How many took part."""
        parts = await self._work(self._encode)
        head = self._replica.chain.head
        self._driver.offer(Contribution(head.round, head.digest, self._words.recipe, SHAPES, 1, 1, 0.0, parts))
        async with asyncio.timeout(ROUND_SECONDS):
            commit = await self._decided
            await self._wishes.download_from_anyone(ROUND_SECONDS, *commit.body.blobs)
            state = await self._replica.compute_next(commit, commit.body.contributions)
        self._naming = asyncio.create_task(self._replica.advance(commit, state))  # a trainer has begun at it
        return len(commit.body.contributions)

    async def download(self) -> int:
        """Forget the state and get it from the others, check it and read it; its size."""
        blob = self._replica.blob
        self._store.discard(blob.digest)
        await self._wishes.download_from_anyone(DOWNLOAD_SECONDS, blob)
        await self._work(self._workshop.load_state, blob)
        return blob.size

    async def settle(self) -> None:
        """The new state is named, and stored for newcomers."""
        await self._naming

    def check(self) -> float:
        return relative_error(self._weights - self._replica.state.anchor, self._words.peers)

    def _encode(self) -> tuple[Blob, ...]:
        sender = ContributionEncoder(self.program)
        payloads = sender.encode(self._replica.chain.round, self._own, self._residual)
        return tuple(self._store.put(payload) for payload in payloads)

    def _begun(self) -> OuterState:
        return OuterState.initial(self._weights.clone(), self.program.method)

    def _settings(self, number: int) -> RoundSettings:
        plan, timing = self.program.plan(number), RoundSection()
        topology = (Butterfly if plan.method.topology.reduces_parts else AllGather)(RUN_ID, len(plan.part_spans))
        return RoundSettings(topology, timing.grace, timing.leader_timeout, ROUND_SECONDS)

    def _failed(self, peer: str, reason: str) -> None:
        """What matters is said again; who is left out in the end is not among the members."""
        sys.stderr.write(f"{peer}: {reason}\n")

    def _broken(self, error: BaseException) -> None:
        raise SystemExit("a merge broke") from error

    def _ignore(self, answers: object) -> None:
        """Nobody is late here."""


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
    parser.add_argument("--codec", help="another one than the recipe's")
    words = parser.parse_args()
    conversation = OrderChannel()
    torch.set_num_threads(1)
    use_one_malloc_arena()
    with suppress(EOFError):
        asyncio.run(serve(words, Path(tempfile.gettempdir()), conversation))


if __name__ == "__main__":
    main()
