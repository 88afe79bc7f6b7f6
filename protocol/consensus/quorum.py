"""Who leads a view of a round, and which peers make a majority.

    rank(view, peer) = SHA-256(run, round, view, peer) as a number; the live member with the lowest leads the view.

Members may disagree for a while on who is alive, so a view can have two leaders. That is harmless as in Paxos: ballots
are totally ordered, by view and then by rank, and each has exactly one proposer.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from protocol.consensus.events import MembershipChanged
from protocol.identity import PeerId
from protocol.manifest import RunId


@dataclass(frozen=True, order=True)
class Ballot:
    """One leader's turn: greater outranks; `precedence` grows as the rank falls."""

    view: int
    precedence: int


# Both are asked over and over in one round and never again: with eight peers these fill in ten minutes with 0.3 MB.
@lru_cache(maxsize=1024)
def leader_rank(run_id: RunId, number: int, view: int, peer: PeerId) -> int:
    text = f"murmur leader {run_id} {number} {view} {peer}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


@lru_cache(maxsize=64)
def lowest_ranked_peer(run_id: RunId, number: int, view: int, peers: frozenset[PeerId]) -> PeerId | None:
    return min(peers, key=lambda peer: leader_rank(run_id, number, view, peer), default=None)


@dataclass(frozen=True)
class Election:
    """The leaders of one round."""

    run_id: RunId
    round: int

    def ballot(self, view: int, peer: PeerId) -> Ballot:
        return Ballot(view, -leader_rank(self.run_id, self.round, view, peer))

    def leader(self, view: int, peers: frozenset[PeerId]) -> PeerId | None:
        return lowest_ranked_peer(self.run_id, self.round, view, peers)


class VoterSet:
    """The members whose majority decides.

    A member that vanishes without a word keeps its vote for `memory` seconds: members notice such things at different
    times, and majorities meet only where they are counted over nearly the same set. Time in which we ourselves were
    away (suspended, or between two rounds) does not count: it says nothing about the others. `step`: the longest time
    between two calls of `advance` while we are not away.

    Whoever is forgotten may have voted before it died, together with others that still live. So it is waited for no
    more, but counted as one of the `electors` until the round ends: it takes a majority of these, or all members. Two
    majorities meet; and all members meet whatever majority decided, unless all of that have been gone for longer than
    `memory`. Where a majority of the electors is left, it is enough: after a few deaths no straggler can hold up the
    round. Where all members are needed and one of them dies, it is forgotten in turn: somebody can always go on, as all
    members can have what any of them has acknowledged, or do without it.

    Whoever is known to be ahead is not forgotten: those who were cut off for nearly `memory` and meet the others again
    must not decide alone a round that these have passed.
    """

    def __init__(self, vote_memory: float, max_gap: float, last_seen: Mapping[PeerId, float], now: float) -> None:
        away = now - max(last_seen.values(), default=now)
        self.live: frozenset[PeerId] = frozenset()
        self._resting: frozenset[PeerId] = frozenset()
        self._ahead: frozenset[PeerId] = frozenset()
        self._vote_memory = vote_memory
        self._max_gap = max_gap
        self._now = now
        self._vanished = {peer: time + away for peer, time in last_seen.items()}
        # Members of the round before that have not yet shown up in this one: late rather than gone.
        self._not_yet_seen = set(last_seen)
        self._forgotten: set[PeerId] = set()
        self._recount()

    def _recount(self) -> None:
        self.members: frozenset[PeerId] = self.live.union(self._vanished) if self._vanished else self.live
        self.voters = self.members | self._forgotten if self._forgotten else self.members
        # Those from whom a contribution may still come.
        expected = self.live | self._not_yet_seen if self._not_yet_seen else self.live
        self.awaited: frozenset[PeerId] = expected - self._resting if self._resting else expected

    def update(self, membership: MembershipChanged, now: float) -> None:
        live, gone = membership.peers, membership.departed
        self._vanished.update(dict.fromkeys((self.live - live) | (self._forgotten & membership.ahead), now))
        for peer in self._vanished.keys() & (live | gone):
            del self._vanished[peer]
        self.live = live
        self._resting = membership.resting
        self._ahead = membership.ahead
        self._not_yet_seen -= live | gone | membership.ahead
        self._forgotten -= live | gone | membership.ahead
        self._recount()

    def advance(self, now: float) -> None:
        """Forget the votes of those that vanished too long ago."""
        away = max(0.0, now - self._now - self._max_gap)
        self._now = now
        if not self._vanished:
            return
        aged = {peer: now if peer in self._ahead else time + away for peer, time in self._vanished.items()}
        self._vanished = {peer: time for peer, time in aged.items() if now - time <= self._vote_memory}
        if len(self._vanished) < len(aged):
            self._not_yet_seen &= self._vanished.keys()
            self._forgotten |= aged.keys() - self._vanished.keys()
            self._recount()

    @property
    def last_seen(self) -> dict[PeerId, float]:
        """When each member was last known to live."""
        return {**self._vanished, **dict.fromkeys(self.live, self._now)}

    @property
    def last_seen_with_forgotten(self) -> dict[PeerId, float]:
        """The same, with those that are forgotten, for a new electorate of this very round: it forgets them at once,
        and counts their votes as we did."""
        return {**dict.fromkeys(self._forgotten, self._now - 2 * self._vote_memory), **self.last_seen}

    def is_voter(self, peer: PeerId) -> bool:
        return peer in self.voters

    def is_quorum(self, peers: Iterable[PeerId]) -> bool:
        """More than half of the electors, or exactly half with the lowest peer id among them, as two such sets still
        meet; or all members."""
        present = self.voters.intersection(peers)
        surplus = 2 * len(present) - len(self.voters)
        if surplus > 0 or (present and surplus == 0 and min(self.voters) in present):
            return True
        return bool(self.members) and self.members <= present

    def next_forget_at(self) -> float | None:
        """When the next vote is forgotten."""
        return min((time + self._vote_memory for time in self._vanished.values()), default=None)
