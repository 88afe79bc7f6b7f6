"""Handlers of received messages: each one updates the round state, or rejects the message with a reason."""

from typing import Any

from protocol.consensus.events import RejectReason
from protocol.consensus.messages.contributions import Commit, Contribution, Roster
from protocol.consensus.messages.kinds import (
    Acknowledgement,
    CommitCertificate,
    Inventory,
    ReducedPart,
    ReducerAssignment,
)
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.rules import view_change
from protocol.consensus.rules.acceptance import unknown_contributors
from protocol.consensus.state import Rejection, RoundState
from protocol.identity import PeerId


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
        case Acknowledgement() | CommitCertificate() if message.body.basis != state.basis:
            return [(message.sender, "other basis")]
        case Acknowledgement():
            state.knowledge.learn_acknowledgement(message)
        case CommitCertificate():
            state.knowledge.learn_certificate(message, state.voter_set.known)
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
