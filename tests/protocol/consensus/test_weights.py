"""The tokens that contributions count for: bounded by the others' claims, whatever one peer claims."""

import hashlib
import random

import pytest

from protocol.blobs.blob import Blob
from protocol.consensus.chain import extend_head, genesis_head
from protocol.consensus.messages.contributions import MAX_MULTIPLE, Commit, Contribution, count_tokens
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import Identity
from protocol.signing import sign

RUN_ID = hashlib.sha256(b"weights").hexdigest()
PEERS = sorted((Identity.create() for _ in range(4)), key=lambda identity: identity.peer_id)


def commit_of(claims: list[int]) -> Commit:
    """Return the first commit of a run, with one contribution per claim."""
    head, shapes = genesis_head(RUN_ID), hashlib.sha256(b"shapes").digest()
    bodies = (Contribution(0, head.digest, "none", shapes, claim, 1, 1.0, (Blob.of(b"part"),)) for claim in claims)
    offers = (
        SignedMessage.of(sign(peer, "contribution", RUN_ID, body.to_wire()), body)
        for peer, body in zip(PEERS, bodies, strict=False)
    )
    return Commit(0, 0, head.digest, tuple(offers), ())


@pytest.mark.parametrize("claim", [2**40, 2**47])
def test_one_claim_counts_for_at_most_twice_the_others_in_weight_and_in_the_chain(claim: int) -> None:
    commit = commit_of([100, claim, 120, 110])
    assert list(commit.counted_tokens.values()) == [100, 2 * 110, 120, 110]
    assert extend_head(genesis_head(RUN_ID), commit).tokens == 550
    assert sum(entry.body.tokens for entry in commit.contributions) > claim, "the control: claims are not bounded"


def test_equal_machines_and_one_of_twice_the_speed_count_in_full() -> None:
    assert count_tokens([100, 100, 200]) == [100, 100, 200]
    assert count_tokens([7]) == [7]


def test_of_two_the_smaller_claim_bounds_the_larger() -> None:
    assert count_tokens([2**40, 100]) == [200, 100]


@pytest.mark.parametrize("seed", range(20))
def test_while_most_are_honest_nobody_counts_for_more_than_twice_an_honest_claim(seed: int) -> None:
    chance = random.Random(seed)
    honest = [chance.randint(1, 10**6) for _ in range(chance.randint(1, 20))]
    lies = [chance.randint(1, 2**48) for _ in range(chance.randint(0, len(honest)))]
    claims = [*honest, *lies]
    chance.shuffle(claims)
    counted = count_tokens(claims)
    assert max(counted) <= MAX_MULTIPLE * max(honest)
    assert all(0 < count <= claim for count, claim in zip(counted, claims, strict=True))
