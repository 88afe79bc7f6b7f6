"""Hold the groups of a rollout peer: which one comes next, which ones a trainer may fetch, when to pause. PURE.

Groups of a round have the serials 0, 1, 2 ... without gaps; a new round begins at 0 again. The peer makes at most
`limit` groups in a round, and at most as many that no trainer has fetched, so a peer that nobody asks does no work in
vain. A trainer that asks from a place on has all groups before it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from protocol.recent import RecentTable
from protocol.rollout_groups import Place

MAX_TRAINERS = 256  # whose places are remembered


@dataclass(frozen=True)
class HeldGroup:
    """A signed group and its place."""

    place: Place
    signed: Signed


class GroupOutbox:
    """The groups of the last rounds, in the order of their places.

    Args:
        limit: groups of one round, and groups that no trainer has fetched.
        max_age: rounds for which groups are kept.
        held: the groups of an earlier process.
    """

    def __init__(self, limit: int, max_age: int, held: Iterable[HeldGroup] = ()) -> None:
        self._limit = limit
        self._max_age = max_age
        self._held = deque(held)
        self._next = self._held[-1].place.next if self._held else Place()
        self._asked = RecentTable[PeerId, Place](MAX_TRAINERS)
        self.made = 0  # by this process

    def begin_round(self, number: int) -> None:
        """Begin with the weights after `number` rounds, and drop the groups that are too old."""
        if number > self._next.round:
            self._next = Place(number, 0)
        while self._held and self._held[0].place.round < number - self._max_age:
            self._held.popleft()

    @property
    def round(self) -> int:
        """Return the round whose groups are made now."""
        return self._next.round

    def next_places(self, count: int) -> list[Place]:
        """Return the places of the next groups, at most `count`; none while the peer has to pause."""
        room = min(count, self._limit - self._next.serial, self._limit - self.waiting)
        return [Place(self._next.round, self._next.serial + index) for index in range(room)]

    def add(self, made: Iterable[HeldGroup]) -> None:
        """Add groups at the next places, in their order."""
        for group in made:
            if group.place != self._next:
                raise ValueError(f"group {group.place} does not follow {self._next}")
            self._held.append(group)
            self._next = group.place.next
            self.made += 1

    def serve(self, trainer: PeerId, since: Place) -> Iterator[Signed]:
        """Yield the groups from a place on, for a trainer that has all before it."""
        self._asked[trainer] = since
        return (group.signed for group in self._held if group.place >= since)

    @property
    def waiting(self) -> int:
        """Return the number of groups that no trainer has fetched."""
        fetched = max(self._asked.values(), default=Place())
        return sum(group.place >= fetched for group in self._held)

    @property
    def groups(self) -> tuple[HeldGroup, ...]:
        return tuple(self._held)
