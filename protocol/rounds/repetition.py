"""What a peer says again, at every repetition, to those who seem to lack it: lost messages then cost time only."""

from collections.abc import Collection
from typing import Any

from protocol.identity import PeerId
from protocol.rounds.reports import Holding
from protocol.rounds.state import RoundState
from protocol.rounds.statements import Statement
from protocol.rounds.view import View

Message = tuple[Collection[PeerId], Statement[Any]]


def repeated(state: RoundState, holding: Statement[Holding]) -> list[Message]:
    """`holding` is our own, of now."""
    view = state.followed
    if view is None and state.leader == state.me:
        return [(state.others if state.view else state.others & state.evidence.contributions.keys(), holding)]
    if view is None:
        return asked_of_leader(state, holding)
    return _of_leader(state, view, holding) if state.leadership else _of_member(state, view, holding)


def asked_of_leader(state: RoundState, holding: Statement[Holding]) -> list[Message]:
    """What the leader of a view needs before it opens: contribution, lock, and that we are in that view."""
    leader = [] if state.leader is None or state.leader == state.me else [state.leader]
    own = state.evidence.contributions.get(state.me)
    messages: list[Message] = [(leader, statement) for statement in (own, state.lock) if statement is not None]
    return [*messages, (state.others, holding)] if state.view else messages


def _of_leader(state: RoundState, view: View, holding: Statement[Holding]) -> list[Message]:
    holdings = state.evidence.holdings
    joined = {peer for peer in state.others & holdings.keys() if holdings[peer].roster == view.roster.digest}
    # The holding is the sign of life, to those whom we hear: others are better off with another leader.
    messages: list[Message] = [(state.others - joined, view.roster), (joined, holding)]
    proposal = state.proposal()
    if proposal:
        messages.append((state.others - state.evidence.acknowledged[proposal.digest].keys(), proposal))
    else:
        messages += [(joined, view.inclusion)] if view.inclusion else []
        for part in view.parts() if state.settings.sums else ():
            lacking = {peer for peer in joined if not state.evidence.holds(peer, part.body.blob.digest)}
            messages.append((lacking - {part.sender}, part))
    return messages


def _of_member(state: RoundState, view: View, holding: Statement[Holding]) -> list[Message]:
    leader = [view.leader]
    acknowledgement = state.acknowledgement()
    if state.is_locked_here() and acknowledgement:
        return [(leader, acknowledgement)]
    messages: list[Message] = [(leader, holding)]
    if state.lock:
        messages.append((leader, state.lock))
    return messages + [(leader, part) for part in view.parts() if part.sender == state.me]
