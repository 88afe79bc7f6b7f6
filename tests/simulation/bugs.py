"""Deliberate bugs in the logic of rounds, each with the word by which the simulation shows it."""

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import replace

import pytest

from node.loop.contributions import ContributionTracker, StoredContribution
from node.loop.peers import syncing
from node.loop.round_loop import RoundLoop
from node.loop.steering import Steering
from protocol.consensus import acceptance, fork_choice, view_change
from protocol.consensus.chain import Chain
from protocol.consensus.events import Reduce
from protocol.consensus.knowledge import RoundKnowledge, Sums
from protocol.consensus.leader import Leader
from protocol.consensus.machine import RoundMachine
from protocol.consensus.messages import contributions as messages
from protocol.consensus.messages.contributions import AppliedContributions, Commit, Contribution, PartBlob, blobs_of
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.quorum import Election, VoterSet
from protocol.consensus.state import RoundState
from protocol.consensus.topology import Contributions, Groups, Topology
from protocol.consensus.view import View
from protocol.electorate import Electorate
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.murmur_pb2 import Signed
from tests.simulation.seeded_run import FAULTS, SIZE_CONFLICT
from tests.simulation.virtual.disk import Disk
from tests.simulation.virtual.peers import SimulatedPeer

Bug = Callable[[pytest.MonkeyPatch], None]
Order = Callable[[RoundKnowledge, Contributions], Contributions]


def commits_without_majority(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VoterSet, "is_quorum", lambda self, voters: bool(self.last_seen.keys() & set(voters)))


def counts_a_vote_twice(patch: pytest.MonkeyPatch) -> None:
    def is_quorum(self: VoterSet, voters: set[str]) -> bool:
        return 2 * (len(self.members.intersection(voters)) + 1) > len(self.members)

    patch.setattr(VoterSet, "is_quorum", is_quorum)


def asks_only_a_majority_of_the_rest(patch: pytest.MonkeyPatch) -> None:
    """Those whose votes are forgotten count no more."""
    is_quorum = VoterSet.is_quorum

    def counted(self: VoterSet, voters: set[str]) -> bool:
        electors, self.voters = self.voters, self.voting_members
        is_enough = is_quorum(self, voters)
        self.voters = electors
        return is_enough

    patch.setattr(VoterSet, "is_quorum", counted)


def lets_keys_without_a_vote_vote(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Electorate, "counted", lambda self, members, known: frozenset(known))


def lets_a_key_be_ground(patch: pytest.MonkeyPatch) -> None:
    """The order of the leaders follows from what is known for years ahead."""
    ballot = Election.ballot
    patch.setattr(Election, "ballot", lambda self, view, peer: ballot(Election(bytes(32)), view, peer))


def waits_for_what_died_with_a_partner(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "required_parts", Topology.required_parts)


def forgets_its_lock_with_the_view(patch: pytest.MonkeyPatch) -> None:
    change_view = RoundMachine._change_view

    def changed(self: RoundMachine, now: float) -> None:
        view = self.view
        change_view(self, now)
        if self.view > view:
            self._state.lock = None

    patch.setattr(RoundMachine, "_change_view", changed)


def forgets_its_vote_with_its_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Disk, "last_vote", lambda self: None)


def keeps_required_blobs_in_memory_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Disk, "persist_required_blobs", lambda self, vow, store: None)


def proposes_whatever_others_are_bound_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "locked_proposal", lambda self: None)


def never_changes_the_view(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(view_change, "leader_fault", lambda state, now: None)
    patch.setattr(view_change, "outvoting_view", lambda state: 0)


def decides_what_nobody_holds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoundState, "required_parts", lambda self, proposal: ())
    patch.setattr(Leader, "_is_ready", lambda self, promised, blobs, now: True)


