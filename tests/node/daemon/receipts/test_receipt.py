"""Receipts add up to the tokens of the run exactly, and every change to a receipt or to the commits is refused."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from node.daemon.receipts.commit_file import COMMIT_FILE_NAME
from node.daemon.receipts.ledger import commit_reader, read_ledger
from node.daemon.receipts.receipt import Receipt, ReceiptContent, issue_receipt, sign_content, verify_receipts
from protocol import murmur_pb2 as wire
from protocol.consensus.chain import CertifiedCommit, Chain, ChainLog, extend_head
from protocol.consensus.messages.contributions import Adoption
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import ReceiptError
from protocol.identity import Identity
from protocol.rollout_credits import RolloutCredit
from protocol.signing import sign
from protocol.steering import REVISION_KIND, Revision, encode_changes
from tests.node.daemon.receipts.example_commits import (
    GENESIS,
    HEADER,
    HOST,
    MARY,
    THREE_PEERS,
    TOM,
    ZOE,
    chain,
    chain_to,
    extend,
    head_after,
    log_in,
    read_messages,
    signed_commit,
    write_messages,
)
from tests.node.small_run import PEERS, RUN_ID, certified, stated

ORGANISER, JANE = PEERS[5], PEERS[4]

COMMITS = chain(THREE_PEERS)
HEAD = head_after(COMMITS)


@pytest.fixture
def commits(tmp_path: Path) -> Path:
    extend(log_in(tmp_path), COMMITS)
    return tmp_path / COMMIT_FILE_NAME


def receipt_of(path: Path, peer: Identity, issuer: Identity = HOST) -> Receipt:
    return issue_receipt(read_ledger(path, commit_reader, {peer.peer_id}), "small", peer.peer_id, "mary", issuer)


def test_receipts_of_all_peers_add_up_to_the_tokens_of_the_run(commits: Path) -> None:
    receipts = [receipt_of(commits, peer) for peer in (MARY, TOM, ZOE)]
    verify_receipts(receipts, commits)
    assert [(receipt.tokens, receipt.rounds) for receipt in receipts] == [(411, 4), (274, 4), (215, 3)]
    assert sum(receipt.tokens for receipt in receipts) == HEAD.tokens == receipts[0].run_tokens
    late = [entry for entry in receipts[2].contributions if entry.age]
    assert [(entry.round, entry.tokens) for entry in late] == [(2, 75)]
    assert receipts[0].describe("valid").startswith("valid: mary gave 411 tokens in 4 rounds of run small (45.7%)")


def test_receipt_stays_valid_while_the_run_goes_on(commits: Path) -> None:
    early = receipt_of(commits, MARY)
    log = log_in(commits.parent)
    extend(log, chain([{1: (5, 0)}], chain_to(COMMITS)), COMMITS)
    verify_receipts([early, receipt_of(commits, MARY)], commits)
    assert receipt_of(commits, MARY).tokens == early.tokens + 5


def test_receipt_after_a_chain_switch_counts_only_the_new_chain(commits: Path) -> None:
    before, start = receipt_of(commits, MARY), chain_to(COMMITS[:1])
    other = chain([{1: (1000, 0), 2: (700, 0)}, {3: (2, 0)}], start, "other")
    extend(log_in(commits.parent), other, COMMITS[:1])
    receipts = [receipt_of(commits, peer) for peer in (MARY, TOM, ZOE)]
    verify_receipts(receipts, commits)
    assert receipts[0].tokens == 1100 and sum(receipt.tokens for receipt in receipts) == receipts[0].run_tokens
    with pytest.raises(ReceiptError):
        verify_receipts([before], commits)


def test_claim_far_above_that_of_the_others_counts_for_twice_theirs(commits: Path) -> None:
    before = receipt_of(commits, MARY).tokens
    extend(log_in(commits.parent), chain([{1: (1 << 40, 0), 2: (3, 0), 3: (5, 0)}], chain_to(COMMITS)), COMMITS)
    receipts = [receipt_of(commits, peer) for peer in (MARY, TOM, ZOE)]
    verify_receipts(receipts, commits)
    assert receipts[0].tokens == before + 2 * 5
    assert sum(receipt.tokens for receipt in receipts) == receipts[0].run_tokens


def test_rollout_peer_gets_a_receipt_of_what_trainers_learned_from_it(commits: Path) -> None:
    """Its own word is nowhere in the commits, so a receipt that says more differs from them."""
    learned = (RolloutCredit(JANE.peer_id, 2, 30),)
    log = log_in(commits.parent)
    extend(log, chain([{1: (100, 0), 2: (90, 0)}, {1: (60, 0)}], chain_to(COMMITS), credited=learned), COMMITS)
    receipt = receipt_of(commits, JANE)
    verify_receipts([receipt, receipt_of(commits, MARY)], commits)
    assert (receipt.tokens, receipt.rounds, receipt.groups, receipt.rollout_tokens) == (0, 0, 6, 90)
    assert [(each.round, len(each.credits)) for each in receipt.rollouts] == [(5, 2), (6, 1)]
    assert {credit.trainer for credit in receipt.rollouts[0].credits} == {MARY.peer_id, TOM.peer_id}
    assert receipt.describe("valid").startswith(
        "valid: mary gave 6 groups of rollouts with 90 tokens that trainers learned in 2 rounds of run small; signed by"
    )
    inflated = [each.model_dump() for each in receipt.rollouts]
    inflated[0]["credits"][0]["groups"] += 1
    for lie in ({"groups": 7}, {"rollout_tokens": 91}, {"rollouts": inflated}, {"rollouts": ()}):
        with pytest.raises(ReceiptError, match="differ in"):
            verify_receipts([sign_content(changed(receipt, **lie), HOST)], commits)


def test_receipt_with_a_gap_names_the_missing_tokens(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    extend(log, COMMITS[:1])
    extend(log, COMMITS[3:], COMMITS[:3])
    receipts = [receipt_of(log.path, peer) for peer in (MARY, TOM, ZOE)]
    verify_receipts(receipts, log.path)
    assert sum(receipt.tokens for receipt in receipts) + receipts[0].missing_tokens == HEAD.tokens
    assert receipts[0].missing_tokens == 376


def changed(receipt: Receipt, **fields: Any) -> ReceiptContent:
    return ReceiptContent.model_validate({**receipt.model_dump(exclude={"signature"}), **fields})


def with_entries(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Receipt], ReceiptContent]:
    def apply(receipt: Receipt) -> ReceiptContent:
        entries = [entry.model_dump() for entry in receipt.contributions]
        change(entries)
        return changed(receipt, contributions=entries)

    return apply


def flip_tokens(entries: list[dict[str, Any]]) -> None:
    entries[1]["tokens"] ^= 1


def double_a_round(entries: list[dict[str, Any]]) -> None:
    entries.append(entries[0])


def leave_out_a_round(entries: list[dict[str, Any]]) -> None:
    del entries[2]


def add_a_round(entries: list[dict[str, Any]]) -> None:
    entries.append({**entries[0], "round": 3})


LIES = {
    "one bit of the tokens": (with_entries(flip_tokens), "round 1 is another one"),
    "a doubled round": (with_entries(double_a_round), "counts round 0 twice"),
    "a round left out": (with_entries(leave_out_a_round), "leaves out round 2"),
    "a round too many": (with_entries(add_a_round), "no contribution of .* in round 3"),
    "the total": (lambda receipt: changed(receipt, tokens=receipt.tokens + 1), "differ in tokens"),
    "the run's tokens": (lambda receipt: changed(receipt, run_tokens=receipt.run_tokens * 2), "differ in run_tokens"),
    "the final digest": (lambda receipt: changed(receipt, chain_digest="00" * 32), "differ in chain_digest"),
    "another run": (lambda receipt: changed(receipt, run_id="ab" * 32), "is for run abab"),
    "work of another peer": (lambda receipt: changed(receipt, peer=TOM.peer_id), "is another one"),
    "another organiser": (lambda receipt: changed(receipt, organiser=TOM.peer_id), "differ in organiser"),
    "fewer rounds": (lambda receipt: changed(receipt, run_rounds=4), "leaves out|no contribution|differ"),
}


@pytest.mark.parametrize("name", LIES)
def test_lie_is_refused_even_if_the_host_signed_it(name: str, commits: Path) -> None:
    """Control: the honest receipt verifies, and without the host's key the lie fails at the signature already."""
    change, reason = LIES[name]
    honest = receipt_of(commits, MARY)
    verify_receipts([honest], commits)
    lie = change(honest)
    with pytest.raises(ReceiptError, match=reason):
        verify_receipts([sign_content(lie, HOST)], commits)
    unsigned = Receipt.model_validate({**lie.model_dump(), "signature": honest.signature})
    with pytest.raises(ReceiptError, match="changed, or forged"):
        verify_receipts([unsigned], commits)


