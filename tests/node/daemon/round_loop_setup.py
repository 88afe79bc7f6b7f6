"""A peer's loop with plain stand-ins around a real replica."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from node.daemon.effects import Effects
from node.daemon.inbox import Inbox
from node.daemon.peers.downloads import Downloads
from node.daemon.state.outer_state import OuterState, OuterVectors, ReplicatedState, Rooms, SignedContributions
from node.daemon.state_effects import StateEffects
from node.from_manifest import round_settings_by_number
from node.loop.actions import LoopAction
from node.loop.contributions import ContributionTracker, ForkOutcome, SettledContribution, StoredContribution
from node.loop.events import SwarmChanged, TimePassed
from node.loop.options import LoopOptions, RoundOptions, SyncOptions
from node.loop.peers.catch_up import SyncOffer
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from node.loop.round_loop import RoundLoop
from node.loop.round_session import RoundSession
from node.loop.steering import Steering, unsteered
from optim.aggregation.base import LeftOut
from protocol.blobs.blob import Blob
from protocol.consensus.chain import CertifiedCommit, Chain, ChainHead
from protocol.consensus.messages.contributions import AppliedContributions, Commit, Contribution
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.steering import RevisionLog
from tests.certificates import offer_of
from tests.node.daemon.recorded_errors import FixedSources, RecordedErrors
from tests.node.small_run import (
    MANIFEST,
    METHOD,
    PEERS,
    PROGRAM,
    TERMS,
    CopyingFetcher,
    apply,
    certified,
    commit_of,
    grown,
    manifest_of,
    payload,
    replica_in,
    store_in,
    until,
)

ME = PEERS[1].peer_id
SETTINGS = round_settings_by_number(unsteered(MANIFEST), PROGRAM)
FRIEND, LIAR = PEERS[2].peer_id, PEERS[3].peer_id


class FakeSession:
    """In the place of RoundSession: a round ends when the test says so."""

    def __init__(self) -> None:
        self.is_open = False
        self.signer: Any = None  # nothing is signed
        self.conduct: Any = None  # nobody is watched
        self.number = -1
        self.decided: CertifiedCommit | None = None
        self.begun: list[int] = []
        self.offered: list[Contribution] = []

    def open(self, chain: Chain, *_: object) -> None:
        self.is_open = True
        self.number = chain.round
        self.begun.append(chain.round)

    def recently_seen(self, now: float) -> frozenset[PeerId]:
        return frozenset()

    def close(self) -> None:
        self.is_open = False

    def submit(self, contribution: StoredContribution, head: ChainHead, now: float, stored: list[Blob]) -> None:
        self.offered.append(contribution.to_contribution(head, TERMS))

    def contributions_for(self, commit: Commit) -> SignedContributions:
        return commit.contributions

    def advance(self, now: float) -> list[LoopAction]:
        return []

    def next_deadline(self, now: float) -> float | None:
        return None

    def update_membership(self, membership: object) -> None:
        """Nobody asks."""

    def tick(self) -> None:
        """Nothing waits for it."""

    def describe_pace(self, round_number: int) -> str:
        return ""


class FakeSwarmView:
    def __init__(self) -> None:
        self.heads: list[ChainHead] = []

    def announce_head(self, chain: Chain, state: bytes, urgent: bool = True) -> None:
        self.heads.append(chain.head)


@dataclass
class FakeTrainerLink:
    contributions: ContributionTracker = field(default_factory=lambda: ContributionTracker(PROGRAM))
    intake: Any = field(default_factory=lambda: SimpleNamespace(lock=asyncio.Lock()))
    started: list[int] = field(default_factory=list)
    adopted: list[int] = field(default_factory=list)

    async def start(self, round_number: int, anchor: object, train: object, exact_step: int = 0) -> None:
        self.started.append(round_number)

    def record_fork(self, verdict: ForkOutcome) -> None:
        """Nobody asks."""

    async def apply_anchor(
        self, round_number: int, anchor: object, train: object, exact_step: int = 0, base: bytes = b""
    ) -> None:
        self.adopted.append(round_number)

    def share_memory(self, round_number: int, state: OuterState) -> OuterState:
        return state

    def anchor_rooms(self, round_number: int) -> Rooms:
        """There is no shared memory."""
        return {}


class FakeRevisionKeeper:
    def adopt(self, revision: bytes) -> None:
        """Nobody asks."""


class FakeCheckpointer:
    """`is_ready`: the last save is on disk."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.is_ready = asyncio.Event()
        self.is_ready.set()

    async def wait_until_announceable(self, replica: ReplicatedState) -> None:
        await self.is_ready.wait()

    async def wait_until_saved(self) -> None:
        await self.is_ready.wait()

    async def retain_state(self, *_: object) -> None:
        """Nothing is fetched here."""

    def prune_blobs(self, *_: object) -> None:
        pass

    async def free_anchor(self, *_: object) -> None:
        """There is no shared memory."""

    def is_anchor_free(self, *_: object) -> bool:
        return True

    async def save_in_background(self, replica: ReplicatedState, offers: ContributionTracker) -> None:
        self.kept.append(replica.chain.round)

    async def keep_before_jump(self) -> None:
        """There is no disk."""

    def confirm_round(self) -> None:
        """There is no disk."""


