"""The state of one peer in a round, and the conclusions from it; nothing here sends a message."""

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
from protocol.consensus.settings import RoundSettings, RoundStart
from protocol.consensus.topology import NeededPart, Topology
from protocol.consensus.view import View
from protocol.identity import PeerId

# A leader sends three signs of life in one timeout, so a single lost message does not depose it.
RETRANSMITS_PER_TIMEOUT = 3
MAX_TIMEOUT_FACTOR = 8
JOIN_TIMEOUTS = 2  # leader timeouts for a majority to join the view of a leader
MAX_VIEW_JUMP = 8  # views
MAX_VIEW = 2**31
Rejection = tuple[PeerId, RejectReason]
MIN_HELD_BLOBS = 256  # blobs that a member may claim to hold before any is known
MAX_OWNERS_ASKED = 4  # for the same blob
ROUNDING_ERROR = 1e-9  # in a share times a count


class MissingPart(NamedTuple):
    """A part that this peer needs and lacks: some of its authors, and whether it is a sum."""

    owners: tuple[PeerId, ...]
    is_reduced: bool


class RoundState:
    """The state of one peer in a round; owned by its round machine.

    `lock`: the newest proposal that this peer acknowledged. `view_since`: the time at which it came to this view or its
    roster. `failed_leaders`: leaders whose views ended undecided. `full_arrival_times`: the time at which each
    full contribution of others was first known. `leader_last_heard`: the last sign of life of a leader without a
    roster.
    """

    def __init__(
        self,
        settings: RoundSettings,
        me: PeerId,
        start: RoundStart,
        now: float,
        early_submit_policy: Callable[[int], EarlySubmitPolicy] | None,
    ) -> None:
        self.settings = settings
        self._early_submit_policy = early_submit_policy
        self.me = me
        self.number = start.number
        self.base = start.base
        self.revision = start.revision
        self.adoption = start.adoption  # of a commit that this peer proposes
        self.election = Election(settings.run_id, start.number)
        self.voter_set = VoterSet(settings.vote_memory, settings.leader_timeout, start.last_seen, now)
        self.knowledge = RoundKnowledge(me)
        self.view = 0
        self.view_since = now
        self.current_view: View | None = None
        self.leader_role: Leader | None = None
        self.contributed_at: float | None = None
        self._counted_contributions = 0
        self.full_arrival_times: dict[PeerId, float] = {}
        self.early_submit_requested = False
        self.leader_last_heard = now
        self.failed_leaders: set[PeerId] = set()
        self.lock: SignedMessage[Commit] | None = None
        self.roster_quorum_since: float | None = None  # enough members have contributed to make a roster at once
        self.half_contributed_since: float | None = None  # at least half of the awaited members have contributed

    def restore_vote(self, vote: VoteRecord) -> tuple[int, Digest]:
        """Continue after the last vote of an earlier process, and return the view and lock that bind this peer."""
        self.view = min(vote.view + 1, MAX_VIEW)
        self.lock = vote.lock
        if vote.lock is None:
            return vote.view, b""
        self.knowledge.learn_proposal(vote.lock)
        self.knowledge.learn_contributions(vote.lock.body, self.voter_set.voters)
        return vote.view, vote.lock.digest

    @property
    def topology(self) -> Topology:
        """Return the kind of exchange."""
        return self.settings.topology

    @property
    def live(self) -> frozenset[PeerId]:
        """Return the members that are alive."""
        return self.voter_set.live

    @property
    def others(self) -> frozenset[PeerId]:
        """Return all other members, with those that vanished a moment ago."""
        return self.voter_set.members - {self.me}

    @property
    def leader(self) -> PeerId | None:
        """Return the leader that this peer follows or expects."""
        return self.current_view.leader if self.current_view else self.election.leader(self.view, self._candidates)

    @property
    def _candidates(self) -> frozenset[PeerId]:
        """Return the members that may lead: not those whose view failed in this round, while there are others."""
        return self.live - self.failed_leaders or self.live if self.failed_leaders else self.live

    def mark_leader_failed(self, leader: PeerId | None) -> None:
        """Record that the view of a leader ends undecided, for whatever reason."""
        if leader is not None and leader != self.me:
            self.failed_leaders.add(leader)

    def may_lead(self, peer: PeerId, view: int) -> bool:
        """Return whether a peer may lead a view.

        The claim of this peer itself does not count, so that a leader stays once it leads. A failed leader leads again
        only in a view that half of the live members have reached: they may know better, and all have to meet in one
        view. Otherwise a peer could choose one view after another that its rank gives it, and delay the round for ever.
        """
        if peer not in self.live or peer == self.me:
            return False
        if (
            peer in self.failed_leaders
            and not self.live - self.failed_leaders <= {self.me}
            and view > self.outvoting_view()
        ):
            return False
        leaders = {self.election.leader(view, self.live), self.election.leader(view, self._candidates)}
        if self.me in leaders:
            leaders |= {self.election.leader(view, group - {self.me}) for group in (self.live, self._candidates)}
        return peer in leaders

    def update_contribution_timers(self, now: float) -> None:
        """Note since when half of the awaited members, or enough for a roster, have contributed."""
        self._record_arrivals(now)
        awaited = self.voter_set.awaited
        senders = self.knowledge.obtainable_senders(self.live)
        count = len(senders) if senders <= awaited else len(senders & awaited)
        half = bool(senders) and 2 * count >= len(awaited)
        complete = bool(senders) and count >= self.settings.roster_quorum * len(awaited) - ROUNDING_ERROR
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
            min_tokens = self._early_submit_policy(self.number).min_full_tokens
            newest = islice(reversed(known.items()), fresh)
            senders = (peer for peer, entry in newest if peer != self.me and entry.body.tokens >= min_tokens)
            self.full_arrival_times |= dict.fromkeys(senders, now)
        self._counted_contributions += fresh

    def early_submit_at(self) -> float | None:
        """Return the time at which to ask for the contribution of this peer, if it is missing and others wait."""
        if (
            self._early_submit_policy is None
            or self.early_submit_requested
            or self.contributed_at is not None
            or self.half_contributed_since is None
        ):
            return None
        if not self.full_arrival_times:
            return None
        margin = self._early_submit_policy(self.number).margin_seconds
        grace_begins = max(min(self.full_arrival_times.values()), self.half_contributed_since)
        return grace_begins + max(0.0, self.settings.grace - margin)

    def roster_due_at(self) -> float | None:
        """Return the time, past or future, at which a roster is due, or `None` if none is in sight."""
        if self.view and self.knowledge.proposals:
            return self.view_since  # something may have been decided, and the leader has to find out
        if self.roster_quorum_since is not None:
            return self.roster_quorum_since
        return None if self.half_contributed_since is None else self.half_contributed_since + self.settings.grace

    def build_roster(self) -> Roster:
        """Return a roster of all obtainable contributions, and of those in proposals that may be decided."""
        knowledge, obtainable = self.knowledge, self.knowledge.obtainable_senders(self.live)
        entries = [entry for peer, entry in knowledge.contributions.items() if peer in obtainable]
        voters = self.voter_set.voters
        entries.sort(key=lambda entry: entry.sender not in voters)
        acknowledged = [
            proposal for digest, proposal in knowledge.proposals.items() if knowledge.has_other_acknowledgers(digest)
        ]
        for proposal in acknowledged if entries else knowledge.proposals.values():
            entries += proposal.body.contributions
        contributions = self._drop_size_conflicts(entries)
        ordered = tuple(contributions[peer] for peer in sorted(contributions))
        return Roster(self.number, self.view, self.base, ordered)

    def _drop_size_conflicts(
        self, entries: Sequence[SignedMessage[Contribution]]
    ) -> dict[PeerId, SignedMessage[Contribution]]:
        """Return the first contributions by sender, as many as a roster may list, without those of conflicting sizes.

        A contribution may name a blob that this peer holds, or that an earlier one names, with another size. Nobody can
        fetch such a blob, but the holders of the real one would seem to hold it.
        """
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
        """Return the latest view that half of the live members have reached, or as many as leave no majority behind.

        The count is over the members, not the voters: to leave a view too late or too early costs only time, and
        forgotten members make no promises any more.
        """
        half, spare = (len(self.live) + 1) // 2, len(self.live) - len(self.voter_set.members) // 2
        needed = min(half, spare) if spare > 0 else half
        ahead = self.knowledge.in_later_view & self.live
        if not ahead or len(ahead) < needed:
            return 0
        return sorted((self.knowledge.inventories[peer].view for peer in ahead), reverse=True)[needed - 1]

    def follow_roster(self, roster: SignedMessage[Roster], now: float) -> list[Rejection]:
        """Follow a roster, and reject contributions that differ from it or are too late for it."""
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
        equivocating = self.knowledge.learn_contributions(roster.body, self.voter_set.voters)
        late = sorted(self.knowledge.contributions.keys() - set(view.contributors))
        return [*((peer, "equivocation") for peer in equivocating), *((peer, "late") for peer in late)]

    def leader_fault(self, now: float) -> RejectReason | None:
        """Return the reason to give up the leader of this view, if there is one."""
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
        deadline = view.started_at + self.settings.exchange_seconds + self.settings.leader_timeout
        return "exchange stalled" if now >= deadline else None

    def _reported_view_of(self, peer: PeerId) -> int:
        """Return the view that another peer last reported."""
        known = self.knowledge.inventories.get(peer) if peer in self.knowledge.in_later_view else None
        return known.view if known else 0

    @property
    def max_reachable_view(self) -> int:
        """Return the latest view to which the roster of a leader may move this peer."""
        return min(max(self.view + MAX_VIEW_JUMP, self.outvoting_view()), MAX_VIEW)

    def next_view(self) -> int:
        """Return the view to change to: one that others have reached, so that all meet, but not too far ahead."""
        latest = max((self._reported_view_of(peer) for peer in self.knowledge.in_later_view & self.live), default=0)
        return min(max(self.view + 1, self.outvoting_view(), min(latest, self.view + MAX_VIEW_JUMP)), MAX_VIEW)

    def _missing_roster_fault(self, now: float) -> RejectReason | None:
        """Return a fault if the leader is silent: it owes a roster when one is due, and before that signs of life."""
        due_at, contributed_at = self.roster_due_at(), self.contributed_at
        if self.leader in (None, self.me):
            return None
        owed = [] if due_at is None else [due_at]
        owed += [] if contributed_at is None else [max(contributed_at, self.leader_last_heard)]
        owed_since = max(min(owed, default=now), self.view_since)
        return "leader silent" if now >= owed_since + self._leader_timeout else None

    @property
    def _leader_timeout(self) -> float:
        """Return the timeout, which grows with the views, so that slow links do not depose leaders for ever."""
        return self.settings.leader_timeout * min(1 + self.view // 2, MAX_TIMEOUT_FACTOR)

    def proposal(self) -> SignedMessage[Commit] | None:
        """Return the proposal of the leader of this view; if it made two, the first one."""
        if self.current_view is None:
            return None
        author = (self.current_view.leader, self.view)
        proposals = self.knowledge.proposals.values()
        return next((entry for entry in proposals if (entry.sender, entry.body.view) == author), None)

    def is_locked_in_current_view(self) -> bool:
        """Return whether this peer has acknowledged the proposal of this leader in this view."""
        return self.lock is not None and (self.lock.sender, self.lock.body.view) == (self.leader, self.view)

    def required_parts(self, proposal: SignedMessage[Commit]) -> Sequence[PartBlob]:
        """Return the parts without which this peer cannot apply a proposal."""
        return self.topology.required_parts(proposal.body, self.me, self.live)

    def predicted_commit(self, view: View) -> Commit | None:
        """Return the commit that the leader will propose unless somebody fails, once all its parts are here."""
        parts = tuple(part.body.blob for part in view.reduced_parts())
        if not self.topology.is_predictable or len(parts) < self.topology.reduced_part_count:
            return None
        commit = Commit(self.number, self.view, self.base, view.included, parts, adoption=self.adoption)
        required = self.topology.required_parts(commit, self.me, self.live)
        return commit if self.knowledge.has_all_parts(self.me, required) else None

    def build_inventory(self) -> Inventory:
        """Return the held blobs of the roster, or without one of all contributions, and the lock."""
        view, held, lock = self.current_view, self.knowledge.held_parts, self.lock.digest if self.lock else b""
        if view:
            reported = view.reportable_blobs(held, self.parts_to_reduce)
            return Inventory(self.number, self.view, view.roster.digest, tuple(sorted(reported)), lock)
        contributed = part_blobs_of([*self.knowledge.contributions.values()])
        blobs = {part_blob.blob.digest for part_blob in contributed if part_blob in held}
        return Inventory(self.number, self.view, NO_ROSTER, tuple(sorted(blobs)), lock)

    def own_acknowledgement(self) -> SignedMessage[Acknowledgement] | None:
        """Return the acknowledgement of the proposal that binds this peer."""
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
        """Return how many blobs a member can hold, as far as this peer knows."""
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
        """Return the seconds between two retransmissions."""
        return self.settings.leader_timeout / RETRANSMITS_PER_TIMEOUT

    def deadlines(self) -> list[float | None]:
        """Return the times at which the passing of time alone may change a decision."""
        grace_ends = None if self.half_contributed_since is None else self.half_contributed_since + self.settings.grace
        of_leader = self.leader_role.deadlines() if self.leader_role else []
        return [grace_ends, self.early_submit_at(), self.voter_set.next_forget_at(), *of_leader]
