"""Summaries of tables: what either side lacks is found by eight bytes a peer, and no key can hide another one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LimitError, MalformedError
from protocol.membership.summary import SALT_BYTES, Summary, tag_of

SALT = bytes(range(SALT_BYTES))
NOW = 1_800_000_000_000  # a sequence, in milliseconds
TABLES = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(NOW - 10**6, NOW + 10**6))


def sent(table: dict[str, int], salt: bytes = SALT) -> Summary:
    return Summary.from_bytes(salt, Summary.of(table, salt).to_bytes(), 8)


@given(TABLES, TABLES)
def test_both_sides_find_what_they_lack(ours: dict[str, int], theirs: dict[str, int]) -> None:
    newer, wanted = sent(theirs).compare(ours)
    lacking = {peer: theirs.get(peer, 0) for peer, sequence in ours.items() if sequence > theirs.get(peer, -1)}
    assert newer == {peer: sequence % 2**32 for peer, sequence in lacking.items()}
    ahead = {peer: ours.get(peer, 0) for peer, sequence in theirs.items() if sequence > ours.get(peer, -1)}
    answer = Summary.from_bytes(SALT, wanted.to_bytes(), 8)
    assert answer.known_of(theirs) == {peer: sequence % 2**32 for peer, sequence in ahead.items()}


def test_sequences_around_a_multiple_of_the_low_half_are_compared_rightly() -> None:
    edge = 2**32 * 419
    before, after = (edge - 1) % 2**32, 1
    assert sent({"a": edge - 1}).compare({"a": edge + 1}) == ({"a": before}, Summary(SALT, {}))
    assert sent({"a": edge + 1}).compare({"a": edge - 1}) == ({}, Summary(SALT, {tag_of("a", SALT): before}))
    assert sent({"a": edge + 1}).sequences == {tag_of("a", SALT): after}


def test_summary_takes_eight_bytes_for_each_peer() -> None:
    peers = {f"12D3KooW{number:044}": NOW for number in range(200)}
    assert len(Summary.of(peers, SALT).to_bytes()) == 8 * 200
    naive = sum(len(peer) + 12 for peer in peers)  # a map of ids and sequences
    assert naive >= 8 * (8 * 200)


def test_tags_collide_anew_with_each_salt() -> None:
    """A pair of keys that collide under one salt are told apart under the next: nobody can hide a peer for long."""
    found: dict[bytes, int] = {}
    first = second = -1
    for number in range(1_000_000):
        first, second = found.setdefault(tag_of(str(number), SALT), number), number
        if first != second:
            break
    assert first != second, "a birthday among a million of 2^32 is nearly sure"
    table = {str(first): NOW, str(second): NOW}
    assert len(sent(table).sequences) == 1
    assert len(sent(table, bytes(SALT_BYTES)).sequences) == 2


@pytest.mark.parametrize(("salt", "entries", "error"), [
    (b"", b"", MalformedError),
    (SALT, bytes(9), MalformedError),
    (SALT, bytes(8 * 9), LimitError),
])  # fmt: skip
def test_bad_summaries_are_refused(salt: bytes, entries: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        Summary.from_bytes(salt, entries, 8)