class FakeChainSync:
    """Peers answer with their own chain; a liar with what the test puts here."""

    def __init__(self, mine: ReplicatedState) -> None:
        self.mine = mine
        self.chains: dict[PeerId, ReplicatedState] = {}
        self.faults: dict[PeerId, Exception] = {}
        self.offers: dict[PeerId, SyncOffer] = {}  # instead
        self.asked: list[PeerId] = []

    async def ask(self, peer: PeerId, since: int) -> SyncOffer:
        self.asked.append(peer)
        await asyncio.sleep(0)
        if peer in self.faults:
            raise self.faults[peer]
        if peer in self.offers:
            return self.offers[peer]
        theirs = self.chains[peer]
        return offer_of(theirs.chain, theirs.blob, word=peer == FRIEND or None)  # as if the user had named it


class FakeStatusReporter:
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.failures: list[str] = []
        self.entries: list[AppliedContributions] = []
        self.left_out: list[tuple[PeerId, LeftOut]] = []
        self.recovered_errors: list[str] = []
        self.catch_ups: list[tuple[str, int]] = []
        self.moves: list[ChainHead] = []

    def record_recovered(self, reason: str, line: str) -> None:
        self.recovered_errors.append(reason)

    def record_left_out(self, peer: PeerId, reason: LeftOut) -> None:
        self.left_out.append((peer, reason))

    def record_applied(self, entries: AppliedContributions, step: float) -> None:
        self.entries.append(entries)

    def record_revised(self, past: Sequence[SettledContribution]) -> None:
        pass

    def reset_validation(self, head: ChainHead) -> None:
        self.moves.append(head)

    def record_catch_up(self, how: str, rounds: int) -> None:
        self.catch_ups.append((how, rounds))

    def set_phase(self, phase: str, reason: str = "") -> None:
        if self.phases[-1:] != [phase]:
            self.phases.append(phase)

    def record_rounds(self, *_: object) -> None:
        pass

    def set_revisions(self, *_: object) -> None:
        pass

    def set_pace(self, *_: object) -> None:
        pass

    def set_miss_reason(self, reason: str) -> None:
        self.failures.append(reason)


