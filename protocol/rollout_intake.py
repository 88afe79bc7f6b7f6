"""Decide which groups of rollout peers a trainer fetches, keeps and learns from, oldest first.

A pure state machine: the daemon feeds it the groups that peers serve and its trainer's verdicts. The trainer's snapshot
holds the truth: for each maker the place after the last group that it has learned (`Cursors`). After the death of
either process the pool begins empty at those places, and the makers serve the rest again.

The pool is bounded, and groups are pulled: while it is full nothing is fetched, and makers pause at their own bound.
"""

import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.recent import RecentTable
from protocol.rollout_groups import Place, SignedGroup, owner_of

MAX_MAKERS: Final = 256  # of which a trainer fetches
MAX_FUTURE_ROUNDS: Final = 2  # that a maker may know before its trainer
SUM_STRIKES: Final = 3  # failed tests after which a maker is refused
Cursors = Mapping[PeerId, Place]


@dataclass
class _Maker:
    """A maker: the place of the next group to fetch, and the strikes against it."""

    next: Place
    strikes: int = 0
    closed_round: int = -1  # whose serials had a gap


@dataclass
class RolloutIntake:
    """The pool of one trainer.

    Attributes:
        capacity: groups of the pool.
        max_age: rounds; older groups are dropped.
        counts: groups by their fate: "fetched", "known", "other trainer", "gap", "too new" or "too old" when they came;
            later "taken", "too old" or "refused".
        dropped_tokens: of groups that were too old.
        refused: makers whose groups this trainer takes no more, with the reason.
    """

    run_id: RunId
    me: PeerId
    capacity: int
    max_age: int
    counts: Counter[str] = field(default_factory=Counter)
    dropped_tokens: int = 0
    refused: RecentTable[PeerId, str] = field(default_factory=lambda: RecentTable(4 * MAX_MAKERS))

    def __post_init__(self) -> None:
        self._round = 0
        self._trainers = dict[int, frozenset[PeerId]]()
        self._makers = RecentTable[PeerId, _Maker](4 * MAX_MAKERS)
        self._pool = list[SignedGroup]()  # oldest first

    def restart(self, cursors: Cursors) -> None:
        """Begin where the trainer's snapshot stands; groups that were fetched after it are fetched again."""
        self._pool.clear()
        for maker, known in self._makers.items():
            known.next = cursors.get(maker, Place())
        for maker, place in cursors.items():
            self._makers.setdefault(maker, _Maker(place))

    def begin_round(self, number: int, trainers: Collection[PeerId]) -> None:
        """Take note of the newest weights, and of those who share their groups; nobody: all are ours.

        Groups of these weights that came before them are kept only if they are ours.
        """
        self._round = number
        self._trainers[number] = frozenset(trainers)
        self._keep_mine(number)
        oldest = number - self.max_age
        for old in [each for each in self._trainers if each < oldest]:
            del self._trainers[old]
        while self._pool and self._pool[0].group.round < oldest:
            self._drop(self._pool.pop(0))

    def sharers(self, number: int) -> frozenset[PeerId]:
        """Return who shares the groups of a round."""
        return self._trainers.get(number, frozenset())

    def wanted(self, makers: Iterable[PeerId]) -> dict[PeerId, Place]:
        """Return from which place on to ask each of these makers; none while the pool is full."""
        if self.is_full:
            return {}
        found = dict[PeerId, Place]()
        for maker in makers:
            if maker not in self.refused and len(found) < MAX_MAKERS:
                place = self._makers[maker].next if maker in self._makers else Place()
                found[maker] = max(place, Place(max(0, self._round - self.max_age)))
        return found

    def offer(self, found: SignedGroup) -> str:
        """Take a group that a maker served, in its order; returns its fate (see `counts`)."""
        outcome = self._judge(found)
        self.counts[outcome] += 1
        if outcome == "fetched":
            bisect.insort(self._pool, found, key=_age_order)
        return outcome

    def take(self, count: int, newest: int) -> list[SignedGroup]:
        """Hand out the oldest groups, whose weights a trainer at round `newest` has."""
        known = bisect.bisect_right(self._pool, newest, key=lambda each: each.group.round)
        ready, self._pool = self._pool[: min(count, known)], self._pool[min(count, known) :]
        self.counts["taken"] += len(ready)
        return ready

    def strike(self, maker: PeerId, reason: str, *, is_proof: bool) -> bool:
        """Count a group that a check refused; a proof, or several tests, end the maker; returns whether now."""
        self.counts["refused"] += 1
        known = self._makers.setdefault(maker, _Maker(Place()))
        known.strikes += 1
        if maker in self.refused or not (is_proof or known.strikes >= SUM_STRIKES):
            return False
        self.refused[maker] = reason
        self._pool = [each for each in self._pool if each.maker != maker]
        return True

    @property
    def is_full(self) -> bool:
        return len(self._pool) >= self.capacity

    @property
    def waiting(self) -> int:
        """Return the number of groups in the pool."""
        return len(self._pool)

    def _judge(self, found: SignedGroup) -> str:
        maker, place = found.maker, found.group.place
        if maker in self.refused:
            return "refused"
        known = self._makers.setdefault(maker, _Maker(Place()))
        if place < known.next or place.round == known.closed_round:
            return "known"
        if place.round > self._round + MAX_FUTURE_ROUNDS:
            return "too new"
        if place.round < self._round - self.max_age:
            self.dropped_tokens += found.group.tokens
            return "too old"
        if place.serial != (known.next.serial if place.round == known.next.round else 0):
            known.closed_round, known.next = place.round, Place(place.round + 1)
            return "gap"
        known.next = place.next
        return "fetched" if place.round > self._round or self._is_mine(found) else "other trainer"

    def _is_mine(self, found: SignedGroup) -> bool:
        place = found.group.place
        trainers = self._trainers.get(place.round) or {self.me}
        return owner_of(trainers, self.run_id, found.maker, place) == self.me

    def _keep_mine(self, number: int) -> None:
        kept = [each for each in self._pool if each.group.round != number or self._is_mine(each)]
        others, self._pool = len(self._pool) - len(kept), kept
        self.counts.update({"fetched": -others, "other trainer": others} if others else {})

    def _drop(self, found: SignedGroup) -> None:
        self.counts["too old"] += 1
        self.dropped_tokens += found.group.tokens


def _age_order(found: SignedGroup) -> tuple[int, int, PeerId]:
    return found.group.round, found.group.serial, found.maker
