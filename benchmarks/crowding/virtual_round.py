"""The messages of one round of virtual peers: real round machines, real encodings, a virtual clock.

Every peer has its own machine. Messages arrive after a latency, in batches as the outbox makes them; nothing is lost.
Each batch is the call that a daemon would make, with briefs in place of whole messages; if a receiver lacks a
contribution that a brief names, the whole message follows. Signatures are hashes of the length of real ones.
"""

import hashlib
import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial

from node.simulation.fake_signer import FakeSigner
from node.simulation.swarm import simulated_peer_id
from node.simulation.virtual.network import VirtualClock
from protocol.blobs.blob import Blob
from protocol.consensus.events import (
    BlobAvailable,
    Event,
    Fetch,
    LocalContribution,
    MembershipChanged,
    MessageReceived,
    PartReduced,
    Reduce,
    Send,
    Tick,
)
from protocol.consensus.machine import RoundMachine
from protocol.consensus.messages.briefs import BriefCache, SeenMessages
from protocol.consensus.messages.contributions import Commit, Contribution, ContributionLimits, Roster
from protocol.consensus.messages.kinds import Body
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.settings import RoundSettings, RoundStart
from protocol.consensus.topology import make_topology
from protocol.identity import PeerId
from protocol.murmur_pb2 import Brief, DeliverReply, DeliverRequest, Signed
from protocol.traffic import bytes_by_kind

RUN = hashlib.sha256(b"a crowd").hexdigest()
RUN_BYTES = bytes.fromhex(RUN)
BASE, SHAPES = hashlib.sha256(b"base").digest(), hashlib.sha256(b"shapes").digest()
CODEC = "sparseloco"
TRAINING_SECONDS = 2.0  # within which all contributions are ready
LATENCY, TRANSFER_SECONDS, REDUCE_SECONDS = 0.05, 0.3, 0.1
GRACE, LEADER_TIMEOUT, EXCHANGE_TIMEOUT = 20.0, 20.0, 60.0  # the manifest's order of magnitude
MAX_BATCH_MESSAGES = 16


@dataclass(frozen=True)
class RoundTraffic:
    """The mean bytes that a peer sends in a round by kind, its calls, and the virtual seconds of the round.

    `most_sent`: the bytes of the peer that sends the most, the leader.
    """

    sent: dict[str, float]
    calls: float
    most_sent: int
    seconds: float


