"""The view of one leader as every member follows it: the roster, the reducers and the reduced parts."""

from collections.abc import Collection, Iterable, Set

from protocol.blobs.blob import Blob
from protocol.consensus.messages.contributions import Evidence, PartBlob, Roster, digest_inputs
from protocol.consensus.messages.kinds import ReducedPart, ReducerAssignment
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.quorum import Ballot
from protocol.identity import PeerId

# Reduced parts may arrive before the assignment that they belong to; parts of later attempts are rejected.
MAX_ATTEMPTS_AHEAD = 1


class View:
    """The roster of a leader, and the progress of its exchange as one member knows it; owned by the round state.

    Each part has one or several reducers. `reducers` has a slot for each of them: the first reducer of each part, then
    the second one of each part. In attempt 0 the reducers that follow from the roster sum all its contributions; each
    assignment begins another attempt. `included`: the contributions to sum, in roster order; `inputs`: their digest.
    `reducing_since`: the time from which every reducer of the newest attempt could sum. `speculated_attempt`: the
    newest attempt for which a commit was predicted. `proposed_at`: the time at which this peer first saw the proposal.
    `quorum_since`: the time from which this peer, as the leader, has the acknowledgements of a quorum.
    """

    def __init__(
        self, ballot: Ballot, roster: SignedMessage[Roster], initial_reducers: tuple[PeerId, ...], now: float
    ) -> None:
        self.ballot = ballot
        self.roster = roster
        self.contributors = tuple(entry.sender for entry in roster.body.contributions)
        self.started_at = now
        self.leader_last_heard = now
        self.reducing_since: float | None = None
        self.speculated_attempt = -1
        self.proposed_at: float | None = None
        self.quorum_since: float | None = None
        self.included = roster.body.contributions
        self.inputs = roster.body.inputs
        self.part_count = len(roster.body.contributions[0].body.parts)
        self.assignment: SignedMessage[ReducerAssignment] | None = None
        self.announcements: dict[tuple[int, int, PeerId], SignedMessage[ReducedPart]] = {}
        self.initial_reducers = initial_reducers

    @property
    def leader(self) -> PeerId:
        """Return the sender of the roster."""
        return self.roster.sender

    @property
    def attempt(self) -> int:
        """Return the number of the newest assignment, or 0."""
        return self.assignment.body.attempt if self.assignment else 0

    @property
    def reducers(self) -> tuple[PeerId, ...]:
        """Return the reducer of each slot in the newest attempt."""
        return self.assignment.body.reducers if self.assignment else self.initial_reducers

    def reducers_of(self, part: int) -> tuple[PeerId, ...]:
        """Return the reducers of one part in the newest attempt."""
        return self.reducers[part :: self.part_count]

    def parts_reduced_by(self, peer: PeerId) -> list[int]:
        """Return the parts that a peer reduces in the newest attempt."""
        return sorted({slot % self.part_count for slot, reducer in enumerate(self.reducers) if reducer == peer})

    def follow_assignment(self, message: SignedMessage[ReducerAssignment], members: Set[PeerId], now: float) -> bool:
        """Take over an assignment.

        Returns:
            False if it is old, includes peers that are not on the roster or appoints peers that are not members.
        """
        body, contributors = message.body, set(self.contributors)
        if body.attempt <= self.attempt or not contributors.issuperset(body.included):
            return False
        if not (contributors | members).issuperset(body.reducers):
            return False
        self.assignment, self.reducing_since, names = message, now, set(body.included)
        self.included = tuple(entry for entry in self.roster.body.contributions if entry.sender in names)
        self.inputs = digest_inputs(entry.digest for entry in self.included)
        return True

    def learn_reduced_part(self, message: SignedMessage[ReducedPart]) -> bool:
        """Record a reduced part of a member; return False if it has announced another one or names a wrong attempt."""
        body = message.body
        ahead = body.attempt - self.attempt
        if not 0 <= ahead <= MAX_ATTEMPTS_AHEAD:
            return False
        return self.announcements.setdefault((body.attempt, body.part, message.sender), message) == message

    def announcements_of(self, part: int) -> list[SignedMessage[ReducedPart]]:
        """Return what the reducers of a part have announced in the newest attempt, in the order of their slots."""
        found = (self.announcements.get((self.attempt, part, reducer)) for reducer in self.reducers_of(part))
        return [message for message in found if message is not None]

    def disputed_parts(self) -> list[int]:
        """Return the parts of which members announced different sums of the same inputs in the newest attempt."""
        sums: dict[int, set[Blob]] = {}
        for (attempt, part, _), message in self.announcements.items():
            if attempt == self.attempt and message.body.inputs == self.inputs:
                sums.setdefault(part, set()).add(message.body.blob)
        return sorted(part for part, blobs in sums.items() if len(blobs) > 1)

    def newest_announcements(self) -> list[SignedMessage[ReducedPart]]:
        """Return all that has been announced in the newest attempt."""
        return [message for (attempt, _, _), message in self.announcements.items() if attempt == self.attempt]

    def reduced_part(self, part: int) -> SignedMessage[ReducedPart] | None:
        """Return the announcement of a part once all its reducers have announced the same sum of the same inputs."""
        found = self.announcements_of(part)
        if len(found) < len(self.reducers_of(part)) or not found:
            return None
        return found[0] if len({(message.body.blob, message.body.inputs) for message in found}) == 1 else None

    def reduced_parts(self) -> list[SignedMessage[ReducedPart]]:
        """Return the parts of the newest attempt of which all reducers agree, in ascending order."""
        found = (self.reduced_part(number) for number in range(self.part_count if self.reducers else 0))
        return [part for part in found if part is not None]

    def evidence(self) -> Evidence:
        """Return the signatures of all reducers of the newest attempt, once they agree."""
        by_slot = [
            self.announcements[self.attempt, slot % self.part_count, reducer]
            for slot, reducer in enumerate(self.reducers)
        ]
        signatures = tuple(message.signed.signature for message in by_slot)
        view = self.roster.body.view
        return Evidence(view, self.roster.digest, self.attempt, self.reducers, signatures)

    def reportable_blobs(self, held: Set[PartBlob], parts_to_reduce: Collection[int]) -> Set[Digest]:
        """Return the blobs of contributions and reduced parts that a member reports as held.

        The same bytes can be several parts. Such a blob is reported only if the member holds it as all parts that it
        needs.

        Args:
            held: the parts that the member holds.
            parts_to_reduce: the parts that it reduces.
        """
        roster = self.roster.body
        announced = {PartBlob(part.body.blob, part.body.part) for part in self.announcements.values()}
        lacking = announced - held | {
            part_blob for part_blob in roster.ambiguous_part_blobs - held if part_blob.part in parts_to_reduce
        }
        return _digests(held & roster.part_blobs | held & announced) - _digests(lacking)


def _digests(part_blobs: Iterable[PartBlob]) -> set[Digest]:
    return {part_blob.blob.digest for part_blob in part_blobs}
