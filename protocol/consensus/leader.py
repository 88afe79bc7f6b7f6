"""What the leader of a view decides: which contributions go in, who reduces, and what is proposed for commit.

The rule that keeps two leaders from committing different things is that of Paxos: a leader proposes only once a
majority has joined its view (a holding of its roster is that promise: whoever gives it acknowledges nothing older, and
says in it which proposal it acknowledged last), and if any of them acknowledged an older proposal, it proposes the same
again, the one of the highest ballot. So nothing that may have been decided is ever replaced. A proposal is decided when
a majority acknowledges it, which each does only when it holds all that it needs to apply it: what is decided outlives
any minority. Acknowledgements go to the leader alone, who shows a majority of them to all. They bind their senders
whoever knows of them, so it does not matter to safety whom they reach: should the leader die over them, the next one
hears of them with the promises. In groups each member needs, and holds, only what its own group contributed, which is
included when all of its group that joined the view hold it.
"""

import math
from collections.abc import Collection, Iterable, Mapping

from protocol.blobs.blob import Blob
from protocol.consensus.events import RoundSettings
from protocol.consensus.knowledge import RoundKnowledge
from protocol.consensus.messages import Commit, Contribution, Digest, SignedMessage
from protocol.consensus.quorum import Ballot, Election, VoterSet
from protocol.consensus.topology import groups_by_peer
from protocol.consensus.view import View, blobs_of, reassign_reducers
from protocol.identity import PeerId

MAX_ATTEMPTS = 8
Contributions = tuple[SignedMessage[Contribution], ...]
Proposal = tuple[Contributions, tuple[Blob, ...], tuple[PeerId, ...]]  # the last: who is left out of groups
Assignment = tuple[Contributions, tuple[PeerId, ...]]  # what is included, and the reducer of each part


