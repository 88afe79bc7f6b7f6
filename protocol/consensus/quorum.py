"""The leader of each view, and the quorums that decide a round.

    rank(view, peer) = SHA-256(digest of the chain, view, peer) as a number; the live voter with the lowest rank leads.

Nobody knows the digest before the round before is decided, so nobody can choose a key that leads a later round.

Members may disagree for a while on the set of live members, so a view can have two leaders. Members follow the one with
the higher ballot: by view, and then by rank; `locks` says which proposals they may acknowledge then.
"""

import hashlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache

from protocol.consensus.events import MembershipChanged
from protocol.consensus.messages.signed import Digest
from protocol.electorate import Electorate
from protocol.identity import PeerId


@dataclass(frozen=True, order=True)
class Ballot:
    """The ballot of a leader in one view; a greater one outranks a smaller one. `precedence` is the negative rank."""

    view: int
    precedence: int


# Both caches serve one round at a time. With eight peers they fill in ten minutes, with 0.3 MB.
@lru_cache(maxsize=1024)
def leader_rank(base: Digest, view: int, peer: PeerId) -> int:
    """Return the rank of a peer in a view; the lowest one leads."""
    text = f"murmur leader {base.hex()} {view} {peer}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


@lru_cache(maxsize=64)
def lowest_ranked_peer(base: Digest, view: int, peers: frozenset[PeerId]) -> PeerId | None:
    """Return the peer with the lowest rank in a view."""
    return min(peers, key=lambda peer: leader_rank(base, view, peer), default=None)


@dataclass(frozen=True)
class Election:
    """The leaders of the round that continues the chain with the digest `base`."""

    base: Digest

    def ballot(self, view: int, peer: PeerId) -> Ballot:
        """Return the ballot of a leader."""
        return Ballot(view, -leader_rank(self.base, view, peer))

    def leader(self, view: int, peers: frozenset[PeerId]) -> PeerId | None:
        """Return the leader of a view among these peers."""
        return lowest_ranked_peer(self.base, view, peers)


@dataclass(frozen=True)
class VoteMemory:
    """How long the votes of absent members count, in seconds.

    `vote_memory`: that of a member which vanished. `max_gap`: the longest time between two calls of `advance` while
    this peer is not away.
    """

    vote_memory: float
    max_gap: float


