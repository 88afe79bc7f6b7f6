"""The secrets that draw audits: sealed before anybody knows them, shown by everybody, and chosen by nobody."""

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from protocol.audits import AuditDraw, draw_audits, is_drawn, seal_contribution
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain
from protocol.consensus.messages.contributions import Commit, Contribution
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import MalformedError
from protocol.murmur_pb2 import Signed
from protocol.signing import sign
from tests.node.small_run import PEERS, RUN_ID, TERMS, certified, contribution_of, stated

SHARE = 0.3
LAST = PEERS[0]  # it contributes when it knows what all others contribute


def sealed(chain: Chain, number: int, variant: int = 0) -> Contribution:
    """Return the contribution of a peer to the next round; `variant` is its content."""
    identity = PEERS[number]
    body = contribution_of(chain.head, [Blob.of(b"%d %d %d" % (chain.round, number, variant))])
    body = replace(body, work=Blob.of(b"record"))
    return seal_contribution(body, chain, identity.peer_id, lambda kind, named: sign(identity, kind, RUN_ID, named))


def commit_of(chain: Chain, bodies: dict[int, Contribution]) -> Commit:
    entries = sorted((stated(PEERS[number], body) for number, body in bodies.items()), key=lambda entry: entry.sender)
    return Commit(chain.round, 0, chain.digest, tuple(entries), ())


def append(chain: Chain, bodies: dict[int, Contribution]) -> Commit:
    commit = commit_of(chain, bodies)
    chain.append(certified(chain, stated(PEERS[1], commit)))
    return commit


def two_rounds(variant: int = 0, **changes: bytes) -> tuple[Commit, Commit, Chain]:
    """Return two commits of six peers, the second one with this variant and these changes of the last peer."""
    chain = Chain.from_genesis(RUN_ID)
    first = append(chain, {number: sealed(chain, number) for number in range(6)})
    bodies = {number: sealed(chain, number) for number in range(6)}
    bodies[0] = replace(sealed(chain, 0, variant), **changes)  # type: ignore[arg-type]
    return first, append(chain, bodies), chain


def test_each_contribution_shows_the_secret_that_the_last_one_sealed() -> None:
    first, second, chain = two_rounds()
    for peer, entry in second.by_sender.items():
        assert hashlib.sha256(entry.body.secret).digest() == first.by_sender[peer].body.seal != entry.body.seal
        assert not first.by_sender[peer].body.secret
    assert sealed(chain, 3) == sealed(chain, 3), "the same after a restart"
    assert AuditDraw.of(first, second).suspects == []


def test_last_contributor_cannot_choose_a_draw_by_its_content() -> None:
    """The control draws by the digest of the chain: a few contributions suffice to evade an audit."""
    draws, digests = set[bytes](), list[bytes]()
    for variant in range(20):
        first, second, chain = two_rounds(variant)
        draws.add(AuditDraw.of(first, second).seed)
        digests.append(chain.digest)
    assert len(draws) == 1 and len(set(digests)) == 20
    assert {is_drawn(LAST.peer_id, digest, SHARE) for digest in digests} == {True, False}


@pytest.mark.parametrize("secret", [b"", b"x" * 32])
def test_peer_that_shows_no_secret_is_audited(secret: bytes) -> None:
    first, second, _ = two_rounds(secret=secret)
    draw = AuditDraw.of(first, second)
    assert draw.suspects == [LAST.peer_id]
    audits = draw_audits(first, second.base, draw, 1e-9, ())
    assert [audit.contribution.sender for audit in audits] == [LAST.peer_id]


def test_peer_that_was_not_included_before_shows_nothing_and_is_no_suspect() -> None:
    chain = Chain.from_genesis(RUN_ID)
    first = append(chain, {number: sealed(chain, number) for number in range(1, 6)})
    second = append(chain, {number: sealed(chain, number) for number in range(6)})
    assert not second.by_sender[LAST.peer_id].body.secret
    assert AuditDraw.of(first, second).suspects == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"work": None}, "without a work record"),
        ({"seal": b""}, "without a seal"),
        ({"seal": b"short"}, "no digest"),
        ({"secret": b"short"}, "no digest"),
    ],
)
def test_contribution_that_cannot_be_audited_is_refused_in_a_run_with_audits(
    changes: dict[str, object], reason: str
) -> None:
    chain = Chain.from_genesis(RUN_ID)
    body, audited = sealed(chain, 1), replace(TERMS, audited=True)
    assert Contribution.from_wire(body.to_wire(), audited, open_nothing) == body
    with pytest.raises(MalformedError, match=reason):
        Contribution.from_wire(replace(body, **changes).to_wire(), audited, open_nothing)  # type: ignore[arg-type]
    bare = replace(body, work=None, seal=b"")
    assert Contribution.from_wire(bare.to_wire(), TERMS, open_nothing) == bare, "the control: a run without audits"


def open_nothing(signed: Signed) -> SignedMessage[Any]:
    raise AssertionError(f"nothing is nested: {signed}")