def counts_as_held_by_the_digest_alone(patch: pytest.MonkeyPatch) -> None:
    """Whatever size it is said to have, and as whichever part it was checked."""

    def holds_all(self: RoundKnowledge, peer: PeerId, portions: Iterable[PartBlob]) -> bool:
        stock = self.held_digests(peer)
        return all(portion.blob.digest in stock for portion in portions)

    def reported(self: View, held: Set[PartBlob], own_parts: Collection[int]) -> Set[Digest]:
        named = {*self.roster.body.part_blobs, *(PartBlob(part.body.blob, 0) for part in self.announcements.values())}
        return {portion.blob.digest for portion in named} & {portion.blob.digest for portion in held}

    patch.setattr(RoundKnowledge, "has_all_parts", holds_all)
    patch.setattr(View, "reportable_blobs", reported)
    patch.setattr(acceptance, "drop_size_conflicts", lambda known, entries: {entry.sender: entry for entry in entries})
    patch.setattr(messages, "check_sizes", lambda blobs: None)


def fetches_beyond_its_group(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "group_contributions", lambda self, view, peer: view.roster.body.contributions)


def _sums(patch: pytest.MonkeyPatch, order: Order) -> None:
    request = Sums.request

    def requested(self: Sums, part: int, included: Contributions, knowledge: RoundKnowledge) -> Reduce | None:
        summed = order(knowledge, included)
        if not knowledge.has_all_parts(knowledge.me, [entry.body.part_blobs[part] for entry in summed]):
            return None
        action = request(self, part, included, knowledge)
        return action and replace(action, contributions=summed)

    patch.setattr(Sums, "request", requested)


def sums_in_the_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    def order(knowledge: RoundKnowledge, included: Contributions) -> Contributions:
        names = {entry.sender for entry in included}
        return tuple(entry for entry in knowledge.contributions.values() if entry.sender in names)

    _sums(patch, order)


def sums_what_came_late(patch: pytest.MonkeyPatch) -> None:
    def order(knowledge: RoundKnowledge, included: Contributions) -> Contributions:
        return tuple(knowledge.contributions[peer] for peer in sorted(knowledge.contributions))

    _sums(patch, order)


def forgets_what_was_left_out(patch: pytest.MonkeyPatch) -> None:
    def arrive(self: ContributionTracker, number: int) -> str:
        if self.pending is not None and not self._may_join(self.pending.header.round, number):
            return self._settle("included")
        return "none"

    patch.setattr(ContributionTracker, "on_round", arrive)


def restores_a_committed_contribution(patch: pytest.MonkeyPatch) -> None:
    def settle(self: ContributionTracker, me: str, commit: Commit) -> str:
        return "none" if self.pending is None else self._settle("excluded")

    patch.setattr(ContributionTracker, "on_commit", settle)


def forgets_what_it_sent(patch: pytest.MonkeyPatch) -> None:
    resume = ContributionTracker.restore

    def resumed(
        self: ContributionTracker,
        outstanding: StoredContribution | None,
        made: int,
        sent: StoredContribution,
        number: int,
    ) -> str:
        return resume(self, outstanding, made, None, number)

    patch.setattr(ContributionTracker, "restore", resumed)


def reports_contributions_instead_of_parts(patch: pytest.MonkeyPatch) -> None:
    def of(share: Sequence[SignedMessage[Contribution]]) -> AppliedContributions:
        senders = tuple(entry.sender for entry in share)
        return AppliedContributions(senders, len(share), sum(blob.size for blob in blobs_of(share)))

    patch.setattr(AppliedContributions, "of", of)


def reports_all_groups(patch: pytest.MonkeyPatch) -> None:
    advance = RoundLoop._advance

    def advanced(self: RoundLoop, contributions: Sequence[SignedMessage[Contribution]]) -> None:
        assert self._applying is not None
        advance(self, self._applying.commit.body.contributions)

    patch.setattr(RoundLoop, "_advance", advanced)


def uses_revisions_before_a_commit_adopts_them(patch: pytest.MonkeyPatch) -> None:
    def manifest_at(self: Steering, round_number: int) -> Manifest:
        return self._revised(self.log.newest(self._chain.head.revision), round_number).manifest

    patch.setattr(Steering, "manifest_at", manifest_at)


