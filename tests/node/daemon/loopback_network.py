"""Peers whose round loops hear each other at once, with real stores and arithmetic, and without a state to apply."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from node.daemon.checkpoints.vote_log import ConvictionFile, ProofFile, VoteLog
from node.daemon.effects import Effects, RoundEffects, VoteEffects
from node.daemon.inbox import Inbox, MessageReceiver
from node.daemon.peers.downloads import Downloads
from node.daemon.state.outer_state import RoundCompute
from node.loop.actions import ApplyCommit, PrecomputeCommit, ReportRecovered
from node.loop.contributions import ContributionTracker, StoredContribution
from node.loop.events import ContributionReady, LoopEvent, Started, SwarmChanged, TimePassed, TrainerStarted
from node.loop.options import LoopOptions, RoundOptions
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from node.loop.round_loop import RoundLoop
from node.loop.round_session import RoundSession
from node.loop.steering import unsteered
from node.trainer.ipc.channel import ContributionHeader
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain, genesis_head
from protocol.consensus.events import Fetch, Rejected
from protocol.consensus.machine import RoundMachine
from protocol.consensus.messages.briefs import SeenMessages
from protocol.consensus.messages.contributions import Commit, PartBlob
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.pacing import Pacing
from protocol.consensus.settings import RoundSettings
from protocol.consensus.topology import make_topology
from protocol.errors import PeerFault
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from protocol.signing import sign
from tests.node.daemon.recorded_errors import FixedSources, RecordedErrors
from tests.node.small_run import (
    PEERS,
    PROGRAM,
    RUN_ID,
    CopyingFetcher,
    at_once,
    method_of,
    payload,
    program_of,
    store_in,
    terms_of,
    until,
)

HEAD = genesis_head(RUN_ID)


class LoopbackNetwork:
    """Peers that hear each other at once, but for those that are unreachable."""

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
            seat.members_changed()

    def __getitem__(self, index: int) -> "LoopbackPeer":
        return self.peers[PEERS[index].peer_id]

    def begin(self) -> None:
        for peer in self.peers.values():
            peer.begin()

    def offer(self, *indices: int) -> None:
        for index in indices:
            self[index].offer()

    def send(self, sender: PeerId, peers: Iterable[PeerId], signed: Signed) -> None:
        for peer in peers:
            if peer not in self.unreachable | {sender} and peer in self.peers:
                asyncio.get_running_loop().call_soon(self._deliver, sender, peer, signed)

    def _deliver(self, sender: PeerId, peer: PeerId, signed: Signed) -> None:
        answers = self.peers[peer].receiver.receive(sender, [signed])
        if answers:
            self.peers[sender].receiver.receive(peer, answers)

    async def wait_until_decided(self, *indices: int) -> set[bytes]:
        seats = [self[index] for index in indices]
        await until(lambda: all(seat.decided for seat in seats))
        return {seat.decided[-1].body.content_digest for seat in seats}


class RecordingInbox(Inbox):
    """Keeps all faults."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[BaseException] = []

    def fail(self, error: BaseException) -> None:
        self.faults.append(error)


class FakeStatus:
    def __init__(self) -> None:
        self.refused: list[PeerFault] = []
        self.refused_calls: list[int] = []
        self.setbacks: list[tuple[str, str]] = []

    def record_refusal(self, peer: PeerId, *faults: PeerFault) -> None:
        self.refused.extend(faults)
        self.refused_calls.append(len(faults))

    def record_recovered(self, kind: str, line: str) -> None:
        self.setbacks.append((kind, line))

    def record_left_out(self, peer: PeerId, reason: str) -> None:
        self.setbacks.append((reason, peer))


