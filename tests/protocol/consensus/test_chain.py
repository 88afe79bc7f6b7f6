import hashlib
import json
from dataclasses import replace

import pytest

from protocol.admission.electorate import OPEN, Electorate
from protocol.blobs.blob import Blob
from protocol.consensus.chain import (
    MAX_KEPT_COMMITS,
    Chain,
    ChainHead,
    chain_to_json,
    extend_head,
    genesis_head,
    is_state_outvoted,
    prefers_theirs,
    restore_chain,
)
from protocol.consensus.messages import Commit, Contribution, SignedMessage
from protocol.errors import CheckpointError, StaleError
from protocol.identity import Identity
from protocol.signing import sign

RUN_ID = hashlib.sha256(b"run").hexdigest()
SHAPES = hashlib.sha256(b"shapes").digest()
PEER = Identity.create()


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
    commit = commit_on(chain.head, tokens=70)
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
    commit = commit_on(chain.head)
    chain.append(commit)
    with pytest.raises(StaleError):
        chain.append(commit)
    with pytest.raises(StaleError):
        chain.append(commit_on(ChainHead(1, bytes(32), 0)))
    assert chain.round == 1


def test_the_log_is_bounded_and_says_where_it_begins() -> None:
    chain = Chain.from_genesis(RUN_ID)
    for _ in range(MAX_KEPT_COMMITS + 10):
        chain.append(commit_on(chain.head))
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
        theirs.append(commit_on(theirs.head))
    commits = theirs.commits_since(0) or ()
    assert ours.head_after(commits) == theirs.head
    assert ours.round == 0
    with pytest.raises(StaleError):
        ours.head_after(commits[1:])


def test_chain_knows_the_voters_of_its_last_rounds() -> None:
    chain = Chain.from_genesis(RUN_ID)
    assert not chain.electorate.voters
    chain.append(commit_on(chain.head))
    founded = chain.electorate
    assert founded.voters == set(chain.kept_commits[0].body.by_sender)
    for _ in range(MAX_KEPT_COMMITS):
        chain.append(commit_on(chain.head))
    assert chain.electorate_at(1) == founded and chain.electorate_at(chain.round) is chain.electorate
    assert chain.electorate_at(0) is None and chain.electorate_at(chain.round + 1) is None
    other = Chain.from_genesis(RUN_ID)
    other.switch_to(chain.head, chain.electorate)
    assert other.electorate == chain.electorate and other.electorate_at(chain.round - 1) is None
    assert other.append(commit_on(chain.head)) and other.electorate == chain.electorate.after(
        other.kept_commits[0].body
    )


def test_head_and_voters_survive_a_checkpoint() -> None:
    chain = Chain.from_genesis(RUN_ID)
    chain.append(commit_on(chain.head))
    saved = json.loads(json.dumps(chain_to_json(chain.head, chain.electorate)))
    restored = restore_chain(saved, OPEN)
    assert (restored.head, restored.electorate) == (chain.head, chain.electorate)
    for values in ({"electorate": None}, {"electorate": Electorate.at_genesis().to_json()}):
        with pytest.raises(CheckpointError, match="earlier checkpoint"):
            restore_chain(saved | values, OPEN)


def test_more_tokens_win_and_then_the_lower_digest() -> None:
    low, high = bytes(32), b"\xff" * 32
    assert prefers_theirs(ChainHead(5, low, 10), ChainHead(4, high, 11))
    assert not prefers_theirs(ChainHead(4, high, 11), ChainHead(5, low, 10))
    assert prefers_theirs(ChainHead(5, high, 10), ChainHead(5, low, 10))
    assert not prefers_theirs(ChainHead(5, low, 10), ChainHead(5, high, 10))
    assert not prefers_theirs(ChainHead(5, low, 10), ChainHead(5, low, 10))


def test_a_head_survives_json() -> None:
    head = Chain.from_genesis(RUN_ID).append(commit_on(genesis_head(RUN_ID)))
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


def test_the_minority_state_is_the_wrong_one() -> None:
    chain, right, wrong = b"c" * 32, b"a" * 32, b"b" * 32
    votes = {"p": (chain, right), "q": (chain, right), "r": (b"d" * 32, wrong), "s": (b"d" * 32, wrong)}
    assert is_state_outvoted(chain, wrong, votes)
    assert not is_state_outvoted(chain, right, votes)
    # Whoever stands elsewhere on the chain has no say: counted in, they would turn the vote.
    everybody = {peer: (chain, state) for peer, (_, state) in votes.items()}
    assert is_state_outvoted(chain, right, {**everybody, "t": (chain, wrong), "u": (chain, wrong)})


def test_of_two_states_alike_in_number_the_lower_is_right() -> None:
    chain, low, high = b"c" * 32, b"a" * 32, b"b" * 32
    assert is_state_outvoted(chain, high, {"p": (chain, low)})
    assert not is_state_outvoted(chain, low, {"p": (chain, high)})
    assert not is_state_outvoted(chain, high, {})
