"""The stateful receivers of frames: the round machine, the gossip directory and the blob server."""

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from protocol import murmur_pb2 as wire
from protocol.blobs.server import BlobService
from protocol.blobs.store import BlobStore
from protocol.consensus.events import LocalContribution, MessageReceived, Send
from protocol.consensus.messages.kinds import KINDS
from protocol.errors import PeerFault
from protocol.membership.clock import SwarmClock
from protocol.membership.directory import PeerDirectory
from protocol.membership.gossip import DirectoryOptions
from protocol.signing import sign
from tests.fuzz.frames import Target
from tests.fuzz.mutate import mutate_message
from tests.fuzz.samples import IDENTITIES, NAMES
from tests.node.small_run import RUN_ID
from tests.protocol.consensus.cluster import Cluster
from tests.protocol.membership.simulated_gossip import FakeNetwork, FakeTransport
from tests.simulation.virtual.network import NAMES as MEMBERS
from tests.simulation.virtual.network import make_contribution, make_signer

FRAMES_PER_ROUND = 200
NOW = 1_800_000_000.0


class OpenRound:
    """Members of a round in the middle of it, who get changed messages of one another, all of them well signed."""

    def __init__(self, exchange: str, parts: int) -> None:
        self._exchange, self._parts = exchange, parts
        self._samples = self._record()
        self._open()

    def _new_cluster(self) -> Cluster:
        return Cluster(4, self._exchange, self._parts)

    def _record(self) -> list[wire.Signed]:
        cluster = self._new_cluster()
        cluster.contribute(*cluster.names)
        return [action.signed for _, action in cluster.log if isinstance(action, Send)]

    def _open(self) -> None:
        self._cluster, self._left = self._new_cluster(), FRAMES_PER_ROUND
        for name in self._cluster.names[:2]:
            contribution = make_contribution(name, 0, self._samples_base(), self._cluster.scenario)
            self._cluster.feed_event(name, LocalContribution(contribution))

    def _samples_base(self) -> bytes:
        return next(
            wire.Contribution.FromString(signed.body).base for signed in self._samples if signed.kind == "contribution"
        )

    def make(self, draw: random.Random) -> bytes:
        sample = draw.choice(self._samples)
        body: Message = KINDS[sample.kind][0].FromString(sample.body)
        mutate_message(body, draw)
        sender = sample.peer if draw.random() < 0.7 else draw.choice(MEMBERS[:6])
        return make_signer(sender)(sample.kind, body).SerializeToString()

    def decode(self, raw: bytes) -> None:
        self._left -= 1
        if not self._left:
            self._open()
        cluster = self._cluster
        signed = wire.Signed.FromString(raw)
        message = cluster.network.open(signed)
        for name in cluster.names:
            cluster.feed_event(name, MessageReceived(message))
        cluster.queue.clear()
        cluster.pending_fetches.clear()
        cluster.log.clear()
        cluster.now += 0.01


class CallContext:
    """The context of a call, of which a servicer may abort."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        raise PeerFault(details)

    async def write(self, chunk: object) -> None:
        pass


class Gossip:
    """A directory that is gossiped at."""

    def __init__(self) -> None:
        transport: Any = FakeTransport(FakeNetwork(), NAMES[0])
        options = DirectoryOptions(run_id=RUN_ID, heartbeat=2.0, expiry=15.0)
        clock = SwarmClock(lambda: NOW)
        self._directory = PeerDirectory(options, IDENTITIES[0], transport, clock, random.Random(0))
        self._loop = asyncio.new_event_loop()
        self._directory._call_buckets.try_take = lambda *_: True  # type: ignore[method-assign]

    def make(self, draw: random.Random) -> bytes:
        record = wire.PeerRecord(
            sequence=int(NOW * 1000), expires=NOW + 10, role="trainer", name="mary",
            addresses=[f"/ip4/10.0.0.1/tcp/4001/p2p/{NAMES[1]}"],
        )  # fmt: skip
        mutate_message(record, draw)
        signed = sign(draw.choice(IDENTITIES), "peer", RUN_ID, record)
        request = wire.GossipRequest(run=bytes.fromhex(RUN_ID), time=NOW, salt=b"12345678", records=[signed] * 2)
        if draw.random() < 0.5:
            mutate_message(request, draw)
        return request.SerializeToString()

    def decode(self, raw: bytes) -> None:
        self._loop.run_until_complete(self._answer(wire.GossipRequest.FromString(raw)))

    async def _answer(self, request: wire.GossipRequest) -> None:
        self._directory._answer_gossip(NAMES[1], request)


class Blobs:
    """A server of two blobs, whose requests are changed."""

    def __init__(self) -> None:
        store = BlobStore(Path(tempfile.mkdtemp(prefix="murmur-fuzz-")), 1 << 24, 1 << 24)
        self._blobs = [store.put_in_memory(b"x" * 100), store.put_in_memory(b"y" * (3 << 20))]
        self._service = BlobService(store, lambda _: NAMES[1])
        self._loop = asyncio.new_event_loop()

    def make(self, draw: random.Random) -> bytes:
        blob = draw.choice(self._blobs)
        request = wire.FetchRequest(digest=blob.digest, offset=0, length=min(blob.size, 1 << 20), squeezed=True)
        mutate_message(request, draw)
        return request.SerializeToString()

    def decode(self, raw: bytes) -> None:
        self._loop.run_until_complete(self._serve(wire.FetchRequest.FromString(raw)))

    async def _serve(self, request: wire.FetchRequest) -> None:
        context: Any = CallContext()
        await self._service.Fetch(request, context)
        await self._service.Pieces(wire.PiecesRequest(digest=request.digest), context)


def servicer_targets() -> list[Target]:
    gather, butterfly, gossip, blobs = OpenRound("gather", 1), OpenRound("butterfly", 4), Gossip(), Blobs()
    return [
        Target("round machine, gather", gather.make, gather.decode, 4),
        Target("round machine, butterfly", butterfly.make, butterfly.decode, 4),
        Target("gossip servicer", gossip.make, gossip.decode, 3),
        Target("blob servicer", blobs.make, blobs.decode, 2),
    ]
