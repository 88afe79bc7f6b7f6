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
from protocol.consensus.events import (
    Action,
    BlobAvailable,
    EarlySubmitPolicy,
    Event,
    Fetch,
    Finish,
    LocalContribution,
    MembershipChanged,
    MessageReceived,
    PartReduced,
    Reduce,
    Rejected,
    RejectReason,
    RequestEarlySubmit,
    Send,
    Speculate,
    Tick,
    VoteRecord,
)
from protocol.consensus.handlers import handle_message
from protocol.consensus.message_kinds import (
    Acknowledgement,
    Body,
    CommitCertificate,
    ReducedPart,
    ReducerAssignment,
    kind_of,
)
from protocol.consensus.messages import NO_ROSTER, Commit, Contribution, Digest, PartBlob, SignedMessage, blobs_of
from protocol.consensus.quorum import VoterSet
from protocol.consensus.retransmit import OutgoingMessage, messages_for_next_leader, messages_to_resend
from protocol.consensus.settings import RoundSettings
from protocol.consensus.state import MAX_VIEW, Rejection, RoundState
from protocol.consensus.view import View
from protocol.identity import PeerId

BodyT = TypeVar("BodyT", bound=Body)
Signer = Callable[[str, message.Message], wire.Signed]  # kind, body
PartSum = tuple[int, tuple[Digest, ...]]  # a part of certain contributions, in their order


