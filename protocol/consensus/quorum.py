"""The leader of each view, and the majorities that decide a round.

    rank(view, peer) = SHA-256(run, round, view, peer) as a number; the live member with the lowest rank leads the view.

Members may disagree for a while on the set of live members, so a view can have two leaders. As in Paxos this is
harmless: ballots are totally ordered, by view and then by rank, and each has exactly one proposer.
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
    """The ballot of a leader in one view; a greater one outranks a smaller one. `precedence` is the negative rank."""

    view: int
    precedence: int


# Both caches serve one round at a time. With eight peers they fill in ten minutes, with 0.3 MB.
@lru_cache(maxsize=1024)
def leader_rank(run_id: RunId, number: int, view: int, peer: PeerId) -> int:
    """Return the rank of a peer in a view; the lowest one leads."""
    text = f"murmur leader {run_id} {number} {view} {peer}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


@lru_cache(maxsize=64)
def lowest_ranked_peer(run_id: RunId, number: int, view: int, peers: frozenset[PeerId]) -> PeerId | None:
    """Return the peer with the lowest rank in a view."""
    return min(peers, key=lambda peer: leader_rank(run_id, number, view, peer), default=None)


@dataclass(frozen=True)
class Election:
    """The leaders of one round."""

    run_id: RunId
    round: int

    def ballot(self, view: int, peer: PeerId) -> Ballot:
        """Return the ballot of a leader."""
        return Ballot(view, -leader_rank(self.run_id, self.round, view, peer))

    def leader(self, view: int, peers: frozenset[PeerId]) -> PeerId | None:
        """Return the leader of a view among these peers."""
        return lowest_ranked_peer(self.run_id, self.round, view, peers)


class VoterSet:
    """The members and voters of one round, and the majority rule.

    A member that vanishes without a goodbye keeps its vote for `vote_memory` seconds. Members notice such a loss at
    different times, and majorities overlap only if all members count them over nearly the same set. Time in which this
    peer itself was away (suspended, or between two rounds) does not count, because it says nothing about the others;
    `max_gap` is the longest time between two calls of `advance` while this peer is not away.

    After that time the member is forgotten. It may have voted before it died, together with members that still live. So
    no peer waits for it, but it remains one of the `voters` until the round ends, and a quorum is a majority of the
    voters, or all members. Two majorities overlap. All members overlap with every majority that decided, unless all of
    that majority have been gone for longer than `vote_memory`. A majority of the voters is enough where it is left: so
    after a few deaths a straggler cannot hold up the round. Where all members are needed and one of them dies, it is
    forgotten in turn: so the round can always go on, because each member can get the blobs that any of them
    acknowledged, or can do without them.

    A member that is known to be ahead is not forgotten: peers that were cut off for nearly `vote_memory` and meet the
    others again must not decide alone a round that the others have passed.
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
        # Members of the round before that have not appeared in this one yet: late rather than gone.
        self._not_yet_seen = set(last_seen)
        self._forgotten: set[PeerId] = set()
        self._recount()

    def _recount(self) -> None:
        self.members: frozenset[PeerId] = self.live.union(self._vanished) if self._vanished else self.live
        self.voters = self.members | self._forgotten if self._forgotten else self.members
        # The members that may still contribute.
        expected = self.live | self._not_yet_seen if self._not_yet_seen else self.live
        self.awaited: frozenset[PeerId] = expected - self._resting if self._resting else expected

    def update(self, membership: MembershipChanged, now: float) -> None:
        """Take over a new set of live members."""
        live, departed = membership.peers, membership.departed
        self._vanished.update(dict.fromkeys((self.live - live) | (self._forgotten & membership.ahead), now))
        for peer in self._vanished.keys() & (live | departed):
            del self._vanished[peer]
        self.live = live
        self._resting = membership.resting
        self._ahead = membership.ahead
        self._not_yet_seen -= live | departed | membership.ahead
        self._forgotten -= live | departed | membership.ahead
        self._recount()

    def advance(self, now: float) -> None:
        """Forget the members that vanished too long ago."""
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
        """Return the time at which each member was last known to be alive."""
        return {**self._vanished, **dict.fromkeys(self.live, self._now)}

    @property
    def last_seen_with_forgotten(self) -> dict[PeerId, float]:
        """Return the same with the forgotten members, for a new voter set of the same round.

        The new set forgets them at once, and counts them as voters.
        """
        return {**dict.fromkeys(self._forgotten, self._now - 2 * self._vote_memory), **self.last_seen}

    def is_voter(self, peer: PeerId) -> bool:
        """Return whether the vote of a peer counts."""
        return peer in self.voters

    def is_quorum(self, peers: Iterable[PeerId]) -> bool:
        """Return whether these peers can decide.

        They can if they are more than half of the voters, or exactly half with the lowest peer id among them (two such
        sets still overlap), or all members.
        """
        present = self.voters.intersection(peers)
        surplus = 2 * len(present) - len(self.voters)
        if surplus > 0 or (present and surplus == 0 and min(self.voters) in present):
            return True
        return bool(self.members) and self.members <= present

    def next_forget_at(self) -> float | None:
        """Return the time at which the next member will be forgotten."""
        return min((time + self._vote_memory for time in self._vanished.values()), default=None)
