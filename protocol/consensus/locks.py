"""Require a later leader to repeat any decision, so that no round is decided twice. PURE.

Of n voters f = floor((n - 1) / 3) may lie, and Q voters are a quorum: two quorums share an honest voter. An honest
voter acknowledges at most one proposal of a view, even of two leaders, and its views only grow. Where no voter may lie
(a trusted list, or up to three voters), the acknowledgements of a quorum decide, and this module has no say.

*Decisions.* The acknowledgements of a quorum are a lock. A member that is shown the lock of a proposal of its view
confirms it, whether or not it has acknowledged the proposal itself. A proposal is decided

    slowly   by the confirmations of a quorum, or
    fast     by the acknowledgements of all voters: so a round takes one phase while all of them acknowledge.

*Promises.* A member that joins a later view promises to acknowledge and confirm nothing of earlier views any more, and
names the newest proposals that it has acknowledged and confirmed. A leader shows with its commit the promises J of a
quorum, and the lock of the newest confirmed proposal in them: call that one c. Members acknowledge the commit only if
its content

    is one that at least |J| - f promises name as acknowledged in a view after c, if there is such a content;
    otherwise is that of c, if any promise names a confirmed proposal;
    otherwise it may be anything.

View 0 is the first one, so it needs no promises.

*Proof.* Let X be decided in view b, and assume that in the views after b, up to some view v, honest voters have
acknowledged nothing but X. Claim: neither do they in v, whatever its leader shows as J.

Locks: two of one view are of one content, because their quorums share an honest voter. A lock of b is of X, because it
shares an honest voter with the acknowledgements of X. A lock after b is of X by the assumption.

Slow: J shares an honest voter with the quorum that confirmed X. It did so before its promise, otherwise it would not
have done it after that. So c is of b or a later view, and thus of X. A content that |J| - f promises name after c was
acknowledged by an honest voter after b, because |J| - f >= Q - f > f: so it is X as well.

Fast: all honest voters acknowledged X in b, before their promises, and X alone after that. So at least |J| - f promises
name X in b or later. If c is of b or later, it is of X, and any content that |J| - f promises name after it is X, as
above. If c is before b, |J| - f promises name X after c, and only liars, f < |J| - f of them, name anything else there.

So X is required in any case, whatever f liars promise. Where voters have died and fewer than Q of them are left, all of
them together stand for a quorum, as everywhere (`VoterSet`).

*Exclusions.* A member drops the votes of a liar as soon as it excludes it, and others may not know of that yet. With
e of the liars excluded it needs Q' of the n - e others, among them at most f - e <= f' = floor((n - e - 1) / 3) liars.
Q' of them and any Q of all have Q' + (Q - e) - (n - e) > (f + f' - e) / 2 >= f - e voters in common that it does not
exclude: so an honest one is among them, which is all that the proof takes. Both kinds of quorum therefore count for
locks and promises (`VoterSet.was_quorum`). A liar that shrank the quorums of some members only could keep them from
agreeing whether votes are enough, so a leader waits a moment for promises that are enough for all.

*Progress.* With n = 3f + 1 and f silent liars, each step needs every honest voter. So none may refuse to take part
because of its opinion of a proposal:

- A lock says what was acknowledged, not what is true: a member confirms that of a proposal which it would not, or
  cannot yet, acknowledge. The proof counts no confirmation as the word of its sender about the content.
- A member that excludes a key by its own sums can convince nobody. It follows the rosters of others that list the
  key, and promises, though it lists the key on none of its own.
- Members acknowledge what promises require, even if they find its sums wrong. It may be decided, and an honest voter
  has acknowledged it, because more than f promises name it or a lock does.

Otherwise one such member and f silent liars stop the round for ever, under every leader.
"""

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Self

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import check_digest
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.signed import Digest, SignedMessage


@dataclass(frozen=True)
class Vote:
    """A proposal that a member acknowledged or confirmed; `content` is the digest of its content."""

    proposal: Digest
    view: int
    content: Digest

    @classmethod
    def of(cls, proposal: SignedMessage[Commit]) -> Self:
        """Name a proposal."""
        return cls(proposal.digest, proposal.body.view, proposal.body.content_digest)

    def to_wire(self) -> wire.Vote:
        return wire.Vote(proposal=self.proposal, view=self.view, content=self.content)

    @classmethod
    def from_wire(cls, body: wire.Vote) -> Self:
        for digest in (body.proposal, body.content):
            check_digest(digest)
        return cls(body.proposal, body.view, body.content)


@dataclass(frozen=True)
class Bounds:
    """The bounds of one member, by its own word: the newest proposals that it acknowledged and confirmed."""

    acknowledged: Vote | None = None
    confirmed: Vote | None = None


NO_BOUNDS = Bounds()


def newest_confirmed(bounds: Iterable[Bounds]) -> Vote | None:
    """Return the confirmed proposal of the latest view."""
    votes = [entry.confirmed for entry in bounds if entry.confirmed is not None]
    return max(votes, key=lambda vote: vote.view, default=None)


def required_contents(bounds: Iterable[Bounds], tolerated: int) -> Set[Digest] | None:
    """Return the contents of which a leader with these promises has to propose one; None if it may propose anything.

    Args:
        bounds: those in the promises of a quorum.
        tolerated: how many voters may lie.
    """
    known = list(bounds)
    lock = newest_confirmed(known)
    acknowledged = [entry.acknowledged for entry in known if entry.acknowledged is not None]
    counts = Counter(vote.content for vote in acknowledged if lock is None or vote.view > lock.view)
    needed = max(1, len(known) - tolerated)
    if frequent := {content for content, count in counts.items() if count >= needed}:
        return frequent
    return None if lock is None else {lock.content}
