"""The view of one leader as every member follows it: the roster, the reducers and the reduced parts."""

from collections.abc import Collection, Iterable, Set

from protocol.consensus.message_kinds import ReducedPart, ReducerAssignment
from protocol.consensus.messages import Digest, PartBlob, Roster, SignedMessage
from protocol.consensus.quorum import Ballot
from protocol.identity import PeerId

# Reduced parts may arrive before the assignment that they belong to; parts of later attempts are rejected.
MAX_ATTEMPTS_AHEAD = 1


class View:
    """The roster of a leader, and the progress of its exchange as one member knows it; owned by the round state.

    In attempt 0 the reducers that follow from the roster sum all its contributions; each assignment begins another
    attempt. `included`: the contributions to sum, in roster order. `reducing_since`: the time from which every reducer
    of the newest attempt could sum. `speculated_attempt`: the newest attempt for which a commit was predicted.
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
        self.included = roster.body.contributions
        self.assignment: SignedMessage[ReducerAssignment] | None = None
        self.announcements: dict[tuple[int, int, PeerId], SignedMessage[ReducedPart]] = {}
        self._initial_reducers = initial_reducers

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
        """Return the reducer of each part in the newest attempt."""
        return self.assignment.body.reducers if self.assignment else self._initial_reducers

    def parts_reduced_by(self, peer: PeerId) -> list[int]:
        """Return the parts that a peer reduces in the newest attempt."""
        return [part for part, reducer in enumerate(self.reducers) if reducer == peer]

    def follow_assignment(self, message: SignedMessage[ReducerAssignment], now: float) -> bool:
        """Take over an assignment; return False if it is old or names peers that are not on the roster."""
        body, contributors = message.body, set(self.contributors)
        if body.attempt <= self.attempt or not contributors.issuperset(body.included + body.reducers):
            return False
        self.assignment, self.reducing_since, names = message, now, set(body.included)
        self.included = tuple(entry for entry in self.roster.body.contributions if entry.sender in names)
        return True

    def learn_reduced_part(self, message: SignedMessage[ReducedPart]) -> bool:
        """Record a reduced part.

        Returns:
            False if the sender is not on the roster, has announced another blob or names a wrong attempt.
        """
        body = message.body
        ahead = body.attempt - self.attempt
        if message.sender not in self.contributors or not 0 <= ahead <= MAX_ATTEMPTS_AHEAD:
            return False
        return self.announcements.setdefault((body.attempt, body.part, message.sender), message) == message

    def reduced_part(self, number: int) -> SignedMessage[ReducedPart] | None:
        """Return the part that its reducer announced in the newest attempt."""
        return self.announcements.get((self.attempt, number, self.reducers[number]))

    def reduced_parts(self) -> list[SignedMessage[ReducedPart]]:
        """Return the announced parts of the newest attempt in ascending order."""
        found = (self.reduced_part(number) for number in range(len(self.reducers)))
        return [part for part in found if part is not None]

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
