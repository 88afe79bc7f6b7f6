"""The content of a roster: the contributions that a leader lists."""

from collections.abc import Sequence

from protocol.consensus.knowledge import RoundKnowledge
from protocol.consensus.messages.contributions import MAX_CONTRIBUTIONS, Contribution, Roster
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.rules.acceptance import binding_proposals
from protocol.consensus.state import RoundState
from protocol.identity import PeerId


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
    """Return whether a roster may list a contribution: members refuse unknown keys.

    A peer that failed to serve lately is listed once this peer has all of its contribution.
    """
    if entry.sender not in state.known_trainers:
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