class RoundMachine:
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
        last_seen: Mapping[PeerId, float] | None = None,
        last_vote: VoteRecord | None = None,
        early_submit_policy: Callable[[int], EarlySubmitPolicy] | None = None,
    ) -> None:
        # What was decided, and the acknowledgements that decide it: the answer to whoever still sends statements of
        # this round; received one by one, they finish his round as well.
        self.commit: SignedMessage[Commit] | None = None
        self.signed_decision: tuple[wire.Signed, ...] = ()
        self._signer = signer
        electorate = VoterSet(settings.vote_memory, settings.leader_timeout, last_seen or {}, now)
        self._state = RoundState(settings, me, number, base, electorate, now, early_submit_policy)
        self._knowledge = self._state.knowledge
        self._persisted_vote: tuple[int, Digest] = -1, b""  # view and lock
        if last_vote is not None and (last_vote.round, last_vote.base) == (number, base):
            self._persisted_vote = self._state.restore_vote(last_vote)
            self._knowledge.learn_inventory(self._sign(self._state.build_inventory()), self._state.max_held_blobs)
        self._retransmit_at = now + self._state.retransmit_interval
        self._last_report = NO_ROSTER, 0, 0  # the roster that we told its leader that we joined, and our stock then
        self._requested_sources: dict[PartBlob, tuple[PeerId, ...]] = {}
        self._requested_sums: list[
            PartSum
        ] = []  # reductions asked for; their place is the attempt that the driver hands back
        self._sums: dict[PartSum, Blob] = {}
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
    def last_seen(self) -> dict[PeerId, float]:
        """For the round after this one; while that is undecided, for this one again."""
        electorate = self._state.voter_set
        return electorate.last_seen_with_forgotten if self.commit is None else electorate.last_seen

    @property
    def arrival_times(self) -> dict[PeerId, float]:
        """When each whole contribution of others was first known of here."""
        return self._state.full_arrival_times

    @property
    def parts_to_reduce(self) -> list[int]:
        """Those that we sum, by the newest roster; none without one."""
        return self._state.parts_to_reduce

    @property
    def left_out_blobs(self) -> frozenset[Digest]:
        """The blobs of contributions that are not in the commit: they may come again."""
        included = {entry.sender for entry in self.commit.body.contributions} if self.commit else set()
        missed = [entry for sender, entry in self._knowledge.contributions.items() if sender not in included]
        return frozenset(blob.digest for blob in blobs_of(missed))

    def has_voter(self, peer: PeerId) -> bool:
        return self._state.voter_set.is_voter(peer)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Nothing more comes out after Finish."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Action]:
        """What follows from all of them, worked out once: for hundreds of peers at once that is much cheaper."""
        if self.commit is None:
            self._state.voter_set.advance(now)
            for event in events:
                self._apply_event(event, now)
            self._advance(now)
        actions, self._actions = [*self._persist_vote(), *self._actions], []
        return actions

    def _persist_vote(self) -> list[Action]:
        """Ahead of all that was just said, if any of it binds us further."""
        state = self._state
        view = state.current_view.ballot.view if state.current_view else self._persisted_vote[0]
        vowed = view, state.lock.digest if state.lock else b""
        if vowed == self._persisted_vote:
            return []
        self._persisted_vote = vowed
        rests_on = tuple(portion.blob for portion in state.required_parts(state.lock)) if state.lock else ()
        return [VoteRecord(state.number, state.base, view, state.lock, state.voter_set.voters, rests_on)]

    def next_deadline(self, now: float) -> float | None:
        """When a Tick is wanted; None once decided."""
        if self.commit is not None:
            return None
        wanted = (time for time in [self._retransmit_at, *self._state.deadlines()] if time is not None and time > now)
        return min(wanted, default=now)

    def _apply_event(self, event: Event, now: float) -> None:
        match event:
            case MessageReceived(statement):
                self._reject_all(handle_message(self._state, statement, now))
            case MembershipChanged():
                self._update_membership(event, now)
            case LocalContribution(contribution):
                self._submit_contribution(contribution, now)
            case BlobAvailable(portion):
                self._knowledge.add_held_parts([portion])
            case PartReduced(part, attempt, blob):
                self._sums[self._requested_sums[attempt]] = blob
                self._knowledge.add_held_parts([PartBlob(blob, part)])
            case Tick():
                pass

    def _update_membership(self, event: MembershipChanged, now: float) -> None:
        state = self._state
        newcomers = event.peers - state.live - {state.me}
        state.voter_set.update(event, now)
        if state.me in self._knowledge.contributions:
            self._send(newcomers, self._knowledge.contributions[state.me])
        if state.leader_role and state.current_view:
            self._send(newcomers, state.current_view.roster)

    def _submit_contribution(self, contribution: Contribution, now: float) -> None:
        statement, self._state.contributed_at = self._sign(contribution), now
        if not self._knowledge.learn_contribution(statement):
            self._reject(self._state.me, "equivocation")
            return
        self._knowledge.add_held_parts(contribution.part_blobs)
        self._send(self._state.others, statement)
        if self._state.current_view:
            self._reject(self._state.me, "late")

    def _advance(self, now: float) -> None:
        """What follows from all that is known, in the order of a round."""
        self._decide()
        if self.commit is not None:
            return
        self._state.update_contribution_timers(now)
        self._request_early_submit(now)
        self._change_view(now)
        self._open_roster(now)
        self._assign_reducers(now)
        self._reduce_own_parts()
        self._speculate()
        self._propose(now)
        self._acknowledge_proposal()
        self._fetch_missing_parts()
        self._report_inventory()
        self._retransmit(now)
        self._decide()

    def _request_early_submit(self, now: float) -> None:
        due = self._state.early_submit_at()
        if due is not None and now >= due:
            self._state.early_submit_requested = True
            self._actions.append(RequestEarlySubmit())

    def _change_view(self, now: float) -> None:
        state = self._state
        outvoting = min(state.outvoting_view(), MAX_VIEW)
        fault: RejectReason | None = "outvoted" if outvoting > state.view else state.leader_fault(now)
        if fault is None:
            return
        self._reject(state.leader, fault)
        if fault != "outvoted":
            state.mark_leader_failed(state.leader)
        state.view, state.view_since = state.next_view(), now
        state.current_view = state.leader_role = None
        holding = self._sign(state.build_inventory())
        self._knowledge.learn_inventory(holding, state.max_held_blobs)
        self._send_all(messages_for_next_leader(state, holding))

    def _open_roster(self, now: float) -> None:
        state = self._state
        due = state.roster_due_at()
        if state.current_view is None and due is not None and now >= due and state.leader == state.me:
            roster = self._sign(state.build_roster())
            self._reject_all(state.follow_roster(roster, now))
            self._send(state.others, roster)

    def _propose(self, now: float) -> None:
        state = self._state
        if state.leader_role is None or state.proposal() is not None:
            return
        proposal = state.leader_role.next_proposal(now)
        if proposal is not None:
            commit = self._sign(Commit(state.number, state.view, state.base, *proposal))
            self._knowledge.learn_proposal(commit)
            self._send(state.others, commit)

    def _assign_reducers(self, now: float) -> None:
        state = self._state
        view, leadership = state.current_view, state.leader_role
        if view is None or leadership is None or state.proposal() is not None:
            return
        appointment = leadership.next_assignment(now)
        if appointment is None:
            return
        included, reducers = appointment
        for reducer in sorted(set(view.reducers) - set(reducers)):
            self._reject(reducer, "reducer silent" if reducer in leadership.silent_reducers else "reducer left")
        names = tuple(contribution.sender for contribution in included)
        for contribution in view.included:
            if contribution.sender not in names:
                self._reject(contribution.sender, "lost")
        inclusion = ReducerAssignment(self.number, self.view, view.roster.digest, view.attempt + 1, names, reducers)
        statement = self._sign(inclusion)
        view.follow_assignment(statement, now)
        self._send(self._state.others, statement)

    def _reduce_own_parts(self) -> None:
        view = self._state.current_view
        if view is None:
            return
        for part, reducer in enumerate(view.reducers):
            if reducer == self._state.me and view.reduced_part(part) is None:
                order = tuple(contribution.digest for contribution in view.included)
                self._reduce_part(view, (part, order))

    def _reduce_part(self, view: View, part_sum: PartSum) -> None:
        part, state = part_sum[0], self._state
        if part_sum in self._sums:
            body = ReducedPart(state.number, state.view, view.roster.digest, view.attempt, part, self._sums[part_sum])
            statement = self._sign(body)
            view.learn_reduced_part(statement)
            self._send(state.others, statement)
        elif part_sum not in self._requested_sums:
            portions = [contribution.body.part_blobs[part] for contribution in view.included]
            if self._knowledge.has_all_parts(state.me, portions):
                self._requested_sums.append(part_sum)
                self._actions.append(Reduce(part, len(self._requested_sums) - 1, view.included))

    def _speculate(self) -> None:
        """Once all is here: to compute what comes of it takes as long as to agree on it."""
        state, view = self._state, self._state.current_view
        if view is None or view.speculated_attempt == view.attempt or state.proposal() is not None:
            return
        if (likely := state.predicted_commit(view)) is not None:
            view.speculated_attempt = view.attempt
            self._actions.append(Speculate(likely))

    def _acknowledge_proposal(self) -> None:
        """Once we hold all that it needs: from now on nothing older gets our vote."""
        state = self._state
        proposal = state.proposal()
        if proposal is None or state.is_locked_in_current_view():
            return
        if self._knowledge.has_all_parts(state.me, state.required_parts(proposal)):
            state.lock = proposal
            said = self._sign(Acknowledgement(state.number, state.view, proposal.digest))
            self._knowledge.learn_acknowledgement(said)
            self._send({proposal.sender} - {state.me}, said)

    def _fetch_missing_parts(self) -> None:
        for portion, want in self._state.missing_parts().items():
            sources = self._state.sources_for(portion.blob, want.owners)
            if sources != self._requested_sources.get(portion):
                self._requested_sources[portion] = sources
                self._actions.append(Fetch(portion, sources, want.is_reduced))

    def _report_inventory(self) -> None:
        """To the leader: at once when we join its view, and when we have all that we want."""
        state, view = self._state, self._state.current_view
        if view is None or state.leader_role:
            return
        stock = view.roster.digest, len(self._knowledge.held_parts), len(view.announcements)
        joined = self._last_report[0] == view.roster.digest
        if stock == self._last_report or (joined and state.missing_parts()):
            return
        if not joined and state.lock:
            self._send([view.leader], state.lock)
        self._last_report = stock
        self._send([view.leader], self._sign(state.build_inventory()))

    def _decide(self) -> None:
        commit = self._knowledge.decided_proposal(self._state.voter_set)
        if commit is None or self.commit is not None:
            return
        decision = self._certificate_for(commit)
        self.commit = commit
        self.signed_decision = (commit.signed, decision.signed)
        if commit.sender == self._state.me:
            self._send(self._state.others, decision)
        included = {contribution.sender for contribution in commit.body.contributions}
        for sender in sorted(self._knowledge.contributions.keys() - included):
            self._reject(sender, "left out")
        self._actions.append(Finish(commit))

    def _certificate_for(self, commit: SignedMessage[Commit]) -> SignedMessage[CommitCertificate]:
        """The acknowledgements that we were shown together, or collected."""
        shown = self._knowledge.certificates.get(commit.digest)
        if shown and self._state.voter_set.is_quorum(vote.sender for vote in shown.body.acknowledgements):
            return shown
        votes = self._knowledge.acknowledgements[commit.digest]
        ordered = tuple(votes[peer] for peer in sorted(votes))
        return self._sign(CommitCertificate(self.number, commit.body.view, commit.digest, ordered))

    def _retransmit(self, now: float) -> None:
        """What may have been lost on the way is said again, to those who seem to lack it."""
        if now < self._retransmit_at:
            return
        self._retransmit_at = now + self._state.retransmit_interval
        self._send_all(messages_to_resend(self._state, self._sign(self._state.build_inventory())))

    def _send_all(self, messages: Iterable[OutgoingMessage]) -> None:
        for peers, statement in messages:
            self._send(peers, statement)

    def _sign(self, body: BodyT) -> SignedMessage[BodyT]:
        return SignedMessage.of(self._signer(kind_of(body), body.to_wire()), body)

    def _send(self, peers: Iterable[PeerId], signed_message: SignedMessage[Any]) -> None:
        receivers = tuple(sorted(peers))
        if receivers:
            self._actions.append(Send(receivers, signed_message.signed))

    def _reject_all(self, rejections: Iterable[Rejection]) -> None:
        for peer, reason in rejections:
            self._reject(peer, reason)

    def _reject(self, peer: PeerId | None, reason: RejectReason) -> None:
        self._actions.append(Rejected(peer, reason))
