"""What one peer knows and is bound by in a round, and what can be told from it; nothing here sends."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.rounds.election import Election, Electorate
from protocol.rounds.events import Reason, RoundSettings, Urgency, Vow
from protocol.rounds.evidence import Evidence
from protocol.rounds.grouping import drawn, group_of
from protocol.rounds.leadership import MAX_ATTEMPTS, Leadership
from protocol.rounds.reports import Acknowledgement, Holding
from protocol.rounds.statements import (
    MAX_CONTRIBUTIONS,
    MAX_HELD,
    NO_ROSTER,
    Commit,
    Contribution,
    Digest,
    Portion,
    Roster,
    Statement,
    portions,
)
from protocol.rounds.view import View, portions_of

# Within one timeout a leader is heard three times, so that one lost message deposes nobody.
REPEATS_PER_TIMEOUT = 3
LONGEST_PATIENCE = 8
JOINING = 2  # patiences for a majority to join a leader's view
FARTHEST = 8  # views at once
MAX_VIEW = 2**31
Fault = tuple[PeerId, Reason]
LEAST_HELD = 256  # blobs of a member that we take its word for, before we know of any
MAX_OWNERS = 4  # who are asked for the same blob
ROUNDING = 1e-9  # of a share times a count


class Want(NamedTuple):
    """Of what is needed: those who made it, or some of them where many made the same, and whether it is a sum."""

    owners: tuple[PeerId, ...]
    is_sum: bool


class RoundState:
    """`lock`: the newest proposal that we acknowledged. `view_since`: when we came to this view or its roster."""

    def __init__(
        self, settings: RoundSettings, me: PeerId, number: int, base: Digest, electorate: Electorate, now: float,
        urgency: Callable[[int], Urgency] | None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self._urgency = urgency
        self.me = me
        self.number = number
        self.base = base
        self.election = Election(settings.run_id, number)
        self.electorate = electorate
        self.evidence = Evidence(me)
        self.view = 0
        self.view_since = now
        self.followed: View | None = None
        self.leadership: Leadership | None = None
        self.offered_at: float | None = None  # when we contributed
        self._watched = 0  # contributions
        self.whole_arrivals: dict[PeerId, float] = {}  # when those of others came that hold most of the plan's steps
        self.hurried = False
        self.heard = now  # when the leader that owes us a roster last gave a sign of life
        self.failed: set[PeerId] = set()  # led a view that came to nothing
        self.lock: Statement[Commit] | None = None
        self.complete_since: float | None = None  # as many have contributed as the quorum asks for
        self.half_since: float | None = None  # at least half have

    def take_up(self, vow: Vow) -> tuple[int, Digest]:
        """Go on after the view that an earlier process of ours was last bound in. The view and lock that bind us."""
        self.view = min(vow.view + 1, MAX_VIEW)
        self.lock = vow.lock
        if vow.lock is None:
            return vow.view, b""
        self.evidence.learn_proposal(vow.lock)
        self.evidence.learn_contributions(vow.lock.body, self.electorate.electors)
        return vow.view, vow.lock.digest

    @property
    def live(self) -> frozenset[PeerId]:
        return self.electorate.live

    @property
    def others(self) -> frozenset[PeerId]:
        """All members but us, also those that vanished a moment ago."""
        return self.electorate.members - {self.me}

    @property
    def leader(self) -> PeerId | None:
        return self.followed.leader if self.followed else self.election.leader(self.view, self._candidates)

    @property
    def _candidates(self) -> frozenset[PeerId]:
        """Whoever led a view to nothing does not get another in this round, while there are others."""
        return self.live - self.failed or self.live if self.failed else self.live

    def fail(self, leader: PeerId | None) -> None:
        """The view that it led ends undecided, whoever is to blame."""
        if leader is not None and leader != self.me:
            self.failed.add(leader)

    def may_lead(self, peer: PeerId, view: int) -> bool:
        """Our own claim does not count: who leads already stays. Whoever failed before leads only where half of the
        living are: they may know better, and all have to meet. Otherwise one peer could pick one view after the other
        that its rank gives it, and hold the round for ever."""
        if peer not in self.live or peer == self.me:
            return False
        if peer in self.failed and not self.live - self.failed <= {self.me} and view > self.outvoting_view():
            return False
        found = {self.election.leader(view, self.live), self.election.leader(view, self._candidates)}
        if self.me in found:
            found |= {self.election.leader(view, group - {self.me}) for group in (self.live, self._candidates)}
        return peer in found

    def watch_contributions(self, now: float) -> None:
        self._note_arrivals(now)
        expected = self.electorate.expected
        given = self.evidence.obtainable(self.live)
        present = len(given) if given <= expected else len(given & expected)
        half = bool(given) and 2 * present >= len(expected)
        complete = bool(given) and present >= self.settings.quorum * len(expected) - ROUNDING
        self.half_since = (now if self.half_since is None else self.half_since) if half else None
        self.complete_since = (now if self.complete_since is None else self.complete_since) if complete else None

    def _note_arrivals(self, now: float) -> None:
        known = self.evidence.contributions
        fresh = len(known) - self._watched
        if fresh and self._urgency is not None:
            least = self._urgency(self.number).whole_tokens
            newest = islice(reversed(known.items()), fresh)
            whole = (peer for peer, one in newest if peer != self.me and one.body.tokens >= least)
            self.whole_arrivals |= dict.fromkeys(whole, now)
        self._watched += fresh

    def hurry_at(self) -> float | None:
        """When to ask for our own contribution, where it is missing and somebody waits for it."""
        if self._urgency is None or self.hurried or self.offered_at is not None or self.half_since is None:
            return None
        if not self.whole_arrivals:
            return None
        reserve = self._urgency(self.number).reserve
        return max(min(self.whole_arrivals.values()), self.half_since) + max(0.0, self.settings.grace - reserve)

    def roster_due(self) -> float | None:
        """Since when (or from when on) a roster is due; None: not in sight."""
        if self.view and self.evidence.proposals:
            return self.view_since  # something may have been decided: whoever leads has to find out
        if self.complete_since is not None:
            return self.complete_since
        return None if self.half_since is None else self.half_since + self.settings.grace

    def new_roster(self) -> Roster:
        evidence, obtainable = self.evidence, self.evidence.obtainable(self.live)
        entries = [entry for peer, entry in evidence.contributions.items() if peer in obtainable]
        entries.sort(key=lambda entry: entry.sender not in self.electorate.electors)
        backed = [proposal for digest, proposal in evidence.proposals.items() if evidence.is_backed(digest)]
        for proposal in backed if entries else evidence.proposals.values():
            entries += proposal.body.contributions
        contributions = self._of_one_size(entries)
        ordered = tuple(contributions[peer] for peer in sorted(contributions))
        return Roster(self.number, self.view, self.base, ordered)

    def _of_one_size(self, entries: Sequence[Statement[Contribution]]) -> dict[PeerId, Statement[Contribution]]:
        """By sender, the first ones, as many as a roster may list. Without those who name what we hold, or what another
        one has named before them, with a size that it does not have: it cannot be fetched, and those who hold the blob
        would seem to hold what they name."""
        sizes, kept = dict(self.evidence.sizes), dict[PeerId, Statement[Contribution]]()
        for entry in entries:
            if entry.sender in kept or len(kept) == MAX_CONTRIBUTIONS:
                continue
            named = {blob.digest: blob.size for blob in entry.body.parts}
            if all(sizes.get(digest, size) == size for digest, size in named.items()):
                sizes.update(named)
                kept[entry.sender] = entry
        return kept or {entry.sender: entry for entry in entries[:1]}

    def outvoting_view(self) -> int:
        """The latest view that half of the living have reached, or so many that the others are no majority.

        Counted over the members, not the electors: a view that is left too late, or too early, costs time and nothing
        else, for whoever is forgotten promises nothing any more.
        """
        half, spare = (len(self.live) + 1) // 2, len(self.live) - len(self.electorate.members) // 2
        enough = min(half, spare) if spare > 0 else half
        moved = self.evidence.moved & self.live
        if not moved or len(moved) < enough:
            return 0
        return sorted((self.evidence.holdings[peer].view for peer in moved), reverse=True)[enough - 1]

    def follow(self, roster: Statement[Roster], now: float) -> list[Fault]:
        """Take a roster for that of our view. Who contributed otherwise than it says, or too late for it."""
        ballot = self.election.ballot(roster.body.view, roster.sender)
        if self.followed and self.followed.ballot.view < ballot.view:
            self.fail(self.followed.leader)
        view = View(ballot, roster, self.settings.parts, now)
        self.view = ballot.view
        self.view_since = now
        self.followed = view
        self.leadership = None
        if roster.sender == self.me:
            self.leadership = Leadership(self.settings, self.election, self.electorate, self.evidence, view)
        twofold = self.evidence.learn_contributions(roster.body, self.electorate.electors)
        late = sorted(self.evidence.contributions.keys() - set(view.contributors))
        return [*((peer, "equivocation") for peer in twofold), *((peer, "late") for peer in late)]

    def fault_of_leader(self, now: float) -> Reason | None:
        """Why not to follow the leader of our view any longer."""
        view = self.followed
        if view is None:
            return self._absence_of_leader(now)
        if view.leader not in self.live:
            return "leader left"
        if self._view_of(view.leader) > self.view:
            return "leader moved on"
        if self.leadership is None and now >= view.heard + self._patience:
            return "leader silent"
        if self.leadership and self.leadership.is_hopeless():
            return "exchange stalled"
        if self.leadership and now >= view.since + JOINING * self._patience and not self.leadership.is_joined():
            return "not followed"
        ends_at = view.since + self.settings.whole_exchange + self.settings.leader_timeout
        return "exchange stalled" if now >= ends_at else None

    def _view_of(self, peer: PeerId) -> int:
        """Where another peer is, as far as it told us."""
        known = self.evidence.holdings.get(peer) if peer in self.evidence.moved else None
        return known.view if known else 0

    @property
    def farthest_view(self) -> int:
        """To which a leader's roster may take us."""
        return min(max(self.view + FARTHEST, self.outvoting_view()), MAX_VIEW)

    def next_view(self) -> int:
        """When we leave ours: where others have gone already, so that all meet. Nobody can take us far alone."""
        latest = max((self._view_of(peer) for peer in self.evidence.moved & self.live), default=0)
        return min(max(self.view + 1, self.outvoting_view(), min(latest, self.view + FARTHEST)), MAX_VIEW)

    def _absence_of_leader(self, now: float) -> Reason | None:
        """It owes a roster when one is due, and until then a word to whoever contributed."""
        due, offered = self.roster_due(), self.offered_at
        if self.leader in (None, self.me):
            return None
        owing = [] if due is None else [due]
        owing += [] if offered is None else [max(offered, self.heard)]
        since = max(min(owing, default=now), self.view_since)
        return "leader silent" if now >= since + self._patience else None

    @property
    def _patience(self) -> float:
        """Grows with the views, so that slow links do not depose one leader after the other for ever."""
        return self.settings.leader_timeout * min(1 + self.view // 2, LONGEST_PATIENCE)

    def proposal(self) -> Statement[Commit] | None:
        """What the leader of our view proposes; should it propose two things, the first one."""
        if self.followed is None:
            return None
        author = (self.followed.leader, self.view)
        found = (entry for entry in self.evidence.proposals.values() if (entry.sender, entry.body.view) == author)
        return next(found, None)

    def is_locked_here(self) -> bool:
        """Whether the proposal of this very leader in this very view is the one that we acknowledged."""
        return self.lock is not None and (self.lock.sender, self.lock.body.view) == (self.leader, self.view)

    def needed(self, proposal: Statement[Commit]) -> Sequence[Portion]:
        """Without these the proposed update cannot be applied. A partner's in a group may have died with it, and nobody
        else was to have it: that is done without."""
        if proposal.body.parts:
            return portions(proposal.body.parts)
        share = group_of(proposal.body, self.me, self.settings)
        if self.settings.exchange == "groups":
            share = tuple(entry for entry in share if entry.sender in self.live or entry.sender == self.me)
        return portions_of(share)

    def likely(self, view: View) -> Commit | None:
        """What its leader will propose where nobody fails, if we hold all that it takes. In groups no member can tell:
        of each it is what all of it hold."""
        parts = tuple(part.body.blob for part in view.parts()) if self.settings.sums else ()
        if self.settings.exchange == "groups" or len(parts) < self.settings.sums:
            return None
        if not self.evidence.holds_all(self.me, portions(parts) or portions_of(view.included)):
            return None
        return Commit(self.number, self.view, self.base, view.included, parts)

    def holding(self) -> Holding:
        """What we hold of the roster, or without one of all contributions; and the proposal that binds us."""
        view, held, lock = self.followed, self.evidence.held, self.lock.digest if self.lock else b""
        if view:
            reported = view.reported(held, self.own_parts)
            return Holding(self.number, self.view, view.roster.digest, tuple(sorted(reported)), lock)
        offered = {p.blob.digest for p in portions_of([*self.evidence.contributions.values()]) if p in held}
        return Holding(self.number, self.view, NO_ROSTER, tuple(sorted(offered)), lock)

    def acknowledgement(self) -> Statement[Acknowledgement] | None:
        """Our own, of the proposal that binds us."""
        return self.evidence.acknowledged.get(self.lock.digest, {}).get(self.me) if self.lock else None

    def wanted(self) -> dict[Portion, Want]:
        """What we need and lack."""
        wanted: dict[Portion, Want] = {}
        for portion, owner, is_sum in self._places():
            if portion in self.evidence.held:
                continue
            known = wanted.get(portion)
            owners = known.owners if known else ()
            if owner is not None and owner not in owners and len(owners) < MAX_OWNERS:
                owners = (*owners, owner)
            wanted[portion] = Want(owners, is_sum)
        return wanted

    def _places(self) -> Iterator[tuple[Portion, PeerId | None, bool]]:
        """Where what we need is named, and as whose; whether it is a sum."""
        proposal, view = self.proposal(), self.followed
        if proposal and proposal.body.parts:
            yield from ((portion, None, True) for portion in portions(proposal.body.parts))
        elif proposal:
            yield from _places_of(group_of(proposal.body, self.me, self.settings))
        if self.settings.exchange == "gather":  # even before the roster: nearly all will be on it
            given, electors = self.evidence.contributions.values(), self.electorate.electors
            yield from _places_of(entry for entry in given if entry.sender in electors)
            listed = view.roster.body.contributions if view else ()
            yield from _places_of(entry for entry in listed if entry.sender not in electors)
        elif view and self.settings.exchange == "groups":
            yield from _places_of(self._of_my_group(view))
        elif view:
            own = self.own_parts
            yield from ((entry.body.portions[part], entry.sender, False) for entry in view.included for part in own)
            yield from ((Portion(part.body.blob, part.body.part), part.sender, True) for part in view.parts())

    @property
    def own_parts(self) -> list[int]:
        """Those that we sum, by the newest roster; none without one."""
        reducers = self.followed.reducers if self.followed else ()
        return [part for part, reducer in enumerate(reducers) if reducer == self.me]

    def _of_my_group(self, view: View) -> list[Statement[Contribution]]:
        group = drawn(self.settings, self.number, view.contributors).get(self.me, frozenset())
        return [entry for entry in view.roster.body.contributions if entry.sender in group]

    @property
    def most_held(self) -> int:
        """How many blobs a member may hold of what we know of."""
        contributed = len(self.evidence.contributions) * self.settings.parts
        return min(MAX_HELD, max(LEAST_HELD, contributed + MAX_ATTEMPTS * self.settings.sums))

    def sources(self, blob: Blob, owners: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """Whom to ask: the owners and known holders; where the owners are gone or unknown, in the end everybody.

        In groups nobody else can have it, but an owner may come back.
        """
        holders = self.evidence.holders(blob.digest, self.live)
        present = [peer for peer in owners if peer in self.live and peer != self.me]
        if present:
            return tuple(dict.fromkeys([*present, *holders]))
        if self.settings.exchange == "groups":
            return tuple(dict.fromkeys([*holders, *(peer for peer in owners if peer != self.me)]))
        return tuple(dict.fromkeys([*holders, *sorted(self.others)]))

    @property
    def repeat_interval(self) -> float:
        return self.settings.leader_timeout / REPEATS_PER_TIMEOUT

    def deadlines(self) -> list[float | None]:
        half = None if self.half_since is None else self.half_since + self.settings.grace
        leading = self.leadership.deadlines() if self.leadership else []
        return [half, self.hurry_at(), self.electorate.next_change(), *leading]


def _places_of(entries: Iterable[Statement[Contribution]]) -> Iterator[tuple[Portion, PeerId, bool]]:
    return ((portion, entry.sender, False) for entry in entries for portion in entry.body.portions)
