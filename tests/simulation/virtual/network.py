"""A seeded virtual network under a virtual clock, for many round machines in one process.

It loses, delays, reorders and duplicates messages, cuts the peers into islands or single directions, and keeps what is
for a frozen process until it runs again. Deliveries are tried again like those of request and reply.

Signatures are keyed hashes instead of Ed25519, a hundred times cheaper: whoever has no key of another peer cannot
speak for it, and everything that is opened, nested or not, is verified once and remembered.
"""

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.consensus.messages.contributions import Contribution, ContributionLimits
from protocol.consensus.messages.kinds import KINDS
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.settings import RoundSettings
from protocol.consensus.topology import Pattern, make_topology
from protocol.errors import ForgedError
from protocol.identity import Identity, PeerId
from protocol.manifest.sections import AdmissionSection
from protocol.steering import REVISION_KIND, Revision

NAMES = [Identity(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)).peer_id for number in range(1, 17)]
RUN_ID = hashlib.sha256(b"simulated run").hexdigest()
SHAPES = hashlib.sha256(b"shapes").digest()
ATTEMPTS_TO_DELIVER = 3
ORGANISER = NAMES[15]


@dataclass(frozen=True)
class Scenario:
    """What a seed stands for. Times in seconds of the virtual clock.

    `carries`: whether a message that missed its round may join the next.
    """

    peers: int
    exchange: str
    parts: int
    rounds: int
    loss: float
    duplication: float
    delay: float  # the longest of a message
    transfer: float  # the longest of a blob
    training: float
    vote_memory: float = 12.0
    expiry: float = 4.0
    roster_quorum: float = 1.0
    group_size: int = 2
    pattern: Pattern = "random"
    disk: float = 0.0  # the longest of a write
    resubmits: bool = True
    reducers_per_part: int = 2
    strangers: int = 0  # keys that announce the head of each peer and do nothing else
    trusted: bool = False  # whether the peers trust one another, so that a majority decides
    machines_answer: bool = False  # whether the machine of a peer that died says so to whom asks

    @property
    def rule(self) -> AdmissionSection:
        """Return the rule by which all peers, and no stranger, vote."""
        names = tuple(NAMES[: self.peers])
        if self.trusted:
            return AdmissionSection(mode="list", keys=names, trusted=True)
        return AdmissionSection(founders=names if self.strangers else ())

    def settings(self) -> RoundSettings:
        return _settings(self)

    def terms(self) -> ContributionLimits:
        return ContributionLimits(codec="none", shapes=SHAPES, parts=self.parts, max_tokens=1000, max_blob_bytes=1000)


@lru_cache(maxsize=64)
def _settings(scenario: Scenario) -> RoundSettings:
    options: dict[str, object] = {}
    if scenario.exchange == "groups":
        options = {"size": scenario.group_size, "pattern": scenario.pattern}
    elif scenario.exchange == "butterfly":
        options = {"reducers_per_part": scenario.reducers_per_part}
    return RoundSettings(
        topology=make_topology(scenario.exchange, RUN_ID, scenario.parts, **options),
        grace=2.0,
        leader_timeout=1.5,
        exchange_timeout=10.0,
        vote_memory=scenario.vote_memory,
        roster_quorum=scenario.roster_quorum,
    )


@dataclass
class LinkState:
    """What stands between the peers just now. `frozen`: until when; `blocked`: single directions."""

    dead: set[PeerId] = field(default_factory=set)
    frozen: dict[PeerId, float] = field(default_factory=dict)
    blocked: set[tuple[PeerId, PeerId]] = field(default_factory=set)
    islands: dict[PeerId, int] = field(default_factory=dict)

    def can_send(self, sender: PeerId, receiver: PeerId) -> bool:
        frozen = self.frozen and (sender in self.frozen or receiver in self.frozen)
        return not frozen and sender not in self.dead and self.can_receive(sender, receiver)

    def can_receive(self, sender: PeerId, receiver: PeerId) -> bool:
        """Whether what `sender` sent before arrives."""
        return receiver not in self.dead and self.is_open(sender, receiver)

    def is_open(self, sender: PeerId, receiver: PeerId) -> bool:
        """Whether the machine of one reaches that of the other, whatever runs there."""
        if (sender, receiver) in self.blocked:
            return False
        return not self.islands or self.islands.get(sender, 0) == self.islands.get(receiver, 0)


