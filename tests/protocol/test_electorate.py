"""Who may vote: as the manifest and the commits say."""

import json
import random
from dataclasses import replace
from itertools import combinations

import pytest

from protocol.electorate import (
    ABSENCES_TO_LOSE,
    INCLUSIONS_FOR_VOTE,
    MAX_CANDIDATES,
    OPEN,
    WINDOW_ROUNDS,
    Electorate,
)
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.manifest.sections import AdmissionSection
from tests.protocol.electorates import after_rounds, commit, included, revoking

KEYS = tuple(sorted(Identity.create().peer_id for _ in range(4)))
LIST = AdmissionSection(mode="list", keys=KEYS)
TRUSTED = AdmissionSection(mode="list", keys=KEYS, trusted=True)
TICKETS = AdmissionSection(mode="tickets")


def names(count: int, prefix: str = "p") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def test_contributors_of_the_first_commit_found_an_open_electorate() -> None:
    genesis = Electorate.at_genesis()
    assert not genesis.voters and not genesis.is_certified_by(names(9))
    founded = genesis.after(commit(0, names(3)))
    assert founded.voters == set(names(3)) and founded.round == 1
    assert founded.is_certified_by(["p0", "p2"]) and not founded.is_certified_by(["p0", "stranger"])


def test_founders_of_the_manifest_vote_before_the_first_commit() -> None:
    genesis = Electorate.at_genesis(AdmissionSection(founders=KEYS[:2]))
    assert genesis.voters == set(KEYS[:2])
    assert genesis.after(commit(0, ["stranger"])).voters == set(KEYS[:2]), "a stranger cannot found it again"


def test_vote_is_earned_by_inclusions_and_lost_by_absences() -> None:
    electorate = after_rounds(Electorate.at_genesis(), 1, names(3))
    almost = after_rounds(electorate, INCLUSIONS_FOR_VOTE - 1, [*names(3), "new"])
    assert "new" not in almost.voters
    earned = after_rounds(almost, 1, [*names(3), "new"])
    assert "new" in earned.voters
    absent = after_rounds(earned, ABSENCES_TO_LOSE - 1, names(3))
    assert "new" in absent.voters
    lost = after_rounds(absent, 1, names(3))
    assert lost.voters == set(names(3))
    again = after_rounds(lost, WINDOW_ROUNDS + INCLUSIONS_FOR_VOTE - 1, names(3))
    assert "new" not in after_rounds(again, INCLUSIONS_FOR_VOTE - 1, [*names(3), "new"]).voters, "it starts over"


def test_inclusions_older_than_the_window_do_not_count() -> None:
    electorate = after_rounds(Electorate.at_genesis(), 1, names(3))
    for _ in range(3 * INCLUSIONS_FOR_VOTE):  # one inclusion in five commits: never eight of 32
        electorate = after_rounds(after_rounds(electorate, 1, [*names(3), "rare"]), 4, names(3))
    assert "rare" not in electorate.voters


