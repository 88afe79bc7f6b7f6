"""What one peer knows and is bound by in a round, and what can be told from it; nothing here sends."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from protocol.blobs.blob import Blob
from protocol.consensus.events import EarlySubmitPolicy, RejectReason, VoteRecord
from protocol.consensus.knowledge import RoundKnowledge
from protocol.consensus.leader import MAX_ATTEMPTS, Leader, new_leader
from protocol.consensus.message_kinds import Acknowledgement, Inventory
from protocol.consensus.messages import (
    MAX_CONTRIBUTIONS,
    MAX_HELD_BLOBS,
    NO_ROSTER,
    Commit,
    Contribution,
    Digest,
    PartBlob,
    Roster,
    SignedMessage,
    part_blobs_of,
)
from protocol.consensus.quorum import Election, VoterSet
from protocol.consensus.settings import RoundSettings
from protocol.consensus.topology import NeededPart, Topology
from protocol.consensus.view import View
from protocol.identity import PeerId

# Within one timeout a leader is heard three times, so that one lost message deposes nobody.
RETRANSMITS_PER_TIMEOUT = 3
MAX_TIMEOUT_FACTOR = 8
JOIN_TIMEOUTS = 2  # patiences for a majority to join a leader's view
MAX_VIEW_JUMP = 8  # views at once
MAX_VIEW = 2**31
Rejection = tuple[PeerId, RejectReason]
MIN_HELD_BLOBS = 256  # blobs of a member that we take its word for, before we know of any
MAX_OWNERS_ASKED = 4  # who are asked for the same blob
ROUNDING_ERROR = 1e-9  # of a share times a count


class MissingPart(NamedTuple):
    """Of what is needed: those who made it, or some of them where many made the same, and whether it is a sum."""

    owners: tuple[PeerId, ...]
    is_reduced: bool


class RoundState:
    """`lock`: the newest proposal that we acknowledged. `view_since`: when we came to this view or its roster."""

    def __init__(
        self, settings: RoundSettings, me: PeerId, number: int, base: Digest, voter_set: VoterSet, now: float,
        early_submit_policy: Callable[[int], EarlySubmitPolicy] | None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self._early_submit_policy = early_submit_policy
        self.me = me
        self.number = number
        self.base = base
        self.election = Election(settings.run_id, number)
        self.voter_set = voter_set
        self.knowledge = RoundKnowledge(me)
        self.view = 0
        self.view_since = now
        self.current_view: View | None = None
        self.leader_role: Leader | None = None
        self.contributed_at: float | None = None  # when we contributed
        self._counted_contributions = 0  # contributions
        self.full_arrival_times: dict[
            PeerId, float
        ] = {}  # when those of others came that hold most of the plan's steps
        self.early_submit_requested = False
        self.leader_last_heard = now  # when the leader that owes us a roster last gave a sign of life
        self.failed_leaders: set[PeerId] = set()  # led a view that came to nothing
        self.lock: SignedMessage[Commit] | None = None
        self.roster_quorum_since: float | None = None  # as many have contributed as the quorum asks for
        self.half_contributed_since: float | None = None  # at least half have

    def restore_vote(self, vote: VoteRecord) -> tuple[int, Digest]:
        """Go on after the view that an earlier process of ours was last bound in. The view and lock that bind us."""
        self.view = min(vote.view + 1, MAX_VIEW)
        self.lock = vote.lock
        if vote.lock is None:
            return vote.view, b""
        self.knowledge.learn_proposal(vote.lock)
        self.knowledge.learn_contributions(vote.lock.body, self.voter_set.voters)
        return vote.view, vote.lock.digest

    @property
    def topology(self) -> Topology:
        return self.settings.topology

    @property
    def live(self) -> frozenset[PeerId]:
        return self.voter_set.live

    @property
    def others(self) -> frozenset[PeerId]:
        """All members but us, also those that vanished a moment ago."""
        return self.voter_set.members - {self.me}

    @property
    def leader(self) -> PeerId | None:
        return self.current_view.leader if self.current_view else self.election.leader(self.view, self._candidates)

    @property
    def _candidates(self) -> frozenset[PeerId]:
        """Whoever led a view to nothing does not get another in this round, while there are others."""
        return self.live - self.failed_leaders or self.live if self.failed_leaders else self.live

    def mark_leader_failed(self, leader: PeerId | None) -> None:
        """The view that it led ends undecided, whoever is to blame."""
        if leader is not None and leader != self.me:
            self.failed_leaders.add(leader)

    def may_lead(self, peer: PeerId, view: int) -> bool:
        """Our own claim does not count: who leads already stays. Whoever failed before leads only where half of the
        living are: they may know better, and all have to meet. Otherwise one peer could pick one view after the other
        that its rank gives it, and hold the round for ever."""
        if peer not in self.live or peer == self.me:
            return False
        if (
            peer in self.failed_leaders
            and not self.live - self.failed_leaders <= {self.me}
            and view > self.outvoting_view()
        ):
            return False
        found = {self.election.leader(view, self.live), self.election.leader(view, self._candidates)}
        if self.me in found:
            found |= {self.election.leader(view, group - {self.me}) for group in (self.live, self._candidates)}
        return peer in found

    def update_contribution_timers(self, now: float) -> None:
        self._record_arrivals(now)
        expected = self.voter_set.awaited
        given = self.knowledge.obtainable_senders(self.live)
        present = len(given) if given <= expected else len(given & expected)
        half = bool(given) and 2 * present >= len(expected)
        complete = bool(given) and present >= self.settings.roster_quorum * len(expected) - ROUNDING_ERROR
        self.half_contributed_since = (
            (now if self.half_contributed_since is None else self.half_contributed_since) if half else None
        )
        self.roster_quorum_since = (
            (now if self.roster_quorum_since is None else self.roster_quorum_since) if complete else None
        )

    def _record_arrivals(self, now: float) -> None:
        known = self.knowledge.contributions
        fresh = len(known) - self._counted_contributions
        if fresh and self._early_submit_policy is not None:
            least = self._early_submit_policy(self.number).min_full_tokens
            newest = islice(reversed(known.items()), fresh)
            whole = (peer for peer, one in newest if peer != self.me and one.body.tokens >= least)
            self.full_arrival_times |= dict.fromkeys(whole, now)
        self._counted_contributions += fresh

    def early_submit_at(self) -> float | None:
        """When to ask for our own contribution, where it is missing and somebody waits for it."""
        if (
            self._early_submit_policy is None
            or self.early_submit_requested
            or self.contributed_at is not None
            or self.half_contributed_since is None
        ):
            return None
        if not self.full_arrival_times:
            return None
        reserve = self._early_submit_policy(self.number).margin_seconds
        return max(min(self.full_arrival_times.values()), self.half_contributed_since) + max(
            0.0, self.settings.grace - reserve
        )

    def roster_due_at(self) -> float | None:
        """Since when (or from when on) a roster is due; None: not in sight."""
        if self.view and self.knowledge.proposals:
            return self.view_since  # something may have been decided: whoever leads has to find out
        if self.roster_quorum_since is not None:
            return self.roster_quorum_since
        return None if self.half_contributed_since is None else self.half_contributed_since + self.settings.grace

    def build_roster(self) -> Roster:
        evidence, obtainable = self.knowledge, self.knowledge.obtainable_senders(self.live)
        entries = [entry for peer, entry in evidence.contributions.items() if peer in obtainable]
        entries.sort(key=lambda entry: entry.sender not in self.voter_set.voters)
        backed = [
            proposal for digest, proposal in evidence.proposals.items() if evidence.has_other_acknowledgers(digest)
        ]
        for proposal in backed if entries else evidence.proposals.values():
            entries += proposal.body.contributions
        contributions = self._drop_size_conflicts(entries)
        ordered = tuple(contributions[peer] for peer in sorted(contributions))
        return Roster(self.number, self.view, self.base, ordered)

    def _drop_size_conflicts(
        self, entries: Sequence[SignedMessage[Contribution]]
    ) -> dict[PeerId, SignedMessage[Contribution]]:
        """By sender, the first ones, as many as a roster may list. Without those who name what we hold, or what another
        one has named before them, with a size that it does not have: it cannot be fetched, and those who hold the blob
        would seem to hold what they name."""
        sizes, kept = dict(self.knowledge.held_sizes), dict[PeerId, SignedMessage[Contribution]]()
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
        half, spare = (len(self.live) + 1) // 2, len(self.live) - len(self.voter_set.members) // 2
        enough = min(half, spare) if spare > 0 else half
        moved = self.knowledge.in_later_view & self.live
        if not moved or len(moved) < enough:
            return 0
        return sorted((self.knowledge.inventories[peer].view for peer in moved), reverse=True)[enough - 1]

    def follow_roster(self, roster: SignedMessage[Roster], now: float) -> list[Rejection]:
        """Take a roster for that of our view. Who contributed otherwise than it says, or too late for it."""
        ballot = self.election.ballot(roster.body.view, roster.sender)
        if self.current_view and self.current_view.ballot.view < ballot.view:
            self.mark_leader_failed(self.current_view.leader)
        contributors = tuple(entry.sender for entry in roster.body.contributions)
        view = View(ballot, roster, self.topology.assign_reducers(roster.digest, contributors), now)
        self.view = ballot.view
        self.view_since = now
        self.current_view = view
        self.leader_role = None
        if roster.sender == self.me:
            self.leader_role = new_leader(self.settings, self.election, self.voter_set, self.knowledge, view)
        twofold = self.knowledge.learn_contributions(roster.body, self.voter_set.voters)
        late = sorted(self.knowledge.contributions.keys() - set(view.contributors))
        return [*((peer, "equivocation") for peer in twofold), *((peer, "late") for peer in late)]

    def leader_fault(self, now: float) -> RejectReason | None:
        """Why not to follow the leader of our view any longer."""
        view = self.current_view
        if view is None:
            return self._missing_roster_fault(now)
        if view.leader not in self.live:
            return "leader left"
        if self._reported_view_of(view.leader) > self.view:
            return "leader moved on"
        if self.leader_role is None and now >= view.leader_last_heard + self._leader_timeout:
            return "leader silent"
        if self.leader_role and self.leader_role.has_nothing_to_propose():
            return "exchange stalled"
        if (
            self.leader_role
            and now >= view.started_at + JOIN_TIMEOUTS * self._leader_timeout
            and not self.leader_role.has_quorum()
        ):
            return "not followed"
        ends_at = view.started_at + self.settings.exchange_seconds + self.settings.leader_timeout
        return "exchange stalled" if now >= ends_at else None

    def _reported_view_of(self, peer: PeerId) -> int:
        """Where another peer is, as far as it told us."""
        known = self.knowledge.inventories.get(peer) if peer in self.knowledge.in_later_view else None
        return known.view if known else 0

    @property
    def max_reachable_view(self) -> int:
        """To which a leader's roster may take us."""
        return min(max(self.view + MAX_VIEW_JUMP, self.outvoting_view()), MAX_VIEW)

    def next_view(self) -> int:
        """When we leave ours: where others have gone already, so that all meet. Nobody can take us far alone."""
        latest = max((self._reported_view_of(peer) for peer in self.knowledge.in_later_view & self.live), default=0)
        return min(max(self.view + 1, self.outvoting_view(), min(latest, self.view + MAX_VIEW_JUMP)), MAX_VIEW)

    def _missing_roster_fault(self, now: float) -> RejectReason | None:
        """It owes a roster when one is due, and until then a word to whoever contributed."""
        due, offered = self.roster_due_at(), self.contributed_at
        if self.leader in (None, self.me):
            return None
        owing = [] if due is None else [due]
        owing += [] if offered is None else [max(offered, self.leader_last_heard)]
        since = max(min(owing, default=now), self.view_since)
        return "leader silent" if now >= since + self._leader_timeout else None

    @property
    def _leader_timeout(self) -> float:
        """Grows with the views, so that slow links do not depose one leader after the other for ever."""
        return self.settings.leader_timeout * min(1 + self.view // 2, MAX_TIMEOUT_FACTOR)

    def proposal(self) -> SignedMessage[Commit] | None:
        """What the leader of our view proposes; should it propose two things, the first one."""
        if self.current_view is None:
            return None
        author = (self.current_view.leader, self.view)
        found = (entry for entry in self.knowledge.proposals.values() if (entry.sender, entry.body.view) == author)
        return next(found, None)

    def is_locked_in_current_view(self) -> bool:
        """Whether the proposal of this very leader in this very view is the one that we acknowledged."""
        return self.lock is not None and (self.lock.sender, self.lock.body.view) == (self.leader, self.view)

    def required_parts(self, proposal: SignedMessage[Commit]) -> Sequence[PartBlob]:
        """Return the parts without which this peer cannot apply a proposal."""
        return self.topology.required_parts(proposal.body, self.me, self.live)

    def predicted_commit(self, view: View) -> Commit | None:
        """Return the commit that the leader will propose unless somebody fails, once all its parts are here."""
        parts = tuple(part.body.blob for part in view.reduced_parts())
        if not self.topology.is_predictable or len(parts) < self.topology.reduced_part_count:
            return None
        commit = Commit(self.number, self.view, self.base, view.included, parts)
        required = self.topology.required_parts(commit, self.me, self.live)
        return commit if self.knowledge.has_all_parts(self.me, required) else None

    def build_inventory(self) -> Inventory:
        """What we hold of the roster, or without one of all contributions; and the proposal that binds us."""
        view, held, lock = self.current_view, self.knowledge.held_parts, self.lock.digest if self.lock else b""
        if view:
            reported = view.reportable_blobs(held, self.parts_to_reduce)
            return Inventory(self.number, self.view, view.roster.digest, tuple(sorted(reported)), lock)
        offered = {p.blob.digest for p in part_blobs_of([*self.knowledge.contributions.values()]) if p in held}
        return Inventory(self.number, self.view, NO_ROSTER, tuple(sorted(offered)), lock)

    def own_acknowledgement(self) -> SignedMessage[Acknowledgement] | None:
        """Our own, of the proposal that binds us."""
        return self.knowledge.acknowledgements.get(self.lock.digest, {}).get(self.me) if self.lock else None

    def missing_parts(self) -> dict[PartBlob, MissingPart]:
        """Return the parts that this peer needs and lacks."""
        missing: dict[PartBlob, MissingPart] = {}
        for part_blob, owner, is_reduced in self._needed_parts():
            if part_blob in self.knowledge.held_parts:
                continue
            known = missing.get(part_blob)
            owners = known.owners if known else ()
            if owner is not None and owner not in owners and len(owners) < MAX_OWNERS_ASKED:
                owners = (*owners, owner)
            missing[part_blob] = MissingPart(owners, is_reduced)
        return missing

    def _needed_parts(self) -> Iterator[NeededPart]:
        proposal, known = self.proposal(), self.knowledge.contributions.values()
        if proposal:
            yield from self.topology.proposed_parts(proposal.body, self.me)
        yield from self.topology.offered_parts(self.me, known, self.voter_set.voters, self.current_view)

    @property
    def parts_to_reduce(self) -> list[int]:
        """Return the parts that this peer reduces, by the newest roster; none without one."""
        return self.current_view.parts_reduced_by(self.me) if self.current_view else []

    @property
    def max_held_blobs(self) -> int:
        """How many blobs a member may hold of what we know of."""
        contributed = len(self.knowledge.contributions) * self.settings.parts
        return min(MAX_HELD_BLOBS, max(MIN_HELD_BLOBS, contributed + MAX_ATTEMPTS * self.topology.reduced_part_count))

    def sources_for(self, blob: Blob, owners: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """Return the peers to ask for a blob: its owners and known holders, or else those that may hold it."""
        holders = self.knowledge.holders(blob.digest, self.live)
        present = [peer for peer in owners if peer in self.live and peer != self.me]
        if present:
            return tuple(dict.fromkeys([*present, *holders]))
        fallback = self.topology.fallback_sources(owners, self.others)
        return tuple(dict.fromkeys([*holders, *(peer for peer in fallback if peer != self.me)]))

    @property
    def retransmit_interval(self) -> float:
        return self.settings.leader_timeout / RETRANSMITS_PER_TIMEOUT

    def deadlines(self) -> list[float | None]:
        half = None if self.half_contributed_since is None else self.half_contributed_since + self.settings.grace
        leading = self.leader_role.deadlines() if self.leader_role else []
        return [half, self.early_submit_at(), self.voter_set.next_forget_at(), *leading]