class RoundLoopSetup:
    def __init__(self, folder: Path, manifest: Manifest, has_contacts: bool) -> None:
        self.folder = folder
        self.store = store_in(folder / "mine")
        self.fetcher = CopyingFetcher(self.store, {})
        self.replica = replica_in(self.store)
        self.others: dict[PeerId, PeerState] = {}
        self.session = FakeSession()
        self.members = FakeSwarmView()
        self.trainer = FakeTrainerLink()
        self.keeper = FakeCheckpointer()
        self.standing = FakeStatusReporter()
        self.scout = FakeChainSync(self.replica)
        self.inbox = Inbox()
        target = manifest.target.model_copy(update={"keepers": 0})
        steered = manifest.model_copy(update={"target": target})
        self.steering = Steering(steered, self.replica.chain, RevisionLog())
        self.state_effects = self._build_state_effects()
        self.loop = self._build_loop(manifest, has_contacts)
        nothing: Any = None
        self.effects = Effects(self.loop, self.inbox, nothing, nothing, nothing, self.state_effects)
        self.running: asyncio.Task[None] | None = None

    def _build_state_effects(self) -> StateEffects:
        sources: Any = FixedSources(lambda: self.fetcher.stores)
        state = SimpleNamespace(
            method=METHOD,
            replicated=self.replica,
            steering=self.steering,
            revisions=FakeRevisionKeeper(),
            contributions=self.trainer.contributions,
            outer_vectors=OuterVectors(self.folder, PROGRAM),
            workers=SimpleNamespace(compute=asyncio.to_thread),
        )
        downloads = Downloads(cast(Any, self.fetcher), sources, sources, RecordedErrors())
        peers = SimpleNamespace(downloads=downloads, sync_client=self.scout, swarm_view=self.members)
        work = SimpleNamespace(trainer=self.trainer, checkpointer=self.keeper, auditor=None)
        fakes: list[Any] = [state, peers, work, self.inbox, self.standing]
        return StateEffects(*fakes)

    def _build_loop(self, manifest: Manifest, has_contacts: bool) -> RoundLoop:
        options = LoopOptions(
            RoundOptions(ME, SETTINGS, TERMS),
            self.steering,
            min_peers=manifest.run.min_peers,
            expiry=manifest.membership.expiry,
            has_contacts=has_contacts,
            sync=SyncOptions(lacks_state=bool(manifest.model.weights)),
        )
        state, session = self.replica.blob.digest, cast(RoundSession, self.session)
        return RoundLoop(options, self.replica.chain, state, self.trainer.contributions, session)

    def run(self) -> None:
        self.tell_members()
        self.running = asyncio.create_task(self.effects.run())

    def tell_members(self) -> None:
        """Tell the loop of the swarm, whether or not there is news."""
        own = PeerState(self.replica.chain.head, self.replica.blob.digest)
        self.inbox.post(SwarmChanged(SwarmSnapshot({ME: own, **self.others})))

    async def done(self) -> None:
        assert self.running is not None
        await asyncio.wait_for(self.running, 10)

    async def until_round(self, number: int) -> None:
        def reached() -> bool:
            assert self.running is not None and (not self.running.done() or self.running.result() is None)
            return self.replica.chain.round >= number

        await until(reached)

    async def peer(self, name: PeerId, rounds: int, seed: int = 2) -> ReplicatedState:
        """Somebody with a chain of so many rounds, whose blobs can be had."""
        store = store_in(self.folder / name)
        replica = replica_in(store)
        await grown(replica, store, rounds, peer=seed)
        self.fetcher.stores[name], self.scout.chains[name] = store, replica
        self.show(name, replica.chain.head, replica.blob.digest)
        return replica

    async def peer_of_two(self, name: PeerId, rounds: int) -> ReplicatedState:
        """Somebody with a chain whose rounds have work of two peers: both have a vote."""
        theirs, store = await self.peer(name, 0), self.fetcher.stores[name]
        for seed in range(rounds):
            blobs = {number: store.put(payload(10 * seed + number)) for number in (2, 3)}
            await apply(theirs, commit_of(theirs.chain.head, blobs))
        self.show(name, theirs.chain.head, theirs.blob.digest)
        return theirs

    def show(self, name: PeerId, head: ChainHead, state: bytes = b"") -> None:
        self.others[name] = PeerState(head, state)
        self.tell_members()

    async def decide(self, seed: int = 1) -> SignedMessage[Commit]:
        """The open round ends with one contribution of somebody."""
        await until(lambda: self.session.is_open)
        commit = commit_of(self.replica.chain.head, {2: self.store.put(payload(seed))})
        self.end_round(commit)
        await self.until_round(commit.body.round + 1)
        return commit

    def end_round(self, commit: SignedMessage[Commit]) -> None:
        self.session.is_open = False
        self.session.decided = certified(self.replica.chain, commit, self.replica.blob.digest)
        self.inbox.post(TimePassed())


class RoundLoopFactory:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = list[RoundLoopSetup]()

    def __call__(self, target: str = "", min_peers: int = 1, has_contacts: bool = False) -> RoundLoopSetup:
        self.made.append(RoundLoopSetup(self.folder, manifest_of(target, min_peers), has_contacts))
        return self.made[-1]