class FakeStateEffects:
    """Notes what would be done, and applies no commit."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.foreseen: list[Commit] = []
        self.decided: list[SignedMessage[Commit]] = []
        self.skipped: list[tuple[PeerId | None, str]] = []
        self.early_submits = 0

    def report(self, action: object) -> None:
        assert not isinstance(action, ReportRecovered), action
        if isinstance(action, Rejected):
            self.skipped.append((action.peer, action.reason))

    def precompute(self, action: PrecomputeCommit) -> None:
        self.foreseen.append(action.commit)

    async def request_early_submit(self) -> None:
        self.early_submits += 1

    async def start_trainer(self) -> None:
        self._inbox.post(TrainerStarted())

    async def apply_commit(self, action: ApplyCommit) -> None:
        self.decided.append(action.commit.commit)


class LoopbackPeer:
    def __init__(self, network: LoopbackNetwork, index: int, folder: Path) -> None:
        self.network = network
        self.identity = PEERS[index]
        self.index = index
        self.store = store_in(folder / str(index))
        self._proofs = folder / f"proofs-{index}"
        self.fetcher = CopyingFetcher(self.store, {})
        self.resting: set[PeerId] = set()
        self.sent: list[Signed] = []
        self.inbox = RecordingInbox()
        self.status = FakeStatus()
        self.state = FakeStateEffects(self.inbox)
        self.receiver = MessageReceiver(RUN_ID, network.terms, SeenMessages(), self.inbox, cast(Any, self.status))
        vote_log = VoteLog(folder / f"vow-{index}.json", RUN_ID, network.terms)
        self.loop = self._build_loop(vote_log)
        self.round_effects = self._build_round_effects(vote_log)
        self.effects = Effects(
            self.loop, self.inbox, self.receiver, cast(Any, self), self.round_effects, cast(Any, self.state)
        )
        self._has_begun = False

    def _build_loop(self, vote_log: VoteLog) -> RoundLoop:
        network, identity = self.network, self.identity
        options = RoundOptions(identity.peer_id, lambda _: network.settings, network.terms)
        session = RoundSession(
            options,
            lambda kind, body: sign(identity, kind, RUN_ID, body),
            Pacing(network.settings.grace, lambda _: 10, 1),
            vote_log.load(),
        )
        self.contributions = ContributionTracker(PROGRAM)
        return RoundLoop(
            LoopOptions(options, unsteered()), Chain.from_genesis(RUN_ID), b"", self.contributions, session
        )

    def _build_round_effects(self, vote_log: VoteLog) -> RoundEffects:
        sources: Any = FixedSources(lambda: self.network.peers)
        downloads = Downloads(cast(Any, self.fetcher), sources, sources, RecordedErrors())
        compute = RoundCompute(self.network.program, self.store, lambda *_: 1.0)
        proof_file = ProofFile(self._proofs, RUN_ID, self.network.terms)
        conviction_file = ConvictionFile(self._proofs.with_suffix(".json"), RUN_ID, self.network.terms)
        votes = VoteEffects(self.store, vote_log, proof_file, conviction_file, self.inbox)
        return RoundEffects(downloads, compute, at_once, votes, self.inbox, cast(Any, self.status))

    @property
    def session(self) -> RoundSession:
        return self.loop.session

    @property
    def machine(self) -> RoundMachine:
        assert self.session.machine is not None
        return self.session.machine

    @property
    def setbacks(self) -> list[tuple[str, str]]:
        return self.status.setbacks

    @property
    def broken(self) -> list[BaseException]:
        return self.inbox.faults

    @property
    def decided(self) -> list[SignedMessage[Commit]]:
        return self.state.decided

    def members_changed(self, peers: Iterable[PeerId] | None = None) -> None:
        """Tell the loop of its peers: all of the network, unless others are named."""
        named = self.network.peers if peers is None else peers
        states = {peer: PeerState(self.loop.chain.head, is_resting=peer in self.resting) for peer in named}
        self.inbox.post(SwarmChanged(SwarmSnapshot(states)))

    def begin(self, peers: Iterable[PeerId] | None = None) -> None:
        """Open the round after the head of the chain, for the first time or again."""
        self.members_changed(peers)
        events: list[LoopEvent] = [TimePassed()] if self._has_begun else [Started(), TrainerStarted()]
        for event in events:
            self.inbox.post(event)
        self._has_begun = True

    def close(self) -> None:
        """Give the open round up."""
        self.session.close()
        self.round_effects.close_round()
        self.effects._set_timer()

    def stop(self) -> None:
        self.effects.stop()

    def fetch(self, part_blob: PartBlob, *sources: PeerId, is_reduced: bool = False) -> None:
        """Order a blob as the round machine does."""
        self.round_effects.fetch(self.session._fetch(Fetch(part_blob, sources, is_reduced)))

    def send(self, peers: Iterable[PeerId], signed: Signed) -> None:
        self.sent.append(signed)
        self.network.send(self.identity.peer_id, peers, signed)

    def parts(self, seed: int = 0) -> list[Blob]:
        sizes = [stop - start for start, stop in self.network.bounds]
        return [self.store.put(payload(100 * seed + 10 * self.index + part, size)) for part, size in enumerate(sizes)]

    def offer(self, parts: list[Blob] | None = None) -> None:
        """Submit a contribution of the round at hand."""
        parts = parts or self.parts()
        sizes = tuple(blob.size for blob in parts)
        header = ContributionHeader(round=self.loop.chain.round, sizes=sizes, tokens=100, steps=5, loss=3.0)
        self.contributions.submit(StoredContribution(header, tuple(parts)))
        self.inbox.post(ContributionReady())
