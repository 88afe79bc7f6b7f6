"""The state machine of one round at one peer: contributions, roster, exchange, commit.

The machine is pure: events and the time go in, actions come out. The daemon and the simulators drive the same one. The
README of this folder lists the messages and explains why two leaders never commit different things.

If a leader is dead or silent, is not joined by a majority or makes no progress, the members change to the next view, or
to the latest one that a member is known to be in. Its leader first repeats any proposal that may have been decided (see
`leader`). A view change needs no separate messages: a member in a later view sends an inventory without a roster.
Messages are repeated until they are answered, so a lost one costs only time. The promises of a peer bind it also after
a restart of its process (see `VoteRecord`).

Without a majority nothing is committed: a minority waits until the votes of vanished members are forgotten
(`vote_memory`), and then commits a proposal that all of it acknowledge (in groups: a majority of it).

The handlers of received messages come first: each one updates the round state, or rejects the message with a reason.
Then come the conduct of the others in a decided round, the messages to repeat, and the machine.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

from google.protobuf import message

from protocol import murmur_pb2 as wire
from protocol.conduct import RoundConduct
from protocol.consensus import view_change
from protocol.consensus.acceptance import (
    build_justification,
    build_roster,
    lacks_assignment,
    lacks_justification,
    proposal_fault,
    proposals_to_show,
    unknown_contributors,
)
from protocol.consensus.chain import CertifiedCommit, build_certificate
from protocol.consensus.events import (
    Action,
    BlobAvailable,
    ContributionFaulty,
    EarlySubmitPolicy,
    Event,
    Fetch,
    Finish,
    LocalContribution,
    MembershipChanged,
    MessageReceived,
    MisbehaviourSeen,
    PartReduced,
    Reduce,
    Rejected,
    RejectReason,
    RequestEarlySubmit,
    Send,
    Speculate,
    VoteRecord,
)
from protocol.consensus.messages.contributions import NO_ROSTER, Commit, Contribution, PartBlob, Roster, blobs_of
from protocol.consensus.messages.kinds import (
    Acknowledgement,
    Basis,
    Body,
    CommitCertificate,
    Inventory,
    Justification,
    Promise,
    ReducedPart,
    ReducerAssignment,
    kind_of,
)
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.reduction import (
    audit_deadline,
    awaits_audit,
    false_announcements,
    missing_inputs,
    next_assignment,
    reduce_parts,
)
from protocol.consensus.settings import RoundSettings, RoundStart
from protocol.consensus.state import MAX_VIEW, PersistentVote, Rejection, RoundState
from protocol.consensus.view import View
from protocol.identity import PeerId

READY_SHARE = 0.25  # of a grace, in which a contribution reaches every leader
FAULTS = frozenset(
    {"leader silent", "exchange stalled", "not followed", "false proposal", "forgets a decision", "wrong sum"}
)
OutgoingMessage = tuple[Collection[PeerId], SignedMessage[Any]]
BodyT = TypeVar("BodyT", bound=Body)
Signer = Callable[[str, message.Message], wire.Signed]  # kind, body


def handle_message(state: RoundState, message: SignedMessage[Any], now: float) -> list[Rejection]:
    """Learn from a checked message and return what is rejected, with the peers to blame.

    A proposal that binds a member counts whoever made it: the next leader has to know it. A certificate counts whoever
    sends it, because only the acknowledgements in it matter: the key that made it may be excluded by now.
    """
    sender, body = message.sender, message.body
    if body.round != state.number or getattr(body, "base", state.base) != state.base:
        return [(sender, "wrong round")]
    if (reason := _standing_fault(state, sender)) and not _counts_from_anybody(state, message):
        return [(sender, reason)]
    if sender == state.me:
        return []
    view = state.current_view
    if view and sender == view.leader and getattr(body, "view", -1) >= state.view and not isinstance(body, Roster):
        # A leader repeats its roster to members that it does not hear, so a roster is not a sign of progress.
        view.leader_last_heard = now
    if view is None and sender == state.leader:
        state.leader_last_heard = now
    return _dispatch(state, message, now)


def _standing_fault(state: RoundState, sender: PeerId) -> RejectReason | None:
    """Return why the messages of a peer do not count in this round, if there is a reason."""
    if sender in state.excluded:
        return "excluded"
    return None if state.voter_set.is_known(sender) else "not a member"


def _counts_from_anybody(state: RoundState, message: SignedMessage[Any]) -> bool:
    is_binding = isinstance(message.body, Commit) and state.knowledge.is_lock(message.digest)
    return is_binding or isinstance(message.body, CommitCertificate)


def _dispatch(state: RoundState, message: SignedMessage[Any], now: float) -> list[Rejection]:
    match message.body:
        case Contribution():
            return _handle_contribution(state, message)
        case Roster():
            return _handle_roster(state, message, now)
        case Inventory():
            state.knowledge.learn_inventory(message, state.max_held_blobs)
        case ReducerAssignment():
            return _handle_assignment(state, message, now)
        case ReducedPart():
            return _handle_reduced_part(state, message)
        case Commit():
            return _handle_proposal(state, message)
        case Promise():
            state.knowledge.learn_promise(message)
        case Justification():
            state.knowledge.learn_justification(message)
        case Acknowledgement() | CommitCertificate() if message.body.basis != state.basis:
            return [(message.sender, "other basis")]
        case Acknowledgement():
            state.knowledge.learn_acknowledgement(message)
        case CommitCertificate():
            state.knowledge.learn_certificate(message, state.voter_set.known | state.voter_set.original)
    return []


def _handle_contribution(state: RoundState, message: SignedMessage[Contribution]) -> list[Rejection]:
    if len(message.body.parts) != state.settings.parts:
        return [(message.sender, "wrong round")]
    return [] if state.knowledge.learn_contribution(message) else [(message.sender, "equivocation")]


def _handle_roster(state: RoundState, message: SignedMessage[Roster], now: float) -> list[Rejection]:
    current, sender = state.current_view, message.sender
    if current and current.roster.digest == message.digest:
        return []
    ballot = state.election.ballot(message.body.view, sender)
    if message.body.part_counts != {state.settings.parts}:
        return [(sender, "wrong round")]
    if ballot.view < state.view or (current and ballot <= current.ballot):
        return [(sender, "stale view")]
    if ballot.view > view_change.max_reachable_view(state):
        return [(sender, "view too far")]
    if current and len(message.body.contributions) < len(current.contributors):
        return [(sender, "smaller roster")]  # until the current leader fails, or half of the live voters have moved on
    if not view_change.may_lead(state, sender, ballot.view):
        return [(sender, "not the leader")]
    if unknown_contributors(state, message.body):
        return [(sender, "unknown contributor")]  # the leader repeats the roster until this peer knows the key
    return state.follow_roster(message, now)


def _handle_assignment(state: RoundState, message: SignedMessage[ReducerAssignment], now: float) -> list[Rejection]:
    view = state.current_view
    count, parts = len(message.body.reducers), state.topology.reduced_part_count
    if not parts or count % parts:
        return [(message.sender, "wrong round")]
    if view is None or message.body.roster != view.roster.digest or message.sender != view.leader:
        return []
    if count != len(view.initial_reducers):
        return [(message.sender, "wrong round")]
    silent = {reducer for part in range(parts) for reducer in view.reducers_of(part)}
    silent -= {announced.sender for announced in view.newest_announcements()} | set(message.body.reducers)
    if view.follow_assignment(message, state.voter_set.known, now) and view.attempt > 1:
        state.withheld |= silent & state.live
    return []


def _handle_reduced_part(state: RoundState, message: SignedMessage[ReducedPart]) -> list[Rejection]:
    view = state.current_view
    if message.body.part >= state.topology.reduced_part_count:
        return [(message.sender, "wrong round")]
    if view and message.body.roster == view.roster.digest and not view.learn_reduced_part(message):
        return [(message.sender, "stale view")]
    return []


def _handle_proposal(state: RoundState, message: SignedMessage[Commit]) -> list[Rejection]:
    if not state.topology.accepts_commit(message.body):
        return [(message.sender, "wrong round")]
    if not message.body.adoption.continues(state.revision):
        return [(message.sender, "other revisions")]
    state.knowledge.learn_proposal(message)
    if unknown_contributors(state, message.body):
        return [(message.sender, "unknown contributor")]
    if message.sender == state.leader or view_change.may_lead(state, message.sender, message.body.view):
        state.knowledge.learn_contributions(message.body, state.voter_set.known)
    return []


def observe_round(state: RoundState, commit: SignedMessage[Commit]) -> RoundConduct:
    """Return what this peer saw of the others in a round that ends with this commit."""
    served = frozenset(commit.body.by_sender)
    withheld = state.withheld | set(_unserved(state, commit.body))
    if state.leader_role is not None:
        withheld |= state.leader_role.silent_reducers
    return RoundConduct(
        state.number,
        commit.sender,
        served,
        frozenset(withheld),
        dict(state.leader_faults),
        frozenset(_left_out(state, commit)),
        frozenset(state.false_reducers),
        len(state.voter_set.voters),
    )


def _unserved(state: RoundState, commit: Commit) -> Iterator[PeerId]:
    """Yield the peers on the roster that the commit drops, and of whose contribution this peer has not all either."""
    view, knowledge = state.current_view, state.knowledge
    for entry in view.roster.body.contributions if view else ():
        is_dropped = entry.sender not in commit.by_sender and entry.sender != state.me
        if is_dropped and not knowledge.has_all_parts(state.me, entry.body.part_blobs):
            yield entry.sender


def _left_out(state: RoundState, commit: SignedMessage[Commit]) -> Iterator[PeerId]:
    """Yield the contributors that the leader left out although their work was ready long before its roster."""
    view, knowledge = state.current_view, state.knowledge
    if view is None or commit.sender != view.leader or commit.sender == state.me:
        return
    if state.me not in commit.body.by_sender and _is_own_ready(state):
        yield state.me
    for sender, entry in knowledge.contributions.items():
        if sender in commit.body.by_sender or sender == state.me or sender not in state.live - state.set_aside:
            continue
        if sender not in view.contributors and knowledge.has_all_parts(state.me, entry.body.part_blobs):
            yield sender


def _is_own_ready(state: RoundState) -> bool:
    view, contributed_at = state.current_view, state.contributed_at
    if view is None or contributed_at is None:
        return False
    is_hasty = 2 * len(view.contributors) < len(state.voter_set.awaited)  # an honest leader waits for half of them
    margin = state.settings.grace if is_hasty else -READY_SHARE * state.settings.grace
    return contributed_at <= view.started_at + margin


def messages_to_resend(state: RoundState, inventory: SignedMessage[Inventory]) -> list[OutgoingMessage]:
    """Return the messages to repeat and their receivers.

    Args:
        inventory: the current inventory of this peer.
    """
    view = state.current_view
    if view is None and state.leader == state.me:
        receivers = state.others if state.view else state.others & state.knowledge.contributions.keys()
        return [*_confirmation(state), (receivers, inventory)]
    if view is None:
        return [*_confirmation(state), *messages_for_next_leader(state, inventory)]
    return _leader_messages(state, view, inventory) if state.leader_role else _member_messages(state, view, inventory)


def messages_for_next_leader(state: RoundState, inventory: SignedMessage[Inventory]) -> list[OutgoingMessage]:
    """Return what the leader of a view needs before it makes a roster: contribution, lock and inventory."""
    leader = [] if state.leader is None or state.leader == state.me else [state.leader]
    own = state.knowledge.contributions.get(state.me)
    messages: list[OutgoingMessage] = [(leader, message) for message in (own, *state.binding_messages) if message]
    return [*messages, (state.others, inventory)] if state.view else messages


def _confirmation(state: RoundState) -> list[OutgoingMessage]:
    """Return the confirmation of this peer in this view, for the maker of the proposal."""
    proposal = state.confirmed.proposal if state.confirmed else None
    if proposal is None or proposal.body.view != state.view or proposal.sender == state.me:
        return []
    vote = state.knowledge.confirmations.get(proposal.digest, {}).get(state.me)
    return [] if vote is None else [([proposal.sender], vote)]


def _leader_messages(state: RoundState, view: View, inventory: SignedMessage[Inventory]) -> list[OutgoingMessage]:
    inventories = state.knowledge.inventories
    joined = {peer for peer in state.others & inventories.keys() if inventories[peer].roster == view.roster.digest}
    # The inventory shows that the leader is alive. Members that it does not hear are better off with another leader.
    messages: list[OutgoingMessage] = [(state.others - joined, view.roster), (joined, inventory)]
    proposal = state.proposal()
    messages += [(state.others, older) for older in proposals_to_show(state)]
    messages += [(joined, view.assignment)] if view.assignment else []
    if proposal:
        messages += _proposal_messages(state, proposal)
    else:
        for part in view.newest_announcements():
            receivers = {peer for peer in joined if not state.knowledge.has_blob(peer, part.body.blob.digest)}
            messages.append((receivers - {part.sender}, part))
    return messages


def _proposal_messages(state: RoundState, proposal: SignedMessage[Commit]) -> list[OutgoingMessage]:
    """Return what the leader repeats about its proposal: itself and why it may make it, or that it is locked."""
    acknowledged, confirmed = (
        table[proposal.digest].keys() for table in (state.knowledge.acknowledgements, state.knowledge.confirmations)
    )
    silent, shown = state.others - acknowledged - confirmed, state.justification_of(proposal)
    messages: list[OutgoingMessage] = [(silent, message) for message in (shown, proposal) if message is not None]
    if state.is_confirmed(proposal):
        messages.append((state.others - confirmed, state.knowledge.locks[proposal.digest]))
    return messages


def _member_messages(state: RoundState, view: View, inventory: SignedMessage[Inventory]) -> list[OutgoingMessage]:
    leader, acknowledgement = [view.leader], state.own_acknowledgement()
    if state.is_locked_in_current_view() and acknowledgement:
        return _confirmation(state) or [(leader, acknowledgement)]
    messages: list[OutgoingMessage] = [*_confirmation(state), (leader, inventory)]
    messages += [(leader, message) for message in state.binding_messages]
    if state.promise is not None and state.promise.body.roster == view.roster.digest:
        messages.append((leader, state.promise))
    return messages + [(leader, part) for part in view.newest_announcements() if part.sender == state.me]


class RoundMachine:
    """The round at one peer, from its opening to the decision; the driver of the rounds owns it.

    `commit` and `decided`: the decided proposal, alone and with the certificate to keep. `signed_decision`: the
    envelopes of commit and certificate. They answer members that still send messages of this round, and end the round
    there as well. `conduct`: what this peer saw of the others in the round, once it is decided.
    """

    def __init__(
        self,
        settings: RoundSettings,
        me: PeerId,
        start: RoundStart,
        signer: Signer,
        now: float,
        early_submit_policy: Callable[[int], EarlySubmitPolicy] | None = None,
    ) -> None:
        """Open a round.

        Args:
            early_submit_policy: maps the round number to the time of a RequestEarlySubmit; `None` means never.
        """
        self.commit: SignedMessage[Commit] | None = None
        self.decided: CertifiedCommit | None = None
        self.signed_decision: tuple[wire.Signed, ...] = ()
        self.conduct: RoundConduct | None = None
        self._signer = signer
        self._state = RoundState(settings, me, start, now, early_submit_policy)
        self._knowledge = self._state.knowledge
        self._persisted_vote: PersistentVote = -1, b"", b""
        vote = start.last_vote
        if vote is not None and (vote.round, vote.base) == (start.number, start.base):
            self._persisted_vote = self._state.restore_vote(vote)
            self._knowledge.learn_inventory(self._sign(self._state.build_inventory()), self._state.max_held_blobs)
        self._retransmit_at = now + self._state.retransmit_interval
        self._last_report = NO_ROSTER, 0, 0  # the joined roster, and the numbers of held and announced parts
        self._requested_sources: dict[PartBlob, tuple[PeerId, ...]] = {}
        self._actions: list[Action] = []

    @property
    def number(self) -> int:
        """Return the number of the round."""
        return self._state.number

    @property
    def view(self) -> int:
        """Return the view that this peer is in."""
        return self._state.view

    @property
    def leader(self) -> PeerId | None:
        """Return the leader of the view, if any member is alive."""
        return self._state.leader

    @property
    def basis(self) -> Basis:
        """Return what every acknowledgement of this round says about the chain before it."""
        return self._state.basis

    @property
    def last_seen(self) -> dict[PeerId, float]:
        """Return the last sign of life of each peer, for the next round or a new machine of this one."""
        voter_set = self._state.voter_set
        return voter_set.last_seen_with_forgotten if self.commit is None else voter_set.last_seen

    @property
    def arrival_times(self) -> dict[PeerId, float]:
        """Return the time at which this peer first knew of each full contribution of others."""
        return self._state.full_arrival_times

    @property
    def patience_spent(self) -> float:
        """Return the seconds for which the roster waited for arriving peers that did not contribute."""
        return self._state.patience_spent

    @property
    def parts_to_reduce(self) -> list[int]:
        """Return the parts that this peer reduces, by the newest roster; none without one."""
        return self._state.parts_to_reduce

    @property
    def left_out_blobs(self) -> frozenset[Digest]:
        """Return the blobs of contributions that are not in the commit: they may be resubmitted."""
        included = {entry.sender for entry in self.commit.body.contributions} if self.commit else set()
        missed = [entry for sender, entry in self._knowledge.contributions.items() if sender not in included]
        return frozenset(blob.digest for blob in blobs_of(missed))

    def has_member(self, peer: PeerId) -> bool:
        """Return whether a peer takes part in this round, or did before it vanished."""
        return self._state.voter_set.is_known(peer)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event; after Finish the machine returns no more actions."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Action]:
        """Handle several events and derive the actions once, which is much cheaper for hundreds of peers."""
        if self.commit is None:
            self._state.voter_set.advance(now)
            for event in events:
                self._apply_event(event, now)
            self._advance(now)
        actions, self._actions = [*self._persist_vote(), *self._actions], []
        return actions

    def _persist_vote(self) -> list[Action]:
        """Return a vote record, to be persisted before the new messages are sent, if they bind this peer further."""
        state = self._state
        view = state.current_view.ballot.view if state.current_view else self._persisted_vote[0]
        if state.confirmed is not None:  # perhaps without the roster of its view
            view = max(view, state.confirmed.proposal.body.view)
        vote = state.persistent_vote(view)
        if vote == self._persisted_vote:
            return []
        self._persisted_vote = vote
        parts = dict.fromkeys(part for proposal in state.binding_proposals for part in state.required_parts(proposal))
        blobs = tuple(dict.fromkeys(part_blob.blob for part_blob in parts))
        return [VoteRecord(state.number, state.base, view, state.lock, state.voter_set.known, blobs, state.confirmed)]

    def next_deadline(self, now: float) -> float | None:
        """Return the time at which the machine needs a Tick, or `None` once the round is decided."""
        if self.commit is not None:
            return None
        known = [self._retransmit_at, audit_deadline(self._state), *self._state.deadlines()]
        times = (time for time in known if time is not None and time > now)
        return min(times, default=now)

    def _apply_event(self, event: Event, now: float) -> None:
        match event:
            case MessageReceived(signed_message):
                self._reject_all(handle_message(self._state, signed_message, now))
            case MisbehaviourSeen(peer):
                self._state.false_speakers.add(peer)
            case ContributionFaulty(peer, reason):
                self._reject_all(self._state.drop_contribution(peer, reason))
            case MembershipChanged():
                self._update_membership(event, now)
            case LocalContribution(contribution):
                self._submit_contribution(contribution, now)
            case BlobAvailable(part_blob):
                self._knowledge.add_held_parts([part_blob])
            case PartReduced(part, request_id, blob):
                self._state.sums.record(request_id, blob)
                self._knowledge.add_held_parts([PartBlob(blob, part)])

    def _update_membership(self, event: MembershipChanged, now: float) -> None:
        state = self._state
        newcomers = event.peers - state.live - {state.me}
        state.update_membership(event, now)
        if state.me in self._knowledge.contributions:
            self._send(newcomers, self._knowledge.contributions[state.me])
        if state.leader_role and state.current_view:
            self._send(newcomers, state.current_view.roster)

    def _submit_contribution(self, contribution: Contribution, now: float) -> None:
        signed_message, self._state.contributed_at = self._sign(contribution), now
        if not self._knowledge.learn_contribution(signed_message):
            self._reject(self._state.me, "equivocation")
            return
        self._knowledge.add_held_parts(contribution.part_blobs)
        self._send(self._state.others, signed_message)
        if self._state.current_view:
            self._reject(self._state.me, "late")

    def _advance(self, now: float) -> None:
        """Do every step that the knowledge of this peer allows, in the order of a round."""
        self._decide()
        if self.commit is not None:
            return
        self._state.update_contribution_timers(now)
        self._request_early_submit(now)
        self._change_view(now)
        self._open_roster(now)
        self._promise()
        self._assign_reducers(now)
        self._reduce_parts()
        self._speculate()
        self._propose(now)
        self._acknowledge_proposal(now)
        self._show_lock(now)
        self._confirm()
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
        outvoting_view = min(view_change.outvoting_view(state), MAX_VIEW)
        fault: RejectReason | None = "outvoted" if outvoting_view > state.view else view_change.leader_fault(state, now)
        if fault is None:
            return
        self._reject(state.leader, fault)
        if fault in FAULTS and state.leader is not None:
            state.leader_faults.setdefault(state.leader, fault)
        if fault != "outvoted":
            state.mark_leader_failed(state.leader)
        state.view, state.view_since = view_change.next_view(state), now
        state.current_view = state.leader_role = None
        inventory = self._sign(state.build_inventory())
        self._knowledge.learn_inventory(inventory, state.max_held_blobs)
        self._send_all(messages_for_next_leader(state, inventory))

    def _open_roster(self, now: float) -> None:
        state = self._state
        due = state.roster_due_at()
        if state.current_view is None and due is not None and now >= due and state.leader == state.me:
            roster = self._sign(build_roster(state))
            self._reject_all(state.follow_roster(roster, now))
            self._send(state.others, roster)

    def _propose(self, now: float) -> None:
        state = self._state
        if state.leader_role is None or state.proposal() is not None:
            return
        proposal = state.leader_role.next_proposal(now)
        if proposal is not None:
            commit = self._sign(proposal.to_commit(state.number, state.view, state.base, state.adoption))
            shown: list[SignedMessage[Any]] = [*proposals_to_show(state)]
            if (justification := build_justification(state, commit)) is not None:
                shown.append(self._sign(justification))
                self._knowledge.learn_justification(shown[-1])
            self._knowledge.learn_proposal(commit)
            self._send_all((state.others, message) for message in (*shown, commit))

    def _promise(self) -> None:
        """Make the promise of a member that follows the leader of a later view: to acknowledge nothing older."""
        state, view = self._state, self._state.current_view
        if view is None or not state.needs_promises or not state.may_acknowledge():
            return
        if state.promise is not None and state.promise.body.roster == view.roster.digest:
            return
        state.promise = self._sign(Promise(state.number, state.view, view.roster.digest, state.bounds))
        self._knowledge.learn_promise(state.promise)
        for known in (*state.binding_messages, state.promise):
            self._send({view.leader} - {state.me}, known)

    def _assign_reducers(self, now: float) -> None:
        view, assignment = self._state.current_view, next_assignment(self._state, now)
        if view is None or assignment is None:
            return
        body, dropped = assignment
        self._reject_all(dropped)
        signed_message = self._sign(body)
        view.follow_assignment(signed_message, self._state.voter_set.known, now)
        self._send(self._state.others, signed_message)

    def _reduce_parts(self) -> None:
        for step in reduce_parts(self._state):
            if isinstance(step, Reduce):
                self._actions.append(step)
            elif (view := self._state.current_view) is not None:
                signed_message = self._sign(step)
                view.learn_reduced_part(signed_message)
                self._send(self._state.others, signed_message)
        for liar in sorted({false.sender for false in false_announcements(self._state)} - self._state.false_reducers):
            self._state.false_reducers.add(liar)
            self._reject(liar, "wrong sum")

    def _speculate(self) -> None:
        """Predict the commit once all its parts are here: to compute the new state takes as long as to agree."""
        state, view = self._state, self._state.current_view
        if view is None or view.speculated_attempt == view.attempt or state.proposal() is not None:
            return
        if (predicted := state.predicted_commit(view)) is not None:
            view.speculated_attempt = view.attempt
            self._actions.append(Speculate(predicted))

    def _acknowledge_proposal(self, now: float) -> None:
        """Vote for the proposal once this peer holds its parts; from then on it votes for nothing older."""
        state, view = self._state, self._state.current_view
        proposal = state.proposal()
        if view is None or proposal is None or not state.may_acknowledge():
            return
        view.proposed_at = now if view.proposed_at is None else view.proposed_at
        if lacks_assignment(state, proposal) or awaits_audit(state, proposal, now) or proposal_fault(state, proposal):
            return
        if lacks_justification(state, proposal):
            return
        if self._knowledge.has_all_parts(state.me, state.required_parts(proposal)):
            state.lock = proposal
            vote = self._sign(Acknowledgement.of(proposal, state.basis))
            self._knowledge.learn_acknowledgement(vote)
            self._send({proposal.sender} - {state.me}, vote)

    def _show_lock(self, now: float) -> None:
        """Show that a quorum has acknowledged the proposal of this peer, once it waits for the others no longer."""
        state, view, lock = self._state, self._state.current_view, self._state.lock
        if view is None or lock is None or lock.sender != state.me or not state.voter_set.tolerated:
            return
        acknowledged, shown = self._knowledge.acknowledgements[lock.digest], self._knowledge.locks.get(lock.digest)
        is_enough = state.voter_set.was_quorum if shown is None else state.voter_set.is_full_quorum
        if not is_enough(acknowledged.keys()) or (shown and is_enough(shown.body.signers)):
            return
        view.quorum_since = now if view.quorum_since is None else view.quorum_since
        due = state.lock_due_at()
        if due is None or now < due or state.voter_set.is_unanimous(acknowledged.keys()):
            return
        certificate = self._sign(CommitCertificate.of([acknowledged[peer] for peer in sorted(acknowledged)]))
        self._knowledge.learn_certificate(certificate, certificate.body.signers)
        self._send(state.others, certificate)

    def _confirm(self) -> None:
        """Confirm the proposal of this view of which it is shown that a quorum has acknowledged it.

        The lock counts, not the opinion of this peer: it may refuse the proposal, or lack its parts, and still knows
        that no other proposal of the view can be decided.
        """
        state = self._state
        lock = state.lock_to_confirm()
        if lock is None:
            return
        state.confirmed = lock
        vote = self._sign(Acknowledgement.of(lock.proposal, state.basis, confirms=True))
        self._knowledge.learn_acknowledgement(vote)
        self._send({lock.proposal.sender} - {state.me}, vote)

    def _fetch_missing_parts(self) -> None:
        for part_blob, missing in {**missing_inputs(self._state), **self._state.missing_parts()}.items():
            sources = self._state.sources_for(part_blob.blob, missing.owners)
            if sources != self._requested_sources.get(part_blob):
                self._requested_sources[part_blob] = sources
                owners = () if missing.is_reduced else missing.owners
                self._actions.append(Fetch(part_blob, sources, missing.is_reduced, owners))

    def _report_inventory(self) -> None:
        """Send the inventory to the leader: at once when joining its view, and again when nothing is missing."""
        state, view = self._state, self._state.current_view
        if view is None or state.leader_role:
            return
        report = view.roster.digest, len(self._knowledge.held_parts), len(view.announcements)
        joined = self._last_report[0] == view.roster.digest
        if report == self._last_report or (joined and state.awaits_parts):
            return
        if not joined and state.lock and not state.needs_promises:
            self._send([view.leader], state.lock)
        self._last_report = report
        self._send([view.leader], self._sign(state.build_inventory()))

    def _decide(self) -> None:
        commit = self._knowledge.decided_proposal(self._state.voter_set)
        if commit is None or self.commit is not None:
            return
        certificate = self._certificate_for(commit)
        self.commit, self.conduct = commit, observe_round(self._state, commit)
        self.decided = CertifiedCommit(commit, build_certificate(certificate.body.by_sender, self._state.electorate))
        self.signed_decision = (commit.signed, certificate.signed)
        if commit.sender == self._state.me:
            self._send(self._state.others, certificate)
        included = {entry.sender for entry in commit.body.contributions}
        for sender in sorted(self._knowledge.contributions.keys() - included):
            self._reject(sender, "left out")
        self._actions.append(Finish(commit))

    def _certificate_for(self, commit: SignedMessage[Commit]) -> SignedMessage[CommitCertificate]:
        """Return the certificate that the leader sent, or else make one of the collected acknowledgements."""
        knowledge, voter_set, digest = self._knowledge, self._state.voter_set, commit.digest
        nobody: frozenset[PeerId] = frozenset()
        for received in (knowledge.certificates.get(digest), knowledge.locks.get(digest)):
            if received is not None:
                votes = nobody, received.body.signers
                if voter_set.is_decided(*(votes if received.body.confirms else reversed(votes))):
                    return received
        is_fast = voter_set.is_decided(knowledge.acknowledgements[digest].keys(), nobody)
        known = (knowledge.acknowledgements if is_fast else knowledge.confirmations)[digest]
        entitled = voter_set.voters | self._state.electorate.voters
        return self._sign(CommitCertificate.of([known[peer] for peer in sorted(known) if peer in entitled]))

    def _retransmit(self, now: float) -> None:
        """Repeat the messages that may have been lost."""
        if now < self._retransmit_at:
            return
        self._retransmit_at = now + self._state.retransmit_interval
        self._send_all(messages_to_resend(self._state, self._sign(self._state.build_inventory())))

    def _send_all(self, messages: Iterable[OutgoingMessage]) -> None:
        for peers, signed_message in messages:
            self._send(peers, signed_message)

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
