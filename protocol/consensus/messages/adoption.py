"""The organiser's revisions that a commit adopts."""

from dataclasses import dataclass

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import check_digest
from protocol.consensus.messages.checks import check_count
from protocol.consensus.messages.signed import Digest, OpenNested, SignedMessage
from protocol.errors import MalformedError
from protocol.steering import MAX_REVISIONS, NO_REVISION, REVISION_KIND, Revision


@dataclass(frozen=True)
class Adoption:
    """The organiser's revisions that a chain has adopted after a commit: the newest one, and those new in the commit.

    They hold from the next round on, or from their own `from_round` if that is later. So the settings of a round follow
    from the commits before it, and all peers that open it on the same chain have the same ones.
    """

    newest: Digest = NO_REVISION
    added: tuple[SignedMessage[Revision], ...] = ()

    def continues(self, adopted: Digest) -> bool:
        """Return whether the revisions continue the list whose newest one is `adopted`."""
        for revision in self.added:
            if revision.body.previous != adopted:
                return False
            adopted = revision.digest
        return adopted == self.newest


NOTHING_ADOPTED = Adoption()


def open_adoption(body: wire.Commit, open_nested: OpenNested) -> Adoption:
    """Return the revisions that a commit from the wire adopts. Raises MalformedError or LimitError."""
    check_count(len(body.revisions), MAX_REVISIONS, "revisions")
    if any(signed.kind != REVISION_KIND for signed in body.revisions):
        raise MalformedError("a message of another kind among the revisions of a commit")
    if body.revision:
        check_digest(body.revision)
    adoption = Adoption(body.revision, tuple(open_nested(signed) for signed in body.revisions))
    if adoption.added and not adoption.continues(adoption.added[0].body.previous):
        raise MalformedError("revisions of a commit that do not follow one another")
    return adoption
