"""Retransmission: the messages that a peer repeats to those that seem to lack them.

So a lost message costs only time.
"""

from collections.abc import Collection
from typing import Any

from protocol.consensus.messages.kinds import Inventory
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.rules.acceptance import proposals_to_show
from protocol.consensus.state import RoundState
from protocol.consensus.views.view import View
from protocol.identity import PeerId

OutgoingMessage = tuple[Collection[PeerId], SignedMessage[Any]]


def messages_to_resend(state: RoundState, inventory: SignedMessage[Inventory]) -> list[OutgoingMessage]:
    """Return the messages to repeat and their receivers.

    Args:
        inventory: the current inventory of this peer.
    """
    view = state.current_view
    if view is None and state.leader == state.me:
        return [(state.others if state.view else state.others & state.knowledge.contributions.keys(), inventory)]
    if view is None:
        return messages_for_next_leader(state, inventory)
    return _leader_messages(state, view, inventory) if state.leader_role else _member_messages(state, view, inventory)


def messages_for_next_leader(state: RoundState, inventory: SignedMessage[Inventory]) -> list[OutgoingMessage]:
    """Return what the leader of a view needs before it makes a roster: contribution, lock and inventory."""
    leader = [] if state.leader is None or state.leader == state.me else [state.leader]
    own = state.knowledge.contributions.get(state.me)
    messages: list[OutgoingMessage] = [(leader, message) for message in (own, state.lock) if message is not None]
    return [*messages, (state.others, inventory)] if state.view else messages


def _leader_messages(state: RoundState, view: View, inventory: SignedMessage[Inventory]) -> list[OutgoingMessage]:
    inventories = state.knowledge.inventories
    joined = {peer for peer in state.others & inventories.keys() if inventories[peer].roster == view.roster.digest}
    # The inventory shows that the leader is alive. Members that it does not hear are better off with another leader.
    messages: list[OutgoingMessage] = [(state.others - joined, view.roster), (joined, inventory)]
    proposal = state.proposal()
    messages += [(state.others, older) for older in proposals_to_show(state)]
    messages += [(joined, view.assignment)] if view.assignment else []
    if proposal:
        messages.append((state.others - state.knowledge.acknowledgements[proposal.digest].keys(), proposal))
    else:
        for part in view.newest_announcements():
            receivers = {peer for peer in joined if not state.knowledge.has_blob(peer, part.body.blob.digest)}
            messages.append((receivers - {part.sender}, part))
    return messages


def _member_messages(state: RoundState, view: View, inventory: SignedMessage[Inventory]) -> list[OutgoingMessage]:
    leader = [view.leader]
    acknowledgement = state.own_acknowledgement()
    if state.is_locked_in_current_view() and acknowledgement:
        return [(leader, acknowledgement)]
    messages: list[OutgoingMessage] = [(leader, inventory)]
    if state.lock:
        messages.append((leader, state.lock))
    return messages + [(leader, part) for part in view.newest_announcements() if part.sender == state.me]
