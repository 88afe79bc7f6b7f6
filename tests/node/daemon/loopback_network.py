"""Peers whose round drivers hear each other at once, with real stores and arithmetic."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from node.checkpoints.vote_log import VoteLog
from node.daemon.downloads import Downloads
from node.daemon.effects import Effects, Hooks
from node.daemon.outer_state import RoundCompute
from protocol.blobs.blob import Blob
from protocol.consensus.chain import ChainHead, genesis_head
from protocol.consensus.events import MembershipChanged
from protocol.consensus.messages import Commit, SignedMessage
from protocol.consensus.pacing import Pacing
from protocol.consensus.settings import RoundSettings
from protocol.consensus.topology import make_topology
from protocol.errors import PeerFault
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from tests.node.small_run import (
    PEERS,
    RUN_ID,
    CopyingFetcher,
    at_once,
    contribution_of,
    method_of,
    payload,
    program_of,
    store_in,
    terms_of,
    until,
)

HEAD = genesis_head(RUN_ID)


class LoopbackNetwork:
    """Peers whose drivers hear each other at once, but for those that are deaf."""

    def __init__(self, folder: Path, count: int, exchange: str, parts: int = 3) -> None:
        self.program = program_of(method_of(exchange), parts)
        self.bounds = self.program.plan(0).part_spans
        self.terms = terms_of(len(self.bounds))
        self.settings = RoundSettings(
            make_topology(exchange, RUN_ID, len(self.bounds)), grace=1.0, leader_timeout=1.5, exchange_timeout=3.0
        )
        self.unreachable: set[PeerId] = set()
        self.peers = {
            identity.peer_id: LoopbackPeer(self, index, folder) for index, identity in enumerate(PEERS[:count])
        }
        stores = {peer: seat.store for peer, seat in self.peers.items()}
        for seat in self.peers.values():
            seat.fetcher.stores = stores

    def __getitem__(self, index: int) -> "LoopbackPeer":
        return self.peers[PEERS[index].peer_id]

    def begin(self, head: ChainHead = HEAD) -> None:
        for seat in self.peers.values():
            seat.driver.begin(head.round, head.digest, self.peers)

    def offer(self, *indices: int, head: ChainHead = HEAD) -> None:
        for index in indices:
            self[index].offer(head)

    def send(self, sender: PeerId, peers: Iterable[PeerId], signed: Signed) -> None:
        for peer in peers:
            if peer not in self.unreachable | {sender} and peer in self.peers:
                asyncio.get_running_loop().call_soon(self._deliver, sender, peer, signed)

    def _deliver(self, sender: PeerId, peer: PeerId, signed: Signed) -> None:
        answers = self.peers[peer].driver.take(sender, [signed])
        if answers:
            self.peers[sender].driver.take(peer, answers)

    async def wait_until_decided(self, *indices: int) -> set[bytes]:
        seats = [self[index] for index in indices]
        await until(lambda: all(seat.decided for seat in seats))
        return {seat.decided[-1].body.content_digest for seat in seats}


class LoopbackPeer:
    def __init__(self, network: LoopbackNetwork, index: int, folder: Path) -> None:
        self.network = network
        self.identity = PEERS[index]
        self.index = index
        self.store = store_in(folder / str(index))
        self.fetcher = CopyingFetcher(self.store, {})
        self.wishes = Downloads(cast(Any, self.fetcher), lambda: network.peers)
        self.workshop = RoundCompute(network.program, self.store, lambda step: 1.0)
        self.resting: set[PeerId] = set()
        self.sent: list[Signed] = []
        self.foreseen: list[Commit] = []
        self.decided: list[SignedMessage[Commit]] = []
        self.hurried: list[float] = []
        self.refused: list[PeerFault] = []
        self.skipped: list[tuple[PeerId | None, str]] = []
        self.setbacks: list[tuple[str, str]] = []
        self.broken: list[BaseException] = []
        hooks = Hooks(
            send=self.send,
            work=at_once,
            members=lambda: MembershipChanged(frozenset(network.peers), resting=frozenset(self.resting)),
            trains=lambda peer: peer in network.peers,
            refused=lambda _, faults: self.refused.extend(faults),
            skipped=lambda peer, reason: self.skipped.append((peer, reason)),
            set_back=lambda reason, line: self.setbacks.append((reason, line)),
            foreseen=self.foreseen.append,
            decided=self.decided.append,
            hurry=lambda: self.hurried.append(network.settings.grace),
            broken=self.broken.append,
        )
        self.driver = Effects(
            self.identity, lambda _: network.settings, network.terms, self.store, self.workshop, self.wishes,
            VoteLog(folder / f"vow-{index}.json", RUN_ID, network.terms), hooks,
            Pacing(network.settings.grace, lambda _: 10, 1),
        )  # fmt: skip

    def send(self, peers: Iterable[PeerId], signed: Signed) -> None:
        self.sent.append(signed)
        self.network.send(self.identity.peer_id, peers, signed)

    def parts(self, seed: int = 0) -> list[Blob]:
        sizes = [stop - start for start, stop in self.network.bounds]
        return [self.store.put(payload(100 * seed + 10 * self.index + part, size)) for part, size in enumerate(sizes)]

    def offer(self, head: ChainHead = HEAD, parts: list[Blob] | None = None) -> None:
        self.driver.offer(contribution_of(head, parts or self.parts()))
