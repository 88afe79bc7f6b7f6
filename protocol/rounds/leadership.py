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
from protocol.identity import PeerId
from protocol.rounds.election import Ballot, Election, Electorate
from protocol.rounds.events import RoundSettings
from protocol.rounds.evidence import Evidence
from protocol.rounds.grouping import drawn
from protocol.rounds.statements import Commit, Contribution, Digest, Statement
from protocol.rounds.view import View, blobs_of, reassign_reducers

MAX_ATTEMPTS = 8
Contributions = tuple[Statement[Contribution], ...]
Proposal = tuple[Contributions, tuple[Blob, ...], tuple[PeerId, ...]]  # the last: who is left out of groups
Appointment = tuple[Contributions, tuple[PeerId, ...]]  # what is included, and the reducer of each part


class Leadership:
    def __init__(
        self, settings: RoundSettings, election: Election, electorate: Electorate, evidence: Evidence, view: View
    ) -> None:
        self.suspects: set[PeerId] = set()  # reducers that were silent for too long
        self._settings = settings
        self._election = election
        self._electorate = electorate
        self._evidence = evidence
        self._view = view
        self._stocked_since: float | None = None
        self._mostly_since: float | None = None  # a majority holds more than half of what is to be had
        self._present: frozenset[PeerId] = electorate.live

    @property
    def _forced_at(self) -> float:
        """From here on whoever is slow is waited for no more."""
        return self._view.since + self._settings.exchange_timeout

    def _watch(self, now: float) -> set[PeerId]:
        """Who joined this view; those who do not within a grace count as absent, whatever their records say."""
        promised = self.promised()
        overdue = now >= self._view.since + self._settings.grace
        self._present = self._electorate.live & promised if overdue else self._electorate.live
        return promised

    def promised(self) -> set[PeerId]:
        """Members that joined this view, and of which we know the proposal that they acknowledged last."""
        return {self._evidence.me} | {
            peer
            for peer, holding in self._evidence.holdings.items()
            if holding.roster == self._view.roster.digest
            and (not holding.lock or holding.lock in self._evidence.proposals)
        }

    def is_joined(self) -> bool:
        """Whether a majority has joined this view."""
        return self._electorate.is_quorum(self.promised())

    def locked(self) -> Statement[Commit] | None:
        """The proposal of the highest ballot before this one that any member of this view acknowledged."""
        promised = self.promised()
        return max(
            (
                proposal
                for digest, proposal in self._evidence.proposals.items()
                if self._ballot(proposal) < self._view.ballot and promised & self._evidence.bound_to(digest)
            ),
            key=self._ballot,
            default=None,
        )

    def _ballot(self, proposal: Statement[Commit]) -> Ballot:
        return self._election.ballot(proposal.body.view, proposal.sender)

    def is_hopeless(self) -> bool:
        """All that the roster lists died with its owners, and no member is bound to any proposal."""
        joined = self._electorate.is_quorum(self.promised())
        return joined and not self._obtainable() and self.locked() is None

    def _obtainable(self) -> Contributions:
        """Of the roster, what is not lost."""
        whole, known = self._evidence.obtainable(self._present), self._evidence.contributions
        listed = self._view.roster.body.contributions
        return tuple(e for e in listed if e.sender in whole and known[e.sender].digest == e.digest)

    def proposal(self, now: float) -> Proposal | None:
        """Contributions and reduced parts, once it is safe and worth while to propose them."""
        promised = self._watch(now)
        if not self._electorate.is_quorum(promised):
            return None
        locked = self.locked()
        if locked is not None:
            return locked.body.contributions, locked.body.parts, locked.body.left_out
        if self._settings.exchange == "butterfly":
            return self._reduced(promised, now)
        return self._gathered(promised, now)

    def _gathered(self, promised: set[PeerId], now: float) -> Proposal | None:
        wanted = self._obtainable()
        if wanted and self._is_stocked(promised, self._needs(wanted), now):
            common = self._held_by_groups(promised, wanted)
        elif now >= min(self._forced_at, self._straggling_at(promised, wanted, now)):
            common = self._common(promised, wanted)
        else:
            return None
        if now < self._forced_at and 2 * len(common) <= len(wanted):
            return None
        return (common, (), self._left_out(common)) if common else None

    def _straggling_at(self, promised: set[PeerId], wanted: Contributions, now: float) -> float:
        """From here on the few messages that a majority still lacks are left out: their senders' links are so thin that
        they hold up all others. What has come of them stays, and joins the next round. Where all links are slow alike,
        all messages come at about the same time, and are waited for as long again."""
        if self._settings.exchange == "groups":  # a group waits for itself alone
            return math.inf
        if self._mostly_since is None:
            if not self._is_mostly_there(promised, wanted):
                return math.inf
            self._mostly_since = now
        return self._mostly_since + self._settings.grace + (self._mostly_since - self._view.since)

    def _is_mostly_there(self, promised: set[PeerId], wanted: Contributions) -> bool:
        """Whether most have more than half of what they wait for."""
        if self._settings.exchange == "butterfly":
            appointed = self._able().intersection(self._view.reducers)
            ahead = {reducer for reducer in appointed if 2 * len(self._ready(reducer, wanted)) > len(wanted)}
            return 2 * len(ahead) > len(appointed)
        blobs = frozenset(blob.digest for blob in blobs_of(wanted))
        return self._electorate.is_quorum(
            peer for peer in promised if 2 * len(blobs & self._evidence.stock(peer)) > len(blobs)
        )

    def _reduced(self, promised: set[PeerId], now: float) -> Proposal | None:
        parts = tuple(part.body.blob for part in self._view.parts())
        if len(parts) < self._settings.parts:
            return None
        digests = frozenset(part.digest for part in parts)
        if not self._is_stocked(promised, dict.fromkeys(promised, digests), now):
            return None
        return self._view.included, parts, ()

    def _needs(self, wanted: Contributions) -> dict[PeerId, frozenset[Digest]]:
        """By contributor, what it takes to apply its share of these; whoever did not contribute needs all or none."""
        everything = frozenset(blob.digest for blob in blobs_of(wanted))
        if self._settings.exchange != "groups":
            return dict.fromkeys(self._electorate.members, everything)
        blobs = {entry.sender: frozenset(blob.digest for blob in entry.body.parts) for entry in wanted}
        return {
            peer: frozenset().union(*(blobs.get(mate, ()) for mate in group)) for peer, group in self._groups.items()
        }

    @property
    def _groups(self) -> Mapping[PeerId, frozenset[PeerId]]:
        return drawn(self._settings, self._view.roster.body.round, self._view.contributors)

    def _is_stocked(self, promised: set[PeerId], needs: Mapping[PeerId, frozenset[Digest]], now: float) -> bool:
        """Whether all contributors hold what they need, or a majority does and the others have had their grace."""
        nothing = frozenset[Digest]()
        stocked = {peer for peer in promised if needs.get(peer, nothing) <= self._evidence.stock(peer)}
        if not self._electorate.is_quorum(stocked):
            self._stocked_since = None
            return False
        if self._stocked_since is None:
            self._stocked_since = now
        awaited = self._present.intersection(self._view.contributors)
        return awaited <= stocked or now >= self._stocked_since + self._settings.grace

    def _common(self, promised: set[PeerId], wanted: Contributions) -> Contributions:
        """What the best stocked majority holds in common; of groups, what each of them can apply."""
        if self._settings.exchange == "groups":
            return self._held_by_groups(promised, wanted)
        holds_all = self._evidence.holds_all
        stock = {peer: {e.sender for e in wanted if holds_all(peer, e.body.portions)} for peer in promised}
        ranking = sorted(promised, key=lambda peer: (-len(stock[peer]), peer))
        size = next(size for size in range(1, len(ranking) + 1) if self._electorate.is_quorum(ranking[:size]))
        shared = set.intersection(*(stock[peer] for peer in ranking[:size]))
        return tuple(contribution for contribution in wanted if contribution.sender in shared)

    def _held_by_groups(self, promised: set[PeerId], wanted: Contributions) -> Contributions:
        """Of groups, the contributions that all of their group hold who live and joined this view: at least one."""
        if self._settings.exchange != "groups":
            return wanted
        present = promised & self._present
        return tuple(entry for entry in wanted if self._is_held(entry, self._groups[entry.sender] & present))

    def _is_held(self, entry: Statement[Contribution], group: Collection[PeerId]) -> bool:
        return bool(group) and all(self._evidence.holds_all(peer, entry.body.portions) for peer in group)

    def _left_out(self, included: Contributions) -> tuple[PeerId, ...]:
        if self._settings.exchange != "groups":
            return ()
        senders = {entry.sender for entry in included}
        return tuple(peer for peer in self._view.contributors if peer not in senders)

    def appointment(self, now: float) -> Appointment | None:
        """The next inclusion of a butterfly, if one is due: none, where all goes as the roster has it."""
        promised, view = self._watch(now), self._view
        if view.included_at is not None:
            return self._replacement(now)
        if not self._electorate.is_quorum(promised) or self.locked() is not None:
            return None
        wanted, able = self._obtainable(), self._able()
        if not wanted or not able:
            return None
        appointed = able.intersection(view.reducers)  # the others have nothing to fetch
        if any(len(self._ready(reducer, wanted)) < len(wanted) for reducer in appointed):
            due = min(self._forced_at, self._straggling_at(promised, wanted, now))
            return self._forced(wanted, able) if now >= due else None
        reducers = self._reassigned(able)
        if (wanted, reducers) != (view.included, view.reducers):
            return wanted, reducers
        view.included_at = now  # they have begun by themselves
        return None

    def _able(self) -> set[PeerId]:
        """Contributors that may reduce: alive, and not known to be silent while there are others."""
        alive = self._present & set(self._view.contributors)
        return set(alive - self.suspects) or set(alive)

    def _reassigned(self, able: set[PeerId]) -> tuple[PeerId, ...]:
        return reassign_reducers(self._view.roster.digest, self._view.reducers, able)

    def _ready(self, reducer: PeerId, wanted: Contributions) -> set[PeerId]:
        """The contributions of which a reducer holds every part that it is to sum."""
        mine = [part for part, name in enumerate(self._view.reducers) if name == reducer]
        holds_all = self._evidence.holds_all
        return {e.sender for e in wanted if holds_all(reducer, [e.body.portions[part] for part in mine])}

    def _forced(self, wanted: Contributions, able: set[PeerId]) -> Appointment | None:
        """Without the reducers that hold less than half, then without what any of the others lacks."""
        ready = {reducer: self._ready(reducer, wanted) for reducer in able}
        kept = {reducer for reducer, senders in ready.items() if 2 * len(senders) >= len(wanted)}
        if not kept:
            return None
        shared = set.intersection(*(ready[reducer] for reducer in kept))
        included = tuple(contribution for contribution in wanted if contribution.sender in shared)
        return (included, self._reassigned(kept)) if included else None

    def _replacement(self, now: float) -> Appointment | None:
        """Other reducers for parts whose reducer died or keeps silent, without what nobody can give out any more."""
        if self._view.attempt + 1 >= MAX_ATTEMPTS:
            return None
        missing = {part for part in range(self._settings.parts) if not self._is_reduced(part)}
        self._suspect(missing, now)
        able = self._able()
        orphaned = {part for part, reducer in enumerate(self._view.reducers) if reducer not in able}
        included = self._still_whole(self._view.included, missing | orphaned if missing & orphaned else missing)
        if not able or not included or (not missing & orphaned and included == self._view.included):
            return None
        if included != self._view.included:  # then every part is summed anew
            included = self._still_whole(included, range(self._settings.parts))
        return (included, self._reassigned(able)) if included else None

    def _is_reduced(self, number: int) -> bool:
        part, live = self._view.part(number), self._present
        if part is None:
            return False
        blob, evidence = part.body.blob, self._evidence
        return part.sender in live or evidence.is_here(blob) or bool(evidence.holders(blob.digest, live))

    def _suspect(self, missing: Iterable[int], now: float) -> None:
        """The time given doubles with each attempt: an heir has to fetch before it can sum."""
        if now >= self.silent_at:
            self.suspects |= {self._view.reducers[part] for part in missing if self._view.part(part) is None}

    @property
    def silent_at(self) -> float:
        """When reducers that have not answered are given up."""
        if self._view.included_at is None:
            return math.inf
        return self._view.included_at + self._settings.grace * float(2**self._view.attempt)

    def _still_whole(self, contributions: Contributions, parts: Collection[int]) -> Contributions:
        return tuple(entry for entry in contributions if self._evidence.is_whole(entry, parts, self._present))

    def deadlines(self) -> list[float]:
        grace = self._settings.grace
        stocked = [] if self._stocked_since is None else [self._stocked_since + grace]
        mostly = [] if self._mostly_since is None else [2 * self._mostly_since - self._view.since + grace]
        return [self._view.since + grace, self._forced_at, self.silent_at, *stocked, *mostly]
