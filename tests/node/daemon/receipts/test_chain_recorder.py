"""A node's own commit log: rounds, restarts, a state that was downloaded, another chain."""

from pathlib import Path

from node.daemon.receipts.commit_log import append_new_commits
from protocol.consensus.chain import Chain, ChainLog
from tests.node.daemon.receipts.example_commits import THREE_PEERS, chain, chain_to, head_after, log_in, log_of
from tests.node.small_run import RUN_ID

COMMITS = chain(THREE_PEERS)


def test_log_follows_the_chain_over_restarts(tmp_path: Path) -> None:
    own, log = Chain.from_genesis(RUN_ID), log_in(tmp_path)
    append_new_commits(log, own)
    for commit in COMMITS[:3]:
        own.append(commit)
    append_new_commits(log, own)
    assert log.head == own.head
    restarted, log = chain_to(COMMITS[:2]), log_in(tmp_path)  # its checkpoint is a round older
    append_new_commits(log, restarted)
    for commit in COMMITS[2:]:
        restarted.append(commit)
        append_new_commits(log, restarted)
    assert log.head == head_after(COMMITS) == log_in(tmp_path).head and not log.ledger.missing_rounds


def test_downloaded_state_leaves_a_gap(tmp_path: Path) -> None:
    own, log = Chain.from_genesis(RUN_ID), log_in(tmp_path)
    own.switch_to(head_after(COMMITS[:3]), ChainLog(chain_to(COMMITS[:3]).electorate))
    append_new_commits(log, own)
    assert log.head.round == 0
    own.append(COMMITS[3])
    append_new_commits(log, own)
    assert log.head == own.head and log.ledger.missing_rounds == 3


def test_other_chain_replaces_the_own_rounds(tmp_path: Path) -> None:
    own, log = Chain.from_genesis(RUN_ID), log_in(tmp_path)
    own.append(COMMITS[0])
    append_new_commits(log, own)
    other = chain([{3: (999, 0)}] * 3, word="other")
    own.switch_to(head_after(other), log_of(other))
    append_new_commits(log, own)
    assert log.head == own.head and log.ledger.tokens == 3 * 999
