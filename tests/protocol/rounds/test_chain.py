import hashlib
import json
from dataclasses import replace

import pytest

from protocol.blobs.blob import Blob
from protocol.errors import CheckpointError, StaleError
from protocol.identity import Identity
from protocol.records import sign
from protocol.rounds.chain import KEPT_COMMITS, Chain, Head, after, disagrees, genesis, preferred
from protocol.rounds.statements import Commit, Contribution, Statement

RUN_ID = hashlib.sha256(b"run").hexdigest()
SHAPES = hashlib.sha256(b"shapes").digest()
PEER = Identity.create()


def commit_on(head: Head, tokens: int = 100, view: int = 0) -> Statement[Commit]:
    blob = Blob.of(f"{head.round} {tokens}".encode())
    offer = Contribution(head.round, head.digest, "none", SHAPES, tokens, 10, 2.0, (blob,))
    contribution = Statement.of(sign(PEER, "contribution", RUN_ID, offer.to_wire()), offer)
    commit = Commit(head.round, view, head.digest, (contribution,), ())
    return Statement.of(sign(PEER, "commit", RUN_ID, commit.to_wire()), commit)


def test_a_chain_begins_with_the_run() -> None:
    head = genesis(RUN_ID)
    assert head == Head(0, hashlib.sha256(b"murmur genesis" + bytes.fromhex(RUN_ID)).digest(), 0)
    assert head != genesis("00" * 32)


def test_a_commit_moves_the_head() -> None:
    chain = Chain.begin(RUN_ID)
    commit = commit_on(chain.head, tokens=70)
    content = hashlib.sha256(replace(commit.body, view=0).to_wire().SerializeToString()).digest()
    digest = hashlib.sha256(chain.digest + content).digest()
    assert chain.append(commit) == chain.head == Head(1, digest, 70)


def test_the_view_in_which_something_was_decided_does_not_matter() -> None:
    head = genesis(RUN_ID)
    early, late = commit_on(head, view=0), commit_on(head, view=7)
    assert early.digest != late.digest
    assert after(head, early.body) == after(head, late.body)
    assert after(head, early.body) != after(head, commit_on(head, tokens=99).body)


def test_a_commit_of_another_place_is_refused() -> None:
    chain = Chain.begin(RUN_ID)
    commit = commit_on(chain.head)
    chain.append(commit)
    with pytest.raises(StaleError):
        chain.append(commit)
    with pytest.raises(StaleError):
        chain.append(commit_on(Head(1, bytes(32), 0)))
    assert chain.round == 1


def test_the_log_is_bounded_and_says_where_it_begins() -> None:
    chain = Chain.begin(RUN_ID)
    for _ in range(KEPT_COMMITS + 10):
        chain.append(commit_on(chain.head))
    assert chain.since(9) is None
    assert chain.since(chain.round + 1) is None
    assert chain.since(chain.round) == ()
    newest = chain.since(chain.round - 3)
    assert newest is not None
    assert [commit.body.round for commit in newest] == [chain.round - 3, chain.round - 2, chain.round - 1]
    assert len(chain.since(10) or ()) == KEPT_COMMITS


def test_commits_of_a_peer_are_tried_before_they_are_taken() -> None:
    ours, theirs = Chain.begin(RUN_ID), Chain.begin(RUN_ID)
    for _ in range(3):
        theirs.append(commit_on(theirs.head))
    commits = theirs.since(0) or ()
    assert ours.would_lead_to(commits) == theirs.head
    assert ours.round == 0
    with pytest.raises(StaleError):
        ours.would_lead_to(commits[1:])


def test_more_tokens_win_and_then_the_lower_digest() -> None:
    low, high = bytes(32), b"\xff" * 32
    assert preferred(Head(5, low, 10), Head(4, high, 11))
    assert not preferred(Head(4, high, 11), Head(5, low, 10))
    assert preferred(Head(5, high, 10), Head(5, low, 10))
    assert not preferred(Head(5, low, 10), Head(5, high, 10))
    assert not preferred(Head(5, low, 10), Head(5, low, 10))


def test_a_head_survives_json() -> None:
    head = Chain.begin(RUN_ID).append(commit_on(genesis(RUN_ID)))
    assert Head.from_json(json.loads(json.dumps(head.to_json()))) == head


@pytest.mark.parametrize(
    "values",
    [{}, {"round": -1}, {"round": True}, {"digest": "zz" * 32}, {"digest": "ab"}, {"tokens": "many"}, {"tokens": 1.5}],
)
def test_a_malformed_head_is_named(values: dict[str, object]) -> None:
    good: dict[str, object] = {"round": 1, "digest": "ab" * 32, "tokens": 5}
    Head.from_json(good)
    with pytest.raises(CheckpointError, match="earlier checkpoint"):
        Head.from_json({**good, **values} if values else {})


def test_the_minority_state_is_the_wrong_one() -> None:
    chain, right, wrong = b"c" * 32, b"a" * 32, b"b" * 32
    votes = {"p": (chain, right), "q": (chain, right), "r": (b"d" * 32, wrong), "s": (b"d" * 32, wrong)}
    assert disagrees(chain, wrong, votes)
    assert not disagrees(chain, right, votes)
    # Whoever stands elsewhere on the chain has no say: counted in, they would turn the vote.
    everybody = {peer: (chain, state) for peer, (_, state) in votes.items()}
    assert disagrees(chain, right, {**everybody, "t": (chain, wrong), "u": (chain, wrong)})


def test_of_two_states_alike_in_number_the_lower_is_right() -> None:
    chain, low, high = b"c" * 32, b"a" * 32, b"b" * 32
    assert disagrees(chain, high, {"p": (chain, low)})
    assert not disagrees(chain, low, {"p": (chain, high)})
    assert not disagrees(chain, high, {})
