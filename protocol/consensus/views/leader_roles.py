"""The leaders of each kind of exchange: when the members hold enough, and for a butterfly who sums each part."""

import math
from collections.abc import Collection, Iterable
from itertools import cycle

from protocol.consensus.knowledge import RoundKnowledge
from protocol.consensus.messages.contributions import blobs_of
from protocol.consensus.settings import RoundSettings
from protocol.consensus.topology import Contributions, ExchangeStatus, GatherTopology, draw_reducers
from protocol.consensus.views.leader import Assignment, Leader, Proposal
from protocol.consensus.views.quorum import Election, VoterSet
from protocol.consensus.views.view import View
from protocol.identity import PeerId

MAX_ATTEMPTS = 8


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