class VoterSet:
    """The members and voters of one round, and the rule by which voters decide.

    A member takes part: it contributes, fetches and is heard. A voter is a member that the electorate entitles to vote;
    `Electorate.counted` says who counts if no such member is left.

    A member that vanishes without a goodbye keeps its vote for `vote_memory` seconds. Members notice such a loss at
    different times, and quorums overlap only if all members count them over nearly the same set. Time in which this
    peer itself was away (suspended, or between two rounds) does not count, because it says nothing about the others.

    After that time the member is forgotten. It may have voted before it died, together with members that still live. So
    no peer waits for it, but it remains one of the `voters` for as long again, and a quorum is `quorum_size` of the
    voters, or all voters that are members. Two quorums of the first kind overlap in an honest voter. All members
    overlap with every quorum that decided, unless all honest ones of that quorum have been gone for longer than
    `vote_memory`. A quorum of the voters is enough where it is left: so after a few deaths a straggler cannot hold up
    the round. Where all members are needed and one of them dies, it is forgotten in turn: so the round can always go
    on, because each member can get the blobs that any of them acknowledged, or can do without them. Where one of them
    is a liar that is alive and silent, the round goes on once the dead no longer count. In a list whose members trust
    one another there is none, and the dead count until the round ends.

    A member that most of the run misses (`missed`) is forgotten at once, where no liar is tolerated anyway: so the
    survivor of two goes on. Peers on the smaller side of a split wait for `vote_memory`, so a shorter one never makes
    two decisions.

    A member whose process has ended (`ended`) is on no side of a split. If too few are left for a quorum, it is
    forgotten at once, so that all members can decide; those that are silent are waited for, because they may live. Of
    a quorum that decided, one of them has to live, or what died with its voters might come back with them.

    A member that is known to be ahead is not forgotten: peers that were cut off for nearly `vote_memory` and meet the
    others again must not decide alone a round that the others have passed.
    """

    def __init__(
        self,
        electorate: Electorate,
        memory: VoteMemory,
        last_seen: Mapping[PeerId, float],
        now: float,
        awaits_standing: bool = False,
    ) -> None:
        self._awaits_standing = awaits_standing
        away = now - max(last_seen.values(), default=now)
        self.live: frozenset[PeerId] = frozenset()
        self._electorate = electorate
        self._resting: frozenset[PeerId] = frozenset()
        self._ahead: frozenset[PeerId] = frozenset()
        self._memory = memory
        self._now = now
        self._vanished = {peer: time + away for peer, time in last_seen.items()}
        # Members of the round before that have not appeared in this one yet: late rather than gone.
        self._not_yet_seen = set(last_seen)
        self._forgotten: dict[PeerId, float] = {}  # since when
        self._most_voters: frozenset[PeerId] = frozenset()
        self._recount()

    def _recount(self) -> None:
        self.members: frozenset[PeerId] = self.live.union(self._vanished) if self._vanished else self.live
        self.known = self.members.union(self._forgotten) if self._forgotten else self.members
        self.voters = self._electorate.counted(self.members, self.known)
        if len(self.voters) > len(self._most_voters):
            self._most_voters = self.voters
        self.voting_members = self.members & self.voters
        # The members that may lead.
        self.electable = self.live & self.voters or self.live
        # The members that may still contribute and that peers wait for.
        expected = self.live | self._not_yet_seen if self._not_yet_seen else self.live
        present = expected - self._resting if self._resting else expected
        is_regular = self._electorate.is_regular
        needed = self.voters
        if self._awaits_standing:  # where nobody has standing, all of them count
            needed = self.voters | (present & self._electorate.standing or present)
        self.awaited: frozenset[PeerId] = frozenset(peer for peer in present if peer in needed or is_regular(peer))

    def update(self, membership: MembershipChanged, now: float) -> None:
        """Take over a new set of live members."""
        live, departed, ahead = membership.peers, membership.departed, membership.ahead
        self._vanished.update(dict.fromkeys((self.live - live) | (self._forgotten.keys() & ahead), now))
        for peer in self._vanished.keys() & (live | departed):
            del self._vanished[peer]
        self.live = live
        self._resting = membership.resting | membership.set_aside
        self._ahead = ahead
        gone = live | departed | ahead
        self._not_yet_seen -= gone
        self._forgotten = {peer: since for peer, since in self._forgotten.items() if peer not in gone}
        if membership.missed and not self._electorate.tolerated_liars(len(self.voters)):
            self._forget(membership.missed & self._vanished.keys(), now)
        self._recount()
        if (ended := membership.ended & self._vanished.keys()) and self._must_do_without():
            self._forget(ended, now)
            self._recount()

    def _must_do_without(self) -> bool:
        """Return whether too few voters live for a quorum, but one of each quorum does."""
        count, living = len(self.voters), len(self.live & self.voters)
        quorum = self._electorate.quorum_size(count)
        return count - quorum < living < quorum

    def _forget(self, peers: Iterable[PeerId], now: float) -> None:
        for peer in peers:
            del self._vanished[peer]
            self._not_yet_seen.discard(peer)
            self._forgotten[peer] = now

    def advance(self, now: float) -> None:
        """Forget the members that vanished too long ago, and their votes as long after that."""
        away = max(0.0, now - self._now - self._memory.max_gap)
        self._now = now
        if not self._vanished and not self._forgotten:
            return
        limit = self._memory.vote_memory
        aged = {peer: now if peer in self._ahead else time + away for peer, time in self._vanished.items()}
        self._vanished = {peer: time for peer, time in aged.items() if now - time <= limit}
        forgotten = {peer: since + away for peer, since in self._forgotten.items()}
        forgotten |= dict.fromkeys(aged.keys() - self._vanished.keys(), now)
        if not self._electorate.rule.trusted:
            forgotten = {peer: since for peer, since in forgotten.items() if now - since <= limit}
        has_changed = len(self._vanished) < len(aged) or forgotten.keys() != self._forgotten.keys()
        self._forgotten = forgotten
        if has_changed:
            self._not_yet_seen &= self._vanished.keys()
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
        return {**dict.fromkeys(self._forgotten, self._now - 2 * self._memory.vote_memory), **self.last_seen}

    def is_known(self, peer: PeerId) -> bool:
        """Return whether a peer is a member, or was one in this round."""
        return peer in self.known

    def is_quorum(self, peers: Iterable[PeerId]) -> bool:
        """Return whether these peers can decide: they are enough of the voters, or all that are members."""
        present = self.voters.intersection(peers)
        if present and len(present) >= self._electorate.quorum_size(len(self.voters)):
            return True
        return bool(self.voting_members) and self.voting_members <= present

    @property
    def tolerated(self) -> int:
        """Return how many voters of the round may lie; while nobody has a vote yet, by the most members that it had."""
        return self._electorate.tolerated_liars(len(self.original))

    @property
    def original(self) -> frozenset[PeerId]:
        """Return all that had a vote when the round began, with those that are gone or excluded by now."""
        return self._electorate.voters or self._most_voters

    def was_quorum(self, peers: Set[PeerId]) -> bool:
        """Return whether these peers are a quorum, or were one of those that had a vote when the round began.

        Some of them may be excluded here by now. Their votes count all the same: a quorum allows for liars.
        """
        return self.is_quorum(peers) or self.is_full_quorum(peers)

    def is_full_quorum(self, peers: Set[PeerId]) -> bool:
        """Return whether these peers are a quorum of all that had a vote when the round began.

        A peer that excludes a liar by its own sums alone has a smaller quorum than the others.
        """
        original = self.original
        return len(original & peers) >= self._electorate.quorum_size(len(original))

    def may_be_unanimous(self, peers: Set[PeerId]) -> bool:
        """Return whether all voters that are not among these peers are alive."""
        return self._entitled - peers <= self.live

    def is_unanimous(self, peers: Set[PeerId]) -> bool:
        """Return whether these peers include all that have a vote, dead or alive."""
        return bool(self._entitled) and self._entitled <= peers

    @property
    def _entitled(self) -> frozenset[PeerId]:
        return self._electorate.voters or self.voters

    def is_decided(self, acknowledged: Set[PeerId], confirmed: Set[PeerId]) -> bool:
        """Return whether a proposal is decided that these peers acknowledged and confirmed; see `locks`."""
        if not self.tolerated:
            return self.is_quorum(acknowledged)
        return self.is_unanimous(acknowledged) or self.is_quorum(confirmed)

    def least_majority(self) -> int:
        """Return how many voters that are members decide."""
        return self._electorate.quorum_size(len(self.voting_members))

    def next_forget_at(self) -> float | None:
        """Return the time at which the next member, or the vote of one, will be forgotten."""
        times = [*self._vanished.values(), *(() if self._electorate.rule.trusted else self._forgotten.values())]
        return min((time + self._memory.vote_memory for time in times), default=None)