class VirtualRound:
    """One round of so many peers; `uses_briefs` is off for the control.

    `parts`: of a dense message, which reducers sum; 0: a sparse message, which all peers fetch.
    """

    def __init__(self, peers: int, seed: int = 0, uses_briefs: bool = True, parts: int = 0) -> None:
        self.names = [simulated_peer_id(slot) for slot in range(peers)]
        self.sent: Counter[str] = Counter()
        self.sent_by: Counter[PeerId] = Counter()
        self.calls = 0
        self._reaction = max(0.02, peers / 4000)  # seconds in which a peer gathers messages before it handles them
        self._random = random.Random(seed)
        self._clock = VirtualClock()
        self._limits = ContributionLimits(CODEC, SHAPES, max(1, parts), 1 << 40, 1 << 30)
        self._signer = FakeSigner(self._limits)
        self._brief_cache = BriefCache(SeenMessages()) if uses_briefs else None  # as if all had seen the same
        topology = make_topology("butterfly", RUN, parts) if parts else make_topology("gather", RUN)
        self._parts = topology.parts
        settings = RoundSettings(topology, GRACE, LEADER_TIMEOUT, EXCHANGE_TIMEOUT)
        seen = dict.fromkeys(self.names, 0.0)
        self.machines = {
            name: RoundMachine(settings, name, RoundStart(0, BASE, seen), self._signer.signer_for(name), 0.0)
            for name in self.names
        }
        self._inboxes: dict[PeerId, list[Event]] = {name: [] for name in self.names}
        self._wake_at: dict[PeerId, float] = {}

    def run(self) -> RoundTraffic:
        """Run until all peers have decided."""
        members = MembershipChanged(frozenset(self.names))
        for number, name in enumerate(self.names):
            self._post(name, members)
            parts = tuple(_blob(f"{name} {part}") for part in range(self._parts))
            offer = Contribution(0, BASE, CODEC, SHAPES, 65_536, 30, 2.5 + number / 997, parts)
            delay = TRAINING_SECONDS * self._random.random()
            self._clock.schedule(delay, partial(self._post, name, LocalContribution(offer)))
        if not self._clock.run(lambda: all(machine.commit for machine in self.machines.values())):
            raise RuntimeError("the round of virtual peers stands still")
        count = len(self.names)
        mean = {kind: total / count for kind, total in self.sent.items()}
        return RoundTraffic(mean, self.calls / count, max(self.sent_by.values()), self._clock.now)

    def _post(self, name: PeerId, event: Event) -> None:
        inbox = self._inboxes[name]
        inbox.append(event)
        if len(inbox) == 1:
            self._clock.schedule(self._reaction, partial(self._handle, name))

    def _handle(self, name: PeerId) -> None:
        events, self._inboxes[name] = self._inboxes[name], []
        machine, outgoing = self.machines[name], defaultdict[PeerId, list[Signed]](list)
        for action in machine.handle_all(events, self._clock.now):
            if isinstance(action, Send):
                for peer in action.peers:
                    outgoing[peer].append(action.signed)
            elif isinstance(action, Fetch):
                arrival = partial(self._post, name, BlobAvailable(action.part_blob))
                self._clock.schedule(TRANSFER_SECONDS * self._random.uniform(0.5, 1.5), arrival)
            elif isinstance(action, Reduce):
                senders = " ".join(entry.sender for entry in action.contributions)
                result = PartReduced(action.part, action.request_id, _blob(f"{senders} {action.part}"))
                self._clock.schedule(REDUCE_SECONDS, partial(self._post, name, result))
        for peer, messages in outgoing.items():
            for start in range(0, len(messages), MAX_BATCH_MESSAGES):
                self._deliver(name, peer, messages[start : start + MAX_BATCH_MESSAGES])
        deadline = machine.next_deadline(self._clock.now)
        if deadline is not None and deadline != self._wake_at.get(name):
            self._wake_at[name] = deadline
            self._clock.schedule(deadline - self._clock.now, partial(self._post, name, Tick()))

    def _deliver(self, sender: PeerId, receiver: PeerId, messages: list[Signed]) -> None:
        briefs = {signed.signature: self._brief_of(signed) for signed in messages}
        whole = [signed for signed in messages if briefs[signed.signature] is None]
        request = DeliverRequest(run=RUN_BYTES, statements=whole, briefs=filter(None, briefs.values()))
        self._count(sender, request)
        self.calls += 1
        abridged = [signed for signed in messages if briefs[signed.signature] is not None]
        self._clock.schedule(LATENCY, partial(self._arrive, sender, receiver, messages, abridged))

    def _brief_of(self, signed: Signed) -> Brief | None:
        if self._brief_cache is None:
            return None
        self._brief_cache.seen.record(signed)
        return self._brief_cache.brief_of(signed)

    def _arrive(self, sender: PeerId, receiver: PeerId, messages: list[Signed], abridged: list[Signed]) -> None:
        lacking = [signed for signed in abridged if not self._can_restore(receiver, self._signer.open(signed))]
        self._count(receiver, DeliverReply(unresolved=range(len(lacking))))
        if lacking:
            self._count(sender, DeliverRequest(run=RUN_BYTES, statements=lacking))
            self.calls += 1
        for signed in messages:
            self._post(receiver, MessageReceived(self._signer.open(signed)))

    def _can_restore(self, receiver: PeerId, message: SignedMessage[Body]) -> bool:
        if not isinstance(message.body, Roster | Commit):
            return True
        waiting = {event.message.sender for event in self._inboxes[receiver] if isinstance(event, MessageReceived)}
        known = self.machines[receiver]._knowledge.contributions
        return message.body.by_sender.keys() <= known.keys() | waiting

    def _count(self, sender: PeerId, message: DeliverRequest | DeliverReply) -> None:
        self.sent.update(bytes_by_kind("deliver", message))
        self.sent_by[sender] += message.ByteSize()


def _blob(name: str) -> Blob:
    return Blob(hashlib.sha256(name.encode()).digest(), 10_000_000)