def follows_a_chain_without_its_revisions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Steering, "learn", lambda self, adoption: True)


def makes_rounds_in_a_pause(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Steering, "is_paused", property(lambda self: False))


def waits_for_a_commit_to_end_a_pause(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Steering, "is_paused", property(lambda self: self._views()[0].is_paused))


def never_sends_what_a_receiver_cannot_restore(patch: pytest.MonkeyPatch) -> None:
    send_whole = SimulatedPeer.send_whole

    def sent(self: SimulatedPeer, receiver: SimulatedPeer, signed: Signed) -> None:
        if self.brief_cache.brief_of(signed) is None:
            send_whole(self, receiver, signed)

    patch.setattr(SimulatedPeer, "send_whole", sent)


def follows_a_chain_that_nobody_certified(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fork_choice, "_uncertified", lambda commits, electorates, witnesses: "")


def prefers_a_chain_by_the_tokens_that_it_claims(patch: pytest.MonkeyPatch) -> None:
    def judged(
        own: Chain, offer: fork_choice.ChainOffer, witnesses: fork_choice.LocalEvidence
    ) -> fork_choice.ChainComparison:
        common = next((head for head in reversed(offer.heads) if own.has_head(head.digest)), None)
        return fork_choice.ChainComparison("ahead" if offer.head.tokens > own.tokens else "other", common=common)

    patch.setattr(syncing, "judge", judged)


HISTORY_BUGS: list[Bug] = [follows_a_chain_that_nobody_certified, prefers_a_chain_by_the_tokens_that_it_claims]
FORK, STUCK = "two commits", "stuck"
RELAPSES = ("relapse",)
BUGS: list[tuple[Bug, str, Sequence[str], int]] = [  # and the faults among which it shows soon, from a seed on
    (commits_without_majority, FORK, FAULTS, 0),
    (lets_keys_without_a_vote_vote, STUCK, FAULTS, 1),
    (lets_a_key_be_ground, "known in advance", FAULTS, 0),
    (counts_a_vote_twice, FORK, FAULTS, 16),
    (forgets_its_lock_with_the_view, FORK, RELAPSES, 13),
    (forgets_its_vote_with_its_memory, FORK, RELAPSES, 6),
    (keeps_required_blobs_in_memory_only, STUCK, FAULTS, 37),
    (proposes_whatever_others_are_bound_to, FORK, RELAPSES, 1),
    (never_changes_the_view, STUCK, FAULTS, 6),
    (never_sends_what_a_receiver_cannot_restore, STUCK, FAULTS, 107),
    (decides_what_nobody_holds, STUCK, FAULTS, 37),
    (counts_as_held_by_the_digest_alone, STUCK, SIZE_CONFLICT, 1),
    (fetches_beyond_its_group, "outside of the group", FAULTS, 0),
    (sums_in_the_order_of_arrival, "in another order", FAULTS, 1),
    (sums_what_came_late, "a sum of something else", FAULTS, 19),
    (forgets_what_was_left_out, "work got lost", FAULTS, 3),
    (restores_a_committed_contribution, "applied", FAULTS, 0),
    (forgets_what_it_sent, "applied", FAULTS, 3),
    (reports_contributions_instead_of_parts, "is told, but", FAULTS, 1),
    (reports_all_groups, "is told, but", FAULTS, 0),
    (uses_revisions_before_a_commit_adopts_them, "two manifests", FAULTS, 14),
    (follows_a_chain_without_its_revisions, "two manifests", FAULTS, 97),
    (makes_rounds_in_a_pause, "that is paused", FAULTS, 17),
    (waits_for_a_commit_to_end_a_pause, STUCK, FAULTS, 17),
    (asks_only_a_majority_of_the_rest, FORK, ("strand",), 3),
    (waits_for_what_died_with_a_partner, STUCK, ("widow",), 395),
]
