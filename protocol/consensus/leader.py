"""The leader of a view: it selects the contributions, assigns the reducers and proposes a commit.

The rule that keeps two leaders from committing different things is that of Paxos and, where voters may lie, of `locks`.
A leader proposes only after a majority has joined its view. Where nobody may lie, an inventory of its roster is the
promise to acknowledge nothing older, and names the proposal that its sender acknowledged last; if a member that joined
acknowledged an older proposal, the leader proposes the same again, the one with the highest ballot. Elsewhere members
of a later view promise, and the leader shows the promises.

A peer acknowledges a proposal only when it holds everything that it needs to apply it: so a decided commit outlives
any minority. Acknowledgements go to the leader. Those of a majority decide, or where voters may lie those of all; if
not all come, the leader shows those of a majority, and a majority confirms. All this binds its senders, whether or not
anybody else knows of it: if the leader dies, the next one learns of it with the promises.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Set
from itertools import cycle
from typing import NamedTuple

from protocol.blobs.blob import Blob
from protocol.consensus.knowledge import RoundKnowledge
from protocol.consensus.locks import required_contents
from protocol.consensus.messages.contributions import Adoption, Commit, Evidence, blobs_of
from protocol.consensus.messages.kinds import Promise
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.quorum import Ballot, Election, VoterSet
from protocol.consensus.settings import RoundSettings
from protocol.consensus.topology import Contributions, ExchangeStatus, GatherTopology, draw_reducers
from protocol.consensus.view import View
from protocol.identity import PeerId

Assignment = tuple[Contributions, tuple[PeerId, ...]]  # contributions to sum, and the reducer of each part
MAX_ATTEMPTS = 8


class Proposal(NamedTuple):
    """The content of a proposed commit; see `Commit`. Without an adoption it adopts the revisions of its leader."""

    contributions: Contributions
    parts: tuple[Blob, ...]
    left_out: tuple[PeerId, ...] = ()
    adoption: Adoption | None = None
    evidence: Evidence | None = None

    def to_commit(self, number: int, view: int, base: Digest, own: Adoption) -> Commit:
        """Return the commit with this content; `own` are the revisions that its leader adopts."""
        adoption = own if self.adoption is None else self.adoption
        content = self.contributions, self.parts, self.left_out, adoption
        return Commit(number, view, base, *content, self.evidence)


class Leader(ABC):
    """The role of the leader in one view, from its roster to its proposal; owned by the round state of the leader."""

    def __init__(
        self, settings: RoundSettings, election: Election, voter_set: VoterSet, knowledge: RoundKnowledge, view: View
    ) -> None:
        self.silent_reducers: set[PeerId] = set()  # those that announced no sum for too long
        self.false_reducers: Set[PeerId] = frozenset()  # those that announced a wrong sum
        self.set_aside: Set[PeerId] = frozenset()  # those that failed to serve in earlier rounds
        self.unusable: Set[PeerId] = frozenset()  # those whose contribution this peer cannot get or decode
        self._settings = settings
        self._election = election
        self._voter_set = voter_set
        self._knowledge = knowledge
        self._view = view
        self._ready_since: float | None = None
        self._mostly_ready_since: float | None = None  # a majority holds more than half of the obtainable blobs
        self._present: frozenset[PeerId] = voter_set.live

    @property
    def _exchange_deadline(self) -> float:
        """Return the time from which the leader waits for no slow peer."""
        return self._view.started_at + self._settings.exchange_timeout

    def _update_present_peers(self, now: float) -> set[PeerId]:
        """Return the peers that joined this view; after a grace, count all others as absent."""
        joined = self.joined_peers()
        overdue = now >= self._view.started_at + self._settings.grace
        self._present = self._voter_set.live & joined if overdue else self._voter_set.live
        return joined

    def joined_peers(self) -> set[PeerId]:
        """Return the members that joined this view and may acknowledge its proposal, as far as this peer knows."""
        roster, me = self._view.roster.digest, self._knowledge.me
        return {me} | {
            peer
            for peer, inventory in self._knowledge.inventories.items()
            if inventory.roster == roster and self._is_known(peer, inventory.lock)
        }

    def _is_known(self, peer: PeerId, lock: Digest) -> bool:
        """Return whether this peer knows what binds a member, and that it is not bound by another proposal of the view.

        Where voters may lie, a member of a later view has to promise as well.
        """
        proposal, view = self._knowledge.proposals.get(lock), self._view.ballot.view
        if lock and proposal is None:
            return False
        if not self._voter_set.tolerated:
            return True
        if proposal is not None and proposal.body.view >= view:
            return proposal.sender == self._knowledge.me
        return not view or peer in self.promises()

    def promises(self) -> dict[PeerId, SignedMessage[Promise]]:
        """Return the promises to this view that name nothing which is unknown here, by ascending senders."""
        view, knowledge, roster = self._view.ballot.view, self._knowledge, self._view.roster.digest
        return {
            peer: promise
            for peer, promise in sorted(knowledge.promises.items())
            if promise.body.roster == roster and knowledge.knows_bounds(promise.body.bounds, view, self._voter_set)
        }

    def has_quorum(self) -> bool:
        """Return whether a majority has joined this view."""
        return self._voter_set.is_quorum(self.joined_peers())

    def locked_proposal(self) -> SignedMessage[Commit] | None:
        """Return the older proposal to repeat: one that the promises require, or the newest that binds a member."""
        known, voters = self._knowledge.proposals.values(), self._voter_set.voters
        older = [entry for entry in known if self._ballot(entry) < self._view.ballot]
        required = self._required_contents()
        if required is not None:
            chosen = [entry for entry in older if entry.body.content_digest in required]
        else:
            joined = self.joined_peers() & voters
            chosen = [entry for entry in older if self._binds(entry, joined)]
        return max(chosen, key=self._precedence, default=None)

    def _required_contents(self) -> Set[Digest] | None:
        if not self._voter_set.tolerated or not self._view.ballot.view:
            return None
        voters = self._voter_set.voters
        bounds = [promise.body.bounds for peer, promise in self.promises().items() if peer in voters]
        return required_contents(bounds, self._voter_set.tolerated)

    def _precedence(self, proposal: SignedMessage[Commit]) -> tuple[Ballot, int]:
        """Return the ballot of a proposal, and of how many voters this peer knows that they acknowledged it."""
        count = len(self._voter_set.voters & self._knowledge.acknowledgers(proposal.digest))
        return self._ballot(proposal), count

    def _binds(self, proposal: SignedMessage[Commit], joined: Set[PeerId]) -> bool:
        """Return whether this leader repeats a proposal that some of these voters may have acknowledged.

        Honest voters refuse one with a wrong sum for ever, so it is given up once it cannot have been decided.
        """
        bound, evidence = joined & self._knowledge.acknowledgers(proposal.digest), proposal.body.evidence
        if not bound or evidence is None or self.false_reducers.isdisjoint(evidence.peers):
            return bool(bound)
        if self._voter_set.tolerated:
            return False
        return self._voter_set.is_quorum(self._voter_set.voters - (joined - bound))

    def _ballot(self, proposal: SignedMessage[Commit]) -> Ballot:
        return self._election.ballot(proposal.body.view, proposal.sender)

    def has_nothing_to_propose(self) -> bool:
        """Return whether all contributions died with their owners and no member is bound to a proposal."""
        return self.has_quorum() and not self._obtainable_contributions() and self.locked_proposal() is None

    def _obtainable_contributions(self) -> Contributions:
        """Return the contributions on the roster that are neither lost nor unusable.

        If a third or more of them are unusable here, the fault may be with this peer.
        """
        senders, known = self._knowledge.obtainable_senders(self._present), self._knowledge.contributions
        listed = self._view.roster.body.contributions
        found = tuple(
            entry for entry in listed if entry.sender in senders and known[entry.sender].digest == entry.digest
        )
        usable = tuple(entry for entry in found if entry.sender not in self.unusable)
        return usable if 3 * (len(found) - len(usable)) < len(found) else found

    def next_proposal(self, now: float) -> Proposal | None:
        """Return a proposal once it is safe and worthwhile to make one."""
        joined = self._update_present_peers(now)
        if not self._voter_set.is_quorum(joined) or self._awaits_promises(now):
            return None
        locked = self.locked_proposal()
        if locked is None:
            return self._new_proposal(joined, now)
        body = locked.body
        return Proposal(body.contributions, body.parts, body.left_out, body.adoption, body.evidence)

    def _awaits_promises(self, now: float) -> bool:
        """Return whether promises may still come that convince the peers which exclude nobody."""
        if not self._voter_set.tolerated or not self._view.ballot.view:
            return False
        is_full, grace_ends = self._voter_set.is_full_quorum, self._view.started_at + self._settings.grace
        return now < grace_ends and is_full(self._present) and not is_full(self.promises().keys())

    @abstractmethod
    def _new_proposal(self, joined: set[PeerId], now: float) -> Proposal | None:
        """Return a proposal that repeats no older one, once the members hold what they need to apply it."""

    def next_assignment(self, now: float) -> Assignment | None:
        """Return the next assignment of reducers, if one is due."""
        return None

    def _straggler_deadline(self, joined: set[PeerId], contributions: Contributions, now: float) -> float:
        """Return the time from which the leader leaves out the few contributions that a majority still lacks.

        The links of their senders are so thin that they delay all other peers. The blobs that have arrived are kept for
        the next round. Where all links are equally slow, all contributions arrive at about the same time; so the leader
        waits a grace and as long again as it took until most had arrived.
        """
        if self._mostly_ready_since is None:
            if not self._is_mostly_ready(joined, contributions):
                return math.inf
            self._mostly_ready_since = now
        return self._mostly_ready_since + self._settings.grace + (self._mostly_ready_since - self._view.started_at)

    @abstractmethod
    def _is_mostly_ready(self, joined: set[PeerId], contributions: Contributions) -> bool:
        """Return whether most peers have more than half of the parts that they wait for."""

    def _is_ready(self, joined: set[PeerId], required_blobs: Mapping[PeerId, Set[Digest]], now: float) -> bool:
        """Return whether all voters that contributed hold their blobs, or a quorum does and the others had a grace."""
        nothing = frozenset[Digest]()
        ready = {peer for peer in joined if required_blobs.get(peer, nothing) <= self._knowledge.held_digests(peer)}
        if not self._voter_set.is_quorum(ready):
            self._ready_since = None
            return False
        if self._ready_since is None:
            self._ready_since = now
        awaited = self._present.intersection(self._view.contributors) & self._voter_set.voters
        return awaited <= ready or now >= self._ready_since + self._settings.grace

    def deadlines(self) -> list[float]:
        """Return the times at which the passing of time alone may change a decision of the leader."""
        grace, started_at = self._settings.grace, self._view.started_at
        ready = [] if self._ready_since is None else [self._ready_since + grace]
        mostly = [] if self._mostly_ready_since is None else [2 * self._mostly_ready_since - started_at + grace]
        return [started_at + grace, self._exchange_deadline, *ready, *mostly]


class GatherLeader(Leader):
    """The leader of an exchange in which peers apply contributions as they are."""

    def __init__(
        self,
        topology: GatherTopology,
        settings: RoundSettings,
        election: Election,
        voter_set: VoterSet,
        knowledge: RoundKnowledge,
        view: View,
    ) -> None:
        super().__init__(settings, election, voter_set, knowledge, view)
        self._topology = topology

    def _new_proposal(self, joined: set[PeerId], now: float) -> Proposal | None:
        contributions = self._obtainable_contributions()
        status = ExchangeStatus(self._view, contributions, joined, self._present, self._knowledge, self._voter_set)
        if contributions and self._is_ready(joined, self._topology.required_blobs(status), now):
            included = self._topology.ready_contributions(status)
        elif now >= min(self._exchange_deadline, self._straggler_deadline(joined, contributions, now)):
            included = self._topology.partial_contributions(status)
        else:
            return None
        if now < self._exchange_deadline and 2 * len(included) <= len(contributions):
            return None
        return Proposal(included, (), self._topology.left_out(self._view, included)) if included else None

    def _straggler_deadline(self, joined: set[PeerId], contributions: Contributions, now: float) -> float:
        if not self._topology.drops_stragglers:
            return math.inf
        return super()._straggler_deadline(joined, contributions, now)

    def _is_mostly_ready(self, joined: set[PeerId], contributions: Contributions) -> bool:
        blobs = frozenset(blob.digest for blob in blobs_of(contributions))
        return self._voter_set.is_quorum(
            peer for peer in joined if 2 * len(blobs & self._knowledge.held_digests(peer)) > len(blobs)
        )


class ReducingLeader(Leader):
    """The leader of an exchange in which reducers sum the parts of all contributions."""

    def _new_proposal(self, joined: set[PeerId], now: float) -> Proposal | None:
        parts = tuple(part.body.blob for part in self._view.reduced_parts())
        if len(parts) < self._settings.parts:
            return None
        digests = frozenset(part.digest for part in parts)
        if not self._is_ready(joined, dict.fromkeys(joined, digests), now):
            return None
        return Proposal(self._view.included, parts, evidence=self._view.evidence())

    def _is_mostly_ready(self, joined: set[PeerId], contributions: Contributions) -> bool:
        reducers = self._available_reducers().intersection(self._view.reducers)
        ready = {
            peer for peer in reducers if 2 * len(self._reducible_senders(peer, contributions)) > len(contributions)
        }
        return 2 * len(ready) > len(reducers)

    def next_assignment(self, now: float) -> Assignment | None:
        """Return the next assignment; none is due while the one that the roster implies works out."""
        joined, view = self._update_present_peers(now), self._view
        if view.reducing_since is not None:
            return self._replacement_assignment(now)
        if not self._voter_set.is_quorum(joined) or self.locked_proposal() is not None:
            return None
        contributions, available = self._obtainable_contributions(), self._available_reducers()
        if not contributions or not available:
            return None
        if view.attempt == 0 and not self.set_aside.isdisjoint(set(view.reducers) - available):
            return self._assign(contributions, available)
        reducers = available.intersection(view.reducers)  # the other peers have nothing to fetch
        if any(len(self._reducible_senders(reducer, contributions)) < len(contributions) for reducer in reducers):
            due = min(self._exchange_deadline, self._straggler_deadline(joined, contributions, now))
            return self._forced_assignment(contributions, available) if now >= due else None
        assignment = self._assign(contributions, available)
        if assignment != (view.included, view.reducers):
            return assignment
        view.reducing_since = now  # the reducers have begun without being asked
        return None

    def _available_reducers(self) -> set[PeerId]:
        """Return the peers that may reduce: alive, and neither silent nor wrong; other members if contributors lack."""
        contributors = self._present & set(self._view.contributors)
        unfit = self.silent_reducers | self.false_reducers
        members = contributors | (self._present & self.joined_peers())
        fit = contributors - unfit
        groups = fit - self.set_aside, fit, members - unfit, members - self.false_reducers
        return set(next((group for group in groups if len(group) >= self._copies), members))

    @property
    def _copies(self) -> int:
        return len(self._view.initial_reducers) // self._settings.parts

    def _assign(self, included: Contributions, available: set[PeerId]) -> Assignment:
        """Return an assignment to the available peers; so few that they cannot check one another sum less.

        A commit needs as many signatures of each sum as it includes contributions, up to the copies of this view. So
        the only survivor includes one contribution, its own if there is one.
        """
        if len(available) < min(self._copies, len(included)):
            ranking = sorted(included, key=lambda entry: entry.sender not in available)
            kept = {entry.sender for entry in ranking[: len(available)]}
            included = tuple(entry for entry in included if entry.sender in kept)
        return included, self._reassign_parts(available)

    def _reassign_parts(self, available: set[PeerId]) -> tuple[PeerId, ...]:
        """Return the reducers of each part; available peers take the places of all others in turn."""
        view, copies = self._view, min(self._copies, len(available))
        heirs = cycle(draw_reducers(view.roster.digest, tuple(sorted(available)), len(available), 1))
        by_part = list[list[PeerId]]()
        for part in range(self._settings.parts):
            kept = [reducer for reducer in view.reducers_of(part) if reducer in available][:copies]
            while len(kept) < copies:
                kept += [heir for heir in [next(heirs)] if heir not in kept]
            by_part.append(kept)
        return tuple(reducers[copy] for copy in range(copies) for reducers in by_part)

    def _reducible_senders(self, reducer: PeerId, contributions: Contributions) -> set[PeerId]:
        """Return the senders of the contributions of which a reducer holds every part that it is to sum."""
        own_parts = self._view.parts_reduced_by(reducer)
        has_all_parts = self._knowledge.has_all_parts
        return {
            entry.sender
            for entry in contributions
            if has_all_parts(reducer, [entry.body.part_blobs[part] for part in own_parts])
        }

    def _forced_assignment(self, contributions: Contributions, available: set[PeerId]) -> Assignment | None:
        """Drop the reducers that hold less than half, then the contributions that any other reducer lacks.

        Members follow no assignment with fewer reducers, so the best of those that hold less fill the gaps.
        """
        ready = {reducer: self._reducible_senders(reducer, contributions) for reducer in available}
        ranking = sorted(available, key=lambda reducer: (-len(ready[reducer]), reducer))
        kept = [reducer for reducer in ranking if 2 * len(ready[reducer]) >= len(contributions)]
        if not kept:
            return None
        shared = set.intersection(*(ready[reducer] for reducer in kept))
        included = tuple(contribution for contribution in contributions if contribution.sender in shared)
        return self._assign(included, {*kept, *ranking[: self._copies]}) if included else None

    def _replacement_assignment(self, now: float) -> Assignment | None:
        """Replace dead and silent reducers, and drop contributions that nobody can give out any more."""
        view = self._view
        if view.attempt + 1 >= MAX_ATTEMPTS:
            return None
        missing = {part for part in range(self._settings.parts) if not self._is_reduced(part)}
        self._mark_silent_reducers(missing, now)
        available = self._available_reducers()
        orphaned = {part for part in range(self._settings.parts) if not available.issuperset(view.reducers_of(part))}
        included = self._still_obtainable(self._view.included, missing | orphaned if missing & orphaned else missing)
        if not available or not included or (not missing & orphaned and included == self._view.included):
            return None
        if included != self._view.included:  # then every part is summed again
            included = self._still_obtainable(included, range(self._settings.parts))
        return self._assign(included, available) if included else None

    def _is_reduced(self, part: int) -> bool:
        """Return whether all reducers of a part agree, and a peer other than one of them can give it out.

        The word of a single peer does not count: it may announce a sum that it never serves.
        """
        reduced, live, knowledge = self._view.reduced_part(part), self._present, self._knowledge
        if reduced is None:
            return False
        reducers, blob = self._view.reducers_of(part), reduced.body.blob
        if knowledge.has_local_blob(blob) or len(live.intersection(reducers)) > 1:
            return True
        holders = knowledge.holders(blob.digest, live)
        return bool(holders) and (len(reducers) == 1 or set(holders) != {reducers[0]})

    def _mark_silent_reducers(self, missing: Iterable[int], now: float) -> None:
        if now < self.reducer_deadline:
            return
        view = self._view
        for part in missing:
            announced = {message.sender for message in view.announcements_of(part)}
            silent = set(view.reducers_of(part)) - announced
            # If all have announced the part and still nobody can give it out, each of them may withhold it.
            disputed = len({message.body.blob for message in view.announcements_of(part)}) > 1
            self.silent_reducers |= silent or (set() if disputed else announced)

    @property
    def reducer_deadline(self) -> float:
        """Return the time at which silent reducers are replaced.

        It doubles with each attempt, because a new reducer has to fetch the parts before it can sum them.
        """
        if self._view.reducing_since is None:
            return math.inf
        return self._view.reducing_since + self._settings.grace * float(2**self._view.attempt)

    def _still_obtainable(self, contributions: Contributions, parts: Collection[int]) -> Contributions:
        return tuple(entry for entry in contributions if self._knowledge.is_obtainable(entry, parts, self._present))

    def deadlines(self) -> list[float]:
        """Return the deadlines of every leader, and that of the reducers."""
        return [*super().deadlines(), self.reducer_deadline]


def new_leader(
    settings: RoundSettings, election: Election, voter_set: VoterSet, knowledge: RoundKnowledge, view: View
) -> Leader:
    """Return the role that fits the topology of the round."""
    if isinstance(settings.topology, GatherTopology):
        return GatherLeader(settings.topology, settings, election, voter_set, knowledge, view)
    return ReducingLeader(settings, election, voter_set, knowledge, view)
