"""Deliberate bugs in the logic of rounds, each with the word by which the simulation shows it."""

from collections.abc import Callable, Collection, Iterable, Sequence, Set

import pytest

from node.daemon.offers import Offer, Offers
from protocol.identity import PeerId
from protocol.rounds import statements
from protocol.rounds.election import Electorate
from protocol.rounds.entries import Entries
from protocol.rounds.evidence import Evidence
from protocol.rounds.grouping import group_of
from protocol.rounds.leadership import Leadership
from protocol.rounds.round import Round, Sum
from protocol.rounds.state import RoundState
from protocol.rounds.statements import Commit, Contribution, Digest, Portion, Statement, portions
from protocol.rounds.view import View, blobs_of, portions_of
from tests.simulation import peers
from tests.simulation.peers import Disk
from tests.simulation.story import FAULTS, TWIN

Bug = Callable[[pytest.MonkeyPatch], None]
Order = Callable[[Round, View], tuple[Statement[Contribution], ...]]


def commits_without_majority(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Electorate, "is_quorum", lambda self, voters: bool(self.seen.keys() & set(voters)))


def counts_a_vote_twice(patch: pytest.MonkeyPatch) -> None:
    def is_quorum(self: Electorate, voters: set[str]) -> bool:
        return 2 * (len(self.members.intersection(voters)) + 1) > len(self.members)

    patch.setattr(Electorate, "is_quorum", is_quorum)


def asks_only_a_majority_of_the_rest(patch: pytest.MonkeyPatch) -> None:
    """Those whose votes are forgotten count no more."""
    is_quorum = Electorate.is_quorum

    def counted(self: Electorate, voters: set[str]) -> bool:
        electors, self.electors = self.electors, self.members
        is_enough = is_quorum(self, voters)
        self.electors = electors
        return is_enough

    patch.setattr(Electorate, "is_quorum", counted)


def waits_for_what_died_with_a_partner(patch: pytest.MonkeyPatch) -> None:
    def needed(self: RoundState, proposal: Statement[Commit]) -> Sequence[Portion]:
        return portions(proposal.body.parts) or portions_of(group_of(proposal.body, self.me, self.settings))

    patch.setattr(RoundState, "needed", needed)


def forgets_its_lock_with_the_view(patch: pytest.MonkeyPatch) -> None:
    change_view = Round._change_view

    def changed(self: Round, now: float) -> None:
        view = self.view
        change_view(self, now)
        if self.view > view:
            self._state.lock = None

    patch.setattr(Round, "_change_view", changed)


def forgets_its_vow_with_its_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Disk, "last_vow", lambda self: None)


def keeps_in_memory_what_its_vow_rests_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Disk, "secure", lambda self, vow, store: None)


def proposes_whatever_others_are_bound_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leadership, "locked", lambda self: None)


def never_changes_the_view(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoundState, "fault_of_leader", lambda self, now: None)
    patch.setattr(RoundState, "outvoting_view", lambda self: 0)


def decides_what_nobody_holds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoundState, "needed", lambda self, proposal: ())
    patch.setattr(Leadership, "_is_stocked", lambda self, promised, blobs, now: True)


def counts_as_held_by_the_digest_alone(patch: pytest.MonkeyPatch) -> None:
    """Whatever size it is said to have, and as whichever part it was checked."""

    def holds_all(self: Evidence, peer: PeerId, portions: Iterable[Portion]) -> bool:
        stock = self.stock(peer)
        return all(portion.blob.digest in stock for portion in portions)

    def reported(self: View, held: Set[Portion], own_parts: Collection[int]) -> Set[Digest]:
        named = {*self.roster.body.offered, *(Portion(part.body.blob, 0) for part in self.announced.values())}
        return {portion.blob.digest for portion in named} & {portion.blob.digest for portion in held}

    patch.setattr(Evidence, "holds_all", holds_all)
    patch.setattr(View, "reported", reported)
    patch.setattr(RoundState, "_of_one_size", lambda self, entries: {entry.sender: entry for entry in entries})
    patch.setattr(statements, "check_sizes", lambda blobs: None)