@pytest.mark.parametrize("founders", [1, 2, 3, 6, 9, 10, 30])
def test_at_most_a_third_of_the_voters_enters_in_any_window(founders: int) -> None:
    electorate = after_rounds(Electorate.at_genesis(), 1, names(founders))
    history = [electorate.voters]
    for _ in range(3 * WINDOW_ROUNDS):
        electorate = after_rounds(electorate, 1, [*names(founders), *names(50, "sybil")])
        history.append(electorate.voters)
    for start, end in combinations(range(len(history)), 2):
        if end - start <= WINDOW_ROUNDS:
            assert len(history[end] - history[start]) <= max(1, len(history[start]) // 3)
    assert len(history[-1]) > founders, "and some do enter"


def test_key_cannot_be_ground_to_enter_first() -> None:
    def entering(number: int) -> frozenset[str]:
        electorate = after_rounds(Electorate.at_genesis(), number, names(3))
        electorate = after_rounds(electorate, INCLUSIONS_FOR_VOTE, [*names(3), *names(9, "a"), *names(9, "z")])
        return electorate.voters - frozenset(names(3))

    chosen = [entering(number) for number in range(1, 13)]
    assert all(len(keys) == 1 for keys in chosen) and len(set(chosen)) > 3, "another key in another round"


def test_ticket_holder_votes_from_its_first_inclusion_until_it_is_absent() -> None:
    electorate = after_rounds(Electorate.at_genesis(TICKETS), 1, ["a"])
    assert electorate.after(commit(1, ["a", "b", "c", "d"])).voters == {"a", "b", "c", "d"}, "tickets need no window"
    assert after_rounds(electorate.after(commit(1, ["a", "b"])), ABSENCES_TO_LOSE, ["a"]).voters == {"a"}


def test_contribution_without_a_ticket_gives_no_vote_in_a_run_of_tickets() -> None:
    body = replace(commit(0, "ab"), contributions=(included("a", 0), included("b", 0, has_ticket=False)))
    assert Electorate.at_genesis(TICKETS).after(body).voters == {"a"}
    assert Electorate.at_genesis().after(body).voters == {"a", "b"}, "the control: an open run"


def test_keys_of_a_list_vote_whatever_they_do() -> None:
    electorate = Electorate.at_genesis(LIST)
    assert after_rounds(electorate, 40, ["stranger"]).voters == set(KEYS)


@pytest.mark.parametrize("rule", [OPEN, LIST, TICKETS])
def test_revoked_key_loses_its_vote_with_the_commit_that_adopts_the_revision(rule: AdmissionSection) -> None:
    electorate = after_rounds(Electorate.at_genesis(rule), 20, KEYS)
    after = electorate.after(commit(20, KEYS, revoking(KEYS[1])))
    assert electorate.voters == set(KEYS) and after.voters == set(KEYS) - {KEYS[1]}
    assert KEYS[1] not in after_rounds(after, 50, KEYS).voters, "contributions do not bring it back"
    pardoned = after.after(commit(21, KEYS, revoking()))
    assert KEYS[1] in after_rounds(pardoned, 10, KEYS).voters


def test_electorate_without_any_present_voter_is_founded_again() -> None:
    electorate = after_rounds(Electorate.at_genesis(), 3, ["dead"])
    others = after_rounds(electorate, ABSENCES_TO_LOSE - 1, names(3))
    assert others.voters == {"dead"}
    assert after_rounds(others, 1, names(3)).voters == set(names(3))


@pytest.mark.parametrize("count", range(1, 60))
def test_two_quorums_share_more_than_a_third_of_the_voters(count: int) -> None:
    size, liars = Electorate.at_genesis().quorum_size(count), (count - 1) // 3
    assert 2 * size - count > liars, "so they share an honest voter"
    assert size <= count - liars, "and the honest ones alone are a quorum"
    trusted = Electorate.at_genesis(TRUSTED).quorum_size(count)
    assert 2 * trusted - count > 0 and trusted <= size


def test_size_of_quorums() -> None:
    electorate = Electorate.at_genesis()
    sizes = [electorate.quorum_size(count) for count in range(1, 11)]
    assert sizes == [1, 2, 2, 3, 4, 4, 5, 6, 6, 7]


def test_bytes_are_canonical_and_name_the_electorate() -> None:
    electorate = after_rounds(Electorate.at_genesis(), 5, names(5)).after(commit(5, names(2)))
    raw = electorate.to_bytes()
    assert (
        Electorate.from_bytes(raw, OPEN) == electorate and Electorate.from_bytes(raw, OPEN).digest == electorate.digest
    )
    others = [
        electorate.after(commit(6, names(2))), after_rounds(Electorate.at_genesis(), 6, names(5)),
        Electorate.at_genesis(),
    ]  # fmt: skip
    assert len({electorate.digest, *(other.digest for other in others)}) == 4


@pytest.mark.parametrize(
    "values",
    [
        {"voters": ["b", "a"]}, {"voters": [1]}, {"voters": "ab"}, {"voters": ["a", "a"]}, {"voters": ["x" * 65]},
        {"attendance": {"a": 0}}, {"attendance": {"a": 2**WINDOW_ROUNDS}}, {"attendance": {"a": True}},
        {"attendance": {"a": 1.0}}, {"attendance": ["a"]}, {"entries": [-1]}, {"entries": {}}, {"round": -1},
        {"round": 2**40}, {"round": None}, {"revoked": [None]}, {"more": 1},
    ],
)  # fmt: skip
def test_malformed_electorate_is_refused(values: dict[str, object]) -> None:
    good = json.loads(after_rounds(Electorate.at_genesis(), 2, ["a", "b"]).to_bytes())
    raw = json.dumps(good | values, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(MalformedError):
        Electorate.from_bytes(raw, OPEN)


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1]", b"\xff", b"[" * 100_000, b" " * (1 << 21), b"null", b"1e999"])
def test_bytes_that_are_no_electorate_are_refused(raw: bytes) -> None:
    with pytest.raises(MalformedError):
        Electorate.from_bytes(raw, OPEN)


def test_other_encodings_of_the_same_values_are_refused() -> None:
    raw = after_rounds(Electorate.at_genesis(), 2, ["a", "b"]).to_bytes()
    with pytest.raises(MalformedError, match="canonical"):
        Electorate.from_bytes(raw.replace(b":", b": ", 1), OPEN)


def test_table_of_candidates_is_bounded() -> None:
    electorate = after_rounds(Electorate.at_genesis(), 2, names(3))
    for number in range(2, 34):
        electorate = electorate.after(commit(number, [*names(3), *names(1000, f"fresh{number}-")]))
    assert len(electorate.attendance) <= MAX_CANDIDATES + 3 and electorate.voters == set(names(3))


def test_equal_commits_give_equal_electorates_in_any_process() -> None:
    dice = random.Random(7)
    rounds = [dice.sample(names(12), dice.randint(1, 12)) for _ in range(100)]
    first = second = Electorate.at_genesis()
    for number, peers in enumerate(rounds):
        first = first.after(commit(number, peers))
        if number == 50:
            second = Electorate.from_bytes(first.to_bytes(), OPEN)
        elif number > 50:
            second = second.after(commit(number, reversed(peers)))
    assert first.digest == second.digest and first.voters == second.voters
