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
from protocol.consensus.chain import Chain, ChainHead, prefers_theirs
from protocol.consensus.events import (
    Action,
    BlobAvailable,
    Event,
    Fetch,
    Finish,
    LocalContribution,
    MembershipChanged,
    MessageReceived,
    PartReduced,
    Reduce,
    Rejected,
    Send,
    Speculate,
    Tick,
    VoteRecord,
)
from protocol.consensus.machine import RoundMachine
from protocol.consensus.message_buffer import MessageBuffer
from protocol.consensus.messages import AppliedContributions, Commit, Contribution, Digest, PartBlob, SignedMessage
from protocol.consensus.settings import RoundStart
from protocol.identity import PeerId
from tests.simulation.network import RUN_ID, Network, fake_reduce, make_signer
from tests.simulation.work_accounting import SavedWork, TrainerWork

if TYPE_CHECKING:
    from tests.simulation.swarm import SimulatedSwarm

HEARTBEAT = 1.0
BEATS_PER_MEASUREMENT = 4
# So long a peer tries to end its own round before it takes over a longer chain that it hears of.
CATCH_UP_AFTER = 3.0
KEPT_COMMITS = 64


@dataclass
class Disk:
    """`store`: blobs of its own, and those that a vow rests on."""

    store: set[Digest]
    head: ChainHead
    commits: tuple[SignedMessage[Commit], ...]
    progress: SavedWork
    vote: VoteRecord | None = None

    def last_vote(self) -> VoteRecord | None:
        """For a process that starts."""
        return self.vote

    def save_vote(self, vow: VoteRecord, store: set[Digest]) -> None:
        """A vow, behind what it rests on of the blobs in memory."""
        self.persist_required_blobs(vow, store)
        self.vote = vow

    def persist_required_blobs(self, vow: VoteRecord, store: set[Digest]) -> None:
        """Out of those in memory."""
        self.store |= {blob.digest for blob in vow.required_blobs} & store