def entries_of(path: Path) -> list[CertifiedCommit]:
    return [commit_reader(HEADER)(content) for content in read_messages(path) if isinstance(content, wire.ChainLog)]


def test_commits_with_one_changed_bit_are_refused(commits: Path) -> None:
    receipt, messages = receipt_of(commits, MARY), entries_of(commits)
    signed = messages[1].commit.signed
    body = wire.Commit.FromString(signed.body)
    inner = wire.Contribution.FromString(body.contributions[0].body)
    inner.tokens ^= 1
    body.contributions[0].body = inner.SerializeToString(deterministic=True)
    leader = next(peer for peer in (HOST, MARY, TOM, ZOE) if peer.peer_id == signed.peer)
    false = dataclasses.replace(messages[1].commit, signed=sign(leader, "commit", RUN_ID, body))
    write_messages(commits, [messages[0], dataclasses.replace(messages[1], commit=false), *messages[2:]])
    with pytest.raises(ReceiptError, match="the commit of round 1 is not valid: the signature is not"):
        verify_receipts([receipt], commits)


def test_every_flipped_byte_of_the_commits_is_noticed(commits: Path) -> None:
    receipt, whole = receipt_of(commits, MARY), commits.read_bytes()
    for position in range(0, len(whole), 61):
        commits.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(ReceiptError):
            verify_receipts([receipt], commits)


