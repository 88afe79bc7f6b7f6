"""The limit on log lines that peers cause."""

import logging

from node.monitoring.peer_lines import DETAIL_FACTOR, LINES_PER_PEER, LINES_PER_PLACE, PERIOD_SECONDS, LineLimit
from protocol.identity import Identity

PEER, OTHER = (Identity.create().peer_id for _ in range(2))


def line(
    text: str, at: float = 0.0, level: int = logging.WARNING, place: int = 1, name: str = "node.x"
) -> logging.LogRecord:
    record = logging.LogRecord(name, level, "x.py", place, text, (), None)
    record.created = at
    return record


def test_flood_of_one_peer_writes_few_lines_and_a_summary_with_the_exact_number() -> None:
    limit = LineLimit()
    flood = [line(f"refusing a call of {PEER}: {number}", number / 857) for number in range(8564)]
    written = sum(limit.admits(record) for record in flood)
    assert written == LINES_PER_PEER
    assert len(flood) > 100 * written  # the control: the number of lines without a limit
    assert limit.admits(line(f"refusing a call of {OTHER}"))
    assert not list(limit.summaries(PERIOD_SECONDS - 1))
    (summary,) = limit.summaries(PERIOD_SECONDS + 1)
    assert f"left out {8564 - LINES_PER_PEER} more lines" in summary
    assert not list(limit.summaries(PERIOD_SECONDS + 3))


def test_many_keys_share_the_lines_of_a_place() -> None:
    limit = LineLimit()
    keys = [Identity.create().peer_id for _ in range(2 * LINES_PER_PLACE)]
    assert sum(limit.admits(line(f"refusing a call of {key}")) for key in keys) == LINES_PER_PLACE
    assert limit.admits(line(f"{OTHER} joined", place=2))


def test_lines_of_our_own_are_never_left_out() -> None:
    limit = LineLimit()
    assert all(limit.admits(line(f"round {number}", level=logging.INFO)) for number in range(1000))


def test_network_code_is_limited_although_it_names_nobody() -> None:
    limit = LineLimit()
    lines = [line("an incoming stream was lost", name="protocol.transport.x") for _ in range(1000)]
    assert sum(map(limit.admits, lines)) == LINES_PER_PLACE


def test_details_have_more_lines_than_warnings() -> None:
    limit = LineLimit()
    lines = [line(f"call of {PEER}", level=logging.DEBUG) for _ in range(10_000)]
    assert sum(map(limit.admits, lines)) == DETAIL_FACTOR * LINES_PER_PEER
    assert limit.admits(line(f"call of {PEER}", place=2))


def test_next_minute_has_lines_again() -> None:
    limit = LineLimit()
    for minute in range(3):
        lines = [line(f"call of {PEER}", minute * (PERIOD_SECONDS + 1)) for _ in range(100)]
        assert sum(map(limit.admits, lines)) == LINES_PER_PEER