class Leader:
    def __init__(
        self, settings: RoundSettings, election: Election, voter_set: VoterSet, knowledge: RoundKnowledge, view: View
    ) -> None:
        self.silent_reducers: set[PeerId] = set()  # reducers that were silent for too long
        self._settings = settings
        self._election = election
        self._voter_set = voter_set
        self._knowledge = knowledge
        self._view = view
        self._ready_since: float | None = None
        self._mostly_ready_since: float | None = None  # a majority holds more than half of what is to be had
        self._present: frozenset[PeerId] = voter_set.live

    @property
    def _exchange_deadline(self) -> float:
        """From here on whoever is slow is waited for no more."""
        return self._view.started_at + self._settings.exchange_timeout

    def _update_present_peers(self, now: float) -> set[PeerId]:
        """Who joined this view; those who do not within a grace count as absent, whatever their records say."""
        promised = self.joined_peers()
        overdue = now >= self._view.started_at + self._settings.grace
        self._present = self._voter_set.live & promised if overdue else self._voter_set.live
        return promised

    def joined_peers(self) -> set[PeerId]:
        """Members that joined this view, and of which we know the proposal that they acknowledged last."""
        return {self._knowledge.me} | {
            peer
            for peer, holding in self._knowledge.inventories.items()
            if holding.roster == self._view.roster.digest
            and (not holding.lock or holding.lock in self._knowledge.proposals)
        }

    def has_quorum(self) -> bool:
        """Whether a majority has joined this view."""
        return self._voter_set.is_quorum(self.joined_peers())

    def locked_proposal(self) -> SignedMessage[Commit] | None:
        """The proposal of the highest ballot before this one that any member of this view acknowledged."""
        promised = self.joined_peers()
        return max(
            (
                proposal
                for digest, proposal in self._knowledge.proposals.items()
                if self._ballot(proposal) < self._view.ballot and promised & self._knowledge.acknowledgers(digest)
            ),
            key=self._ballot,
            default=None,
        )

    def _ballot(self, proposal: SignedMessage[Commit]) -> Ballot:
        return self._election.ballot(proposal.body.view, proposal.sender)

    def has_nothing_to_propose(self) -> bool:
        """All that the roster lists died with its owners, and no member is bound to any proposal."""
        joined = self._voter_set.is_quorum(self.joined_peers())
        return joined and not self._obtainable_contributions() and self.locked_proposal() is None

    def _obtainable_contributions(self) -> Contributions:
        """Of the roster, what is not lost."""
        whole, known = self._knowledge.obtainable_senders(self._present), self._knowledge.contributions
        listed = self._view.roster.body.contributions
        return tuple(e for e in listed if e.sender in whole and known[e.sender].digest == e.digest)

    def next_proposal(self, now: float) -> Proposal | None:
        """Contributions and reduced parts, once it is safe and worth while to propose them."""
        promised = self._update_present_peers(now)
        if not self._voter_set.is_quorum(promised):
            return None
        locked = self.locked_proposal()
        if locked is not None:
            return locked.body.contributions, locked.body.parts, locked.body.left_out
        if self._settings.exchange == "butterfly":
            return self._butterfly_proposal(promised, now)
        return self._gather_proposal(promised, now)

    def _gather_proposal(self, joined: set[PeerId], now: float) -> Proposal | None:
        wanted = self._obtainable_contributions()
        if wanted and self._is_ready(joined, self._required_blobs(wanted), now):
            common = self._held_by_groups(joined, wanted)
        elif now >= min(self._exchange_deadline, self._straggler_deadline(joined, wanted, now)):
            common = self._commonly_held(joined, wanted)
        else:
            return None
        if now < self._exchange_deadline and 2 * len(common) <= len(wanted):
            return None
        return (common, (), self._left_out_peers(common)) if common else None

    def _straggler_deadline(self, joined: set[PeerId], contributions: Contributions, now: float) -> float:
        """From here on the few messages that a majority still lacks are left out: their senders' links are so thin that
        they hold up all others. What has come of them stays, and joins the next round. Where all links are slow alike,
        all messages come at about the same time, and are waited for as long again."""
        if self._settings.exchange == "groups":  # a group waits for itself alone
            return math.inf
        if self._mostly_ready_since is None:
            if not self._is_mostly_ready(joined, contributions):
                return math.inf
            self._mostly_ready_since = now
        return self._mostly_ready_since + self._settings.grace + (self._mostly_ready_since - self._view.started_at)

    def _is_mostly_ready(self, joined: set[PeerId], contributions: Contributions) -> bool:
        """Whether most have more than half of what they wait for."""
        if self._settings.exchange == "butterfly":
            appointed = self._available_reducers().intersection(self._view.reducers)
            ahead = {
                reducer
                for reducer in appointed
                if 2 * len(self._reducible_senders(reducer, contributions)) > len(contributions)
            }
            return 2 * len(ahead) > len(appointed)
        blobs = frozenset(blob.digest for blob in blobs_of(contributions))
        return self._voter_set.is_quorum(
            peer for peer in joined if 2 * len(blobs & self._knowledge.held_digests(peer)) > len(blobs)
        )

    def _butterfly_proposal(self, joined: set[PeerId], now: float) -> Proposal | None:
        parts = tuple(part.body.blob for part in self._view.reduced_parts())
        if len(parts) < self._settings.parts:
            return None
        digests = frozenset(part.digest for part in parts)
        if not self._is_ready(joined, dict.fromkeys(joined, digests), now):
            return None
        return self._view.included, parts, ()

    def _required_blobs(self, contributions: Contributions) -> dict[PeerId, frozenset[Digest]]:
        """By contributor, what it takes to apply its share of these; whoever did not contribute needs all or none."""
        everything = frozenset(blob.digest for blob in blobs_of(contributions))
        if self._settings.exchange != "groups":
            return dict.fromkeys(self._voter_set.members, everything)
        blobs = {entry.sender: frozenset(blob.digest for blob in entry.body.parts) for entry in contributions}
        return {
            peer: frozenset().union(*(blobs.get(mate, ()) for mate in group)) for peer, group in self._groups.items()
        }

    @property
    def _groups(self) -> Mapping[PeerId, frozenset[PeerId]]:
        return groups_by_peer(self._settings, self._view.roster.body.round, self._view.contributors)

    def _is_ready(self, joined: set[PeerId], required_blobs: Mapping[PeerId, frozenset[Digest]], now: float) -> bool:
        """Whether all contributors hold what they need, or a majority does and the others have had their grace."""
        nothing = frozenset[Digest]()
        stocked = {peer for peer in joined if required_blobs.get(peer, nothing) <= self._knowledge.held_digests(peer)}
        if not self._voter_set.is_quorum(stocked):
            self._ready_since = None
            return False
        if self._ready_since is None:
            self._ready_since = now
        awaited = self._present.intersection(self._view.contributors)
        return awaited <= stocked or now >= self._ready_since + self._settings.grace

    def _commonly_held(self, joined: set[PeerId], contributions: Contributions) -> Contributions:
        """What the best stocked majority holds in common; of groups, what each of them can apply."""
        if self._settings.exchange == "groups":
            return self._held_by_groups(joined, contributions)
        holds_all = self._knowledge.has_all_parts
        stock = {peer: {e.sender for e in contributions if holds_all(peer, e.body.part_blobs)} for peer in joined}
        ranking = sorted(joined, key=lambda peer: (-len(stock[peer]), peer))
        size = next(size for size in range(1, len(ranking) + 1) if self._voter_set.is_quorum(ranking[:size]))
        shared = set.intersection(*(stock[peer] for peer in ranking[:size]))
        return tuple(contribution for contribution in contributions if contribution.sender in shared)

    def _held_by_groups(self, joined: set[PeerId], contributions: Contributions) -> Contributions:
        """Of groups, the contributions that all of their group hold who live and joined this view: at least one."""
        if self._settings.exchange != "groups":
            return contributions
        present = joined & self._present
        return tuple(entry for entry in contributions if self._is_held(entry, self._groups[entry.sender] & present))

    def _is_held(self, entry: SignedMessage[Contribution], group: Collection[PeerId]) -> bool:
        return bool(group) and all(self._knowledge.has_all_parts(peer, entry.body.part_blobs) for peer in group)

    def _left_out_peers(self, included: Contributions) -> tuple[PeerId, ...]:
        if self._settings.exchange != "groups":
            return ()
        senders = {entry.sender for entry in included}
        return tuple(peer for peer in self._view.contributors if peer not in senders)

    def next_assignment(self, now: float) -> Assignment | None:
        """The next inclusion of a butterfly, if one is due: none, where all goes as the roster has it."""
        promised, view = self._update_present_peers(now), self._view
        if view.reducing_since is not None:
            return self._replacement_assignment(now)
        if not self._voter_set.is_quorum(promised) or self.locked_proposal() is not None:
            return None
        wanted, able = self._obtainable_contributions(), self._available_reducers()
        if not wanted or not able:
            return None
        appointed = able.intersection(view.reducers)  # the others have nothing to fetch
        if any(len(self._reducible_senders(reducer, wanted)) < len(wanted) for reducer in appointed):
            due = min(self._exchange_deadline, self._straggler_deadline(promised, wanted, now))
            return self._forced_assignment(wanted, able) if now >= due else None
        reducers = self._reassign_parts(able)
        if (wanted, reducers) != (view.included, view.reducers):
            return wanted, reducers
        view.reducing_since = now  # they have begun by themselves
        return None

    def _available_reducers(self) -> set[PeerId]:
        """Contributors that may reduce: alive, and not known to be silent while there are others."""
        alive = self._present & set(self._view.contributors)
        return set(alive - self.silent_reducers) or set(alive)

    def _reassign_parts(self, available: set[PeerId]) -> tuple[PeerId, ...]:
        return reassign_reducers(self._view.roster.digest, self._view.reducers, available)

    def _reducible_senders(self, reducer: PeerId, contributions: Contributions) -> set[PeerId]:
        """The contributions of which a reducer holds every part that it is to sum."""
        mine = [part for part, name in enumerate(self._view.reducers) if name == reducer]
        holds_all = self._knowledge.has_all_parts
        return {e.sender for e in contributions if holds_all(reducer, [e.body.part_blobs[part] for part in mine])}

    def _forced_assignment(self, contributions: Contributions, available: set[PeerId]) -> Assignment | None:
        """Without the reducers that hold less than half, then without what any of the others lacks."""
        ready = {reducer: self._reducible_senders(reducer, contributions) for reducer in available}
        kept = {reducer for reducer, senders in ready.items() if 2 * len(senders) >= len(contributions)}
        if not kept:
            return None
        shared = set.intersection(*(ready[reducer] for reducer in kept))
        included = tuple(contribution for contribution in contributions if contribution.sender in shared)
        return (included, self._reassign_parts(kept)) if included else None

    def _replacement_assignment(self, now: float) -> Assignment | None:
        """Other reducers for parts whose reducer died or keeps silent, without what nobody can give out any more."""
        if self._view.attempt + 1 >= MAX_ATTEMPTS:
            return None
        missing = {part for part in range(self._settings.parts) if not self._is_reduced(part)}
        self._mark_silent_reducers(missing, now)
        able = self._available_reducers()
        orphaned = {part for part, reducer in enumerate(self._view.reducers) if reducer not in able}
        included = self._still_obtainable(self._view.included, missing | orphaned if missing & orphaned else missing)
        if not able or not included or (not missing & orphaned and included == self._view.included):
            return None
        if included != self._view.included:  # then every part is summed anew
            included = self._still_obtainable(included, range(self._settings.parts))
        return (included, self._reassign_parts(able)) if included else None

    def _is_reduced(self, part_number: int) -> bool:
        part, live = self._view.reduced_part(part_number), self._present
        if part is None:
            return False
        blob, evidence = part.body.blob, self._knowledge
        return part.sender in live or evidence.has_local_blob(blob) or bool(evidence.holders(blob.digest, live))

    def _mark_silent_reducers(self, missing: Iterable[int], now: float) -> None:
        """The time given doubles with each attempt: an heir has to fetch before it can sum."""
        if now >= self.reducer_deadline:
            self.silent_reducers |= {
                self._view.reducers[part] for part in missing if self._view.reduced_part(part) is None
            }

    @property
    def reducer_deadline(self) -> float:
        """When reducers that have not answered are given up."""
        if self._view.reducing_since is None:
            return math.inf
        return self._view.reducing_since + self._settings.grace * float(2**self._view.attempt)

    def _still_obtainable(self, contributions: Contributions, parts: Collection[int]) -> Contributions:
        return tuple(entry for entry in contributions if self._knowledge.is_obtainable(entry, parts, self._present))

    def deadlines(self) -> list[float]:
        grace = self._settings.grace
        stocked = [] if self._ready_since is None else [self._ready_since + grace]
        mostly = (
            [] if self._mostly_ready_since is None else [2 * self._mostly_ready_since - self._view.started_at + grace]
        )
        return [self._view.started_at + grace, self._exchange_deadline, self.reducer_deadline, *stocked, *mostly]
