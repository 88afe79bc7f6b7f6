"""What a statement of another peer changes in what we know, and why it is refused where it is."""

from typing import Any

from protocol.rounds.reports import Acknowledgement, Decision, Holding, Inclusion, Part
from protocol.rounds.state import Fault, RoundState
from protocol.rounds.statements import Commit, Contribution, Roster, Statement


def hear(state: RoundState, statement: Statement[Any], now: float) -> list[Fault]:
    """Learns from a checked statement. Whom to blame for what: empty where all is well."""
    sender, body = statement.sender, statement.body
    if body.round != state.number or getattr(body, "base", state.base) != state.base:
        return [(sender, "foreign")]
    if not state.electorate.is_elector(sender):
        return [(sender, "stranger")]
    if sender == state.me:
        return []
    view = state.followed
    if view and sender == view.leader and getattr(body, "view", -1) >= state.view and not isinstance(body, Roster):
        # A roster is repeated to those whom its leader has not heard: no sign that it is of use to us.
        view.heard = now
    if view is None and sender == state.leader:
        state.heard = now
    return _learn(state, statement, now)


def _learn(state: RoundState, statement: Statement[Any], now: float) -> list[Fault]:
    match statement.body:
        case Contribution():
            return _learn_contribution(state, statement)
        case Roster():
            return _learn_roster(state, statement, now)
        case Holding():
            state.evidence.learn_holding(statement, state.most_held)
        case Inclusion():
            return _learn_inclusion(state, statement, now)
        case Part():
            return _learn_part(state, statement)
        case Commit():
            return _learn_proposal(state, statement)
        case Acknowledgement():
            state.evidence.learn_acknowledgement(statement)
        case Decision():
            state.evidence.learn_decision(statement, state.electorate.electors)
    return []


def _learn_contribution(state: RoundState, statement: Statement[Contribution]) -> list[Fault]:
    if len(statement.body.parts) != state.settings.parts:
        return [(statement.sender, "foreign")]
    return [] if state.evidence.learn_contribution(statement) else [(statement.sender, "equivocation")]


def _learn_roster(state: RoundState, statement: Statement[Roster], now: float) -> list[Fault]:
    followed, sender = state.followed, statement.sender
    if followed and followed.roster.digest == statement.digest:
        return []
    ballot = state.election.ballot(statement.body.view, sender)
    if statement.body.widths != {state.settings.parts}:
        return [(sender, "foreign")]
    if ballot.view < state.view or (followed and ballot <= followed.ballot):
        return [(sender, "stale view")]
    if ballot.view > state.farthest_view:
        return [(sender, "far view")]
    if followed and len(statement.body.contributions) < len(followed.contributors):
        return [(sender, "poorer roster")]  # until our own leader fails, or half of the living have moved on
    if not state.may_lead(sender, ballot.view):
        return [(sender, "not the leader")]
    return state.follow(statement, now)


def _learn_inclusion(state: RoundState, statement: Statement[Inclusion], now: float) -> list[Fault]:
    view = state.followed
    if len(statement.body.reducers) != state.settings.parts:
        return [(statement.sender, "foreign")]
    if view and statement.body.roster == view.roster.digest and statement.sender == view.leader:
        view.follow_inclusion(statement, now)
    return []


def _learn_part(state: RoundState, statement: Statement[Part]) -> list[Fault]:
    view = state.followed
    if statement.body.part >= state.settings.parts:
        return [(statement.sender, "foreign")]
    if view and statement.body.roster == view.roster.digest and not view.learn_part(statement):
        return [(statement.sender, "stale view")]
    return []


def _learn_proposal(state: RoundState, statement: Statement[Commit]) -> list[Fault]:
    if not state.settings.fits(statement.body):
        return [(statement.sender, "foreign")]
    state.evidence.learn_proposal(statement)
    if statement.sender == state.leader or state.may_lead(statement.sender, statement.body.view):
        state.evidence.learn_contributions(statement.body, state.electorate.electors)
    return []