class SimulatedPeer:
    def __init__(self, name: PeerId, network: Network, swarm: "SimulatedSwarm") -> None:
        self.name = name
        self.network = network
        self.swarm = swarm
        self.chain = Chain.from_genesis(RUN_ID)
        self.progress = TrainerWork(name, network.scenario, swarm.ledger)
        self.disk = Disk(set(), self.chain.head, (), self.progress.save())
        self.store: set[Digest] = set()  # blobs, in memory and on disk
        self.vote: VoteRecord | None = None
        self.records: dict[PeerId, tuple[ChainHead, float]] = {}
        self.message_buffer = MessageBuffer(network.scenario.settings().leader_timeout)
        self.sources: dict[PartBlob, tuple[PeerId, ...]] = {}
        self.pending: SignedMessage[Commit] | None = None  # decided, but not all its blobs are here
        self.behind_since: float | None = None
        self.round: RoundMachine
        self.waiting: deque[Action] = deque()  # for a vow to be on disk
        self._is_writing = False
        self._live = MembershipChanged(frozenset())
        self._tick_at = 0.0
        self._life = 0  # how often it came back
        self._beats = 0

    def restart(self) -> None:
        """A new process on the old disk."""
        self._life += 1
        disk, now = self.disk, self.network.now
        self.chain = Chain(disk.head, disk.commits)
        self.progress.restore(disk.progress, disk.head.round)
        self.vote = disk.last_vote()
        self.store = set(disk.store)
        self._is_writing = False
        self.message_buffer = MessageBuffer(self.network.scenario.settings().leader_timeout)
        self.records = {}
        # A run begins only once enough peers are there; who has been in it knows of whom.
        members = disk.vote.members if disk.vote else self.swarm.peers
        self.begin_round(dict.fromkeys(members, now))
        self.after(HEARTBEAT, self.send_heartbeat)

    def begin_round(self, seen: dict[PeerId, float]) -> None:
        """The next round on our chain."""
        head, now = self.chain.head, self.network.now
        settings = self.network.scenario.settings()
        self.pending = None
        self.behind_since = None
        self._live = MembershipChanged(frozenset())
        self._tick_at = 0.0
        self.sources.clear()
        self.waiting.clear()
        start = RoundStart(head.round, head.digest, seen, self.vote)
        self.round = RoundMachine(settings, self.name, start, make_signer(self.name), now)
        self.refresh_membership()
        machine = self.round
        self.submit_contribution(machine)
        if head.round < self.network.scenario.rounds:
            time = self.network.random.uniform(0.3, 1.0) * self.network.scenario.training
            self.after(time, lambda: self.train(machine))
        self.broadcast_record()
        for statement in self.message_buffer.open_round(head.round):
            if machine is self.round:
                self.feed_event(MessageReceived(statement))

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

    def train(self, machine: RoundMachine) -> None:
        if machine is self.round and machine.commit is None:
            self.progress.train(machine.number)
            self.submit_contribution(machine)

    def submit_contribution(self, machine: RoundMachine) -> None:
        contribution = self.progress.contribution(self.chain.head)
        if contribution is not None and machine is self.round and self.name != self.swarm.conflicting_peer:
            self.store.update(blob.digest for blob in contribution.parts)
            self.disk.store.update(blob.digest for blob in contribution.parts)
            self.feed_event(LocalContribution(contribution))

    def copy_with_wrong_size(self, contribution: Contribution) -> None:
        """Of the others' messages the first that comes in a round is ours as well, but for its sizes."""
        parts = tuple(Blob(blob.digest, blob.size - 1) for blob in contribution.parts)
        self.swarm.invented_blobs.update(parts)
        self.feed_event(LocalContribution(replace(contribution, parts=parts)))

    def feed_event(self, event: Event) -> None:
        if not isinstance(event, Tick):
            self.network.record(self.name, event)
        machine = self.round
        self.waiting.extend(machine.handle(event, self.network.now))
        self._carry_out_waiting()
        self._arm(machine)

    def _arm(self, machine: RoundMachine) -> None:
        deadline = machine.next_deadline(self.network.now)
        if machine is not self.round or deadline is None or self.network.now < self._tick_at <= deadline:
            return
        self._tick_at = deadline
        self.after(deadline - self.network.now, lambda: self._tick(machine))

    def _tick(self, machine: RoundMachine) -> None:
        if machine is self.round and self.network.now >= self._tick_at - 1e-9:
            self.feed_event(Tick())

    def _carry_out_waiting(self) -> None:
        dead = self.network.link.dead
        while self.waiting and not self._is_writing:
            action = self.waiting.popleft()
            self.network.record(self.name, action)
            for watch in self.swarm.action_watchers:
                watch(self.name, action)
            if self.name not in dead:
                self._act(action)

    def _act(self, action: Any) -> None:
        match action:
            case Send(peers, signed):
                for peer in peers:
                    self.network.transmit(self.name, peer, partial(self.swarm.peers[peer].receive, signed))
            case Fetch(portion, sources):
                self.request_part(portion, sources)
            case Reduce(part, attempt, contributions):
                if not self.swarm.invented_blobs.isdisjoint(entry.body.parts[part] for entry in contributions):
                    return  # the twin's own: it keeps silent
                assert {entry.body.parts[part].digest for entry in contributions} <= self.store
                machine = self.round
                self.after(0.05, lambda: self.reduced(machine, part, attempt, contributions))
            case Speculate(commit):
                lacking = {blob.digest for blob in commit.blobs} - self.store
                assert not lacking or self.name == self.swarm.conflicting_peer, "foreseen without what it takes"
            case Finish(commit):
                self.finish(commit)
            case Rejected():
                self.swarm.rejections.append((self.name, action.peer, action.reason))
            case VoteRecord():
                self._write(action)

    def _write(self, vow: VoteRecord) -> None:
        self.vote, longest = vow, self.network.scenario.disk
        if longest == 0.0:
            self.disk.save_vote(vow, self.store)
            return
        self._is_writing = True
        self.after(self.network.random.uniform(0.0, longest), lambda: self._written(vow))

    def _written(self, vow: VoteRecord) -> None:
        self.disk.save_vote(vow, self.store)
        self._is_writing = False
        self._carry_out_waiting()

    def reduced(
        self, machine: RoundMachine, part: int, attempt: int, contributions: tuple[SignedMessage[Contribution], ...]
    ) -> None:
        blob = fake_reduce(part, contributions)
        self.swarm.ledger.sums[blob.digest] = [entry.body.parts[part] for entry in contributions]
        self.store.add(blob.digest)
        if machine is self.round:
            self.feed_event(PartReduced(part, attempt, blob))

    def receive(self, signed: wire.Signed) -> None:
        """A delivery; whoever still asks about a round that is decided is answered with the decision."""
        statement = self.network.open(signed)
        number = statement.body.round
        if number == self.round.number and self.round.commit is None:
            if self.name == self.swarm.conflicting_peer and isinstance(statement.body, Contribution):
                self.copy_with_wrong_size(statement.body)
            self.feed_event(MessageReceived(statement))
        elif number == self.chain.round + 1:
            self.message_buffer.buffer_early(statement)
        elif self.message_buffer.is_late(statement):
            asking = self.swarm.peers[statement.sender]
            for answer in self.message_buffer.answer_late(number, asking.name, self.network.now):
                self.network.transmit(self.name, asking.name, partial(asking.receive, answer))

    def request_part(self, portion: PartBlob, sources: tuple[PeerId, ...]) -> None:
        fresh = portion not in self.sources
        self.sources[portion] = sources
        if fresh:
            self._try(portion, 0)

    def _try(self, portion: PartBlob, attempt: int) -> None:
        """Until the round is over."""
        if portion not in self.sources:
            return
        scenario, sources = self.network.scenario, self.sources[portion] or tuple(self.swarm.peers)
        source = sources[attempt % len(sources)]
        here = portion.blob.digest in self.store
        delay = 0.0 if here else self.network.random.uniform(0.02, scenario.transfer)
        self.after(delay, lambda: self._transferred(portion, source, attempt))

    def _transferred(self, portion: PartBlob, source: PeerId, attempt: int) -> None:
        link, digest = self.network.link, portion.blob.digest
        if portion not in self.sources or portion.blob in self.swarm.invented_blobs:
            return
        connected = link.can_send(self.name, source) and link.can_send(source, self.name)
        if digest in self.store or (connected and digest in self.swarm.peers[source].store):
            self.store.add(digest)
            self.feed_event(BlobAvailable(portion))
            self.apply()
        else:
            self.after(0.2, lambda: self._try(portion, attempt + 1))

    def finish(self, commit: SignedMessage[Commit]) -> None:
        told = self.round.last_seen if commit.sender == self.name else ()
        self.message_buffer.record_decision(commit.body.round, self.round.signed_decision, told, self.network.now)
        self.swarm.on_decided(self.name, commit)
        self.pending = commit
        for portion, sources in self.swarm.needed(commit.body, self.name).items():
            if portion.blob.digest not in self.store:
                self.request_part(portion, tuple(peer for peer in sources if peer != self.name))
        self.after(self.network.scenario.settings().exchange_timeout, partial(self._go_on, commit))
        self.apply()

    def _go_on(self, commit: SignedMessage[Commit]) -> None:
        """What we lack cannot be had: in groups the round passes us by; otherwise it is opened again."""
        if self.pending is not commit:
            return
        if self.network.scenario.exchange == "groups":
            self._append(commit)
        else:
            self.network.record(self.name, "gives up what was decided")
            self.swarm.on_given_up(self.name, commit.body)
            self.begin_round(self.round.last_seen)

    def apply(self) -> None:
        if self.pending is None:
            return
        needed = {portion.blob for portion in self.swarm.needed(self.pending.body, self.name)}
        if all(blob.digest in self.store for blob in needed) and needed.isdisjoint(self.swarm.invented_blobs):
            self._append(self.pending)

    def _append(self, commit: SignedMessage[Commit]) -> None:
        self.swarm.ledger.append(self.chain.head, commit.body)
        share = self.own_contributions(commit.body)
        held = [entry for entry in share if commit.body.parts or entry.body.parts[0].digest in self.store]
        self.swarm.check_applied(self.name, commit.body, AppliedContributions.of(held), self.store)
        self.chain.append(commit)
        self._settle((commit,), None)

    def own_contributions(self, commit: Commit) -> tuple[SignedMessage[Contribution], ...]:
        return self.network.scenario.settings().topology.contributions_for(commit, self.name)

    def _settle(self, commits: tuple[SignedMessage[Commit], ...], left: ChainHead | None) -> None:
        """A new head: the fate of our message, a checkpoint, and the next round."""
        self.progress.settle(commits, self.chain.round, left)
        kept = self.chain.commits_since(max(0, self.chain.round - KEPT_COMMITS)) or ()
        self.disk.head, self.disk.commits, self.disk.progress = self.chain.head, kept, self.progress.save()
        self.swarm.on_head_changed(self)
        self.swarm.measure_tables(self)
        self.begin_round(self.round.last_seen)

    def broadcast_record(self) -> None:
        head, network = self.chain.head, self.network

        def gossip() -> None:
            for other in self.swarm.peers.values():
                reached = other is not self and network.link.can_send(self.name, other.name)
                if reached and network.random.random() >= network.scenario.loss:
                    other.receive_record(self.name, head)

        network.schedule(network.random.uniform(0.005, network.scenario.delay), gossip)

    def send_heartbeat(self) -> None:
        self._beats += 1
        if self._beats % BEATS_PER_MEASUREMENT == 0:
            self.swarm.measure_tables(self)
        self.broadcast_record()
        self.refresh_membership()
        self.catch_up()
        self.after(HEARTBEAT, self.send_heartbeat)

    def receive_record(self, peer: PeerId, head: ChainHead) -> None:
        known = self.records.get(peer)
        if known is None or known[0].round <= head.round or prefers_theirs(known[0], head):
            self.records[peer] = (head, self.network.now)
            live, mine = self._live, self.chain.head
            if (peer in live.peers) != (head == mine) or (peer in live.ahead) != prefers_theirs(mine, head):
                self.refresh_membership()

    def refresh_membership(self) -> None:
        oldest, mine = self.network.now - self.network.scenario.expiry, self.chain.head
        heads = {peer: head for peer, (head, heard) in self.records.items() if heard >= oldest}
        level = [peer for peer, head in heads.items() if head == mine]
        ahead = frozenset(peer for peer, head in heads.items() if prefers_theirs(mine, head))
        live = MembershipChanged(frozenset([*level, self.name]), ahead=ahead)
        if live != self._live:
            self._live = live
            self.feed_event(live)

    def catch_up(self) -> None:
        """Takes over the chain of whoever is ahead, when our own round does not end by itself."""
        now, mine = self.network.now, self.chain.head
        ahead = [
            peer
            for peer, (head, heard) in sorted(self.records.items())
            if prefers_theirs(mine, head)
            and now - heard <= HEARTBEAT * 2
            and self.network.link.can_send(peer, self.name)
        ]
        if not ahead:
            self.behind_since = None
        elif self.behind_since is None:
            self.behind_since = now
        elif now - self.behind_since >= CATCH_UP_AFTER:
            self._adopt(self.swarm.peers[ahead[0]].chain)

    def _adopt(self, theirs: Chain) -> None:
        if not prefers_theirs(self.chain.head, theirs.head):
            return
        self.network.record(self.name, f"takes over the chain at round {theirs.round}")
        missed = theirs.commits_since(self.progress.offers.history_needed_since(self.chain.round)) or ()
        left = self.chain.head
        self.chain = Chain(theirs.head, theirs.commits_since(max(0, theirs.round - KEPT_COMMITS)) or ())
        self._settle(missed, left)
