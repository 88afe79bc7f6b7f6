import hashlib
import json
from dataclasses import replace

import pytest

from node.daemon.checkpoints.checkpoint import SavedChain
from protocol.blobs.blob import Blob
from protocol.consensus.chain import (
    MAX_KEPT_COMMITS,
    CertifiedCommit,
    Chain,
    ChainHead,
    ChainLog,
    extend_head,
    genesis_head,
)
from protocol.consensus.messages.contributions import Commit, Contribution, ContributionLimits
from protocol.consensus.messages.signed import SignedMessage
from protocol.electorate import OPEN
from protocol.errors import CheckpointError, StaleError
from protocol.identity import Identity
from protocol.signing import MAX_CHAIN_TOKENS, sign
from tests.certificates import certify

RUN_ID = hashlib.sha256(b"run").hexdigest()
SHAPES = hashlib.sha256(b"shapes").digest()
PEER = Identity.create()
LIMITS = ContributionLimits("none", SHAPES, 1, 1000, 1000)


def entry_on(chain: Chain, tokens: int = 100) -> CertifiedCommit:
    return certify(commit_on(chain.head, tokens), chain, RUN_ID, [PEER])


def commit_on(head: ChainHead, tokens: int = 100, view: int = 0) -> SignedMessage[Commit]:
    blob = Blob.of(f"{head.round} {tokens}".encode())
    offer = Contribution(head.round, head.digest, "none", SHAPES, tokens, 10, 2.0, (blob,))
    contribution = SignedMessage.of(sign(PEER, "contribution", RUN_ID, offer.to_wire()), offer)
    commit = Commit(head.round, view, head.digest, (contribution,), ())
    return SignedMessage.of(sign(PEER, "commit", RUN_ID, commit.to_wire()), commit)


def test_a_chain_begins_with_the_run() -> None:
    head = genesis_head(RUN_ID)
    assert head == ChainHead(0, hashlib.sha256(b"murmur genesis" + bytes.fromhex(RUN_ID)).digest(), 0)
    assert head != genesis_head("00" * 32)


def test_a_commit_moves_the_head() -> None:
    chain = Chain.from_genesis(RUN_ID)
    commit = entry_on(chain, tokens=70)
    content = hashlib.sha256(replace(commit.body, view=0).to_wire().SerializeToString()).digest()
    digest = hashlib.sha256(chain.digest + content).digest()
    assert chain.append(commit) == chain.head == ChainHead(1, digest, 70)


def test_the_view_in_which_something_was_decided_does_not_matter() -> None:
    head = genesis_head(RUN_ID)
    early, late = commit_on(head, view=0), commit_on(head, view=7)
    assert early.digest != late.digest
    assert extend_head(head, early.body) == extend_head(head, late.body)
    assert extend_head(head, early.body) != extend_head(head, commit_on(head, tokens=99).body)


def test_a_commit_of_another_place_is_refused() -> None:
    chain = Chain.from_genesis(RUN_ID)
    commit = entry_on(chain)
    chain.append(commit)
    with pytest.raises(StaleError):
        chain.append(commit)
    with pytest.raises(StaleError):
        chain.append(entry_on(Chain(ChainHead(1, bytes(32), 0), ChainLog(chain.electorate))))
    assert chain.round == 1


def test_the_log_is_bounded_and_says_where_it_begins() -> None:
    chain = Chain.from_genesis(RUN_ID)
    for _ in range(MAX_KEPT_COMMITS + 10):
        chain.append(entry_on(chain))
    assert chain.commits_since(9) is None
    assert chain.commits_since(chain.round + 1) is None
    assert chain.commits_since(chain.round) == ()
    newest = chain.commits_since(chain.round - 3)
    assert newest is not None
    assert [commit.body.round for commit in newest] == [chain.round - 3, chain.round - 2, chain.round - 1]
    assert len(chain.commits_since(10) or ()) == MAX_KEPT_COMMITS


def test_commits_of_a_peer_are_tried_before_they_are_taken() -> None:
    ours, theirs = Chain.from_genesis(RUN_ID), Chain.from_genesis(RUN_ID)
    for _ in range(3):
        theirs.append(entry_on(theirs))
    commits = theirs.commits_since(0) or ()
    assert ours.head_after(commits) == theirs.head
    assert ours.round == 0
    with pytest.raises(StaleError):
        ours.head_after(commits[1:])


def test_chain_knows_the_voters_of_its_last_rounds() -> None:
    chain = Chain.from_genesis(RUN_ID)
    genesis = chain.digest
    assert not chain.electorate.voters
    first = chain.append(entry_on(chain))
    founded = chain.electorate
    assert founded.voters == {PEER.peer_id} and chain.electorate_at(genesis) == chain.log.electorate
    for _ in range(MAX_KEPT_COMMITS):
        chain.append(entry_on(chain))
    assert chain.electorate_at(first.digest) == founded and chain.electorate_at(chain.digest) is chain.electorate
    assert not chain.has_head(genesis) and chain.has_head(first.digest)
    other = Chain.from_genesis(RUN_ID)
    other.switch_to(chain.head, ChainLog(chain.electorate))
    assert other.electorate == chain.electorate and not other.has_head(first.digest) and not other.log.commits
    entry = entry_on(chain)
    assert other.append(entry) and other.electorate == chain.electorate.after(entry.body)


def test_chain_survives_a_checkpoint() -> None:
    chain = Chain.from_genesis(RUN_ID)
    for _ in range(3):
        chain.append(entry_on(chain))
    saved = SavedChain.of(chain.head, chain.log)
    stored = SavedChain(json.loads(json.dumps(dict(saved.table))), saved.log)
    restored = stored.restore(OPEN, LIMITS)
    assert (restored.head, restored.log) == (chain.head, chain.log) and restored.electorate == chain.electorate
    shorter = SavedChain.of(chain.head, ChainLog(chain.log.electorate, chain.log.commits[:2]))
    for damaged in (b"", b"\xff" * 9, shorter.log):
        with pytest.raises(CheckpointError, match="earlier"):
            SavedChain(stored.table, damaged).restore(OPEN, LIMITS)


def test_tokens_of_a_chain_stop_at_their_bound() -> None:
    """Control: without the bound, no peer could announce the head any more."""
    head = replace(genesis_head(RUN_ID), tokens=MAX_CHAIN_TOKENS - 1)
    assert extend_head(head, commit_on(head).body).tokens == MAX_CHAIN_TOKENS


def test_a_head_survives_json() -> None:
    chain = Chain.from_genesis(RUN_ID)
    head = chain.append(entry_on(chain))
    assert ChainHead.from_json(json.loads(json.dumps(head.to_json()))) == head


@pytest.mark.parametrize(
    "values",
    [{}, {"round": -1}, {"round": True}, {"digest": "zz" * 32}, {"digest": "ab"}, {"tokens": "many"}, {"tokens": 1.5}],
)
def test_a_malformed_head_is_named(values: dict[str, object]) -> None:
    good: dict[str, object] = {"round": 1, "digest": "ab" * 32, "tokens": 5}
    ChainHead.from_json(good)
    with pytest.raises(CheckpointError, match="earlier checkpoint"):
        ChainHead.from_json({**good, **values} if values else {})
