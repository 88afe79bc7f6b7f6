"""Ledgers of exact steps, the void rule, and the agreement of one server."""

from dataclasses import replace
from itertools import combinations

import pytest

from protocol.blobs.blob import DIGEST_BYTES, Blob
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages.contributions import Commit
from protocol.errors import MalformedError
from protocol.pipeline.exact import (
    FIRST_GRACE_SECONDS,
    MAX_DECISIONS,
    OVERTAKEN_SECONDS,
    Credibility,
    OfferStep,
    Phase,
    SendStatement,
    Statement,
    StepAgreement,
    StepDecisions,
    StepReports,
    owner_of,
    ranked_owners,
)
from protocol.pipeline.ledger import StepLedger, covers_step
from protocol.pipeline.microbatch import ServerLife
from tests.node.small_run import PEERS, contribution_of, stated

RUNS = ("aa" * 32, "bb" * 32)
COUNT = 4


def ledger(*ids: int) -> StepLedger:
    return StepLedger.of(COUNT, ids)


def test_ledger_has_one_encoding_of_its_size_only() -> None:
    assert StepLedger.from_bytes(ledger(0, 3).to_bytes(), COUNT) == ledger(0, 3) and list(ledger(0, 3)) == [0, 3]
    for wrong in (b"", b"\x00\x00", b"\x10"):  # too short, too long, an id that the step does not have
        with pytest.raises(MalformedError):
            StepLedger.from_bytes(wrong, COUNT)


def test_commit_covers_a_step_only_with_each_id_exactly_once() -> None:
    sets = [frozenset(ids) for size in range(COUNT + 1) for ids in combinations(range(COUNT), size)]
    for first in sets:
        for second in sets:
            expected = sorted([*first, *second]) == list(range(COUNT))
            found = [StepLedger.of(COUNT, ids).to_bytes() for ids in (first, second)]
            assert covers_step(found, COUNT) == expected
    assert not covers_step([], COUNT)


def agreement(count: int = COUNT) -> StepAgreement:
    made = StepAgreement("b", RUNS, 0, count)
    made.begin(0, 1, 0.0)
    made.set_peers([{"a": 1, "b": 1, "c": 1}, {"z": 1}], ["a", "b", "c", "z"])
    return made


def say(run: str, ids: StepLedger, phase: Phase = "open", life: int = 1, version: int = 1) -> Statement:
    return Statement(run, 0, life, version, ids, phase)


def offers(made: StepAgreement, now: float = 10.0) -> list[OfferStep]:
    return [action for action in made.advance(now) if isinstance(action, OfferStep)]


def test_server_offers_once_all_have_sealed_and_leaves_doubles_to_lower_ids() -> None:
    made = agreement()
    for number in (1, 2, 3):
        made.add(number, 0.0)
    made.record("z", say(RUNS[1], ledger(0, 1, 2, 3)), 1.0)
    made.record("a", say(RUNS[0], ledger(0, 1)), 1.0)
    made.record("c", say(RUNS[0], ledger(3)), 1.0)
    assert not offers(made) and made.phase == "sealed", "others may still add"
    made.record("a", say(RUNS[0], ledger(0, 1), "sealed", version=2), 2.0)
    made.record("c", say(RUNS[0], ledger(3), "sealed", version=2), 2.0)
    assert offers(made) == [OfferStep(ledger(1))], "a keeps 1, and c leaves 3 to us"
    made.offered(ledger(2, 3), 3.0)
    assert made.statement.phase == "offered" and not offers(made)


def test_what_has_been_offered_stays_with_a_higher_id() -> None:
    made = agreement()
    for number in range(COUNT):
        made.add(number, 0.0)
    made.record("z", say(RUNS[1], ledger(0, 1, 2, 3)), 1.0)
    made.record("c", say(RUNS[0], ledger(3), "offered"), 1.0)
    assert offers(made) == [OfferStep(ledger(3))]


def test_sealed_server_opens_again_when_a_death_takes_a_sum_away() -> None:
    made = agreement()
    made.add(0, 0.0)
    made.record("a", say(RUNS[0], ledger(1, 2, 3)), 1.0)
    made.record("z", say(RUNS[1], ledger(0, 1, 2, 3)), 1.0)
    made.advance(2.0)
    phases = [made.phase]
    made.set_peers([{"a": 2, "b": 1}, {"z": 1}], ["a", "b", "z"])  # a's trainer has a new life
    made.advance(3.0)
    assert [*phases, made.phase] == ["sealed", "open"]


