"""Each contribution is included once or returned once, whichever process is killed at any point."""

import pytest

from node.loop.contributions import (
    MAX_AGE_ROUNDS,
    MAX_RESTORABLE,
    MAX_SETTLED,
    ContributionTracker,
    ForkOutcome,
    LastSent,
    SettledContribution,
    StoredContribution,
)
from node.trainer.ipc.channel import ContributionHeader, ContributionOutcome
from optim.compose import compose
from optim.exact import exact_method
from protocol.blobs.blob import Blob
from protocol.consensus.chain import ChainHead, extend_head, genesis_head
from protocol.consensus.messages.contributions import Commit
from tests.node.small_run import PEERS, PROGRAM, RUN_ID, TERMS, commit_of, program_of
from tests.optim.fake_peers import Tables, constant

ME = PEERS[1].peer_id
NOWHERE = ChainHead(9, bytes(32), 0)  # of a chain that nobody else knows


def make_header(number: int, serial: int = 0) -> ContributionHeader:
    return ContributionHeader(serial=serial, round=number, sizes=(4,), tokens=100, steps=5, loss=3.0)


def make_contribution(number: int, identity: int = 0) -> StoredContribution:
    return StoredContribution(make_header(number, identity + 1), (Blob.of(f"message {number} {identity}".encode()),))


def commit(head: ChainHead, mine: StoredContribution | None) -> Commit:
    return commit_of(head, {0: Blob.of(b"other")} | ({1: mine.parts[0]} if mine else {})).body


def test_outcome_is_kept_until_the_next_contribution() -> None:
    tracker, head = ContributionTracker(PROGRAM), genesis_head(RUN_ID)
    tracker.submit(make_contribution(0))
    assert tracker.is_known(make_header(0)) and not tracker.is_known(make_header(1))
    assert tracker.on_commit(ME, commit(head, make_contribution(0))) == "included"
    assert tracker.pending is None and tracker.outcome_of(0) == "included" and tracker.outcome_of(None) == "none"
    assert tracker.is_known(make_header(0))
    assert ContributionTracker.from_json(PROGRAM, tracker.to_json()).outcome_of(0) == "included"
    tracker.submit(make_contribution(1))
    assert (
        tracker.outcome_of(0) == "none"
        and ContributionTracker.from_json(PROGRAM, tracker.to_json()).last_outcome is None
    )


def test_late_contribution_is_resubmitted_until_it_is_too_old() -> None:
    tracker, head = ContributionTracker(PROGRAM), genesis_head(RUN_ID)
    tracker.submit(make_contribution(0))
    for number in range(MAX_AGE_ROUNDS):
        assert tracker.pending is not None
        contribution = tracker.pending.to_contribution(head, TERMS)
        assert (contribution.round, contribution.age) == (number, number)
        missed = commit(head, None)
        assert tracker.on_commit(ME, missed) == "none"
        head = extend_head(head, missed)
    assert tracker.pending is not None and tracker.pending.to_contribution(head, TERMS).age == MAX_AGE_ROUNDS
    assert tracker.on_commit(ME, commit(head, None)) == "excluded"
    assert tracker.outcome_of(0) == "excluded"


FRAGMENTS = compose("averaging", {"schedule": {"fragments": 2}})


@pytest.mark.parametrize("made", range(4))
def test_contribution_is_not_submitted_to_a_round_of_another_fragment(made: int) -> None:
    """Of two fragments: it is given back at once. (The next round of its own would come, but its peer may send another
    make_header by then.)"""
    tracker = ContributionTracker(program_of(FRAGMENTS))
    tracker.submit(make_contribution(made))
    assert tracker.on_round(made) == "none" and tracker.pending is not None
    assert tracker.on_round(made + 1) == "excluded" and tracker.pending is None
    control = ContributionTracker(PROGRAM)  # where every round sends everything
    control.submit(make_contribution(made))
    assert control.on_round(made + 1) == "none" and control.pending is not None


