"""A peer's loop with plain stand-ins around a real replica."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from node.daemon.catch_up import Way
from node.daemon.offers import Offers, Past, Verdict
from node.daemon.participant import Participant
from node.daemon.replica import Replica
from node.daemon.wishes import Wishes
from node.program import round_settings
from protocol.errors import MalformedError
from protocol.identity import PeerId
from protocol.manifest import Manifest
from protocol.murmur_pb2 import PeerRecord
from protocol.pacing import Pacing
from protocol.rounds.chain import Head
from protocol.rounds.entries import Entries
from protocol.rounds.statements import Commit, Contribution, Statement
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
SETTINGS = round_settings(MANIFEST, PROGRAM)
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
        if not SETTINGS(commit.round).fits(commit):
            raise MalformedError("another shape")

    def offer(self, contribution: Contribution, steps: int | None) -> None:
        self.offered.append(contribution)


class FakeMembers:
    has_contacts = False

    def __init__(self) -> None:
        self.others: dict[PeerId, PeerRecord] = {}
        self.heads: list[Head] = []

    def records(self) -> dict[PeerId, PeerRecord]:
        return dict(self.others)

    def trainers(self) -> list[PeerId]:
        return [ME, *self.others]

    def holders(self, head: Head, other_than: bytes) -> list[PeerId]:
        found = ((peer, record) for peer, record in self.others.items() if record.digest == head.digest)
        return [peer for peer, record in found if record.state_digest not in (b"", other_than)]

    def announce_head(self, head: Head, state: bytes) -> None:
        self.heads.append(head)


@dataclass
class FakeTrainer:
    offers: Offers = field(default_factory=lambda: Offers(PROGRAM))
    placing: asyncio.Lock = field(default_factory=asyncio.Lock)
    started: list[int] = field(default_factory=list)
    adopted: list[int] = field(default_factory=list)
    fates: list[str] = field(default_factory=list)

    async def start(self, round_number: int, anchor: object) -> None:
        self.started.append(round_number)

    def settle(self, commits: Iterable[Commit], number: int) -> str:
        self.fates.extend(self.offers.settle(ME, commit) for commit in commits)
        self.offers.arrive(number)
        return self.fates[-1] if self.fates else "none"

    def jump(self, commits: Sequence[Commit], number: int, left: Head) -> Verdict:
        verdict = self.offers.jump(ME, commits, number, left)
        self.fates.append(verdict.fate)
        return verdict

    async def adopt(self, round_number: int, anchor: object) -> None:
        self.adopted.append(round_number)


class FakeKeeper:
    """`is_ready`: the last save is on disk."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.is_ready = asyncio.Event()
        self.is_ready.set()

    async def ready(self, replica: Replica) -> None:
        await self.is_ready.wait()

    async def saved(self) -> None:
        await self.is_ready.wait()

    async def replace(self, *_: object) -> None:
        """Nothing is fetched here."""

    def prune(self, *_: object) -> None:
        pass

    async def keep(self, replica: Replica, offers: Offers) -> None:
        self.kept.append(replica.chain.round)


class FakeScout:
    """Peers answer with their own chain; a liar with what the test puts here."""

    def __init__(self, mine: Replica) -> None:
        self.mine = mine
        self.chains: dict[PeerId, Replica] = {}
        self.faults: dict[PeerId, Exception] = {}
        self.ways: dict[PeerId, Way] = {}  # instead
        self.asked: list[tuple[PeerId, bool]] = []

    async def find_way(self, peer: PeerId, replay: bool, since: int) -> Way:
        self.asked.append((peer, replay))
        await asyncio.sleep(0)
        if peer in self.faults:
            raise self.faults[peer]
        if peer in self.ways:
            return self.ways[peer]
        theirs = self.chains[peer]
        commits = theirs.chain.since(self.mine.chain.round) or ()
        if replay and commits and commits[0].body.base == self.mine.chain.digest:
            return Way(theirs.chain.head, commits, None)
        return Way(theirs.chain.head, commits, theirs.blob)


class FakeStanding:
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.failures: list[str] = []
        self.entries: list[Entries] = []
        self.setbacks: list[str] = []
        self.catch_ups: list[tuple[str, int]] = []
        self.moves: list[Head] = []

    def set_back(self, reason: str, line: str) -> None:
        self.setbacks.append(reason)

    def entered(self, entries: Entries, step: float) -> None:
        self.entries.append(entries)

    def revised(self, past: Sequence[Past]) -> None:
        pass

    def moved_to(self, head: Head) -> None:
        self.moves.append(head)

    def caught_up(self, how: str, rounds: int) -> None:
        self.catch_ups.append((how, rounds))

    def enter(self, phase: str, reason: str = "") -> None:
        if self.phases[-1:] != [phase]:
            self.phases.append(phase)

    def applied(self, *_: object) -> None:
        pass

    def paced(self, *_: object) -> None:
        pass

    def goes_without(self, reason: str) -> None:
        self.failures.append(reason)


class World:
    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.store = store_in(folder / "mine")
        self.fetcher = CopyingFetcher(self.store, {})
        self.replica = replica_in(self.store)
        self.driver = FakeDriver()
        self.members = FakeMembers()
        self.trainer = FakeTrainer()
        self.keeper = FakeKeeper()
        self.standing = FakeStanding()
        self.scout = FakeScout(self.replica)
        parts: dict[str, Any] = {
            "members": self.members, "driver": self.driver, "scout": self.scout, "trainer": self.trainer,
            "keeper": self.keeper, "standing": self.standing,
            "wishes": Wishes(cast(Any, self.fetcher), lambda: self.fetcher.stores),
        }  # fmt: skip
        self.participant = Participant(
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

    async def peer(self, name: PeerId, rounds: int, seed: int = 2) -> Replica:
        """Somebody with a chain of so many rounds, whose blobs can be had."""
        store = store_in(self.folder / name)
        replica = replica_in(store)
        await grown(replica, store, rounds, peer=seed)
        self.fetcher.stores[name], self.scout.chains[name] = store, replica
        self.show(name, replica.chain.head, replica.blob.digest)
        return replica

    def show(self, name: PeerId, head: Head, state: bytes = b"") -> None:
        self.members.others[name] = PeerRecord(
            role="trainer", round=head.round, digest=head.digest, chain_tokens=head.tokens, state_digest=state
        )

    async def decide(self, seed: int = 1) -> Statement[Commit]:
        """The open round ends with one contribution of somebody."""
        await until(lambda: self.driver.is_open)
        commit = commit_of(self.replica.chain.head, {2: self.store.put(payload(seed))})
        self.driver.is_open = False
        self.participant.decided(commit)
        await self.until_round(commit.body.round + 1)
        return commit


class Make:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = list[World]()

    def __call__(self, target: str = "", min_peers: int = 1) -> World:
        self.made.append(World(self.folder, manifest_of(target, min_peers)))
        return self.made[-1]
