"""The peers of the virtual network: each drives one round machine after the other, as the daemon does.

A peer that is killed keeps its disk: its checkpoint (written after every round), its own blobs, its last vow and the
blobs that this rests on. All else is memory, and gone.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.rounds.attendance import Attendance
from protocol.rounds.chain import Chain, Head, preferred
from protocol.rounds.entries import Entries
from protocol.rounds.events import (
    Action,
    Event,
    Fetch,
    Finish,
    Foresee,
    Held,
    Live,
    Offered,
    Received,
    Reduce,
    Reduced,
    Send,
    Skip,
    Tick,
    Vow,
)
from protocol.rounds.grouping import group_of
from protocol.rounds.round import Round
from protocol.rounds.statements import Commit, Contribution, Digest, Portion, Statement
from tests.simulation.network import RUN_ID, Network, signer_of, sum_of
from tests.simulation.progress import Progress, Saved

if TYPE_CHECKING:
    from tests.simulation.swarm import Swarm

HEARTBEAT = 1.0
BEATS_PER_MEASUREMENT = 4
# So long a peer tries to end its own round before it takes over a longer chain that it hears of.
CATCH_UP_AFTER = 3.0
KEPT_COMMITS = 64


@dataclass
class Disk:
    """`store`: blobs of its own, and those that a vow rests on."""

    store: set[Digest]
    head: Head
    commits: tuple[Statement[Commit], ...]
    progress: Saved
    vow: Vow | None = None

    def last_vow(self) -> Vow | None:
        """For a process that starts."""
        return self.vow

    def keep(self, vow: Vow, store: set[Digest]) -> None:
        """A vow, behind what it rests on of the blobs in memory."""
        self.secure(vow, store)
        self.vow = vow

    def secure(self, vow: Vow, store: set[Digest]) -> None:
        """Out of those in memory."""
        self.store |= {blob.digest for blob in vow.rests_on} & store


class Peer:
    def __init__(self, name: PeerId, network: Network, swarm: "Swarm") -> None:
        self.name = name
        self.network = network
        self.swarm = swarm
        self.chain = Chain.begin(RUN_ID)
        self.progress = Progress(name, network.scenario, swarm.ledger)
        self.disk = Disk(set(), self.chain.head, (), self.progress.save())
        self.store: set[Digest] = set()  # blobs, in memory and on disk
        self.vow: Vow | None = None
        self.records: dict[PeerId, tuple[Head, float]] = {}
        self.attendance = Attendance(network.scenario.settings().leader_timeout)
        self.sources: dict[Portion, tuple[PeerId, ...]] = {}
        self.pending: Statement[Commit] | None = None  # decided, but not all its blobs are here
        self.behind_since: float | None = None
        self.round: Round
        self.waiting: deque[Action] = deque()  # for a vow to be on disk
        self._is_writing = False
        self._live = Live(frozenset())
        self._tick_at = 0.0
        self._life = 0  # how often it came back
        self._beats = 0

    def come_back(self) -> None:
        """A new process on the old disk."""
        self._life += 1
        disk, now = self.disk, self.network.now
        self.chain = Chain(disk.head, disk.commits)
        self.progress.restore(disk.progress, disk.head.round)
        self.vow = disk.last_vow()
        self.store = set(disk.store)
        self._is_writing = False
        self.attendance = Attendance(self.network.scenario.settings().leader_timeout)
        self.records = {}
        # A run begins only once enough peers are there; who has been in it knows of whom.
        members = disk.vow.members if disk.vow else self.swarm.peers
        self.begin(dict.fromkeys(members, now))
        self.after(HEARTBEAT, self.beat)

    def begin(self, seen: dict[PeerId, float]) -> None:
        """The next round on our chain."""
        head, now = self.chain.head, self.network.now
        settings = self.network.scenario.settings()
        self.pending = None
        self.behind_since = None
        self._live = Live(frozenset())
        self._tick_at = 0.0
        self.sources.clear()
        self.waiting.clear()
        self.round = Round(settings, self.name, head.round, head.digest, signer_of(self.name), now, seen, self.vow)
        self.refresh()
        machine = self.round
        self.offer(machine)
        if head.round < self.network.scenario.rounds:
            time = self.network.random.uniform(0.3, 1.0) * self.network.scenario.training
            self.after(time, lambda: self.train(machine))
        self.broadcast_record()
        for statement in self.attendance.begin(head.round):
            if machine is self.round:
                self.feed(Received(statement))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Later, unless dead by then; a frozen process goes on when it thaws."""
        life = self._life

        def act() -> None:
            link = self.network.link
            if self.name in link.frozen:
                self.network.schedule(max(0.0, link.frozen[self.name] - self.network.now) + 0.001, act)
            elif self.name not in link.dead and life == self._life:
                action()

        self.network.schedule(delay, act)

    def train(self, machine: Round) -> None:
        if machine is self.round and machine.commit is None:
            self.progress.train(machine.number)
            self.offer(machine)

    def offer(self, machine: Round) -> None:
        contribution = self.progress.contribution(self.chain.head)
        if contribution is not None and machine is self.round and self.name != self.swarm.twin:
            self.store.update(blob.digest for blob in contribution.parts)
            self.disk.store.update(blob.digest for blob in contribution.parts)
            self.feed(Offered(contribution))

    def copy(self, contribution: Contribution) -> None:
        """Of the others' messages the first that comes in a round is ours as well, but for its sizes."""
        parts = tuple(Blob(blob.digest, blob.size - 1) for blob in contribution.parts)
        self.swarm.invented.update(parts)
        self.feed(Offered(replace(contribution, parts=parts)))

    def feed(self, event: Event) -> None:
        if not isinstance(event, Tick):
            self.network.say(self.name, event)
        machine = self.round
        self.waiting.extend(machine.handle(event, self.network.now))
        self._carry_out_waiting()
        self._arm(machine)

    def _arm(self, machine: Round) -> None:
        deadline = machine.next_deadline(self.network.now)
        if machine is not self.round or deadline is None or self.network.now < self._tick_at <= deadline:
            return
        self._tick_at = deadline
        self.after(deadline - self.network.now, lambda: self._tick(machine))

    def _tick(self, machine: Round) -> None:
        if machine is self.round and self.network.now >= self._tick_at - 1e-9:
            self.feed(Tick())

    def _carry_out_waiting(self) -> None:
        dead = self.network.link.dead
        while self.waiting and not self._is_writing:
            action = self.waiting.popleft()
            self.network.say(self.name, action)
            for watch in self.swarm.watches:
                watch(self.name, action)
            if self.name not in dead:
                self._act(action)

    def _act(self, action: Any) -> None:
        match action:
            case Send(peers, signed):
                for peer in peers:
                    self.network.transmit(self.name, peer, partial(self.swarm.peers[peer].receive, signed))
            case Fetch(portion, sources):
                self.want(portion, sources)
            case Reduce(part, attempt, contributions):
                if not self.swarm.invented.isdisjoint(entry.body.parts[part] for entry in contributions):
                    return  # the twin's own: it keeps silent
                assert {entry.body.parts[part].digest for entry in contributions} <= self.store
                machine = self.round
                self.after(0.05, lambda: self.reduced(machine, part, attempt, contributions))
            case Foresee(commit):
                lacking = {blob.digest for blob in commit.blobs} - self.store
                assert not lacking or self.name == self.swarm.twin, "foreseen without what it takes"
            case Finish(commit):
                self.finish(commit)
            case Skip():
                self.swarm.skips.append((self.name, action.peer, action.reason))
            case Vow():
                self._write(action)

    def _write(self, vow: Vow) -> None:
        self.vow, longest = vow, self.network.scenario.disk
        if longest == 0.0:
            self.disk.keep(vow, self.store)
            return
        self._is_writing = True
        self.after(self.network.random.uniform(0.0, longest), lambda: self._written(vow))

    def _written(self, vow: Vow) -> None:
        self.disk.keep(vow, self.store)
        self._is_writing = False
        self._carry_out_waiting()

    def reduced(
        self, machine: Round, part: int, attempt: int, contributions: tuple[Statement[Contribution], ...]
    ) -> None:
        blob = sum_of(part, contributions)
        self.swarm.ledger.sums[blob.digest] = [entry.body.parts[part] for entry in contributions]
        self.store.add(blob.digest)
        if machine is self.round:
            self.feed(Reduced(part, attempt, blob))

    def receive(self, signed: wire.Signed) -> None:
        """A delivery; whoever still asks about a round that is decided is answered with the decision."""
        statement = self.network.open(signed)
        number = statement.body.round
        if number == self.round.number and self.round.commit is None:
            if self.name == self.swarm.twin and isinstance(statement.body, Contribution):
                self.copy(statement.body)
            self.feed(Received(statement))
        elif number == self.chain.round + 1:
            self.attendance.keep(statement)
        elif self.attendance.is_late(statement):
            asking = self.swarm.peers[statement.sender]
            for answer in self.attendance.answer(number, asking.name, self.network.now):
                self.network.transmit(self.name, asking.name, partial(asking.receive, answer))

    def want(self, portion: Portion, sources: tuple[PeerId, ...]) -> None:
        fresh = portion not in self.sources
        self.sources[portion] = sources
        if fresh:
            self._try(portion, 0)

    def _try(self, portion: Portion, attempt: int) -> None:
        """Until the round is over."""
        if portion not in self.sources:
            return
        scenario, sources = self.network.scenario, self.sources[portion] or tuple(self.swarm.peers)
        source = sources[attempt % len(sources)]
        here = portion.blob.digest in self.store
        delay = 0.0 if here else self.network.random.uniform(0.02, scenario.transfer)
        self.after(delay, lambda: self._transferred(portion, source, attempt))

    def _transferred(self, portion: Portion, source: PeerId, attempt: int) -> None:
        link, digest = self.network.link, portion.blob.digest
        if portion not in self.sources or portion.blob in self.swarm.invented:
            return
        connected = link.reaches(self.name, source) and link.reaches(source, self.name)
        if digest in self.store or (connected and digest in self.swarm.peers[source].store):
            self.store.add(digest)
            self.feed(Held(portion))
            self.apply()
        else:
            self.after(0.2, lambda: self._try(portion, attempt + 1))

    def finish(self, commit: Statement[Commit]) -> None:
        told = self.round.seen if commit.sender == self.name else ()
        self.attendance.decide(commit.body.round, self.round.decision, told, self.network.now)
        self.swarm.decided(self.name, commit)
        self.pending = commit
        for portion, sources in self.swarm.needed(commit.body, self.name).items():
            if portion.blob.digest not in self.store:
                self.want(portion, tuple(peer for peer in sources if peer != self.name))
        self.after(self.network.scenario.settings().exchange_timeout, partial(self._go_on, commit))
        self.apply()

    def _go_on(self, commit: Statement[Commit]) -> None:
        """What we lack cannot be had: in groups the round passes us by; otherwise it is opened again."""
        if self.pending is not commit:
            return
        if self.network.scenario.exchange == "groups":
            self._append(commit)
        else:
            self.network.say(self.name, "gives up what was decided")
            self.swarm.given_up(self.name, commit.body)
            self.begin(self.round.seen)

    def apply(self) -> None:
        if self.pending is None:
            return
        needed = {portion.blob for portion in self.swarm.needed(self.pending.body, self.name)}
        if all(blob.digest in self.store for blob in needed) and needed.isdisjoint(self.swarm.invented):
            self._append(self.pending)

    def _append(self, commit: Statement[Commit]) -> None:
        self.swarm.ledger.append(self.chain.head, commit.body)
        share = group_of(commit.body, self.name, self.network.scenario.settings())
        held = [entry for entry in share if commit.body.parts or entry.body.parts[0].digest in self.store]
        self.swarm.check_told(self.name, commit.body, Entries.of(held), self.store)
        self.chain.append(commit)
        self._settle((commit,), None)

    def _settle(self, commits: tuple[Statement[Commit], ...], left: Head | None) -> None:
        """A new head: the fate of our message, a checkpoint, and the next round."""
        self.progress.settle(commits, self.chain.round, left)
        kept = self.chain.since(max(0, self.chain.round - KEPT_COMMITS)) or ()
        self.disk.head, self.disk.commits, self.disk.progress = self.chain.head, kept, self.progress.save()
        self.swarm.moved(self)
        self.swarm.measure(self)
        self.begin(self.round.seen)

    def broadcast_record(self) -> None:
        head, network = self.chain.head, self.network

        def gossip() -> None:
            for other in self.swarm.peers.values():
                reached = other is not self and network.link.reaches(self.name, other.name)
                if reached and network.random.random() >= network.scenario.loss:
                    other.hear(self.name, head)

        network.schedule(network.random.uniform(0.005, network.scenario.delay), gossip)

    def beat(self) -> None:
        self._beats += 1
        if self._beats % BEATS_PER_MEASUREMENT == 0:
            self.swarm.measure(self)
        self.broadcast_record()
        self.refresh()
        self.catch_up()
        self.after(HEARTBEAT, self.beat)

    def hear(self, peer: PeerId, head: Head) -> None:
        known = self.records.get(peer)
        if known is None or known[0].round <= head.round or preferred(known[0], head):
            self.records[peer] = (head, self.network.now)
            live, mine = self._live, self.chain.head
            if (peer in live.peers) != (head == mine) or (peer in live.ahead) != preferred(mine, head):
                self.refresh()

    def refresh(self) -> None:
        oldest, mine = self.network.now - self.network.scenario.expiry, self.chain.head
        heads = {peer: head for peer, (head, heard) in self.records.items() if heard >= oldest}
        level = [peer for peer, head in heads.items() if head == mine]
        ahead = frozenset(peer for peer, head in heads.items() if preferred(mine, head))
        live = Live(frozenset([*level, self.name]), ahead=ahead)
        if live != self._live:
            self._live = live
            self.feed(live)

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
        missed = theirs.since(self.progress.offers.asks_since(self.chain.round)) or ()
        left = self.chain.head
        self.chain = Chain(theirs.head, theirs.since(max(0, theirs.round - KEPT_COMMITS)) or ())
        self._settle(missed, left)
