"""The state of one peer in a round, and the conclusions from it; nothing here sends a message."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from protocol.blobs.blob import Blob
from protocol.consensus.events import EarlySubmitPolicy, Lock, MembershipChanged, RejectReason, VoteRecord
from protocol.consensus.knowledge import RoundKnowledge, Sums
from protocol.consensus.leader import MAX_ATTEMPTS, Leader, new_leader
from protocol.consensus.locks import Bounds, Vote
from protocol.consensus.messages.contributions import MAX_HELD_BLOBS, NO_ROSTER, Commit, PartBlob, Roster, part_blobs_of
from protocol.consensus.messages.kinds import Acknowledgement, Inventory, Justification, Promise
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.quorum import Election, VoteMemory, VoterSet
from protocol.consensus.settings import RoundSettings, RoundStart
from protocol.consensus.topology import NeededPart, Topology
from protocol.consensus.view import View
from protocol.identity import PeerId

# A leader sends three signs of life in one timeout, so a single lost message does not depose it.
RETRANSMITS_PER_TIMEOUT = 3
MAX_VIEW = 2**31
Rejection = tuple[PeerId, RejectReason]
PersistentVote = tuple[int, Digest, Digest]  # view, and the proposals that were acknowledged and confirmed
MIN_HELD_BLOBS = 256  # blobs that a member may claim to hold before any is known
MAX_OWNERS_ASKED = 4  # for the same blob
FORGIVING_VIEW = 2  # from this view on, peers lead again that failed in earlier rounds
LEAST_WAIT = 0.05  # seconds, for the last acknowledgements
ROUNDING_ERROR = 1e-9  # in a share times a count


class MissingPart(NamedTuple):
    """A part that this peer needs and lacks: some of its authors, and whether it is a sum."""

    owners: tuple[PeerId, ...]
    is_reduced: bool


class RoundState:
    """The state of one peer in a round; owned by its round machine.

    `lock`: the newest proposal that this peer acknowledged. `confirmed`: the newest one that it confirmed. `promise`:
    that to the current view, if it needs one. `view_since`: the time at which it came to this view or its
    roster. `failed_leaders`: leaders whose views ended undecided. `full_arrival_times`: the time at which each
    full contribution of others was first known. `leader_last_heard`: the last sign of life of a leader without a
    roster. `known_trainers`: all keys that this peer knows to train in the run or to have trained lately.
    `excluded`, `set_aside`, `not_leading`: see `MembershipChanged`. `leader_faults`: the faults of the leaders of this
    round. `withheld`: peers that announced something that this peer, or the leader, could not get.
    `false_reducers`: peers that announced another sum than this peer computed. `false_speakers`: peers that signed a
    statement that no honest peer signs. `unusable`: peers whose contribution this peer cannot get or decode.
    `audit_secret`: see `reduction`.
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
        self.electorate = start.electorate
        self.basis = start.basis  # of all acknowledgements that count
        self.adoption = start.adoption  # of a commit that this peer proposes
        self.election = Election(start.base)
        self.voter_set = VoterSet(
            start.electorate,
            VoteMemory(settings.vote_memory, settings.leader_timeout),
            start.last_seen,
            now,
            settings.awaits_standing,
        )
        self.knowledge = RoundKnowledge(me)
        self.sums = Sums()
        self.audit_secret = start.audit_secret
        self._patience = start.patience
        self._arriving: frozenset[PeerId] = frozenset()
        self._arrived_at: float | None = None  # when the last of the arriving peers had contributed
        self.patience_spent = 0.0  # seconds for which this round waited in vain for arriving peers
        self.false_reducers: set[PeerId] = set()
        self.false_speakers: set[PeerId] = set()
        self.unusable: set[PeerId] = set()
        self.known_trainers = {me, *start.last_seen}
        self.excluded: frozenset[PeerId] = frozenset()
        self.set_aside: frozenset[PeerId] = frozenset()
        self.not_leading: frozenset[PeerId] = frozenset()
        self.leader_faults: dict[PeerId, str] = {}
        self.withheld: set[PeerId] = set()
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
        self.confirmed: Lock | None = None
        self.promise: SignedMessage[Promise] | None = None
        self.roster_quorum_since: float | None = None  # enough members have contributed to make a roster at once
        self.half_contributed_since: float | None = None  # at least half of the awaited members have contributed

    def update_membership(self, event: MembershipChanged, now: float) -> None:
        """Take over a new set of live members."""
        self.known_trainers |= event.peers | event.departed | event.ahead | event.trainers
        self.known_trainers = self.known_trainers - event.excluded | event.doubted
        self.excluded, self.not_leading = event.excluded, event.not_leading - {self.me}
        self.set_aside = event.set_aside - {self.me}
        self.voter_set.update(event, now)
        self._arriving = event.arriving

    def restore_vote(self, vote: VoteRecord) -> PersistentVote:
        """Continue after the last vote of an earlier process, and return what binds this peer."""
        self.view = min(vote.view + 1, MAX_VIEW)
        self.lock, self.confirmed = vote.lock, vote.confirmed
        for proposal in self.binding_proposals:
            self.knowledge.learn_proposal(proposal)
            self.knowledge.learn_contributions(proposal.body, self.voter_set.known)
        if vote.confirmed is not None:
            self.knowledge.learn_certificate(vote.confirmed.certificate, vote.confirmed.certificate.body.signers)
        return self.persistent_vote(vote.view)

    def persistent_vote(self, view: int) -> PersistentVote:
        """Return what binds this peer in a view: its promise, and the proposals that it acknowledged and confirmed."""
        lock, confirmed = self.lock, self.confirmed
        return view, lock.digest if lock else b"", confirmed.proposal.digest if confirmed else b""

    @property
    def binding_proposals(self) -> list[SignedMessage[Commit]]:
        """Return the proposals that this peer acknowledged and confirmed last."""
        confirmed = self.confirmed.proposal if self.confirmed else None
        found = [] if self.lock is None else [self.lock]
        return found if confirmed is None or confirmed == self.lock else [*found, confirmed]

    @property
    def binding_messages(self) -> list[SignedMessage[Any]]:
        """Return what the leader of a later view has to know about these proposals."""
        proposals: list[SignedMessage[Any]] = [*self.binding_proposals]
        return [*proposals, self.confirmed.certificate] if self.confirmed else proposals

    @property
    def bounds(self) -> Bounds:
        """Return what a promise of this peer names."""
        lock, confirmed = self.lock, self.confirmed
        return Bounds(Vote.of(lock) if lock else None, Vote.of(confirmed.proposal) if confirmed else None)

    @property
    def needs_promises(self) -> bool:
        """Return whether the leader of this view has to show promises."""
        return self.view > 0 and self.voter_set.tolerated > 0

    def justification_of(self, proposal: SignedMessage[Commit]) -> SignedMessage[Justification] | None:
        """Return the justification that the leader of this view has shown for its proposal."""
        known, view = self.knowledge.justifications.get(proposal.sender), self.current_view
        if known is None or view is None:
            return None
        said = known.body.proposal, known.body.view, known.body.base, known.body.roster
        return known if said == (proposal.digest, proposal.body.view, self.base, view.roster.digest) else None

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
        return self.current_view.leader if self.current_view else self.election.leader(self.view, self.candidates)

    @property
    def candidates(self) -> frozenset[PeerId]:
        """Return the voters that may lead: not those whose view failed in this round, while there are others."""
        unfit = self.failed_leaders | self.not_leading if self.view < FORGIVING_VIEW else self.failed_leaders
        electable = self.voter_set.electable
        return electable - unfit or electable if unfit else electable

    def mark_leader_failed(self, leader: PeerId | None) -> None:
        """Record that the view of a leader ends undecided, for whatever reason."""
        if leader is not None and leader != self.me:
            self.failed_leaders.add(leader)

    def drop_contribution(self, peer: PeerId, reason: RejectReason) -> list[Rejection]:
        """Wait no longer for the contribution of a peer in this round, and remember that it withheld it."""
        if peer == self.me or peer in self.unusable:
            return []
        self.unusable.add(peer)
        self.withheld.add(peer)
        return [(peer, reason)]

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
        has_arrived = self._arriving - awaited <= senders
        self._arrived_at = (now if self._arrived_at is None else self._arrived_at) if has_arrived else None

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
            or not self.full_arrival_times
        ):
            return None
        policy, half_since = self._early_submit_policy(self.number), self.half_contributed_since
        if policy.awaits_half and half_since is None:
            return None
        first = min(self.full_arrival_times.values())
        grace_begins = max(first, half_since) if policy.awaits_half and half_since is not None else first
        return grace_begins + max(0.0, self.settings.grace - policy.margin_seconds)

    def roster_due_at(self) -> float | None:
        """Return the time, past or future, at which a roster is due, or `None` if none is in sight."""
        if self.view and self.knowledge.proposals:
            return self.view_since  # something may have been decided, and the leader has to find out
        grace_ends = None if self.half_contributed_since is None else self.half_contributed_since + self.settings.grace
        if self.roster_quorum_since is not None:
            patience = self._patience if self._arrived_at is None else 0.0
            return min(self.roster_quorum_since + patience, float("inf") if grace_ends is None else grace_ends)
        return grace_ends

    def follow_roster(self, roster: SignedMessage[Roster], now: float) -> list[Rejection]:
        """Follow a roster, and reject contributions that differ from it or are too late for it."""
        ballot = self.election.ballot(roster.body.view, roster.sender)
        if self.current_view and self.current_view.ballot.view < ballot.view:
            self.mark_leader_failed(self.current_view.leader)
        contributors = tuple(entry.sender for entry in roster.body.contributions)
        view = View(ballot, roster, self.topology.assign_reducers(roster.digest, contributors), now)
        if self.current_view is None and self.roster_quorum_since is not None and self._arrived_at is None:
            self.patience_spent = min(max(0.0, now - self.roster_quorum_since), self._patience)
        self.view = ballot.view
        self.view_since = now
        self.current_view = view
        self.leader_role = None
        if roster.sender == self.me:
            self.leader_role = new_leader(self.settings, self.election, self.voter_set, self.knowledge, view)
            self.leader_role.false_reducers, self.leader_role.set_aside = self.false_reducers, self.set_aside
            self.leader_role.unusable = self.unusable
        equivocating = self.knowledge.learn_contributions(roster.body, self.voter_set.known)
        late = sorted(self.knowledge.contributions.keys() - set(view.contributors))
        return [*((peer, "equivocation") for peer in equivocating), *((peer, "late") for peer in late)]

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

    def may_acknowledge(self) -> bool:
        """Return whether this peer has acknowledged no proposal in this view.

        Where nobody may lie, it may acknowledge those of two leaders.
        """
        if not self.voter_set.tolerated:
            return not self.is_locked_in_current_view()
        return self.lock is None or self.lock.body.view < self.view

    def lock_due_at(self) -> float | None:
        """Return the time at which this peer shows the lock of its own proposal, because not all have acknowledged it.

        It waits for the last acknowledgements as long again as those of a quorum took, unless a voter is gone.
        """
        view, lock = self.current_view, self.lock
        if view is None or lock is None or view.quorum_since is None or not self.is_locked_in_current_view():
            return None
        if not self.voter_set.may_be_unanimous(self.knowledge.acknowledgements[lock.digest].keys()):
            return view.quorum_since
        since = view.started_at if view.proposed_at is None else view.proposed_at
        return view.quorum_since + min(self.settings.grace, max(LEAST_WAIT, view.quorum_since - since))

    def lock_to_confirm(self) -> Lock | None:
        """Return a proposal of this view of which a quorum is known to have acknowledged it, if none is confirmed."""
        if not self.voter_set.tolerated or (self.confirmed and self.confirmed.proposal.body.view >= self.view):
            return None
        for digest, certificate in self.knowledge.locks.items():
            proposal = self.knowledge.proposals[digest]
            if proposal.body.view == self.view and self.voter_set.was_quorum(certificate.body.signers):
                return Lock(proposal, certificate)
        return None

    def is_confirmed(self, proposal: SignedMessage[Commit]) -> bool:
        """Return whether this peer has confirmed a proposal."""
        return self.confirmed is not None and self.confirmed.proposal.digest == proposal.digest

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
        if self.lock is None:
            return None
        return self.knowledge.acknowledgements.get(self.lock.digest, {}).get(self.me)

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

    @property
    def awaits_parts(self) -> bool:
        """Return whether this peer lacks parts that may still arrive."""
        missing = self.missing_parts().values()
        return any(not part.owners or not self.unusable.issuperset(part.owners) for part in missing)

    def _needed_parts(self) -> Iterator[NeededPart]:
        proposal, known = self.proposal(), self.knowledge.contributions.values()
        if proposal:
            yield from self.topology.proposed_parts(proposal.body, self.me)
        yield from self.topology.offered_parts(self.me, known, self.voter_set.known, self.current_view)

    @property
    def parts_to_reduce(self) -> list[int]:
        """Return the parts that this peer reduces, by the newest roster; none without one."""
        return self.current_view.parts_reduced_by(self.me) if self.current_view else []

    @property
    def max_held_blobs(self) -> int:
        """Return how many blobs a member can hold, as far as this peer knows."""
        contributed = len(self.knowledge.contributions) * self.settings.parts
        return min(
            MAX_HELD_BLOBS, max(MIN_HELD_BLOBS, contributed + 2 * MAX_ATTEMPTS * self.topology.reduced_part_count)
        )

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
        return [
            grace_ends,
            self.roster_due_at(),
            self.early_submit_at(),
            self.voter_set.next_forget_at(),
            self.lock_due_at(),
            *of_leader,
        ]
