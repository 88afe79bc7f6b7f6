"""One outer round at one peer: announce, roster, exchange, commit.

A pure state machine: events and the time go in, actions come out; the daemon and the tests' simulator drive the same.

    contributions  ->  all members    each member's message, the first one counts
    roster         <-  leader         the ordered list; a member's first holding of it is its promise to the view
    holdings       ->  leader         which blobs a member has
    parts          ->  all members    (butterfly) the sums, each as soon as its reducer holds what goes into it
    inclusion      <-  leader         (butterfly) where not all that the roster lists can be summed, or a reducer fails:
                                      whose parts to sum, and who sums which
    commit         <-  leader         a proposal, which it may make once a majority has joined its view
    acknowledgement -> leader         of the proposal, by whoever holds all that it takes to apply it
    decision       <-  leader         the acknowledgements of a majority: the proposal is decided

A leader that is dead, silent, not joined by a majority or makes no progress is followed by that of the next view, or of
the latest that anybody is known to be in; it proposes again whatever may have been decided (see `leadership`). The view
change needs no messages of its own: a member in a later view says so by a holding without a roster. Everything is
repeated until it is answered, so lost messages cost time only.

What a peer promises binds it beyond the life of its process (see `Vow`).

No majority, no commit: a minority waits until the votes of those that vanished are forgotten (`vote_memory`), and then
commits what all of it acknowledge (in groups: what a majority of it does).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf import message

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.rounds.election import Electorate
from protocol.rounds.events import (
    Action,
    Event,
    Fetch,
    Finish,
    Foresee,
    Held,
    Hurry,
    Live,
    Offered,
    Reason,
    Received,
    Reduce,
    Reduced,
    RoundSettings,
    Send,
    Skip,
    Tick,
    Urgency,
    Vow,
)
from protocol.rounds.hearing import hear
from protocol.rounds.kinds import Body, kind_of
from protocol.rounds.repetition import Message, asked_of_leader, repeated
from protocol.rounds.reports import Acknowledgement, Decision, Inclusion, Part
from protocol.rounds.state import MAX_VIEW, Fault, RoundState
from protocol.rounds.statements import NO_ROSTER, Commit, Contribution, Digest, Portion, Statement
from protocol.rounds.view import View, blobs_of

Said = TypeVar("Said", bound=Body)
Signer = Callable[[str, message.Message], wire.Signed]  # kind, body
Sum = tuple[int, tuple[Digest, ...]]  # a part of certain contributions, in their order


class Round:
    """`seen`: when each peer that may take part was last known to live: `previous_round.seen`, or at the first
    round of a process every live trainer of the run, whatever its round, at `now`. `vow`: the last that this peer
    made, whenever that was.
    `urgency`: by the round's number, when to ask for a contribution of ours that is missing; None: never."""

    def __init__(
        self,
        settings: RoundSettings,
        me: PeerId,
        number: int,
        base: Digest,
        signer: Signer,
        now: float,
        seen: Mapping[PeerId, float] | None = None,
        vow: Vow | None = None,
        urgency: Callable[[int], Urgency] | None = None,
    ) -> None:
        # What was decided, and the acknowledgements that decide it: the answer to whoever still sends statements of
        # this round; received one by one, they finish his round as well.
        self.commit: Statement[Commit] | None = None
        self.decision: tuple[wire.Signed, ...] = ()
        self._signer = signer
        electorate = Electorate(settings.vote_memory, settings.leader_timeout, seen or {}, now)
        self._state = RoundState(settings, me, number, base, electorate, now, urgency)
        self._evidence = self._state.evidence
        self._vowed: tuple[int, Digest] = -1, b""  # view and lock
        if vow is not None and (vow.round, vow.base) == (number, base):
            self._vowed = self._state.take_up(vow)
            self._evidence.learn_holding(self._sign(self._state.holding()), self._state.most_held)
        self._repeat_at = now + self._state.repeat_interval
        self._reported = NO_ROSTER, 0, 0  # the roster that we told its leader that we joined, and our stock then
        self._sources: dict[Portion, tuple[PeerId, ...]] = {}
        self._ordered: list[Sum] = []  # reductions asked for; their place is the attempt that the driver hands back
        self._sums: dict[Sum, Blob] = {}
        self._actions: list[Action] = []

    @property
    def number(self) -> int:
        return self._state.number

    @property
    def view(self) -> int:
        return self._state.view

    @property
    def leader(self) -> PeerId | None:
        return self._state.leader

    @property
    def seen(self) -> dict[PeerId, float]:
        """For the round after this one; while that is undecided, for this one again."""
        electorate = self._state.electorate
        return electorate.remembered if self.commit is None else electorate.seen

    @property
    def arrivals(self) -> dict[PeerId, float]:
        """When each whole contribution of others was first known of here."""
        return self._state.whole_arrivals

    @property
    def own_parts(self) -> list[int]:
        """Those that we sum, by the newest roster; none without one."""
        return self._state.own_parts

    @property
    def left_out(self) -> frozenset[Digest]:
        """The blobs of contributions that are not in the commit: they may come again."""
        included = {entry.sender for entry in self.commit.body.contributions} if self.commit else set()
        missed = [entry for sender, entry in self._evidence.contributions.items() if sender not in included]
        return frozenset(blob.digest for blob in blobs_of(missed))

    def has_elector(self, peer: PeerId) -> bool:
        return self._state.electorate.is_elector(peer)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Nothing more comes out after Finish."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Action]:
        """What follows from all of them, worked out once: for hundreds of peers at once that is much cheaper."""
        if self.commit is None:
            self._state.electorate.advance(now)
            for event in events:
                self._apply(event, now)
            self._progress(now)
        actions, self._actions = [*self._vow(), *self._actions], []
        return actions

    def _vow(self) -> list[Action]:
        """Ahead of all that was just said, if any of it binds us further."""
        state = self._state
        view = state.followed.ballot.view if state.followed else self._vowed[0]
        vowed = view, state.lock.digest if state.lock else b""
        if vowed == self._vowed:
            return []
        self._vowed = vowed
        rests_on = tuple(portion.blob for portion in state.needed(state.lock)) if state.lock else ()
        return [Vow(state.number, state.base, view, state.lock, state.electorate.electors, rests_on)]

    def next_deadline(self, now: float) -> float | None:
        """When a Tick is wanted; None once decided."""
        if self.commit is not None:
            return None
        wanted = (time for time in [self._repeat_at, *self._state.deadlines()] if time is not None and time > now)
        return min(wanted, default=now)

    def _apply(self, event: Event, now: float) -> None:
        match event:
            case Received(statement):
                self._skip_all(hear(self._state, statement, now))
            case Live():
                self._meet(event, now)
            case Offered(contribution):
                self._offer(contribution, now)
            case Held(portion):
                self._evidence.hold([portion])
            case Reduced(part, attempt, blob):
                self._sums[self._ordered[attempt]] = blob
                self._evidence.hold([Portion(blob, part)])
            case Tick():
                pass

    def _meet(self, event: Live, now: float) -> None:
        state = self._state
        newcomers = event.peers - state.live - {state.me}
        state.electorate.update(event, now)
        if state.me in self._evidence.contributions:
            self._send(newcomers, self._evidence.contributions[state.me])
        if state.leadership and state.followed:
            self._send(newcomers, state.followed.roster)

    def _offer(self, contribution: Contribution, now: float) -> None:
        statement, self._state.offered_at = self._sign(contribution), now
        if not self._evidence.learn_contribution(statement):
            self._skip(self._state.me, "equivocation")
            return
        self._evidence.hold(contribution.portions)
        self._send(self._state.others, statement)
        if self._state.followed:
            self._skip(self._state.me, "late")

    def _progress(self, now: float) -> None:
        """What follows from all that is known, in the order of a round."""
        self._decide()
        if self.commit is not None:
            return
        self._state.watch_contributions(now)
        self._hurry(now)
        self._change_view(now)
        self._open_roster(now)
        self._appoint(now)
        self._reduce()
        self._foresee()
        self._propose(now)
        self._acknowledge()
        self._fetch()
        self._report()
        self._repeat(now)
        self._decide()

    def _hurry(self, now: float) -> None:
        due = self._state.hurry_at()
        if due is not None and now >= due:
            self._state.hurried = True
            self._actions.append(Hurry())

    def _change_view(self, now: float) -> None:
        state = self._state
        outvoting = min(state.outvoting_view(), MAX_VIEW)
        fault: Reason | None = "outvoted" if outvoting > state.view else state.fault_of_leader(now)
        if fault is None:
            return
        self._skip(state.leader, fault)
        if fault != "outvoted":
            state.fail(state.leader)
        state.view, state.view_since = state.next_view(), now
        state.followed = state.leadership = None
        holding = self._sign(state.holding())
        self._evidence.learn_holding(holding, state.most_held)
        self._say(asked_of_leader(state, holding))

    def _open_roster(self, now: float) -> None:
        state = self._state
        due = state.roster_due()
        if state.followed is None and due is not None and now >= due and state.leader == state.me:
            roster = self._sign(state.new_roster())
            self._skip_all(state.follow(roster, now))
            self._send(state.others, roster)

    def _propose(self, now: float) -> None:
        state = self._state
        if state.leadership is None or state.proposal() is not None:
            return
        proposal = state.leadership.proposal(now)
        if proposal is not None:
            commit = self._sign(Commit(state.number, state.view, state.base, *proposal))
            self._evidence.learn_proposal(commit)
            self._send(state.others, commit)

    def _appoint(self, now: float) -> None:
        state = self._state
        view, leadership = state.followed, state.leadership
        if view is None or leadership is None or not state.settings.sums or state.proposal() is not None:
            return
        appointment = leadership.appointment(now)
        if appointment is None:
            return
        included, reducers = appointment
        for reducer in sorted(set(view.reducers) - set(reducers)):
            self._skip(reducer, "reducer silent" if reducer in leadership.suspects else "reducer left")
        names = tuple(contribution.sender for contribution in included)
        for contribution in view.included:
            if contribution.sender not in names:
                self._skip(contribution.sender, "lost")
        inclusion = Inclusion(self.number, self.view, view.roster.digest, view.attempt + 1, names, reducers)
        statement = self._sign(inclusion)
        view.follow_inclusion(statement, now)
        self._send(self._state.others, statement)

    def _reduce(self) -> None:
        view = self._state.followed
        if view is None or not self._state.settings.sums:
            return
        for part, reducer in enumerate(view.reducers):
            if reducer == self._state.me and view.part(part) is None:
                order = tuple(contribution.digest for contribution in view.included)
                self._reduce_part(view, (part, order))

    def _reduce_part(self, view: View, wanted: Sum) -> None:
        part, state = wanted[0], self._state
        if wanted in self._sums:
            body = Part(state.number, state.view, view.roster.digest, view.attempt, part, self._sums[wanted])
            statement = self._sign(body)
            view.learn_part(statement)
            self._send(state.others, statement)
        elif wanted not in self._ordered:
            portions = [contribution.body.portions[part] for contribution in view.included]
            if self._evidence.holds_all(state.me, portions):
                self._ordered.append(wanted)
                self._actions.append(Reduce(part, len(self._ordered) - 1, view.included))

    def _foresee(self) -> None:
        """Once all is here: to compute what comes of it takes as long as to agree on it."""
        state, view = self._state, self._state.followed
        if view is None or view.foreseen == view.attempt or state.proposal() is not None:
            return
        if (likely := state.likely(view)) is not None:
            view.foreseen = view.attempt
            self._actions.append(Foresee(likely))

    def _acknowledge(self) -> None:
        """Once we hold all that it needs: from now on nothing older gets our vote."""
        state = self._state
        proposal = state.proposal()
        if proposal is None or state.is_locked_here():
            return
        if self._evidence.holds_all(state.me, state.needed(proposal)):
            state.lock = proposal
            said = self._sign(Acknowledgement(state.number, state.view, proposal.digest))
            self._evidence.learn_acknowledgement(said)
            self._send({proposal.sender} - {state.me}, said)

    def _fetch(self) -> None:
        for portion, want in self._state.wanted().items():
            sources = self._state.sources(portion.blob, want.owners)
            if sources != self._sources.get(portion):
                self._sources[portion] = sources
                self._actions.append(Fetch(portion, sources, want.is_sum))

    def _report(self) -> None:
        """To the leader: at once when we join its view, and when we have all that we want."""
        state, view = self._state, self._state.followed
        if view is None or state.leadership:
            return
        stock = view.roster.digest, len(self._evidence.held), len(view.announced)
        joined = self._reported[0] == view.roster.digest
        if stock == self._reported or (joined and state.wanted()):
            return
        if not joined and state.lock:
            self._send([view.leader], state.lock)
        self._reported = stock
        self._send([view.leader], self._sign(state.holding()))

    def _decide(self) -> None:
        commit = self._evidence.decided(self._state.electorate)
        if commit is None or self.commit is not None:
            return
        decision = self._proof(commit)
        self.commit = commit
        self.decision = (commit.signed, decision.signed)
        if commit.sender == self._state.me:
            self._send(self._state.others, decision)
        included = {contribution.sender for contribution in commit.body.contributions}
        for sender in sorted(self._evidence.contributions.keys() - included):
            self._skip(sender, "left out")
        self._actions.append(Finish(commit))

    def _proof(self, commit: Statement[Commit]) -> Statement[Decision]:
        """The acknowledgements that we were shown together, or collected."""
        shown = self._evidence.proofs.get(commit.digest)
        if shown and self._state.electorate.is_quorum(vote.sender for vote in shown.body.acknowledgements):
            return shown
        votes = self._evidence.acknowledged[commit.digest]
        ordered = tuple(votes[peer] for peer in sorted(votes))
        return self._sign(Decision(self.number, commit.body.view, commit.digest, ordered))

    def _repeat(self, now: float) -> None:
        """What may have been lost on the way is said again, to those who seem to lack it."""
        if now < self._repeat_at:
            return
        self._repeat_at = now + self._state.repeat_interval
        self._say(repeated(self._state, self._sign(self._state.holding())))

    def _say(self, messages: Iterable[Message]) -> None:
        for peers, statement in messages:
            self._send(peers, statement)

    def _sign(self, body: Said) -> Statement[Said]:
        return Statement.of(self._signer(kind_of(body), body.to_wire()), body)

    def _send(self, peers: Iterable[PeerId], statement: Statement[Any]) -> None:
        receivers = tuple(sorted(peers))
        if receivers:
            self._actions.append(Send(receivers, statement.signed))

    def _skip_all(self, faults: Iterable[Fault]) -> None:
        for peer, reason in faults:
            self._skip(peer, reason)

    def _skip(self, peer: PeerId | None, reason: Reason) -> None:
        self._actions.append(Skip(peer, reason))
