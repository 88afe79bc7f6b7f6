"""Which older proposal a leader repeats where the leader of an earlier view made two.

Honest voters acknowledge one proposal of a view, and a liar may acknowledge all of them. So at most one of them was
decided, but while some voters are silent, the new leader may be unable to tell which one. It waits for them: a voter
that knows the decision answers with the certificate. It does not wait for ever, because a liar may be silent as well.
"""

from collections.abc import Sequence, Set
from typing import NamedTuple

from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.views.quorum import Ballot, VoterSet
from protocol.identity import PeerId


class BoundProposal(NamedTuple):
    """An older proposal, and the voters of this view that are known to have acknowledged it."""

    ballot: Ballot
    proposal: SignedMessage[Commit]
    voters: Set[PeerId]


class Repetition(NamedTuple):
    """The proposal to repeat; `is_doubtful`: whether voters that are still silent may know of another decision."""

    proposal: SignedMessage[Commit]
    is_doubtful: bool


def choose_repetition(
    bound: Sequence[BoundProposal], voter_set: VoterSet, joined: Set[PeerId], liars: Set[PeerId]
) -> Repetition | None:
    """Return the newest proposal that may have been decided; of several, the one that more voters acknowledged.

    Args:
        bound: the older proposals that some of the voters that joined this view acknowledged.
        voter_set: the voters of the round.
        joined: the voters that joined this view.
        liars: the keys whose misdeeds are proved.
    """
    newest = max((entry.ballot for entry in bound), default=None)
    rivals = [entry for entry in bound if entry.ballot == newest]
    silent = voter_set.voters - joined
    possible = [entry for entry in rivals if voter_set.may_have_decided(entry.voters | silent, liars)]
    chosen = max(possible or rivals, key=lambda entry: len(entry.voters), default=None)
    if chosen is None:
        return None
    contents = {entry.proposal.body.content_digest for entry in possible}
    return Repetition(chosen.proposal, bool(silent) and len(contents) > 1)
