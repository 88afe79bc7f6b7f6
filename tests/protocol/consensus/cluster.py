"""A few round machines around one table: what they say arrives at once and in order, unless a test drops it."""

from collections import deque
from collections.abc import Callable

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.consensus.chain import genesis_head
from protocol.consensus.events import (
    Action,
    BlobAvailable,
    Event,
    Fetch,
    LocalContribution,
    MembershipChanged,
    MessageReceived,
    PartReduced,
    Reduce,
    Rejected,
    Send,
    Tick,
)
from protocol.consensus.machine import RoundMachine
from protocol.consensus.messages.contributions import Commit, PartBlob
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.settings import RoundStart
from protocol.electorate import NOBODY, Electorate
from protocol.identity import PeerId
from protocol.manifest.sections import AdmissionSection
from tests.simulation.virtual.network import (
    NAMES,
    RUN_ID,
    Network,
    Scenario,
    fake_reduce,
    make_contribution,
    make_signer,
)

BASE = genesis_head(RUN_ID).digest
TRUSTED = Electorate.at_genesis(AdmissionSection(mode="list", keys=tuple(NAMES), trusted=True))
Drop = Callable[[PeerId, PeerId, str], bool]  # sender, receiver, kind


class Cluster:
    """`names` stand in the order in which they would lead: names[0] leads view 0."""

    def __init__(
        self, peers: int, exchange: str, parts: int = 1, quorum: float = 1.0, reducers: int = 2,
        electorate: Electorate = NOBODY,
    ) -> None:  # fmt: skip
        self.electorate = electorate
        timing = (0.0, 0.0, 0.0, 0.0, 0.0)
        self.scenario = Scenario(peers, exchange, parts, 1, *timing, roster_quorum=quorum, reducers_per_part=reducers)
        self.network = Network(self.scenario, seed=0)
        self.now = 0.0
        self.drop: Drop = lambda sender, receiver, kind: False
        self.is_slow: Callable[[PeerId, Digest], bool] = lambda peer, digest: False  # transfers that do not end
        self.invalid_parts: set[PartBlob] = set()  # of another size, or not well-formed as that part
        self.dead: set[PeerId] = set()
        self.log: list[tuple[PeerId, Action]] = []
        self.queue: deque[tuple[PeerId, PeerId, wire.Signed]] = deque()
        self.delivers_backwards = False
        self.copies = 1
        self.reduce_part: Callable[[PeerId, Reduce], Blob] = lambda peer, order: fake_reduce(
            order.part, order.contributions
        )
        members = NAMES[:peers]
        self.stores: dict[PeerId, set[Digest]] = {name: set() for name in members}
        self.pending_fetches: dict[tuple[PeerId, PartBlob], Fetch] = {}
        self.machines = {name: self.new_machine(name) for name in members}
        for name in members:
            self.feed_event(name, MembershipChanged(frozenset(members)))
        leader = self.machines[members[0]].leader
        self.names = sorted(members, key=lambda name: name != leader)

    def new_machine(self, name: PeerId, seen: dict[PeerId, float] | None = None) -> RoundMachine:
        start = RoundStart(0, BASE, seen or {}, electorate=self.electorate)
        return RoundMachine(self.scenario.settings(), name, start, make_signer(name), self.now)

    def contribute(self, *names: PeerId) -> None:
        for name in names:
            offer = make_contribution(name, 0, BASE, self.scenario)
            self.stores[name].update(blob.digest for blob in offer.parts)
            self.feed_event(name, LocalContribution(offer))
        self.deliver_all()

    def feed_event(self, name: PeerId, event: Event) -> None:
        if name in self.dead:
            return
        for action in self.machines[name].handle(event, self.now):
            self.log.append((name, action))
            self._act(name, action)

    def _act(self, name: PeerId, action: Action) -> None:
        if isinstance(action, Send):
            self.queue.extend((name, peer, action.signed) for peer in action.peers * self.copies)
        elif isinstance(action, Fetch):
            self.pending_fetches[name, action.part_blob] = action
        elif isinstance(action, Reduce):
            blob = self.reduce_part(name, action)
            self.stores[name].add(blob.digest)
            self.feed_event(name, PartReduced(action.part, action.request_id, blob))

    def deliver_all(self) -> None:
        """Until nothing is under way any more."""
        while self.queue or self._transfer():
            while self.queue:
                sender, receiver, signed = self.queue.pop() if self.delivers_backwards else self.queue.popleft()
                if receiver not in self.dead and not self.drop(sender, receiver, signed.kind):
                    self.feed_event(receiver, MessageReceived(self.network.open(signed)))

    def _transfer(self) -> bool:
        for (name, portion), fetch in list(self.pending_fetches.items()):
            digest = portion.blob.digest
            able = [peer for peer in fetch.sources if peer not in self.dead and digest in self.stores[peer]]
            able = [] if portion in self.invalid_parts else able
            if able and name not in self.dead and not self.is_slow(name, digest):
                del self.pending_fetches[name, portion]
                self.stores[name].add(digest)
                self.feed_event(name, BlobAvailable(portion))
                return True
        return False

    def elapse(self, seconds: float) -> None:
        """In steps of a fifth of a second."""
        for _ in range(round(seconds * 5)):
            self.now += 0.2
            for name in self.machines:
                self.feed_event(name, Tick())
            self.deliver_all()

    def kill(self, *names: PeerId, noticed: bool = True) -> None:
        self.dead.update(names)
        if noticed:
            self.set_live(*(name for name in self.machines if name not in self.dead))

    def set_live(self, *names: PeerId) -> None:
        for name in names:
            self.feed_event(name, MembershipChanged(frozenset(names)))
        self.deliver_all()

    def commit(self, name: PeerId) -> Commit | None:
        commit: SignedMessage[Commit] | None = self.machines[name].commit
        return commit.body if commit else None

    def included_peers(self) -> set[tuple[PeerId, ...]]:
        """The contributors that those alive agree on: one element if they agree, none if nobody is done."""
        bodies = [self.commit(name) for name in self.machines if name not in self.dead]
        return {tuple(entry.sender for entry in body.contributions) for body in bodies if body}

    def rejections_by(self, name: PeerId) -> set[tuple[PeerId | None, str]]:
        found = (action for who, action in self.log if who == name)
        return {(action.peer, action.reason) for action in found if isinstance(action, Rejected)}

    def senders_of(self, kind: str) -> list[PeerId]:
        return [name for name, action in self.log if isinstance(action, Send) and action.signed.kind == kind]

    def blobs_of_contribution(self, name: PeerId) -> tuple[Blob, ...]:
        return make_contribution(name, 0, BASE, self.scenario).parts
