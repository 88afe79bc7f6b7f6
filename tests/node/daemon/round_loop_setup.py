"""A peer's loop with plain stand-ins around a real replica."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from node.daemon.chain_sync import SyncPlan
from node.daemon.contributions import ContributionTracker, ForkOutcome, SettledContribution
from node.daemon.downloads import Downloads
from node.daemon.outer_state import ReplicatedState
from node.daemon.round_loop import RoundLoop
from node.from_manifest import round_settings_by_number
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages import Commit, Contribution, SignedMessage
from protocol.consensus.pacing import Pacing
from protocol.consensus.topology import AppliedContributions
from protocol.errors import MalformedError
from protocol.identity import PeerId
from protocol.manifest import Manifest
from protocol.murmur_pb2 import PeerRecord
from tests.node.small_run import (
    MANIFEST,
    METHOD,
    PEERS,
    PROGRAM,
    TERMS,
    CopyingFetcher,
    commit_of,
    grown,
    manifest_of,
    payload,
    replica_in,
    store_in,
    until,
)

ME = PEERS[1].peer_id
SETTINGS = round_settings_by_number(MANIFEST, PROGRAM)
FRIEND, LIAR = PEERS[2].peer_id, PEERS[3].peer_id


class FakeDriver:
    def __init__(self) -> None:
        self.is_open = False
        self.number = -1
        self.begun: list[int] = []
        self.offered: list[Contribution] = []

    def begin(self, number: int, base: bytes, live: Iterable[PeerId]) -> None:
        self.is_open = True
        self.number = number
        self.begun.append(number)

    def close(self) -> None:
        self.is_open = False

    def check(self, commit: Commit) -> None:
        if not SETTINGS(commit.round).topology.accepts_commit(commit):
            raise MalformedError("another shape")

    def offer(self, contribution: Contribution, steps: int | None) -> None:
        self.offered.append(contribution)


class FakeSwarmView:
    has_contacts = False

    def __init__(self) -> None:
        self.others: dict[PeerId, PeerRecord] = {}
        self.heads: list[ChainHead] = []

    def other_records(self) -> dict[PeerId, PeerRecord]:
        return dict(self.others)

    def trainers(self) -> list[PeerId]:
        return [ME, *self.others]

    def state_holders(self, head: ChainHead, other_than: bytes) -> list[PeerId]:
        found = ((peer, record) for peer, record in self.others.items() if record.digest == head.digest)
        return [peer for peer, record in found if record.state_digest not in (b"", other_than)]

    def announce_head(self, head: ChainHead, state: bytes) -> None:
        self.heads.append(head)


@dataclass
class FakeTrainerLink:
    contributions: ContributionTracker = field(default_factory=lambda: ContributionTracker(PROGRAM))
    submit_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    started: list[int] = field(default_factory=list)
    adopted: list[int] = field(default_factory=list)
    fates: list[str] = field(default_factory=list)

    async def start(self, round_number: int, anchor: object) -> None:
        self.started.append(round_number)

    def on_commits(self, commits: Iterable[Commit], number: int) -> str:
        self.fates.extend(self.contributions.on_commit(ME, commit) for commit in commits)
        self.contributions.on_round(number)
        return self.fates[-1] if self.fates else "none"

    def on_fork(self, commits: Sequence[Commit], number: int, left: ChainHead) -> ForkOutcome:
        verdict = self.contributions.on_fork(ME, commits, number, left)
        self.fates.append(verdict.outcome)
        return verdict

    async def apply_anchor(self, round_number: int, anchor: object) -> None:
        self.adopted.append(round_number)


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

    async def save_in_background(self, replica: ReplicatedState, offers: ContributionTracker) -> None:
        self.kept.append(replica.chain.round)


class FakeChainSync:
    """Peers answer with their own chain; a liar with what the test puts here."""

    def __init__(self, mine: ReplicatedState) -> None:
        self.mine = mine
        self.chains: dict[PeerId, ReplicatedState] = {}
        self.faults: dict[PeerId, Exception] = {}
        self.plans: dict[PeerId, SyncPlan] = {}  # instead
        self.asked: list[tuple[PeerId, bool]] = []

    async def plan_sync(self, peer: PeerId, replay: bool, since: int) -> SyncPlan:
        self.asked.append((peer, replay))
        await asyncio.sleep(0)
        if peer in self.faults:
            raise self.faults[peer]
        if peer in self.plans:
            return self.plans[peer]
        theirs = self.chains[peer]
        commits = theirs.chain.commits_since(self.mine.chain.round) or ()
        if replay and commits and commits[0].body.base == self.mine.chain.digest:
            return SyncPlan(theirs.chain.head, commits, None)
        return SyncPlan(theirs.chain.head, commits, theirs.blob)


class FakeStatusReporter:
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.failures: list[str] = []
        self.entries: list[AppliedContributions] = []
        self.recovered_errors: list[str] = []
        self.catch_ups: list[tuple[str, int]] = []
        self.moves: list[ChainHead] = []

    def record_recovered(self, reason: str, line: str) -> None:
        self.recovered_errors.append(reason)

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

    def set_pace(self, *_: object) -> None:
        pass

    def set_miss_reason(self, reason: str) -> None:
        self.failures.append(reason)


class RoundLoopSetup:
    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.store = store_in(folder / "mine")
        self.fetcher = CopyingFetcher(self.store, {})
        self.replica = replica_in(self.store)
        self.driver = FakeDriver()
        self.members = FakeSwarmView()
        self.trainer = FakeTrainerLink()
        self.keeper = FakeCheckpointer()
        self.standing = FakeStatusReporter()
        self.scout = FakeChainSync(self.replica)
        parts: dict[str, Any] = {
            "members": self.members, "driver": self.driver, "scout": self.scout, "trainer": self.trainer,
            "keeper": self.keeper, "standing": self.standing,
            "wishes": Downloads(cast(Any, self.fetcher), lambda: self.fetcher.stores),
        }  # fmt: skip
        self.participant = RoundLoop(
            manifest=manifest, method=METHOD, terms=TERMS, replica=self.replica,
            share=lambda commit: commit.contributions, pacing=Pacing(1.0, lambda number: 1, 1), **parts,
        )  # fmt: skip
        self.running: asyncio.Task[None] | None = None

    def run(self) -> None:
        self.running = asyncio.create_task(self.participant.run())

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

    def show(self, name: PeerId, head: ChainHead, state: bytes = b"") -> None:
        self.members.others[name] = PeerRecord(
            role="trainer", round=head.round, digest=head.digest, chain_tokens=head.tokens, state_digest=state
        )

    async def decide(self, seed: int = 1) -> SignedMessage[Commit]:
        """The open round ends with one contribution of somebody."""
        await until(lambda: self.driver.is_open)
        commit = commit_of(self.replica.chain.head, {2: self.store.put(payload(seed))})
        self.driver.is_open = False
        self.participant.decided(commit)
        await self.until_round(commit.body.round + 1)
        return commit


class RoundLoopFactory:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = list[RoundLoopSetup]()

    def __call__(self, target: str = "", min_peers: int = 1) -> RoundLoopSetup:
        self.made.append(RoundLoopSetup(self.folder, manifest_of(target, min_peers)))
        return self.made[-1]