@pytest.mark.parametrize("missing", range(len(COMMITS)))
def test_commit_left_out_is_refused(missing: int, commits: Path) -> None:
    receipt, messages = receipt_of(commits, MARY), entries_of(commits)
    write_messages(commits, messages[:missing] + messages[missing + 1 :])
    with pytest.raises(ReceiptError):
        verify_receipts([receipt], commits)


def test_commit_that_repeats_a_round_is_refused(commits: Path) -> None:
    receipt, messages = receipt_of(commits, MARY), entries_of(commits)
    write_messages(commits, [*messages[:2], messages[1], *messages[2:]])
    with pytest.raises(ReceiptError, match="do not follow one another"):
        verify_receipts([receipt], commits)


def test_gap_that_the_receipt_does_not_name_is_refused(commits: Path) -> None:
    receipt, folder = receipt_of(commits, TOM), commits.parent / "other"
    log = log_in(folder)
    extend(log, COMMITS[:2])
    extend(log, COMMITS[3:], COMMITS[:3])  # Tom gave nothing in the round that is missing
    with pytest.raises(ReceiptError, match="missing_tokens"):
        verify_receipts([receipt], log.path)


def test_commits_of_another_run_are_refused(commits: Path) -> None:
    receipt = receipt_of(commits, MARY)
    foreign = signed_commit(GENESIS, THREE_PEERS[0], run_id="ab" * 32)
    write_messages(commits, [certified(Chain.from_genesis(RUN_ID), foreign)])
    with pytest.raises(ReceiptError, match="round 0 is not valid"):
        verify_receipts([receipt], commits)


def test_ledger_refuses_a_commit_of_another_chain(commits: Path) -> None:
    ledger = read_ledger(commits, commit_reader)
    whole = chain_to(COMMITS)
    stray = chain([{1: (1, 0)}], Chain(dataclasses.replace(HEAD, digest=bytes(32)), ChainLog(whole.electorate)))
    assert extend_head(ledger.head, chain([{1: (1, 0)}], whole)[0].body).round == HEAD.round + 1
    with pytest.raises(ReceiptError, match="do not follow"):
        ledger.add(stray[0])


def steered(organiser: Identity) -> list[CertifiedCommit]:
    """Return a chain whose second commit adopts a revision."""
    body = Revision(1, b"", 3, encode_changes({"target.rounds": 9}), 1.0)
    revision = SignedMessage.of(sign(organiser, REVISION_KIND, RUN_ID, body.to_wire()), body)
    first, second = COMMITS[:2]
    adopting = dataclasses.replace(second.body, adoption=Adoption(revision.digest, (revision,)))
    return [first, certified(chain_to([first]), stated(HOST, adopting))]


def test_commits_that_adopt_a_revision_of_the_organiser_verify(tmp_path: Path) -> None:
    """Control: a revision that another key signed makes the commit invalid."""
    assert HEADER.organiser == ORGANISER.peer_id
    for organiser, is_valid in ((ORGANISER, True), (TOM, False)):
        log = log_in(tmp_path / organiser.peer_id)
        extend(log, steered(organiser))
        receipt = receipt_of(log.path, MARY)
        assert receipt.tokens == 210
        if is_valid:
            verify_receipts([receipt], log.path)
        else:
            with pytest.raises(ReceiptError, match="round 1 is not valid: a revision"):
                verify_receipts([receipt], log.path)
