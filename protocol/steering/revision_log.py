"""The revisions that a peer knows, by digest, and the list of them that its chain should go on with. PURE.

Each revision names the one before it, so the digest of a revision names a whole list. The organiser signs one list; if
two revisions continue the same one (an organiser who wrote from two machines, or whose first copy went astray), the
commits decide which one the run adopts, and until then every peer prefers the one that was written last.
"""

from collections.abc import Sequence
from typing import Literal

from protocol import murmur_pb2 as wire
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.errors import ForgedError, LimitError, StaleError
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.signing import open_signed, read_unverified
from protocol.steering.revisions import MAX_REVISION_BYTES, MAX_REVISIONS, NO_REVISION, REVISION_KIND, Revision

SignedRevision = SignedMessage[Revision]
MAX_STORED = 2 * MAX_REVISIONS  # with revisions that contradict others


def open_revision(signed: wire.Signed, run_id: RunId, organiser: PeerId) -> SignedRevision:
    """Return the checked revision in an envelope.

    Raises:
        ForgedError: It is not signed by the organiser of the run.
        MalformedError: It is invalid.
    """
    if signed.kind == REVISION_KIND and signed.peer != organiser:  # before the signature, which takes time to verify
        raise ForgedError("a revision that the organiser of the run has not signed")
    body = open_signed(signed, run_id, REVISION_KIND, wire.Revision, MAX_REVISION_BYTES)
    return SignedMessage.of(signed, Revision.from_wire(body))


def read_revision(signed: wire.Signed) -> SignedRevision:
    """Return the revision in an envelope that this program verified before. Raises MalformedError."""
    body = read_unverified(signed, REVISION_KIND, wire.Revision, MAX_REVISION_BYTES)
    return SignedMessage.of(signed, Revision.from_wire(body))


class RevisionLog:
    """The revisions of one run that this peer knows."""

    def __init__(self) -> None:
        self._revisions: dict[Digest, SignedRevision] = {}
        self._successors: dict[Digest, list[SignedRevision]] = {}

    def __contains__(self, digest: Digest) -> bool:
        return digest == NO_REVISION or digest in self._revisions

    @property
    def revisions(self) -> tuple[SignedRevision, ...]:
        """Return all revisions, each after the one that it continues."""
        return tuple(self._revisions.values())

    @property
    def conflicts(self) -> int:
        """Return how many revisions contradict another one."""
        return sum(len(entries) - 1 for entries in self._successors.values())

    def add(self, revision: SignedRevision) -> Literal["known", "new", "conflict"]:
        """Add a revision whose signature is verified; "conflict" means that it contradicts one that is known.

        Raises:
            StaleError: It continues a revision that is not known.
            LimitError: The log is full.
        """
        if revision.digest in self._revisions:
            return "known"
        previous = self._revisions.get(revision.body.previous)
        expected = previous.body.number + 1 if previous else 1
        if revision.body.previous not in self or revision.body.number != expected:
            raise StaleError(f"revision {revision.body.number} continues one that is not known here")
        if len(self._revisions) >= MAX_STORED:
            raise LimitError(f"more than {MAX_STORED} revisions of one run")
        self._revisions[revision.digest] = revision
        successors = self._successors.setdefault(revision.body.previous, [])
        successors.append(revision)
        return "conflict" if len(successors) > 1 else "new"

    def list_to(self, digest: Digest) -> tuple[SignedRevision, ...] | None:
        """Return the revisions up to one, oldest first; None if it is not known."""
        entries: list[SignedRevision] = []
        while digest != NO_REVISION:
            if digest not in self._revisions:
                return None
            entries.append(self._revisions[digest])
            digest = entries[-1].body.previous
        return tuple(reversed(entries))

    def list_after(self, adopted: Digest) -> tuple[SignedRevision, ...]:
        """Return the revisions with which the list goes on after an adopted one: of several, the last written."""
        entries: list[SignedRevision] = []
        while successors := self._successors.get(adopted):
            newest = max(successors, key=lambda entry: (entry.body.time, entry.digest))
            entries.append(newest)
            adopted = newest.digest
        return tuple(entries)

    def newest(self, adopted: Digest = NO_REVISION) -> Digest:
        """Return the digest of the last revision of the list that goes on after an adopted one."""
        after = self.list_after(adopted)
        return after[-1].digest if after else adopted


def add_all(log: RevisionLog, revisions: Sequence[SignedRevision]) -> tuple[SignedRevision, ...]:
    """Add revisions, and return those that were not known. Raises StaleError or LimitError."""
    return tuple(revision for revision in revisions if log.add(revision) != "known")
