"""The commit log of a host that is killed, whose disk is damaged, and whose swarm switches to another chain."""

from pathlib import Path

import pytest

from node.daemon.receipts.commit_file import COMMIT_FILE_NAME, CommitFileHeader, read_header
from node.daemon.receipts.commit_log import CommitLog
from node.daemon.receipts.ledger import commit_verifier, read_ledger
from protocol.errors import ReceiptError
from tests.node.daemon.receipts.example_commits import (
    HEADER,
    MARY,
    THREE_PEERS,
    TOM,
    chain,
    chain_to,
    extend,
    head_after,
    log_in,
    read_messages,
)

COMMITS = chain(THREE_PEERS)
HEAD = head_after(COMMITS)


def accounts(log: CommitLog) -> dict[str, tuple[int, int]]:
    return {peer: (account.tokens, account.rounds) for peer, account in log.ledger.accounts.items()}


def test_log_counts_tokens_and_rounds_of_each_peer(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    extend(log, COMMITS[:2])
    extend(log, COMMITS[2:], COMMITS[:2])
    assert log.head == HEAD and log.ledger.tokens == HEAD.tokens == sum(t for g in THREE_PEERS for t, _ in g.values())
    assert accounts(log)[MARY.peer_id] == (411, 4) and log.ledger.missing_tokens == 0
    again = log_in(tmp_path)
    assert again.head == HEAD and accounts(again) == accounts(log)
    assert read_ledger(log.path, commit_verifier).head == HEAD


def test_log_cut_anywhere_is_repaired_and_continues(tmp_path: Path) -> None:
    """Control: without the repair, the next commit would follow a partial record."""
    extend(log_in(tmp_path), COMMITS)
    path = tmp_path / COMMIT_FILE_NAME
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        log = log_in(tmp_path)
        assert log.head in [head_after(COMMITS[:count]) for count in range(len(COMMITS) + 1)]
        extend(log, COMMITS[log.head.round :], COMMITS[: log.head.round])
        assert path.read_bytes() == whole, size
    path.write_bytes(whole[:-7] + b"more")
    with pytest.raises(ReceiptError, match="cut off|damaged"):
        read_ledger(path, commit_verifier)


def test_damaged_log_is_kept_aside_and_goes_on_before_the_damage(tmp_path: Path) -> None:
    extend(log_in(tmp_path), COMMITS)
    path = tmp_path / COMMIT_FILE_NAME
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    log = log_in(tmp_path)
    assert 0 < log.head.round < len(COMMITS)
    assert (tmp_path / "commits.log.damaged").read_bytes() == damaged
    extend(log, COMMITS[log.head.round :], COMMITS[: log.head.round])
    assert log.head == HEAD


def test_switch_to_another_chain_drops_the_rounds_of_the_old_one(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    extend(log, COMMITS)
    start = chain_to(COMMITS[:2])
    other = chain([{2: (500, 0)}, {2: (600, 0)}], start, "other")
    extend(log, other, COMMITS[:2])
    assert log.head == head_after(other, start.head) and accounts(log)[TOM.peer_id] == (90 + 90 + 500 + 600, 4)
    assert accounts(log) == accounts(log_in(tmp_path)) and log.ledger.tokens == log.head.tokens
    longer = [*COMMITS[:2], *other]
    extend(log, [*longer, *chain([{1: (7, 0)}], chain_to(longer))])  # from further back than necessary
    assert (log.head.round, log.ledger.missing_rounds) == (5, 0) and len(list(read_messages(log.path))) == 5


def test_chain_without_a_common_round_replaces_everything(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    extend(log, COMMITS)
    stranger = chain([{3: (10_000, 0)}] * 4, word="stranger")
    extend(log, stranger[3:], stranger[:3])
    assert log.head.tokens == 40_000 and log.ledger.missing_tokens == 30_000 and log.ledger.missing_rounds == 3
    assert MARY.peer_id not in log.ledger.accounts


def test_rounds_that_nobody_can_show_are_a_gap(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    extend(log, COMMITS[:1])
    extend(log, COMMITS[3:], COMMITS[:3])
    again = log_in(tmp_path).ledger
    assert (again.missing_rounds, again.missing_tokens, again.head) == (2, 110 + 90 + 101 + 75, HEAD)
    assert again.tokens + again.missing_tokens == HEAD.tokens


def test_log_of_another_run_is_refused(tmp_path: Path) -> None:
    extend(log_in(tmp_path), COMMITS)
    other = CommitFileHeader("cd" * 32, HEADER.codec, HEADER.shapes)
    with pytest.raises(ReceiptError, match="another run"):
        CommitLog.open(tmp_path / COMMIT_FILE_NAME, other)


def test_header_survives_with_and_without_an_organiser_and_a_whole_run(tmp_path: Path) -> None:
    for organiser, whole_run in (("", ""), (MARY.peer_id, ""), (MARY.peer_id, "ab" * 32)):
        header = CommitFileHeader("cd" * 32, "streaming-diloco", bytes(32), organiser, whole_run=whole_run)
        (tmp_path / "file").write_bytes(header.to_line())
        with (tmp_path / "file").open("rb") as file:
            assert read_header(file, tmp_path) == header
