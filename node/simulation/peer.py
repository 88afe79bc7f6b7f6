"""The daemon's side of a virtual peer: rounds one after the other, blobs, the trainer kept in step.

It drives the same machine as a daemon and answers to it in the same way (see node.daemon.rounds and
node.daemon.participant); what takes a daemon time on the network takes it virtual time here, and arithmetic takes none.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from node.channel import Fate
from node.daemon.catch_up import PATIENCE, is_time_to_go
from node.daemon.offers import Offer, Offers
from node.daemon.replica import Share, blobs_of
from node.program import pacing_of
from node.simulation.clock import VirtualClock
from node.simulation.directory import Directory
from node.simulation.learner import Learner
from node.simulation.ledger import End, Ledger
from node.simulation.links import Links
from node.simulation.notary import Notary
from node.simulation.setting import Setting
from node.simulation.vault import KEPT_ROUNDS, Applied, Vault
from optim.method import Method
from optim.program import Program
from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.rounds.attendance import Attendance
from protocol.rounds.chain import Chain, Head
from protocol.rounds.events import (
    Action,
    Event,
    Fetch,
    Finish,
    Held,
    Hurry,
    Live,
    Offered,
    Received,
    Reduce,
    Reduced,
    RoundSettings,
    Send,
    Skip,
    Tick,
)
from protocol.rounds.grouping import group_of
from protocol.rounds.round import Round
from protocol.rounds.statements import Commit, Digest, Portion, Statement, Terms

REACTION = 0.01  # virtual seconds in which a peer gathers what came in before it looks at it
RETRY = 0.2  # until it asks again for a blob that nobody had


class World(Protocol):
    """What a peer asks of the swarm that it is in, and tells it."""

    setting: Setting
    method: Method
    program: Program
    run_id: RunId
    clock: VirtualClock
    links: Links
    ledger: Ledger
    directory: Directory
    notary: Notary
    vault: Vault
    terms: Terms
    round_settings: Callable[[int], RoundSettings]
    peers: dict[PeerId, "VirtualPeer"]

    def say(self, sender: "VirtualPeer", receivers: Iterable[PeerId], signed: wire.Signed) -> None: ...

    def new_learner(self, peer: "VirtualPeer") -> Learner: ...

    def steps_to_target(self, tokens: int) -> int: ...

    def stepped(self, peer: "VirtualPeer") -> None: ...

    def arrived(self, peer: "VirtualPeer") -> None: ...


class VirtualPeer:
    """`slot`: which machine and link it has. A peer that comes back is a new one on the old slot."""

    def __init__(self, name: PeerId, slot: int, swarm: World) -> None:
        self.name = name
        self.slot = slot
        self.swarm = swarm
        self.alive = True
        self.chain = Chain.begin(swarm.run_id)
        self.applied: Applied = swarm.vault.initial
        self.held: dict[Digest, int] = {}  # since which round of ours
        self.offers = Offers(swarm.program)
        self.learner: Learner | None = None
        self._machine: Round | None = None
        self._seen: dict[PeerId, float] | None = None
        self._live: frozenset[PeerId] = frozenset()
        self._inbox: list[Event] = []
        self._attendance = Attendance(swarm.round_settings(0).leader_timeout)
        self._pacing = pacing_of(swarm.setting.manifest, swarm.program)
        self._wanted: dict[Portion, tuple[PeerId, ...]] = {}
        self._pending: Statement[Commit] | None = None  # decided, but not all its blobs are here
        self._behind_since: float | None = None
        self._taking_over = self._busy = False
        self._adoption: Fate | None = None
        self._tick_at = 0.0

    @property
    def is_done(self) -> bool:
        return self.chain.tokens >= self.swarm.setting.target_tokens

    def begin(self) -> None:
        """Open the next round on our chain, and go on training."""
        swarm, head = self.swarm, self.chain.head
        if self.is_done:
            return self.train()  # adopts the last anchor
        swarm.vault.enter(head.round)
        self.held = {digest: since for digest, since in self.held.items() if since >= head.round - KEPT_ROUNDS}
        now = swarm.clock.now
        seen = self._seen if self._seen is not None else dict.fromkeys(swarm.directory.peers, now)
        self._inbox.clear()
        self._live = frozenset()
        self._tick_at = 0.0
        self._machine = Round(
            swarm.round_settings(head.round), self.name, head.round, head.digest, swarm.notary.signer(self.name), now,
            seen, urgency=self._pacing.urgency,
        )  # fmt: skip
        self._pacing.opened(head.round, now)
        self.refresh()
        for statement in self._attendance.begin(head.round):
            self._queue(Received(statement))
        self._offer()
        self.train()

    def _offer(self) -> None:
        offer = self.offers.current
        if offer is not None and self._machine is not None:
            fresh = offer.message.round == self.chain.round
            self._pacing.offered(offer.message.steps if fresh else None, self.swarm.clock.now)
            self._queue(Offered(offer.contribution(self.chain.head, self.swarm.terms)))

    def refresh(self) -> None:
        """What all know of one another has changed, or we have moved."""
        if self._machine is not None:
            last = self.chain.since(max(0, self.chain.round - 1)) or ()
            near = {self.chain.digest, *(commit.body.base for commit in last)}
            live = self.swarm.directory.standing_at(near)
            live = live if self.name in live else live | {self.name}
            if live != self._live:
                self._live = live
                self._queue(Live(live))
        self._catch_up()

    def _queue(self, event: Event) -> None:
        if not self._inbox:
            self._later(REACTION, self._look)
        self._inbox.append(event)

    def _look(self) -> None:
        events, self._inbox = self._inbox, []
        machine = self._machine
        if machine is None or not events:
            return
        started = time.process_time()
        actions = machine.handle_all(events, self.swarm.clock.now)
        self.swarm.ledger.logic_seconds += time.process_time() - started
        for action in actions:
            self._carry_out(action)
        if machine is self._machine:
            self._arm(machine)

    def _arm(self, machine: Round) -> None:
        now = self.swarm.clock.now
        deadline = machine.next_deadline(now)
        if deadline is not None and not now < self._tick_at <= deadline:
            self._tick_at = deadline
            self._later(deadline - now, lambda: self._tick(machine, deadline))

    def _tick(self, machine: Round, deadline: float) -> None:
        if machine is self._machine and deadline == self._tick_at:
            self._queue(Tick())

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(peers, signed):
                self.swarm.say(self, peers, signed)
            case Fetch(portion, sources):
                self._want(portion, sources)
            case Reduce():
                self._reduce(action)
            case Finish(commit):
                self._finish(commit)
            case Hurry():
                self._hurry()
            case Skip():
                self.swarm.ledger.skips[action.reason] += 1

    def _hurry(self) -> None:
        self._pacing.asked(self.swarm.clock.now)
        self.swarm.ledger.skips["hurried"] += 1
        if self.learner is not None:
            self.learner.wanted.ask(self.chain.round, 1)
            self.train()

    def _reduce(self, order: Reduce) -> None:
        contributions = [contribution.body for contribution in order.contributions]
        blob = self.swarm.vault.reduce(self.chain.round, order.part, contributions)
        self.held[blob.digest] = self.chain.round
        self._queue(Reduced(order.part, order.attempt, blob))

    def _finish(self, commit: Statement[Commit]) -> None:
        machine = self._machine
        assert machine is not None
        self._seen = machine.seen
        self._pacing.decided(machine.arrivals, commit.body.in_time)
        told = self._seen if commit.sender == self.name else ()
        self._attendance.decide(machine.number, machine.decision, told, self.swarm.clock.now)
        self._machine = None
        self._pending = commit
        self.swarm.ledger.decide(commit.body)
        others = tuple(sorted(self.swarm.peers.keys() - {self.name}))
        for place, blob in enumerate(blobs_of(commit.body, self._share(commit.body))):
            if blob.digest not in self.held:  # a sum's part, or somebody's message, whole
                self._want(Portion(blob, place if commit.body.parts else 0), others)
        self._apply_when_whole()

    def _share(self, commit: Commit) -> Share:
        """What of it is for us; a partner's message that died with it is not."""
        share = group_of(commit, self.name, self.swarm.round_settings(commit.round))
        if self.swarm.method.topology.kind != "groups":
            return share
        return tuple(entry for entry in share if self._is_to_be_had(entry.body.parts[0]))

    def _is_to_be_had(self, blob: Blob) -> bool:
        return any(peer.alive and blob.digest in peer.held for peer in self.swarm.peers.values())

    def _apply_when_whole(self) -> None:
        commit = self._pending
        if commit is None:
            return
        share = self._share(commit.body)
        if not all(blob.digest in self.held for blob in blobs_of(commit.body, share)):
            return
        self._pending = None
        self.applied = self.swarm.vault.apply(self.applied, commit.body, share)
        self.chain.append(commit)
        self._settle(self.offers.current, self.offers.reach(self.name, [commit.body], self.chain.round))

    def _settle(self, offer: Offer | None, fate: Fate) -> None:
        """A new state is in place; what became of the message that was on its way."""
        self._behind_since = None
        if offer is not None and fate != "none":
            end: End = "given back" if fate == "excluded" else fate
            self.swarm.ledger.settle(self.name, offer.message.round, end)
        self.swarm.arrived(self)
        if self.learner is None:
            self.learner = self.swarm.new_learner(self)
        elif self._adoption in (None, "none"):  # a fate that the trainer has not heard yet stays
            self._adoption = fate
        self.begin()

    def receive(self, signed: wire.Signed) -> None:
        """A statement; whoever still asks about a round that is decided is answered with the decision."""
        if not self.alive:
            return
        received = self.swarm.notary.received(signed)
        statement, ahead = received.statement, received.statement.body.round - self.chain.head.round
        if ahead == 0 and self._machine is not None:
            self._queue(received)
        elif ahead == 1:
            self._attendance.keep(statement)
        elif self._attendance.is_late(statement):
            for answer in self._attendance.answer(statement.body.round, statement.sender, self.swarm.clock.now):
                self.swarm.say(self, [statement.sender], answer)

    def _want(self, portion: Portion, sources: tuple[PeerId, ...]) -> None:
        if portion.blob.digest in self.held:
            return self._check(portion)
        fresh, self._wanted[portion] = portion not in self._wanted, sources
        if fresh:
            self._ask(portion)

    def _ask(self, portion: Portion) -> None:
        """Of those who have it, the one whose uplink is free first: a daemon asks several at once."""
        links, peers, blob = self.swarm.links, self.swarm.peers, portion.blob
        found = (peers[name] for name in self._wanted[portion] if name in peers)
        holders = [peer for peer in found if peer.alive and blob.digest in peer.held]
        if not holders:
            self._later(RETRY, lambda: self._ask(portion))
            self._apply_when_whole()
            return
        source = min(holders, key=lambda peer: links.backlog(peer.slot))
        links.carry(source.slot, self.slot, blob.size, self._if_alive(lambda: self._arrived(portion, source)))

    def _arrived(self, portion: Portion, source: "VirtualPeer") -> None:
        if not source.alive:
            return self._ask(portion)
        self._wanted.pop(portion, None)
        self._check(portion)

    def _check(self, portion: Portion) -> None:
        if self.swarm.vault.is_well_formed(portion.blob, self.chain.round, portion.part):
            self.held[portion.blob.digest] = self.chain.round
            self._queue(Held(portion))
            self._apply_when_whole()

    def _catch_up(self) -> None:
        """Take the state over where others are ahead and the commit does not come by itself."""
        swarm = self.swarm
        head = swarm.directory.best(self.chain.head)
        if head is None or self._taking_over or self._pending is not None:
            self._behind_since = None if head is None else self._behind_since
            return
        now = swarm.clock.now
        if self._behind_since is None:
            self._behind_since = now
            self._later(PATIENCE, self._catch_up)
        if self.learner is None or is_time_to_go(self.chain.head, head, now - self._behind_since):
            self._take_over()

    def _take_over(self) -> None:
        """From the peer that is furthest, among those the one whose uplink is free first."""
        swarm = self.swarm
        best = max((peer for peer in swarm.peers.values() if peer.alive), key=lambda peer: peer.chain.tokens)
        if best.chain.head == self.chain.head:
            return  # whoever was further has died
        level = [peer for peer in swarm.peers.values() if peer.alive and peer.chain.head == best.chain.head]
        source = min(level, key=lambda peer: swarm.links.backlog(peer.slot))
        since = self.offers.asks_since(self.chain.round)
        head, applied, commits = source.chain.head, source.applied, source.chain.since(since) or ()
        self._taking_over = True
        self._machine = None
        self._inbox.clear()
        swarm.ledger.takeovers += 1
        arrived = self._if_alive(lambda: self._took_over(source, head, commits, applied))
        swarm.links.carry(source.slot, self.slot, applied[1].size, arrived)

    def _took_over(
        self, source: "VirtualPeer", head: Head, commits: Sequence[Statement[Commit]], applied: Applied
    ) -> None:
        self._taking_over = False
        if not source.alive:
            return self._catch_up()
        self.applied = applied  # who gives it out keeps it for as long as that takes
        offer, bodies, left = self.offers.current, [commit.body for commit in commits], self.chain.head
        self.chain.restart(head, commits)
        self._settle(offer, self.offers.jump(self.name, bodies, head.round, left).fate)

    def train(self) -> None:
        """What the trainer does next."""
        learner = self.learner
        if learner is None or self._busy or not self.alive:
            return
        if self._adoption is not None and learner.may_adopt():
            shared, payloads = self.applied[0].shared(self.swarm.method), self.swarm.vault.payloads
            revised = [entry for entry in self.offers.past if entry.was is not None]
            learner.adopt(self.chain.round, shared, self._adoption, revised, payloads)
            learner.wanted.ask(self.chain.round, self._pacing.steps(self.chain.round))
            self._adoption = None
        if self.is_done:
            return
        if learner.is_message_due(self.swarm.steps_to_target(self.chain.tokens), self.swarm.clock.now):
            self._place(learner)
        if not learner.must_wait():
            self._busy = True
            self._later(1 / self.swarm.setting.speeds[self.slot], self._stepped)

    def _stepped(self) -> None:
        assert self.learner is not None
        self._busy = False
        self.learner.step()
        step = self.learner.state.counters.step
        self._pacing.trained(step, step / self.swarm.setting.speeds[self.slot])
        self.swarm.stepped(self)
        self.train()

    def _place(self, learner: Learner) -> None:
        message, payloads = learner.message()
        parts = tuple(self.swarm.vault.put(payload) for payload in payloads)
        self.held.update((blob.digest, self.chain.round) for blob in parts)
        self.offers.place(Offer(message, parts))
        self.swarm.ledger.enter(self.name, message, parts)
        self._offer()

    def _later(self, delay: float, action: Callable[[], None]) -> None:
        self.swarm.clock.after(delay, self._if_alive(action))

    def _if_alive(self, action: Callable[[], None]) -> Callable[[], None]:
        def act() -> None:
            if self.alive:
                action()

        return act

    def die(self) -> None:
        self.alive = False
        self._machine = None
        self.learner = None
        self.swarm.ledger.bury(self.name)
        self.swarm.directory.lose(self.name)
