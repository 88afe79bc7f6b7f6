"""The draw: its share, its auditors, and that nobody can know it before the commit."""

from collections import Counter

from protocol.audit_tracker import PANELS
from protocol.audits import AuditDraw, draw_audits, is_drawn
from protocol.consensus.chain import genesis_head
from tests.node.small_run import PEERS, RUN_ID
from tests.protocol.audits.panel import audits_of, commit_after

ROUNDS = 4000
CHAIN = b"c" * 32


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_share_of_the_contributions_is_drawn() -> None:
    drawn = sum(is_drawn(peer.peer_id, digest(number), 0.05) for peer in PEERS for number in range(ROUNDS))
    assert 0.045 < drawn / (ROUNDS * len(PEERS)) < 0.055


def test_peer_that_always_cheats_is_drawn_within_60_rounds_with_95_percent() -> None:
    peer = PEERS[0].peer_id
    caught = [any(is_drawn(peer, digest(1000 * swarm + number), 0.05) for number in range(60)) for swarm in range(2000)]
    assert 0.94 < sum(caught) / len(caught) < 0.97
    # The control: a share of 2 % is too little.
    rarely = [any(is_drawn(peer, digest(1000 * swarm + number), 0.02) for number in range(60)) for swarm in range(2000)]
    assert sum(rarely) / len(rarely) < 0.8


def test_share_of_0_draws_nothing_and_1_draws_all() -> None:
    assert audits_of(0.0) == ()
    assert len(audits_of(1.0)) == 6


def test_auditors_are_other_contributors_and_evenly_drawn() -> None:
    commit, counts = commit_after(genesis_head(RUN_ID)), Counter[str]()
    for number in range(1000):
        for audit in draw_audits(commit, CHAIN, AuditDraw(digest(number)), 1.0, ()):
            assert len(set(audit.auditors)) == 5 and audit.contribution.sender not in audit.auditors
            counts[audit.auditors[0]] += 1
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_only_voters_audit_where_there_are_any() -> None:
    commit = commit_after(genesis_head(RUN_ID))
    voters = frozenset(peer.peer_id for peer in PEERS[:2])
    audits = draw_audits(commit, CHAIN, AuditDraw(digest(1)), 1.0, voters)
    assert {peer for audit in audits for peer in audit.auditors} == voters
    assert {len(audit.auditors) for audit in audits} == {1, 2} and {audit.voters for audit in audits} == {voters}


def test_all_voters_are_ranked_those_first_that_contributed() -> None:
    commit, voters = commit_after(genesis_head(RUN_ID), 4), [peer.peer_id for peer in PEERS]
    for audit in draw_audits(commit, CHAIN, AuditDraw(digest(1)), 1.0, voters):
        assert {*audit.auditors, audit.contribution.sender} == set(voters)
        assert {*audit.auditors[: PANELS[0]], audit.contribution.sender} == commit.by_sender.keys()


def test_draw_follows_from_its_seed() -> None:
    commit = commit_after(genesis_head(RUN_ID))
    ranks = {draw_audits(commit, CHAIN, AuditDraw(digest(number)), 1.0, ())[0].auditors for number in range(50)}
    assert len(ranks) > 20  # known before the commit, a liar could be honest only when it is audited by others
    assert draw_audits(commit, CHAIN, AuditDraw(digest(1)), 1.0, ()) == draw_audits(
        commit, CHAIN, AuditDraw(digest(1)), 1.0, ()
    )
