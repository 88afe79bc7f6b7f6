"""A seeded virtual network that drives many round machines under a virtual clock.

It stands in for the daemon: deliveries with retries like those of request and reply, blob transfers from the sources
the machine names, gossiped records with expiry, a trainer that takes its time, and catching up by the chain.
Signatures are left out here (they have tests of their own): a body is opened once and remembered.
"""

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.rounds.events import Exchange, Pattern, RoundSettings
from protocol.rounds.kinds import KINDS
from protocol.rounds.reports import Decision, acknowledging
from protocol.rounds.statements import Commit, Contribution, Digest, Roster, Statement, Terms

RUN_ID = hashlib.sha256(b"simulated run").hexdigest()
SHAPES = hashlib.sha256(b"shapes").digest()
ATTEMPTS_TO_DELIVER = 3


@dataclass(frozen=True)
class Scenario:
    """What a seed stands for. Times in seconds of the virtual clock."""

    peers: int
    exchange: Exchange
    parts: int
    rounds: int
    loss: float
    duplication: float
    delay: float  # the longest of a message
    transfer: float  # the longest of a blob
    training: float
    vote_memory: float = 12.0
    expiry: float = 4.0
    quorum: float = 1.0
    group_size: int = 2
    pattern: Pattern = "random"

    def settings(self) -> RoundSettings:
        return RoundSettings(
            run_id=RUN_ID,
            exchange=self.exchange,
            parts=self.parts,
            grace=2.0,
            leader_timeout=1.5,
            exchange_timeout=10.0,
            vote_memory=self.vote_memory,
            quorum=self.quorum,
            group_size=self.group_size,
            pattern=self.pattern,
        )

    def terms(self) -> Terms:
        return Terms(codec="none", shapes=SHAPES, parts=self.parts, max_tokens=1000, max_blob_bytes=1000)


@dataclass
class Link:
    """What stands between the peers just now."""

    dead: set[PeerId] = field(default_factory=set)
    frozen: set[PeerId] = field(default_factory=set)
    deaf: set[PeerId] = field(default_factory=set)  # nothing reaches them, but they reach the others
    islands: dict[PeerId, int] = field(default_factory=dict)

    def reaches(self, sender: PeerId, receiver: PeerId) -> bool:
        if {sender, receiver} & (self.dead | self.frozen) or receiver in self.deaf:
            return False
        return self.islands.get(sender, 0) == self.islands.get(receiver, 0)


class Network:
    """The clock, the links and the trace. `schedule` runs something later; `run` goes on until a time."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.random = random.Random(seed)
        self.link = Link()
        self.now = 0.0
        self.trace: list[tuple[float, str, Any]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._opened: dict[tuple[str, str, bytes], Statement[Any]] = {}

    def schedule(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._counter), action))

    def run(self, until: float, finished: Callable[[], bool] = lambda: False) -> None:
        while self._queue and self._queue[0][0] <= until and not finished():
            self.now, _, action = heapq.heappop(self._queue)
            action()

    def say(self, peer: str, what: Any) -> None:
        self.trace.append((self.now, peer, what))

    def transmit(self, sender: PeerId, receiver: PeerId, deliver: Callable[[], None], attempt: int = 1) -> None:
        """Late, twice, out of order or, after a few attempts, not at all."""
        delay = self.random.uniform(0.005, self.scenario.delay)
        if self.link.reaches(sender, receiver) and self.random.random() >= self.scenario.loss:
            copies = 2 if self.random.random() < self.scenario.duplication else 1
            for copy in range(copies):
                self.schedule(delay * (1 + 3 * copy), lambda: self._arrive(sender, receiver, deliver))
        elif attempt < ATTEMPTS_TO_DELIVER:
            self.schedule(0.3 * attempt, lambda: self.transmit(sender, receiver, deliver, attempt + 1))

    def _arrive(self, sender: PeerId, receiver: PeerId, deliver: Callable[[], None]) -> None:
        if sender in self.link.dead and self.random.random() < 0.5:
            return  # what was on its way when the sender died, arrives or not
        if receiver in self.link.frozen:  # the kernel keeps it until the process runs again
            self.schedule(0.5, lambda: self._arrive(sender, receiver, deliver))
        elif self.link.islands.get(sender, 0) == self.link.islands.get(receiver, 0) and receiver not in self.link.dead:
            deliver()

    def open(self, signed: wire.Signed) -> Statement[Any]:
        key = (signed.kind, signed.peer, signed.body)
        if key not in self._opened:
            self._opened[key] = Statement.of(signed, self._body(signed))
        return self._opened[key]

    def _body(self, signed: wire.Signed) -> Any:
        message, from_wire = KINDS[signed.kind]
        body: Any = message()
        body.ParseFromString(signed.body)
        if signed.kind == "roster":
            return Roster(body.round, body.view, body.base, self._all(body.contributions))
        if signed.kind == "commit":
            parts = tuple(Blob.from_wire(part) for part in body.parts)
            contributions, left_out = self._all(body.contributions), tuple(body.left_out)
            return Commit(body.round, body.view, body.base, contributions, parts, left_out)
        if signed.kind == "decision":
            return Decision(body.round, body.view, body.proposal, self._all(acknowledging(body)))
        return from_wire(body, RUN_ID, self.scenario.terms())

    def _all(self, envelopes: Iterable[wire.Signed]) -> tuple[Statement[Any], ...]:
        return tuple(self.open(signed) for signed in envelopes)


def signer_of(peer: PeerId) -> Callable[[str, Message], wire.Signed]:
    def sign(kind: str, body: Message) -> wire.Signed:
        return wire.Signed(kind=kind, peer=peer, body=body.SerializeToString(deterministic=True))

    return sign


def sum_of(part: int, contributions: Iterable[Statement[Contribution]]) -> Blob:
    """Stands in for a reduction: the same bytes for the same contributions in the same order."""
    return Blob.of(b"".join([b"sum", bytes([part]), *(entry.digest for entry in contributions)]))


def offer_of(peer: PeerId, number: int, base: Digest, scenario: Scenario) -> Contribution:
    parts = tuple(Blob.of(f"{peer} {number} {base.hex()} {part}".encode()) for part in range(scenario.parts))
    return Contribution(number, base, "none", SHAPES, 100, 10, 2.5, parts)