def test_contribution_stays_pending_for_a_round_of_its_fragment() -> None:
    tracker = ContributionTracker(program_of(FRAGMENTS))
    tracker.submit(make_contribution(1))
    assert tracker.on_round(3) == "none" and tracker.on_round(5) == "excluded"


@pytest.mark.parametrize(
    ("tables", "kept"),
    [
        ({"codec": {"k": [constant(64, 1), 32]}}, False),
        ({"codec": {"kind": "subset"}}, False),
        ({"codec": {"kind": "subset", "shared": False}}, True),
        ({"signal": {"kind": "weights"}, "update": {"kind": "replace"}}, False),
        ({"feedback": {"decay": [constant(0.5, 1), 0.9]}}, True),
    ],
    ids=str,
)
def test_contribution_is_resubmitted_only_to_a_compatible_round(tables: Tables, kept: bool) -> None:
    tracker = ContributionTracker(program_of(compose("sparseloco", tables)))
    tracker.submit(make_contribution(0))
    assert (tracker.on_round(1) == "none") is kept


def test_contribution_is_excluded_on_a_chain_with_much_lower_rounds() -> None:
    tracker = ContributionTracker(PROGRAM)
    tracker.submit(make_contribution(7))
    assert tracker.on_round(6 - MAX_AGE_ROUNDS) == "excluded"


def test_contribution_included_by_the_other_chain_is_not_resubmitted() -> None:
    """Two parts of a split network end round 0 otherwise; we make one round more, and then meet the better chain."""
    ours, theirs, tracker = genesis_head(RUN_ID), genesis_head(RUN_ID), ContributionTracker(PROGRAM)
    tracker.submit(make_contribution(0))
    missed, taken = commit(ours, None), commit(theirs, make_contribution(0))
    assert tracker.on_commit(ME, missed) == "none"
    ours, theirs = extend_head(ours, missed), extend_head(theirs, taken)
    assert tracker.on_commits(ME, [commit(ours, None)], 2) == "none" and tracker.submitted_since == 0
    naive = ContributionTracker(PROGRAM)
    naive.submit(make_contribution(0))
    assert naive.on_commits(ME, [], 1) == "none" and naive.pending == make_contribution(0), (
        "it would be offered to round 1 of theirs"
    )
    assert tracker.on_fork(ME, [taken], 1, ours) == ForkOutcome("included")


@pytest.mark.parametrize("known", [(), (1,), (0,)], ids=str)
def test_contribution_with_unknown_outcome_is_lost(known: tuple[int, ...]) -> None:
    head, chain, tracker = genesis_head(RUN_ID), [], ContributionTracker(PROGRAM)
    for _ in range(2):
        chain.append(commit(head, None))
        head = extend_head(head, chain[-1])
    tracker.submit(make_contribution(0))
    assert (
        tracker.on_fork(ME, [chain[number] for number in known], 2, NOWHERE).outcome == "lost"
        and tracker.pending is None
    )
    assert tracker.outcome_of(0) == "lost"
    tracker.submit(make_contribution(0))
    assert tracker.on_fork(ME, chain, 2, NOWHERE).outcome == "none" and tracker.pending == make_contribution(0)


def test_exact_step_counts_from_the_weights_of_its_own_chain_only() -> None:
    """A difference of weights, the control, means the same on another chain."""
    other, exact = [commit(genesis_head(RUN_ID), None)], program_of(exact_method(compose("data-parallel"), 4, 1.0))
    for program, outcome in ((exact, "excluded"), (PROGRAM, "none")):
        tracker = ContributionTracker(program)
        tracker.submit(make_contribution(1))
        assert tracker.on_fork(ME, other, 1, NOWHERE).outcome == outcome
    same_chain = ContributionTracker(exact)
    same_chain.submit(make_contribution(1))
    assert same_chain.on_fork(ME, other, 1, genesis_head(RUN_ID)).outcome == "none"


