"""Which rosters a member follows, and which proposals it acknowledges: a leader may leave out, but not invent.

A roster and a commit may list only contributions of keys that train in this run, each with the signature of its sender.
A commit lists nothing that is not on the roster of its view, unless it repeats an older proposal.
"""

from collections.abc import Sequence, Set

from protocol.consensus.events import RejectReason
from protocol.consensus.knowledge import RoundKnowledge
from protocol.consensus.locks import newest_confirmed, required_contents
from protocol.consensus.messages.contributions import (
    MAX_CONTRIBUTIONS,
    Commit,
    Contribution,
    ContributionList,
    Evidence,
    Roster,
)
from protocol.consensus.messages.kinds import CommitCertificate, Justification
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.state import RoundState
from protocol.consensus.view import View
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
    if view is None or not state.view:
        return []
    listed, known = view.roster.body.by_sender.items(), state.knowledge.proposals.items()
    older = [entry for digest, entry in known if entry.body.view < state.view and state.knowledge.acknowledgers(digest)]
    return [
        proposal
        for proposal in older
        if proposal.body.evidence is not None
        or not proposal.body.by_sender.items() <= listed
        or not proposal.body.by_sender.keys() <= state.live
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
    view, evidence = state.current_view, proposal.body.evidence
    if view is None:
        return None
    if state.needs_promises and (shown := state.justification_of(proposal)) is not None:
        required = required_contents(shown.body.bounds, state.voter_set.tolerated)
        if required is not None:  # it may be decided, whatever this peer thinks of it
            return None if proposal.body.content_digest in required else "forgets a decision"
    if evidence and not state.false_reducers.isdisjoint(evidence.peers):
        return "wrong sum"
    is_listed = proposal.body.by_sender.items() <= view.roster.body.by_sender.items()
    if is_listed and (evidence is None or _is_appointed(view, proposal.body, evidence)):
        return None
    return None if is_repeated(state, proposal) else "false proposal"


def _is_appointed(view: View, commit: Commit, evidence: Evidence) -> bool:
    """Return whether the reducers of this view have summed the parts of a commit, as far as this peer can know.

    An assignment that this peer has not received yet appoints reducers that it does not know.
    """
    if evidence.roster != view.roster.digest or evidence.attempt < view.attempt:
        return False
    if evidence.attempt > view.attempt:
        return True
    return evidence.peers == view.reducers and commit.inputs == view.inputs


def lacks_assignment(state: RoundState, proposal: SignedMessage[Commit]) -> bool:
    """Return whether this peer waits for the assignment that a proposal follows."""
    view, evidence = state.current_view, proposal.body.evidence
    if view is None or evidence is None or evidence.roster != view.roster.digest:
        return False
    return evidence.attempt > view.attempt


def lacks_justification(state: RoundState, proposal: SignedMessage[Commit]) -> bool:
    """Return whether this peer waits for the promises of a quorum that let the leader of a later view propose.

    Promises count that name only earlier views, and the lock among them has to be that of a quorum.
    """
    if not state.needs_promises:
        return False
    shown = state.justification_of(proposal)
    if shown is None or not state.voter_set.was_quorum({entry.sender for entry in shown.body.promises}):
        return True
    votes = [vote for bounds in shown.body.bounds for vote in (bounds.acknowledged, bounds.confirmed)]
    lock = shown.body.certificate
    is_lock = lock is None or (lock.basis == state.basis and state.voter_set.was_quorum(lock.signers))
    return not is_lock or any(vote is not None and vote.view >= proposal.body.view for vote in votes)


def build_justification(state: RoundState, proposal: SignedMessage[Commit]) -> Justification | None:
    """Return why this peer, the leader of a view, may propose that; None in a view that needs no promises."""
    view, role, voters = state.current_view, state.leader_role, state.voter_set.voters
    if not state.needs_promises or view is None or role is None:
        return None
    promises = tuple(promise for peer, promise in role.promises().items() if peer in voters)
    newest = newest_confirmed(promise.body.bounds for promise in promises)
    certificate = None
    if newest is not None:
        known = state.knowledge.acknowledgements[newest.proposal]
        certificate = CommitCertificate.of([known[peer] for peer in sorted(known)])
    place = state.number, state.base, state.view, view.roster.digest, proposal.digest
    return Justification(*place, state.voter_set.tolerated, promises, certificate)


def build_roster(state: RoundState) -> Roster:
    """Return a roster of all obtainable contributions, and of those in proposals that may be decided."""
    knowledge, obtainable = state.knowledge, state.knowledge.obtainable_senders(state.live)
    entries = [entry for peer, entry in knowledge.contributions.items() if peer in obtainable]
    voters = state.voter_set.voters
    entries.sort(key=lambda entry: entry.sender not in voters)
    entries = [entry for entry in entries if _may_list(state, entry)]
    for proposal in binding_proposals(state) if entries else knowledge.proposals.values():
        entries += proposal.body.contributions
    contributions = drop_size_conflicts(knowledge, entries)
    ordered = tuple(contributions[peer] for peer in sorted(contributions))
    return Roster(state.number, state.view, state.base, ordered)


def _may_list(state: RoundState, entry: SignedMessage[Contribution]) -> bool:
    """Return whether a roster of this peer may list a contribution: members refuse unknown keys.

    A peer that failed to serve lately is listed once this peer has all of its contribution. A key that this peer alone
    excludes is not; but it follows rosters of others that list it, because all honest voters may be needed.
    """
    if entry.sender not in state.known_trainers or entry.sender in state.excluded:
        return False
    return entry.sender not in state.set_aside or state.knowledge.has_all_parts(state.me, entry.body.part_blobs)


def drop_size_conflicts(
    knowledge: RoundKnowledge, entries: Sequence[SignedMessage[Contribution]]
) -> dict[PeerId, SignedMessage[Contribution]]:
    """Return the first contributions by sender, as many as a roster may list, without those of conflicting sizes.

    A contribution may name a blob that this peer holds, or that an earlier one names, with another size. Nobody can
    fetch such a blob, but the holders of the real one would seem to hold it.
    """
    sizes, kept = dict(knowledge.held_sizes), dict[PeerId, SignedMessage[Contribution]]()
    for entry in entries:
        if entry.sender in kept or len(kept) == MAX_CONTRIBUTIONS:
            continue
        named = {blob.digest: blob.size for blob in entry.body.parts}
        if all(sizes.get(digest, size) == size for digest, size in named.items()):
            sizes.update(named)
            kept[entry.sender] = entry
    return kept or {entry.sender: entry for entry in entries[:1]}