def test_stage_that_has_decided_counts_what_its_dead_had() -> None:
    made = agreement()
    for number in range(COUNT):
        made.add(number, 0.0)
    made.record("z", say(RUNS[1], ledger(0, 1, 2, 3)), 1.0)
    made.set_peers([{"a": 1, "b": 1}, {}], ["a", "b"])
    made.advance(2.0)
    phases = [made.phase]
    made.take_reports(StepReports(2, {0: {1: True}}))
    made.advance(3.0)
    assert [*phases, made.phase] == ["open", "sealed"]


def test_doomed_round_ends_with_what_there_is() -> None:
    made = agreement()
    made.add(0, 0.0)
    assert not offers(made)
    made.take_reports(StepReports(2, {0: {1: False}}))
    assert offers(made) == [OfferStep(ledger())]


def test_microbatches_of_the_dead_pass_on_to_the_living() -> None:
    peers = ("a", "b", "c", "z")
    for number in range(64):
        owner = owner_of(0, number, peers)
        left = tuple(peer for peer in peers if peer != owner)
        assert owner in peers and owner_of(0, number, left) in left
        other = next(peer for peer in peers if peer != owner)
        assert owner_of(0, number, tuple(peer for peer in peers if peer != other)) == owner, "others keep theirs"


def test_acknowledgements_end_with_their_process_or_its_sum() -> None:
    made, nothing = agreement(count=32), StepLedger(32)
    mine = made.wanted((), 0.0)
    assert mine, "some microbatches are ours"
    number = mine[0]
    made.acknowledge(number, {0: ServerLife("a", 1), 1: ServerLife("z", 1)}, 0.0)
    assert number not in made.wanted((), 0.0) and made.counted_at(number) == {0, 1}
    made.record("a", say(RUNS[0], nothing), 0.1)
    assert number not in made.wanted((), 0.1), "the statement may be older than the acknowledgement"
    made.record("a", say(RUNS[0], nothing, version=2), OVERTAKEN_SECONDS + 0.1)
    assert made.counted_at(number) == {1} and number in made.wanted((), 2.0), "a has begun its sum again"
    made.acknowledge(number, {0: ServerLife("a", 1)}, 1.2)
    made.record("a", say(RUNS[0], nothing, version=2), 1.3)
    assert number not in made.wanted((), 1.3), "it may be older"
    made.record("a", say(RUNS[0], nothing, version=2), 3.3)
    assert number in made.wanted((), 3.3), "a says so again"
    made.acknowledge(number, {0: ServerLife("a", 1)}, 2.0)
    made.set_peers([{"a": 2, "b": 1}, {"z": 1}], ["a", "b", "c", "z"])
    assert number in made.wanted((), 2.0), "that life of a is over"


def test_statements_are_repeated_and_the_newest_counts() -> None:
    made = agreement()
    assert [type(action) for action in made.advance(1.0)] == [SendStatement] and made.advance(1.5) == []
    assert made.advance(9.0)
    made.record("a", say(RUNS[0], ledger(1), version=2), 1.0)
    made.record("a", say(RUNS[0], ledger(2), version=1), 1.0)
    assert list(made._covered()[0]) == [1]


def test_round_counts_only_if_all_stages_cover_its_step() -> None:
    reports = StepReports(2, {5: {0: True}})
    assert reports.verdict(5, {}) is None and reports.verdict(5, {1: True}) is True
    assert reports.verdict(5, {1: False}) is False and not reports.is_void(5)
    assert StepReports(3, {5: {0: False}}).is_void(5), "one stage is enough"


def commit_with(*ledgers: StepLedger) -> Commit:
    """Return a commit to round 5 with contributions of these ledgers."""
    head = ChainHead(5, bytes(DIGEST_BYTES), 0)
    bodies = [replace(contribution_of(head, [Blob.of(b"sum")]), ledger=each.to_bytes()) for each in ledgers]
    statements = [stated(peer, body) for peer, body in zip(PEERS, bodies, strict=False)]
    return Commit(5, 0, head.digest, tuple(statements), ())


def test_decisions_are_those_of_certified_commits() -> None:
    decisions = StepDecisions(2, COUNT)
    decisions.record(0, commit_with(ledger(0, 1), ledger(2, 3)))
    decisions.record(1, commit_with(ledger(0, 1), ledger(1, 2, 3)))
    assert decisions.reports().decided == {5: {0: True, 1: False}}
    assert not decisions.reports().lacking, "one is doubled, and none lacks"
    decisions.record(1, commit_with(ledger(1), ledger(3)))
    assert decisions.reports().lacking == {5: {1: ledger(0, 2)}}
    for number in range(MAX_DECISIONS):
        decisions.note(0, 6 + number, True, ledger())
    assert 0 not in decisions.reports().decided[5], "it is bounded"


