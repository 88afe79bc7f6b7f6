"""One leader's turn in a round, as every member follows it: the roster, who reduces what, and the reduced parts."""

import hashlib
from collections.abc import Collection, Iterable, Sequence, Set
from functools import lru_cache

from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.rounds.election import Ballot
from protocol.rounds.reports import Inclusion, Part
from protocol.rounds.statements import Contribution, Digest, Portion, Roster, Statement

# Parts of an attempt whose inclusion has not arrived yet are kept, but not those of any attempt a peer may dream up.
ATTEMPTS_AHEAD = 1


class View:
    """`heard`: when its leader last gave a sign of life. Attempt 0 is to sum all that the roster lists, by the reducers
    that it draws; an inclusion says otherwise. `included_at`: since when every reducer of the newest attempt could sum.
    """

    def __init__(self, ballot: Ballot, roster: Statement[Roster], parts: int, now: float) -> None:
        self.ballot = ballot
        self.roster = roster
        self.contributors = tuple(contribution.sender for contribution in roster.body.contributions)
        self.since = now
        self.heard = now
        self.included_at: float | None = None
        self.foreseen = -1  # the attempt of which it was told what will most likely be decided
        self.included = roster.body.contributions  # what is to be summed, in roster order
        self.inclusion: Statement[Inclusion] | None = None
        self.announced: dict[tuple[int, int, PeerId], Statement[Part]] = {}
        self._first_reducers = assign_reducers(roster.digest, self.contributors, parts)

    @property
    def leader(self) -> PeerId:
        return self.roster.sender

    @property
    def attempt(self) -> int:
        return self.inclusion.body.attempt if self.inclusion else 0

    @property
    def reducers(self) -> tuple[PeerId, ...]:
        """By part."""
        return self.inclusion.body.reducers if self.inclusion else self._first_reducers

    def follow_inclusion(self, statement: Statement[Inclusion], now: float) -> bool:
        """False: an old one, or one that names peers outside the roster."""
        body, contributors = statement.body, set(self.contributors)
        if body.attempt <= self.attempt or not contributors.issuperset(body.included + body.reducers):
            return False
        self.inclusion, self.included_at, names = statement, now, set(body.included)
        self.included = tuple(entry for entry in self.roster.body.contributions if entry.sender in names)
        return True

    def learn_part(self, statement: Statement[Part]) -> bool:
        """False: of a stranger, of a wrong attempt, or a second word on the same part."""
        body = statement.body
        ahead = body.attempt - self.attempt
        if statement.sender not in self.contributors or not 0 <= ahead <= ATTEMPTS_AHEAD:
            return False
        return self.announced.setdefault((body.attempt, body.part, statement.sender), statement) == statement

    def part(self, number: int) -> Statement[Part] | None:
        """What the appointed reducer announced in the newest attempt."""
        return self.announced.get((self.attempt, number, self.reducers[number]))

    def parts(self) -> list[Statement[Part]]:
        """Those that are announced, ascending."""
        found = (self.part(number) for number in range(len(self.reducers)))
        return [part for part in found if part is not None]

    def reported(self, held: Set[Portion], own_parts: Collection[int]) -> Set[Digest]:
        """Of what a member holds, that of which it reports it: contributions and reduced parts. `own_parts`: which it
        sums. Of a blob that is to be several parts not before it is held as all that concern it."""
        roster = self.roster.body
        announced = {Portion(part.body.blob, part.body.part) for part in self.announced.values()}
        lacking = announced - held | {portion for portion in roster.repeated - held if portion.part in own_parts}
        return _digests(held & roster.offered | held & announced) - _digests(lacking)


def _digests(portions: Iterable[Portion]) -> set[Digest]:
    return {portion.blob.digest for portion in portions}


@lru_cache(maxsize=16)
def assign_reducers(seed: Digest, peers: tuple[PeerId, ...], parts: int) -> tuple[PeerId, ...]:
    """One reducer a part: round robin over the peers in an order that the seed shuffles."""
    order = sorted(peers, key=lambda peer: hashlib.sha256(seed + peer.encode()).digest())
    return tuple(order[part % len(order)] for part in range(parts))


def reassign_reducers(seed: Digest, reducers: Sequence[PeerId], able: Collection[PeerId]) -> tuple[PeerId, ...]:
    """The same, but for the parts of those who are not able any more: these go round the others."""
    orphaned = [part for part, reducer in enumerate(reducers) if reducer not in able]
    heirs = dict(zip(orphaned, assign_reducers(seed, tuple(able), len(orphaned)), strict=True))
    return tuple(heirs.get(part, reducer) for part, reducer in enumerate(reducers))


def portions_of(contributions: Sequence[Statement[Contribution]]) -> list[Portion]:
    return [portion for contribution in contributions for portion in contribution.body.portions]


def blobs_of(contributions: Sequence[Statement[Contribution]]) -> list[Blob]:
    return [blob for contribution in contributions for blob in contribution.body.parts]
