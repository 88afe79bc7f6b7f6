"""The peers of the virtual network: each drives one round machine after the other, as the daemon does."""

from collections.abc import Callable
from functools import partial
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.identity import Identity, PeerId
from protocol.rounds.attendance import Attendance
from protocol.rounds.chain import Chain, Head, preferred
from protocol.rounds.events import (
    Action,
    Event,
    Fetch,
    Finish,
    Held,
    Live,
    Offered,
    Received,
    Reduce,
    Reduced,
    Send,
    Skip,
    Tick,
)
from protocol.rounds.grouping import drawn, group_of
from protocol.rounds.round import Round
from protocol.rounds.statements import Commit, Contribution, Digest, Statement
from tests.simulation.network import RUN_ID, Network, Scenario, offer_of, signer_of, sum_of

NAMES = [Identity(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)).peer_id for number in range(1, 17)]
HEARTBEAT = 1.0
# So long a peer tries to end its own round before it takes over a longer chain that it hears of.
CATCH_UP_AFTER = 3.0


class Peer:
    def __init__(self, name: PeerId, network: Network, swarm: "Swarm") -> None:
        self.name = name
        self.network = network
        self.swarm = swarm
        self.chain = Chain.begin(RUN_ID)
        self.store: set[Digest] = set()
        self.records: dict[PeerId, tuple[Head, float]] = {}
        self.attendance = Attendance(network.scenario.settings().leader_timeout)
        self.sources: dict[Digest, tuple[PeerId, ...]] = {}
        self.pending: Statement[Commit] | None = None  # decided, but not all its blobs are here
        self.behind_since: float | None = None
        self.round: Round
        self._live: frozenset[PeerId] = frozenset()
        self._seen: dict[PeerId, float] = {}
        self._tick_at = 0.0
        self._life = 0  # how often it came back

    def come_back(self, furthest: Chain) -> None:
        """A new process on the old disk: it takes over the furthest chain, and has its old message to offer."""
        self._life += 1
        self.chain = Chain(furthest.head, furthest.since(max(0, furthest.round - 64)) or ())
        self.sources.clear()
        self.attendance = Attendance(self.network.scenario.settings().leader_timeout)
        others = [peer.name for peer in self.swarm.alive() if peer is not self]
        self.records = {name: (self.swarm.peers[name].chain.head, self.network.now) for name in others}
        self.begin(dict.fromkeys(self.swarm.peers, self.network.now))
        self.offer(self.round)
        self.after(HEARTBEAT, self.beat)

    def begin(self, seen: dict[PeerId, float]) -> None:
        """The next round on our chain."""
        head, now = self.chain.head, self.network.now
        settings = self.network.scenario.settings()
        self.pending, self.behind_since, self._live, self._tick_at = None, None, frozenset(), 0.0
        self.round = Round(settings, self.name, head.round, head.digest, signer_of(self.name), now, seen)
        self.refresh()
        machine = self.round
        if head.round < self.network.scenario.rounds:
            time = self.network.random.uniform(0.3, 1.0) * self.network.scenario.training
            self.after(time, lambda: self.offer(machine))
        self.broadcast_record()
        for statement in self.attendance.begin(head.round):
            if machine is self.round:
                self.feed(Received(statement))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Later, unless dead by then; a frozen process goes on when it thaws."""
        life = self._life

        def act() -> None:
            if self.name in self.network.link.frozen:
                self.network.schedule(0.1, act)
            elif self.name not in self.network.link.dead and life == self._life:
                action()

        self.network.schedule(delay, act)

    def offer(self, machine: Round) -> None:
        if machine is self.round and machine.commit is None:
            offer = offer_of(self.name, self.chain.round, self.chain.digest, self.network.scenario)
            self.store.update(blob.digest for blob in offer.parts)
            self.swarm.offered.append((self.name, offer))
            self.feed(Offered(offer))

    def feed(self, event: Event) -> None:
        if not isinstance(event, Tick):
            self.network.say(self.name, event)
        machine = self.round
        for action in machine.handle(event, self.network.now):
            self.network.say(self.name, action)
            for watch in self.swarm.watches:
                watch(self.name, action)
            if self.name not in self.network.link.dead:
                self.act(action)
        self._arm(machine)
        self.swarm.check()

    def _arm(self, machine: Round) -> None:
        deadline = machine.next_deadline(self.network.now)
        if machine is not self.round or deadline is None or self.network.now < self._tick_at <= deadline:
            return
        self._tick_at = deadline
        self.after(deadline - self.network.now, lambda: self._tick(machine))

    def _tick(self, machine: Round) -> None:
        if machine is self.round and self.network.now >= self._tick_at - 1e-9:
            self.feed(Tick())

    def act(self, action: Any) -> None:
        match action:
            case Send(peers, signed):
                for peer in peers:
                    self.network.transmit(self.name, peer, partial(self.swarm.peers[peer].receive, signed))
            case Fetch(blob, sources):
                self.want(blob, sources)
            case Reduce(part, attempt, contributions):
                assert {entry.body.parts[part].digest for entry in contributions} <= self.store
                machine = self.round
                self.after(0.05, lambda: self.reduced(machine, part, attempt, contributions))
            case Finish(commit):
                self.finish(commit)
            case Skip():
                self.swarm.skips.append((self.name, action.peer, action.reason))

    def reduced(
        self, machine: Round, part: int, attempt: int, contributions: tuple[Statement[Contribution], ...]
    ) -> None:
        blob = sum_of(part, contributions)
        self.store.add(blob.digest)
        if machine is self.round:
            self.feed(Reduced(part, attempt, blob))

    def receive(self, signed: wire.Signed) -> None:
        """A delivery; whoever still asks about a round that is decided is answered with the decision."""
        statement = self.network.open(signed)
        number = statement.body.round
        if number == self.round.number and self.round.commit is None:
            self.feed(Received(statement))
        elif number == self.chain.round + 1:
            self.attendance.keep(statement)
        elif self.attendance.is_late(statement):
            asking = self.swarm.peers[statement.sender]
            for answer in self.attendance.answer(number, asking.name, self.network.now):
                self.network.transmit(self.name, asking.name, partial(asking.receive, answer))

    def want(self, blob: Blob, sources: tuple[PeerId, ...]) -> None:
        fresh = blob.digest not in self.sources
        self.sources[blob.digest] = sources
        if fresh:
            self._try(blob, 0)

    def _try(self, blob: Blob, attempt: int) -> None:
        if blob.digest in self.store:
            return
        sources = self.sources[blob.digest]
        source = sources[attempt % len(sources)]
        delay = self.network.random.uniform(0.02, self.network.scenario.transfer)
        self.after(delay, lambda: self._transferred(blob, source, attempt))

    def _transferred(self, blob: Blob, source: PeerId, attempt: int) -> None:
        link = self.network.link
        connected = link.reaches(self.name, source) and link.reaches(source, self.name)
        if connected and blob.digest in self.swarm.peers[source].store:
            self.store.add(blob.digest)
            self.feed(Held(blob.digest))
            self.apply()
        else:
            self.after(0.2, lambda: self._try(blob, attempt + 1))

    def finish(self, commit: Statement[Commit]) -> None:
        told = self.round.seen if commit.sender == self.name else ()
        self.attendance.decide(commit.body.round, self.round.decision, told, self.network.now)
        self.swarm.decided(self.name, commit)
        self.pending = commit
        for blob, sources in self.swarm.needed(commit.body, self.name).items():
            if blob.digest not in self.store:
                self.want(blob, tuple(peer for peer in sources if peer != self.name))
        if self.network.scenario.exchange == "groups":
            self.after(self.network.scenario.settings().exchange_timeout, partial(self._go_on, commit))
        self.apply()

    def _go_on(self, commit: Statement[Commit]) -> None:
        """What only our partner had has died with it: this round passes us by."""
        if self.pending is commit:
            self.swarm.passed_by.append(self.name)
            self._append(commit)

    def apply(self) -> None:
        needed = self.swarm.needed(self.pending.body, self.name) if self.pending else {}
        if self.pending and all(blob.digest in self.store for blob in needed):
            self._append(self.pending)

    def _append(self, commit: Statement[Commit]) -> None:
        self.chain.append(commit)
        self.begin(self.round.seen)

    def broadcast_record(self) -> None:
        head = self.chain.head
        for other in self.swarm.peers.values():
            if other is not self:
                self.network.transmit(self.name, other.name, partial(other.hear, self.name, head))

    def beat(self) -> None:
        self.broadcast_record()
        self.refresh()
        self.catch_up()
        self.after(HEARTBEAT, self.beat)

    def hear(self, peer: PeerId, head: Head) -> None:
        known = self.records.get(peer)
        if known is None or known[0].round <= head.round or preferred(known[0], head):
            self.records[peer] = (head, self.network.now)
            self.refresh()

    def refresh(self) -> None:
        oldest = self.network.now - self.network.scenario.expiry
        level = (peer for peer, (head, heard) in self.records.items() if heard >= oldest and head == self.chain.head)
        live = frozenset(level) | {self.name}
        if live != self._live:
            self._live = live
            self.feed(Live(live))

    def catch_up(self) -> None:
        """Takes over the chain of whoever is ahead, when our own round does not end by itself."""
        now, mine = self.network.now, self.chain.head
        ahead = [
            peer
            for peer, (head, heard) in sorted(self.records.items())
            if preferred(mine, head) and now - heard <= HEARTBEAT * 2 and self.network.link.reaches(peer, self.name)
        ]
        if not ahead:
            self.behind_since = None
        elif self.behind_since is None:
            self.behind_since = now
        elif now - self.behind_since >= CATCH_UP_AFTER:
            self._adopt(self.swarm.peers[ahead[0]].chain)

    def _adopt(self, theirs: Chain) -> None:
        if not preferred(self.chain.head, theirs.head):
            return
        self.network.say(self.name, f"takes over the chain at round {theirs.round}")
        self.chain = Chain(theirs.head, theirs.since(max(0, theirs.round - 64)) or ())
        self.begin(self.round.seen)


class Swarm:
    """All peers, and what must hold whatever happens. `forks`: rounds with two decisions on the same base."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.network = Network(scenario, seed)
        self.offered: list[tuple[PeerId, Contribution]] = []
        self.skips: list[tuple[PeerId, PeerId | None, str]] = []
        self.decisions: dict[tuple[int, Digest], dict[bytes, list[PeerId]]] = {}
        self.checks: list[Callable[[], None]] = []
        self.watches: list[Callable[[PeerId, Action], None]] = [self._watch_groups]
        self.passed_by: list[PeerId] = []
        self._rosters: dict[Digest, list[tuple[PeerId, ...]]] = {}  # by the base that they continue
        self.peers = {name: Peer(name, self.network, self) for name in NAMES[: scenario.peers]}

    def start(self) -> None:
        head = next(iter(self.peers.values())).chain.head
        for peer in self.peers.values():
            peer.records = {other: (head, 0.0) for other in self.peers if other != peer.name}
        for peer in self.peers.values():
            peer.begin(dict.fromkeys(self.peers, 0.0))
            peer.after(self.network.random.uniform(0, HEARTBEAT), peer.beat)

    def alive(self) -> list[Peer]:
        return [peer for name, peer in self.peers.items() if name not in self.network.link.dead]

    def is_done(self) -> bool:
        return all(peer.chain.round >= self.scenario.rounds for peer in self.alive())

    def is_one_chain(self) -> bool:
        return self.is_done() and len({peer.chain.head for peer in self.alive()}) == 1

    def needed(self, commit: Commit, peer: PeerId) -> dict[Blob, tuple[PeerId, ...]]:
        """What that peer has to have, and whom it may ask."""
        mine = group_of(commit, peer, self.scenario.settings())
        sources = tuple(entry.sender for entry in mine) if self.scenario.exchange == "groups" else tuple(self.peers)
        blobs = commit.parts or [blob for entry in mine for blob in entry.body.parts]
        return dict.fromkeys(blobs, sources)

    def _watch_groups(self, name: PeerId, action: Action) -> None:
        """Nobody asks for anything outside of its group."""
        if self.scenario.exchange != "groups":
            return
        if isinstance(action, Send) and action.signed.kind == "roster":
            body = self.network.open(action.signed).body
            self._rosters.setdefault(body.base, []).append(tuple(entry.sender for entry in body.contributions))
        elif isinstance(action, Fetch):
            owner, offer = next((name, offer) for name, offer in self.offered if action.blob in offer.parts)
            rosters, settings = self._rosters.get(offer.base, []), self.scenario.settings()
            circles = [drawn(settings, offer.round, roster).get(name, ()) for roster in rosters]
            assert any(owner in circle for circle in circles), "a blob from outside of the group"

    def decided(self, peer: PeerId, commit: Statement[Commit]) -> None:
        body = commit.body
        self.decisions.setdefault((body.round, body.base), {}).setdefault(body.content, []).append(peer)
        senders = [entry.sender for entry in body.contributions]
        assert senders == sorted(set(senders)) and senders, "a contribution stands twice, or none at all"
        assert all((entry.sender, entry.body) in self.offered for entry in body.contributions), "an invented one"
        if self.scenario.exchange == "butterfly":
            assert body.parts == tuple(sum_of(part, body.contributions) for part in range(self.scenario.parts))

    def check(self) -> None:
        for check in self.checks:
            check()

    def forks(self) -> list[tuple[int, Digest]]:
        return [place for place, contents in self.decisions.items() if len(contents) > 1]

    def kill(self, name: PeerId) -> None:
        self.network.say(name, "is killed")
        self.network.link.dead.add(name)

    def bring_back(self, name: PeerId, deaf_seconds: float) -> None:
        self.network.say(name, f"comes back, deaf for {deaf_seconds:.1f} s")
        furthest = max(self.alive(), key=lambda peer: peer.chain.tokens).chain
        self.network.link.dead.discard(name)
        if deaf_seconds:
            self.network.link.deaf.add(name)
            self.network.schedule(deaf_seconds, lambda: self.network.link.deaf.discard(name))
        self.peers[name].come_back(furthest)

    def freeze(self, name: PeerId, seconds: float) -> None:
        self.network.say(name, f"freezes for {seconds:.1f} s")
        self.network.link.frozen.add(name)
        self.network.schedule(seconds, lambda: self.network.link.frozen.discard(name))

    def split(self, islands: dict[PeerId, int], seconds: float) -> None:
        self.network.say("network", f"splits for {seconds:.1f} s: {islands}")
        self.network.link.islands = islands
        self.network.schedule(seconds, islands.clear)