class Network:
    """The clock, the links and the trace. `schedule` runs something later; `run` goes on until a time."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.random = random.Random(seed)
        self.link = LinkState()
        self.now = 0.0
        self.trace: list[tuple[float, str, Any]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._opened: dict[tuple[str, str, bytes, bytes], SignedMessage[Any]] = {}

    def schedule(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._counter), action))

    def run(self, until: float, finished: Callable[[], bool] = lambda: False) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until and not finished():
            self.now, _, action = heapq.heappop(queue)
            action()

    def record(self, peer: str, what: Any) -> None:
        self.trace.append((self.now, peer, what))

    def transmit(self, sender: PeerId, receiver: PeerId, deliver: Callable[[], None], attempt: int = 1) -> None:
        """Late, twice, out of order or, after a few attempts, not at all."""
        chance, scenario = self.random.random, self.scenario
        delay = 0.005 + (scenario.delay - 0.005) * chance()
        if self.link.can_send(sender, receiver) and chance() >= scenario.loss:
            copies = 2 if chance() < scenario.duplication else 1
            for copy in range(copies):
                self.schedule(delay * (1 + 3 * copy), lambda: self._arrive(sender, receiver, deliver))
        elif attempt < ATTEMPTS_TO_DELIVER:
            self.schedule(0.3 * attempt, lambda: self.transmit(sender, receiver, deliver, attempt + 1))

    def _arrive(self, sender: PeerId, receiver: PeerId, deliver: Callable[[], None]) -> None:
        link = self.link
        if sender in link.dead and self.random.random() < 0.5:
            return  # what was on its way when the sender died, arrives or not
        if receiver in link.frozen:  # the kernel keeps it until the process runs again
            later = link.frozen[receiver] - self.now + 0.1 * self.random.random()
            self.schedule(later, lambda: self._arrive(sender, receiver, deliver))
        elif link.can_receive(sender, receiver):
            deliver()

    def open(self, signed: wire.Signed) -> SignedMessage[Any]:
        """Raises ForgedError where its sender has not signed it."""
        key = (signed.kind, signed.peer, signed.body, signed.signature)
        known = self._opened.get(key)
        if known is None:
            if signed.signature != signature_of(signed.peer, signed.kind, signed.body):
                raise ForgedError(f"a {signed.kind} that {signed.peer} has not signed")
            if signed.kind == REVISION_KIND:
                known = self._opened[key] = SignedMessage.of(
                    signed, Revision.from_wire(wire.Revision.FromString(signed.body))
                )
                return known
            message, body_type = KINDS[signed.kind]
            body = body_type.from_wire(message.FromString(signed.body), self.scenario.terms(), self.open)
            known = self._opened[key] = SignedMessage.of(signed, body)
        return known


def signature_of(peer: PeerId, kind: str, body: bytes) -> bytes:
    key = hashlib.blake2b(b"only its owner has this" + peer.encode()).digest()
    return hashlib.blake2b(kind.encode() + b"\0" + body, key=key, digest_size=16).digest()


def make_signer(peer: PeerId) -> Callable[[str, Message], wire.Signed]:
    def sign(kind: str, message: Message) -> wire.Signed:
        body = message.SerializeToString(deterministic=True)
        return wire.Signed(kind=kind, peer=peer, body=body, signature=signature_of(peer, kind, body))

    return sign


def fake_reduce(part: int, contributions: Iterable[SignedMessage[Contribution]]) -> Blob:
    """Stands in for a reduction: the same bytes for the same contributions in the same order."""
    return Blob.of(b"".join([b"sum", bytes([part]), *(entry.digest for entry in contributions)]))


def make_contribution(peer: PeerId, number: int, base: Digest, scenario: Scenario) -> Contribution:
    parts = tuple(Blob.of(f"{peer} {number} {base.hex()} {part}".encode()) for part in range(scenario.parts))
    return Contribution(number, base, "none", SHAPES, 100, 10, 2.5, parts)
