"""What the leader of a view decides: which contributions go in, who reduces, and what is proposed for commit.

The rule that keeps two leaders from committing different things is that of Paxos: a leader proposes only once a
majority has joined its view (a holding of its roster is that promise: whoever gives it acknowledges nothing older),
and if any of them acknowledged an older proposal, it proposes the same again. So nothing that may have been decided is
ever replaced. A proposal is decided when a majority acknowledges it, which each does only when it holds all that is
needed to apply it: what is decided outlives any minority.
"""

from collections.abc import Collection, Iterable, Sequence

from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.rounds.election import Ballot, Election, Electorate
from protocol.rounds.events import RoundSettings
from protocol.rounds.evidence import Evidence
from protocol.rounds.statements import Commit, Contribution, Statement
from protocol.rounds.view import View, blobs_of, reassign_reducers

MAX_ATTEMPTS = 8
Contributions = tuple[Statement[Contribution], ...]
Proposal = tuple[Contributions, tuple[Blob, ...]]
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

    @property
    def _forced_at(self) -> float:
        """From here on whoever is slow is waited for no more."""
        return self._view.since + self._settings.exchange_timeout

    def promised(self) -> set[PeerId]:
        """Members that joined this view, and of which we know every proposal that they acknowledged before."""
        known = self._view.blobs() | self._evidence.proposals.keys()
        return {self._evidence.me} | {
            peer
            for peer, holding in self._evidence.holdings.items()
            if holding.body.roster == self._view.roster.digest and known.issuperset(holding.body.blobs)
        }

    def locked(self) -> Statement[Commit] | None:
        """The proposal of the highest ballot before this one that any member of this view acknowledged."""
        promised = self.promised()
        return max(
            (
                proposal
                for digest, proposal in self._evidence.proposals.items()
                if self._ballot(proposal) < self._view.ballot and promised & self._evidence.acknowledged[digest].keys()
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
        whole = {contribution.digest for contribution in self._evidence.obtainable(self._electorate.live)}
        return tuple(entry for entry in self._view.roster.body.contributions if entry.digest in whole)

    def proposal(self, now: float) -> Proposal | None:
        """Contributions and reduced parts, once it is safe and worth while to propose them."""
        promised = self.promised()
        if not self._electorate.is_quorum(promised):
            return None
        locked = self.locked()
        if locked is not None:
            return locked.body.contributions, locked.body.parts
        if self._settings.exchange == "butterfly":
            return self._reduced(promised, now)
        return self._gathered(promised, now)

    def _gathered(self, promised: set[PeerId], now: float) -> Proposal | None:
        wanted = self._obtainable()
        if wanted and self._is_stocked(promised, blobs_of(wanted), now):
            return wanted, ()
        if now < self._forced_at:
            return None
        common = self._common(promised, wanted)
        return (common, ()) if common else None

    def _reduced(self, promised: set[PeerId], now: float) -> Proposal | None:
        parts = tuple(part.body.blob for part in self._view.parts())
        if len(parts) < self._settings.parts or not self._is_stocked(promised, parts, now):
            return None
        return self._view.included, parts

    def _is_stocked(self, promised: set[PeerId], blobs: Sequence[Blob], now: float) -> bool:
        """Whether everybody alive holds all of it, or a majority does and the others have had their grace."""
        stocked = {peer for peer in promised if self._evidence.holds_all(peer, blobs)}
        if not self._electorate.is_quorum(stocked):
            self._stocked_since = None
            return False
        if self._stocked_since is None:
            self._stocked_since = now
        return self._electorate.live <= stocked or now >= self._stocked_since + self._settings.grace

    def _common(self, promised: set[PeerId], wanted: Contributions) -> Contributions:
        """What the best stocked majority holds in common."""
        stock = {peer: {e.sender for e in wanted if self._evidence.holds_all(peer, e.body.parts)} for peer in promised}
        ranking = sorted(promised, key=lambda peer: (-len(stock[peer]), peer))
        size = next(size for size in range(1, len(ranking) + 1) if self._electorate.is_quorum(ranking[:size]))
        shared = set.intersection(*(stock[peer] for peer in ranking[:size]))
        return tuple(contribution for contribution in wanted if contribution.sender in shared)

    def appointment(self, now: float) -> Appointment | None:
        """The next inclusion of a butterfly, if one is due."""
        if self._view.inclusion is not None:
            return self._replacement(now)
        if not self._electorate.is_quorum(self.promised()) or self.locked() is not None:
            return None
        wanted, able = self._obtainable(), self._able()
        if not wanted or not able:
            return None
        lacking = {reducer for reducer in able if len(self._ready(reducer, wanted)) < len(wanted)}
        if not lacking:
            return wanted, self._reassigned(able)
        return self._forced(wanted, able) if now >= self._forced_at else None

    def _able(self) -> set[PeerId]:
        """Contributors that may reduce: alive, and not known to be silent while there are others."""
        alive = self._electorate.live & set(self._view.contributors)
        return set(alive - self.suspects) or set(alive)

    def _reassigned(self, able: set[PeerId]) -> tuple[PeerId, ...]:
        return reassign_reducers(self._view.roster.digest, self._view.reducers, able)

    def _ready(self, reducer: PeerId, wanted: Contributions) -> set[PeerId]:
        """The contributions of which a reducer holds every part that it is to sum."""
        mine = [part for part, name in enumerate(self._view.reducers) if name == reducer]
        return {e.sender for e in wanted if self._evidence.holds_all(reducer, [e.body.parts[part] for part in mine])}

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
        part = self._view.part(number)
        live = self._electorate.live
        if part is None:
            return False
        return part.sender in live or bool(self._evidence.holders(part.body.blob.digest, live))

    def _suspect(self, missing: Iterable[int], now: float) -> None:
        """The time given doubles with each attempt: an heir has to fetch before it can sum."""
        if now >= self.silent_at:
            self.suspects |= {self._view.reducers[part] for part in missing if self._view.part(part) is None}

    @property
    def silent_at(self) -> float:
        return self._view.included_at + self._settings.grace * float(2 ** max(0, self._view.attempt))

    def _still_whole(self, contributions: Contributions, parts: Collection[int]) -> Contributions:
        live = self._electorate.live
        return tuple(e for e in contributions if all(self._evidence.is_obtainable(e, part, live) for part in parts))

    def deadlines(self) -> list[float]:
        grace = self._settings.grace
        stocked = [] if self._stocked_since is None else [self._stocked_since + grace]
        return [self._forced_at, self.silent_at, *stocked]