class Fork:
    """Our messages to a chain of ours; `taken` says of each which of two chains takes it: o(urs), t(heirs) or none."""

    def __init__(self, taken: str) -> None:
        self.tracker = ContributionTracker(program_of(compose("averaging", {"schedule": {"fragments": 2}})))
        self.ours = genesis_head(RUN_ID)
        self.theirs = genesis_head(RUN_ID)
        self.chain = list[Commit]()
        self.made = [make_contribution(number, number) for number in range(len(taken))]
        for number, taker in enumerate(taken):
            self.tracker.submit(self.made[number])
            mine = commit(self.ours, self.made[number] if taker == "o" else None)
            self.chain.append(commit(self.theirs, self.made[number] if taker == "t" else None))
            self.tracker.on_commits(ME, [mine], number + 1)
            self.ours = extend_head(self.ours, mine)
            self.theirs = extend_head(self.theirs, self.chain[-1])

    def meet(self, known_since: int = 0) -> ForkOutcome:
        return self.tracker.on_fork(ME, self.chain[known_since:], len(self.chain), self.ours)

    def outcomes(self, fork_outcome: ForkOutcome) -> dict[int, tuple[ContributionOutcome | None, ContributionOutcome]]:
        return {
            self.made.index(entry.contribution): (entry.previous_outcome, entry.outcome)
            for entry in fork_outcome.revised
        }


def test_contribution_included_only_by_the_old_chain_is_returned() -> None:
    fork = Fork("oo")
    assert fork.outcomes(fork.meet()) == {0: ("included", "excluded"), 1: ("included", "excluded")}
    assert fork.meet().revised == (), "once"


def test_returned_contribution_included_by_the_new_chain_is_subtracted() -> None:
    fork = Fork("t-")
    fork_outcome = fork.meet()
    assert fork.outcomes(fork_outcome) == {0: ("excluded", "included")} and fork_outcome.retracts_restored
    kept = Fork("--").meet()
    assert kept.revised == () and not kept.retracts_restored, "the control: it stays what is to be sent"


def test_pending_contribution_with_subtracted_work_is_returned() -> None:
    fork = Fork("t")
    fork.tracker.submit(make_contribution(1, 1))
    assert fork.meet() == ForkOutcome("excluded", (SettledContribution(fork.made[0], 0, "included", "excluded"),))
    clean = Fork("o")
    clean.tracker.submit(make_contribution(1, 1))
    assert clean.meet().outcome == "none", "what is given back now is not in it"


def test_work_resent_in_a_later_contribution_is_revised_with_it() -> None:
    """The first was given back and went into the second, which ours took: that alone comes back, less the first."""
    fork = Fork("to")
    assert fork.outcomes(fork.meet()) == {1: ("included", "excluded"), 0: ("excluded", "included")}


def test_unknown_history_of_the_new_chain_sends_nothing_twice() -> None:
    assert Fork("o-").outcomes(Fork("o-").meet(1)) == {0: ("included", "lost")}
    fork = Fork("-o")
    assert fork.outcomes(fork.meet(1)) == {1: ("included", "excluded"), 0: ("excluded", "lost")}
    assert fork.tracker.history_needed_since(2) == 0


def test_jump_further_on_our_own_chain_revises_nothing() -> None:
    fork = Fork("o-")
    further = commit(fork.ours, None)
    assert fork.tracker.on_fork(ME, [further], 3, fork.ours) == ForkOutcome("none")
    assert Fork("o-").tracker.on_fork(ME, [further], 3, NOWHERE).revised, "the control: as if it were another one"


def come_back(*, carried: bool = False) -> tuple[ContributionTracker, Commit, Commit]:
    """Return our contributions after a jump back to before the commit that has the last one, that commit, and an empty
    one.

    `carried`: what was returned is in a new contribution already.
    """
    tracker, head = ContributionTracker(PROGRAM), genesis_head(RUN_ID)
    tracker.submit(make_contribution(0, 0))
    ours, nothing = commit(head, make_contribution(0, 0)), commit(head, None)
    tracker.on_decided(ME, ours)
    fork = tracker.on_fork(ME, [], 0, extend_head(head, ours))
    assert [entry.outcome for entry in fork.revised] == ["excluded"]
    if carried:
        tracker.submit(make_contribution(0, 1))
    return tracker, ours, nothing