def test_microbatch_without_progress_passes_to_the_next_peer_by_hash() -> None:
    made = agreement()
    orders = {number: ranked_owners(0, number, ("a", "b", "c", "z")) for number in range(COUNT)}
    at_first = [number for number, order in orders.items() if order[0] == "b"]
    assert made.wanted([], 1.0) == at_first
    due = [FIRST_GRACE_SECONDS * order.index("b") for order in orders.values()]
    assert made.next_deadline() == 0.0, "its first statement"
    for now in sorted({*due, FIRST_GRACE_SECONDS - 0.1}):
        expected = [number for number, order in orders.items() if FIRST_GRACE_SECONDS * order.index("b") <= now]
        assert made.wanted([], now) == expected


def test_owner_that_makes_progress_keeps_its_microbatches() -> None:
    made, order = agreement(), ("a", "b", "c", "z")
    number = next(each for each in range(COUNT) if ranked_owners(0, each, order)[0] != "b")
    owner, mine = ranked_owners(0, number, order)[0], made.wanted([], 1.0)
    made.record("z", say(RUNS[1], ledger(number)), FIRST_GRACE_SECONDS - 1)
    theirs = [each for each in range(COUNT) if ranked_owners(0, each, order)[0] == owner]
    assert not set(theirs) & set(made.wanted([], FIRST_GRACE_SECONDS + 1)) - set(mine)


def lacking(number: int, ids: StepLedger) -> StepReports:
    """Return that the commit of stage 0 to a round lacks microbatches."""
    return StepReports(2, {number: {0: not len(ids)}}, {number: {0: ids}} if len(ids) else {})


def test_statements_count_only_from_servers_with_standing() -> None:
    made, nobody = agreement(), frozenset[str]()
    stages = [{"a": 1, "b": 1, "c": 1}, {"z": 1}]
    made.set_peers(stages, ["b", "z"], frozenset({"b", "z"}))
    made.record("a", say(RUNS[0], ledger(0, 1, 2, 3), "offered"), 1.0)
    assert not list(made._covered()[0]) and made.may_add and made._duplicates() == ledger()
    made.set_peers(stages, ["a", "b", "z"], frozenset({"a", "z"}))
    assert list(made._covered()[0]) == [0, 1, 2, 3]
    assert not made.may_add and not made.is_believed(0, "b"), "we have no standing ourselves"
    made.set_peers(stages, ["a", "b"], nobody)
    assert made.may_add and made.is_believed(0, "a"), "where nobody has standing, all count"


def test_server_whose_word_commits_belie_twice_is_not_believed_for_some_rounds() -> None:
    made, full = agreement(), ledger(0, 1, 2, 3)
    for number in range(9):
        if number:
            made.begin(number, 1, float(number))
        believed = made.is_believed(0, "a")
        assert believed == (number < 2 or number > 5), number
        made.record("a", replace(say(RUNS[0], full, "sealed", version=number), round=number), float(number))
        made.take_reports(lacking(number, full if number < 2 else ledger()))


def test_honest_servers_are_not_to_blame_for_what_they_gave_up() -> None:
    """A lower id claimed it, or somebody had offered it; who takes an offer back is to blame all the same."""
    credibility, full = Credibility(), ledger(0, 1, 2, 3)
    for number in range(2):
        credibility.begin(number)
        credibility.state("b", 0, full, "sealed")
        credibility.state("a" if number else "z", 0, full, "sealed" if number else "offered")
        credibility.state("a" if number else "z", 0, ledger(), "open")
        credibility.state("b", 0, ledger(), "offered")
        credibility.judge(lacking(number, ledger(2)))
    assert {peer: record.level for peer, record in credibility._records.items()} == {"z": 1, "a": 1}


def test_server_that_never_seals_is_waited_for_once() -> None:
    made = agreement()
    for number in range(2):
        made.begin(number, 1, 100.0 * number)
        for microbatch in range(COUNT):
            made.add(microbatch, 100.0 * number)
        for peer, run in (("z", RUNS[1]), ("a", RUNS[0])):
            ids = ledger(0, 1, 2, 3) if peer == "z" else ledger()
            made.record(peer, replace(say(run, ids), round=number), 100.0 * number)
        assert bool(offers(made, 100.0 * number + 1)) == bool(number)
        assert number or offers(made, FIRST_GRACE_SECONDS + 2)
