"""Which rosters a member follows, and which proposals it acknowledges: a leader may leave out, but not invent.

A roster and a commit may list only contributions of keys that train in this run, each with the signature of its sender.
A commit lists nothing that is not on the roster of its view, unless it repeats an older proposal.
"""

from collections.abc import Set

from protocol.consensus.events import RejectReason
from protocol.consensus.messages import Commit, ContributionList, SignedMessage
from protocol.consensus.state import RoundState
from protocol.identity import PeerId


def unknown_contributors(state: RoundState, contribution_list: ContributionList) -> Set[PeerId]:
    """Return the senders in a list that this peer does not know as trainers.

    The contributors of a proposal that binds another peer are known: it may be decided already.
    """
    unknown = contribution_list.by_sender.keys() - state.known_trainers
    if unknown:
        unknown -= {sender for proposal in binding_proposals(state) for sender in proposal.body.by_sender}
    return unknown


def binding_proposals(state: RoundState) -> list[SignedMessage[Commit]]:
    """Return the proposals that a peer other than their leader acknowledged."""
    known = state.knowledge.proposals.items()
    return [proposal for digest, proposal in known if state.knowledge.has_other_acknowledgers(digest)]


def proposals_to_show(state: RoundState) -> list[SignedMessage[Commit]]:
    """Return the older proposals that a leader shows to the members of its view.

    They explain contributions of keys that a member does not know, and a proposal that goes beyond the roster.
    """
    view = state.current_view
    listed = view.roster.body.by_sender.items() if view and state.view else None
    if listed is None:
        return []
    return [
        proposal
        for proposal in binding_proposals(state)
        if proposal.body.view < state.view
        and (not proposal.body.by_sender.items() <= listed or not proposal.body.by_sender.keys() <= state.live)
    ]


def is_repeated(state: RoundState, proposal: SignedMessage[Commit]) -> bool:
    """Return whether this peer knows an older proposal with the same content."""
    ballot = state.election.ballot(proposal.body.view, proposal.sender)
    return any(
        state.election.ballot(known.body.view, known.sender) < ballot
        and known.body.content_digest == proposal.body.content_digest
        for known in state.knowledge.proposals.values()
    )


def proposal_fault(state: RoundState, proposal: SignedMessage[Commit]) -> RejectReason | None:
    """Return why this peer does not acknowledge the proposal of the leader that it follows, if there is a reason."""
    view = state.current_view
    if view is None:
        return None
    listed = view.roster.body.by_sender.items()
    if not proposal.body.by_sender.items() <= listed and not is_repeated(state, proposal):
        return "false proposal"
    return None