def test_work_meets_the_chain_that_was_left_and_is_taken_out_again() -> None:
    """Control: the rule for the pending contribution alone would leave the work to be sent once more."""
    tracker, ours, nothing = come_back()
    assert tracker.on_decided(ME, nothing) == ForkOutcome("none")
    tracker, ours, _ = come_back()
    verdict = tracker.on_decided(ME, ours)
    assert [(entry.previous_outcome, entry.outcome) for entry in verdict.revised] == [("excluded", "included")]
    assert tracker.on_decided(ME, ours) == ForkOutcome("none"), "once"
    naive, ours, _ = come_back()
    assert naive.on_commits(ME, [ours], 1) == "none" and naive.settled[0].outcome == "excluded"


def test_what_carries_the_work_comes_back_before_it_is_taken_out() -> None:
    tracker, ours, _ = come_back(carried=True)
    verdict = tracker.on_decided(ME, ours)
    assert verdict.outcome == "excluded" and tracker.pending is None
    assert [entry.contribution for entry in verdict.revised] == [make_contribution(0, 0)]
    sent, ours, nothing = come_back(carried=True)
    assert sent.on_decided(ME, commit(genesis_head(RUN_ID), make_contribution(0, 1))).outcome == "included"
    assert sent.on_decided(ME, ours).revised == (), "the control: nothing of it is to be sent any more"


def test_settled_contributions_and_retained_parts_are_bounded() -> None:
    fork = Fork("o" * 20)
    outcomes = fork.outcomes(fork.meet())
    assert len(outcomes) == MAX_SETTLED + 1 and len(fork.tracker.retained_parts) == MAX_RESTORABLE
    assert [number for number, (_, outcome) in outcomes.items() if outcome == "excluded"] == [19, 18, 17]
    again = ContributionTracker.from_json(PROGRAM, fork.tracker.to_json())
    assert (again.settled, again.last_outcome) == (fork.tracker.settled, fork.tracker.last_outcome)
    assert again.history_needed_since(200) == 200, "no chain remembers that"


def test_contribution_made_after_the_checkpoint_is_pending_after_restore() -> None:
    tracker = ContributionTracker(PROGRAM)
    assert tracker.restore(
        make_contribution(0, 0), 1, LastSent(make_contribution(0, 0)), 0
    ) == "none" and tracker.pending == make_contribution(0, 0)
    assert tracker.restore(
        None, 1, LastSent(make_contribution(1, 1)), 1
    ) == "one" and tracker.pending == make_contribution(1, 1)
    assert tracker.restore(
        make_contribution(0, 0), 1, LastSent(make_contribution(2, 2)), 1
    ) == "many" and tracker.pending == make_contribution(2, 2)
    assert (
        tracker.restore(None, 0, LastSent(make_contribution(9, 0)), 9 - MAX_AGE_ROUNDS - 1) == "one"
        and tracker.pending is None
    )
    assert tracker.outcome_of(9) == "lost"


def test_same_parts_of_another_peer_are_not_our_contribution() -> None:
    tracker, head = ContributionTracker(PROGRAM), genesis_head(RUN_ID)
    tracker.submit(make_contribution(0))
    assert tracker.on_commit(ME, commit_of(head, {2: make_contribution(0).parts[0]}).body) == "none"


def test_old_outcome_of_the_same_round_number_is_not_reused() -> None:
    tracker, head = ContributionTracker(PROGRAM), ChainHead(7, bytes(32), 0)
    tracker.submit(make_contribution(7))
    tracker.on_commit(ME, commit(head, make_contribution(7)))
    tracker.submit(make_contribution(5))  # after a jump back to round 5
    tracker.on_commit(ME, commit(ChainHead(5, bytes(32), 0), make_contribution(5)))
    tracker.submit(make_contribution(7, identity=1))
    assert tracker.outcome_of(7) == "none"
