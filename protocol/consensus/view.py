"""One leader's turn in a round, as every member follows it: the roster, who reduces what, and the reduced parts."""

from collections.abc import Collection, Iterable, Set

from protocol.consensus.message_kinds import ReducedPart, ReducerAssignment
from protocol.consensus.messages import Digest, PartBlob, Roster, SignedMessage
from protocol.consensus.quorum import Ballot
from protocol.identity import PeerId

# Parts of an attempt whose inclusion has not arrived yet are kept, but not those of any attempt a peer may dream up.
MAX_ATTEMPTS_AHEAD = 1


class View:
    """`heard`: when its leader last gave a sign of life. Attempt 0 is to sum all that the roster lists, by the reducers
    that it draws; an inclusion says otherwise. `included_at`: since when every reducer of the newest attempt could sum.
    """

    def __init__(
        self, ballot: Ballot, roster: SignedMessage[Roster], initial_reducers: tuple[PeerId, ...], now: float
    ) -> None:
        self.ballot = ballot
        self.roster = roster
        self.contributors = tuple(contribution.sender for contribution in roster.body.contributions)
        self.started_at = now
        self.leader_last_heard = now
        self.reducing_since: float | None = None
        self.speculated_attempt = -1  # the attempt of which it was told what will most likely be decided
        self.included = roster.body.contributions  # what is to be summed, in roster order
        self.assignment: SignedMessage[ReducerAssignment] | None = None
        self.announcements: dict[tuple[int, int, PeerId], SignedMessage[ReducedPart]] = {}
        self._initial_reducers = initial_reducers

    @property
    def leader(self) -> PeerId:
        return self.roster.sender

    @property
    def attempt(self) -> int:
        return self.assignment.body.attempt if self.assignment else 0

    @property
    def reducers(self) -> tuple[PeerId, ...]:
        """By part."""
        return self.assignment.body.reducers if self.assignment else self._initial_reducers

    def parts_reduced_by(self, peer: PeerId) -> list[int]:
        """Return the parts that a peer reduces in the newest attempt."""
        return [part for part, reducer in enumerate(self.reducers) if reducer == peer]

    def follow_assignment(self, message: SignedMessage[ReducerAssignment], now: float) -> bool:
        """False: an old one, or one that names peers outside the roster."""
        body, contributors = message.body, set(self.contributors)
        if body.attempt <= self.attempt or not contributors.issuperset(body.included + body.reducers):
            return False
        self.assignment, self.reducing_since, names = message, now, set(body.included)
        self.included = tuple(entry for entry in self.roster.body.contributions if entry.sender in names)
        return True

    def learn_reduced_part(self, message: SignedMessage[ReducedPart]) -> bool:
        """False: of a stranger, of a wrong attempt, or a second word on the same part."""
        body = message.body
        ahead = body.attempt - self.attempt
        if message.sender not in self.contributors or not 0 <= ahead <= MAX_ATTEMPTS_AHEAD:
            return False
        return self.announcements.setdefault((body.attempt, body.part, message.sender), message) == message

    def reduced_part(self, number: int) -> SignedMessage[ReducedPart] | None:
        """What the appointed reducer announced in the newest attempt."""
        return self.announcements.get((self.attempt, number, self.reducers[number]))

    def reduced_parts(self) -> list[SignedMessage[ReducedPart]]:
        """Those that are announced, ascending."""
        found = (self.reduced_part(number) for number in range(len(self.reducers)))
        return [part for part in found if part is not None]

    def reportable_blobs(self, held: Set[PartBlob], parts_to_reduce: Collection[int]) -> Set[Digest]:
        """Of what a member holds, that of which it reports it: contributions and reduced parts. `own_parts`: which it
        sums. Of a blob that is to be several parts not before it is held as all that concern it."""
        roster = self.roster.body
        announced = {PartBlob(part.body.blob, part.body.part) for part in self.announcements.values()}
        lacking = announced - held | {
            portion for portion in roster.ambiguous_part_blobs - held if portion.part in parts_to_reduce
        }
        return _digests(held & roster.part_blobs | held & announced) - _digests(lacking)


def _digests(part_blobs: Iterable[PartBlob]) -> set[Digest]:
    return {portion.blob.digest for portion in part_blobs}