def fetches_beyond_its_group(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoundState, "_of_my_group", lambda self, view: list(view.roster.body.contributions))


def _sums(patch: pytest.MonkeyPatch, order: Order) -> None:
    reduce_part = Round._reduce_part

    def reduced(self: Round, view: View, wanted: Sum) -> None:
        included, view.included = view.included, order(self, view)
        reduce_part(self, view, wanted)
        view.included = included

    patch.setattr(Round, "_reduce_part", reduced)


def sums_in_the_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    def order(machine: Round, view: View) -> tuple[Statement[Contribution], ...]:
        names = {entry.sender for entry in view.included}
        return tuple(entry for entry in machine._evidence.contributions.values() if entry.sender in names)

    _sums(patch, order)


def sums_what_came_late(patch: pytest.MonkeyPatch) -> None:
    def order(machine: Round, view: View) -> tuple[Statement[Contribution], ...]:
        known = machine._evidence.contributions
        return tuple(known[peer] for peer in sorted(known))

    _sums(patch, order)


def forgets_what_was_left_out(patch: pytest.MonkeyPatch) -> None:
    def arrive(self: Offers, number: int) -> str:
        if self.current is not None and not self._may_join(self.current.message.round, number):
            return self._decide("included")
        return "none"

    patch.setattr(Offers, "arrive", arrive)


def takes_its_message_back_from_a_commit(patch: pytest.MonkeyPatch) -> None:
    def settle(self: Offers, me: str, commit: Commit) -> str:
        return "none" if self.current is None else self._decide("excluded")

    patch.setattr(Offers, "settle", settle)


def forgets_what_it_sent(patch: pytest.MonkeyPatch) -> None:
    resume = Offers.resume

    def resumed(self: Offers, outstanding: Offer | None, made: int, sent: Offer, number: int) -> str:
        return resume(self, outstanding, made, None, number)

    patch.setattr(Offers, "resume", resumed)


def tells_of_messages_instead_of_parts(patch: pytest.MonkeyPatch) -> None:
    def of(share: Sequence[Statement[Contribution]]) -> Entries:
        senders = tuple(entry.sender for entry in share)
        return Entries(senders, len(share), sum(blob.size for blob in blobs_of(share)))

    patch.setattr(Entries, "of", of)


def tells_of_all_groups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(peers, "group_of", lambda commit, me, settings: commit.contributions)


FORK, STUCK = "two commits", "stuck"
RELAPSES = ("relapse",)
BUGS: list[tuple[Bug, str, Sequence[str]]] = [  # and the faults among which it shows soon
    (commits_without_majority, FORK, FAULTS),
    (counts_a_vote_twice, FORK, FAULTS),
    (forgets_its_lock_with_the_view, FORK, RELAPSES),
    (forgets_its_vow_with_its_memory, FORK, RELAPSES),
    (keeps_in_memory_what_its_vow_rests_on, STUCK, FAULTS),
    (proposes_whatever_others_are_bound_to, FORK, RELAPSES),
    (never_changes_the_view, STUCK, FAULTS),
    (decides_what_nobody_holds, STUCK, FAULTS),
    (counts_as_held_by_the_digest_alone, STUCK, TWIN),
    (fetches_beyond_its_group, "outside of the group", FAULTS),
    (sums_in_the_order_of_arrival, "in another order", FAULTS),
    (sums_what_came_late, "a sum of something else", FAULTS),
    (forgets_what_was_left_out, "work got lost", FAULTS),
    (takes_its_message_back_from_a_commit, "applied", FAULTS),
    (forgets_what_it_sent, "applied", FAULTS),
    (tells_of_messages_instead_of_parts, "is told, but", FAULTS),
    (tells_of_all_groups, "is told, but", FAULTS),
]
RARE_BUGS: list[tuple[Bug, str, int]] = [  # and a seed of very few that show it
    (asks_only_a_majority_of_the_rest, FORK, 833),
    (waits_for_what_died_with_a_partner, STUCK, 405090),
]
