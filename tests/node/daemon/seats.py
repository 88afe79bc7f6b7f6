"""Peers whose round drivers hear each other at once, with real stores and arithmetic."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from node.daemon.replica import Workshop
from node.daemon.rounds import Hooks, RoundDriver
from node.daemon.vows import VowFile
from node.daemon.wishes import Wishes
from protocol.blobs.blob import Blob
from protocol.errors import PeerFault
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from protocol.pacing import Pacing
from protocol.rounds.chain import Head, genesis
from protocol.rounds.events import Exchange, Live, RoundSettings
from protocol.rounds.statements import Commit, Statement
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

HEAD = genesis(RUN_ID)


class Table:
    """Peers whose drivers hear each other at once, but for those that are deaf."""

    def __init__(self, folder: Path, count: int, exchange: Exchange, parts: int = 3) -> None:
        self.program = program_of(method_of(exchange), parts)
        self.bounds = self.program.plan(0).bounds
        self.terms = terms_of(len(self.bounds))
        self.settings = RoundSettings(
            RUN_ID, exchange, len(self.bounds), grace=1.0, leader_timeout=1.5, exchange_timeout=3.0
        )
        self.deaf: set[PeerId] = set()
        self.seats = {identity.peer_id: Seat(self, index, folder) for index, identity in enumerate(PEERS[:count])}
        stores = {peer: seat.store for peer, seat in self.seats.items()}
        for seat in self.seats.values():
            seat.fetcher.stores = stores

    def __getitem__(self, index: int) -> "Seat":
        return self.seats[PEERS[index].peer_id]

    def begin(self, head: Head = HEAD) -> None:
        for seat in self.seats.values():
            seat.driver.begin(head.round, head.digest, self.seats)

    def offer(self, *indices: int, head: Head = HEAD) -> None:
        for index in indices:
            self[index].offer(head)

    def carry(self, sender: PeerId, peers: Iterable[PeerId], signed: Signed) -> None:
        for peer in peers:
            if peer not in self.deaf | {sender} and peer in self.seats:
                asyncio.get_running_loop().call_soon(self._arrive, sender, peer, signed)

    def _arrive(self, sender: PeerId, peer: PeerId, signed: Signed) -> None:
        answers = self.seats[peer].driver.take(sender, [signed])
        if answers:
            self.seats[sender].driver.take(peer, answers)

    async def all_decided(self, *indices: int) -> set[bytes]:
        seats = [self[index] for index in indices]
        await until(lambda: all(seat.decided for seat in seats))
        return {seat.decided[-1].body.content for seat in seats}


class Seat:
    def __init__(self, table: Table, index: int, folder: Path) -> None:
        self.table = table
        self.identity = PEERS[index]
        self.index = index
        self.store = store_in(folder / str(index))
        self.fetcher = CopyingFetcher(self.store, {})
        self.wishes = Wishes(cast(Any, self.fetcher), lambda: table.seats)
        self.workshop = Workshop(table.program, self.store, lambda step: 1.0)
        self.resting: set[PeerId] = set()
        self.sent: list[Signed] = []
        self.foreseen: list[Commit] = []
        self.decided: list[Statement[Commit]] = []
        self.hurried: list[float] = []
        self.refused: list[PeerFault] = []
        self.skipped: list[tuple[PeerId | None, str]] = []
        self.setbacks: list[tuple[str, str]] = []
        self.broken: list[BaseException] = []
        hooks = Hooks(
            send=self.send,
            work=at_once,
            members=lambda: Live(frozenset(table.seats), resting=frozenset(self.resting)),
            trains=lambda peer: peer in table.seats,
            refused=lambda _, faults: self.refused.extend(faults),
            skipped=lambda peer, reason: self.skipped.append((peer, reason)),
            set_back=lambda reason, line: self.setbacks.append((reason, line)),
            foreseen=self.foreseen.append,
            decided=self.decided.append,
            hurry=lambda: self.hurried.append(table.settings.grace),
            broken=self.broken.append,
        )
        self.driver = RoundDriver(
            self.identity, lambda _: table.settings, table.terms, self.store, self.workshop, self.wishes,
            VowFile(folder / f"vow-{index}.json", RUN_ID, table.terms), hooks,
            Pacing(table.settings.grace, lambda _: 10, 1),
        )  # fmt: skip

    def send(self, peers: Iterable[PeerId], signed: Signed) -> None:
        self.sent.append(signed)
        self.table.carry(self.identity.peer_id, peers, signed)

    def parts(self, seed: int = 0) -> list[Blob]:
        sizes = [stop - start for start, stop in self.table.bounds]
        return [self.store.put(payload(100 * seed + 10 * self.index + part, size)) for part, size in enumerate(sizes)]

    def offer(self, head: Head = HEAD, parts: list[Blob] | None = None) -> None:
        self.driver.offer(contribution_of(head, parts or self.parts()))
