import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.consensus.locks import Bounds, Vote
from protocol.consensus.messages.contributions import (
    MAX_AGE,
    MAX_HELD_BLOBS,
    MAX_TOKENS,
    NO_ROSTER,
    Commit,
    Contribution,
    ContributionLimits,
    Roster,
)
from protocol.consensus.messages.kinds import (
    Acknowledgement,
    Body,
    CommitCertificate,
    Inventory,
    Justification,
    Promise,
    ReducedPart,
    ReducerAssignment,
    kind_of,
    parse,
)
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import ForgedError, LimitError, MalformedError, PeerFault
from protocol.identity import Identity
from protocol.signing import sign

RUN_ID = hashlib.sha256(b"run").hexdigest()
BASE = hashlib.sha256(b"base").digest()
SHAPES = hashlib.sha256(b"shapes").digest()
TERMS = ContributionLimits(codec="int8", shapes=SHAPES, parts=2, max_tokens=1000, max_blob_bytes=64)
PEERS = sorted((Identity.create() for _ in range(3)), key=lambda identity: identity.peer_id)
NAMES = tuple(identity.peer_id for identity in PEERS)
BLOBS = (Blob.of(b"first"), Blob.of(b"second"))
OFFER = Contribution(3, BASE, "int8", SHAPES, 500, 10, 2.5, BLOBS)


def signed_message(identity: Identity, body: Body) -> SignedMessage[Any]:
    return SignedMessage.of(sign(identity, kind_of(body), RUN_ID, body.to_wire()), body)


OFFERS = tuple(signed_message(identity, OFFER) for identity in PEERS)
OTHER_SIZE = Blob(BLOBS[0].digest, 4)
TWIN = signed_message(PEERS[2], replace(OFFER, parts=(OTHER_SIZE,)))
PROMISES = tuple(signed_message(identity, Promise(3, 1, BASE)) for identity in PEERS)
VOTES = tuple(signed_message(identity, Acknowledgement(3, 1, BASE)) for identity in PEERS)


@pytest.mark.parametrize(
    "body",
    [
        OFFER,
        replace(OFFER, age=MAX_AGE, parts=BLOBS[:1]),
        Roster(3, 1, BASE, OFFERS),
        Inventory(3, 1, NO_ROSTER, tuple(sorted((BASE, SHAPES)))),
        ReducerAssignment(3, 1, BASE, 2, NAMES, (NAMES[2], NAMES[0])),
        ReducedPart(3, 1, BASE, 2, 1, BLOBS[0], BASE),
        Commit(3, 1, BASE, OFFERS[:2], BLOBS),
        Commit(3, 1, BASE, OFFERS[:2], BLOBS[:1]),
        Commit(3, 1, BASE, OFFERS[:2], ()),
        Commit(3, 1, BASE, OFFERS[:2], (), NAMES[2:]),
        Inventory(3, 1, BASE, (), SHAPES),
        Acknowledgement(3, 1, BASE),
        Acknowledgement(3, 1, BASE, content=SHAPES, confirms=True),
        CommitCertificate(3, 1, BASE, VOTES),
        Promise(3, 1, BASE),
        Promise(3, 1, BASE, Bounds(Vote(SHAPES, 0, BASE), Vote(BASE, 0, SHAPES))),
        Justification(3, BASE, 1, BASE, SHAPES, 1, PROMISES),
    ],
    ids=lambda body: kind_of(body),
)
def test_every_statement_survives_the_wire(body: Body) -> None:
    said = signed_message(PEERS[0], body)
    received = parse(wire.Signed.FromString(said.signed.SerializeToString()), RUN_ID, TERMS)
    assert received == said
    assert received.body.to_wire().SerializeToString(deterministic=True) == said.signed.body
    assert received.sender == NAMES[0]


def test_the_same_words_of_two_leaders_are_two_statements() -> None:
    roster = Roster(3, 1, BASE, OFFERS)
    assert signed_message(PEERS[0], roster).digest != signed_message(PEERS[1], roster).digest
    assert signed_message(PEERS[0], roster).digest == signed_message(PEERS[0], roster).digest


def test_a_commit_counts_its_tokens() -> None:
    assert Commit(3, 1, BASE, OFFERS, ()).tokens == 1500


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (replace(OFFER, base=b"short"), MalformedError),
        (replace(OFFER, shapes=BASE), MalformedError),
        (replace(OFFER, codec="int4"), MalformedError),
        (replace(OFFER, loss=float("nan")), MalformedError),
        (replace(OFFER, loss=float("inf")), MalformedError),
        (replace(OFFER, tokens=0), LimitError),
        (replace(OFFER, tokens=1001), LimitError),
        (replace(OFFER, parts=()), MalformedError),
        (replace(OFFER, age=MAX_AGE + 1), MalformedError),
        (replace(OFFER, parts=(*BLOBS, BLOBS[0])), MalformedError),
        (replace(OFFER, parts=(BLOBS[0], Blob.of(bytes(65)))), LimitError),
        (replace(OFFER, parts=(BLOBS[0], Blob.of(b""))), LimitError),
        (replace(OFFER, round=2**60), MalformedError),
        (Roster(3, 1, BASE, ()), MalformedError),
        (Roster(3, 1, BASE, OFFERS[::-1]), MalformedError),
        (Roster(3, 1, BASE, (OFFERS[0], OFFERS[0])), MalformedError),
        (Roster(4, 1, BASE, OFFERS), MalformedError),
        (Roster(3, 1, SHAPES, OFFERS), MalformedError),
        (Commit(3, 1, BASE, OFFERS, (*BLOBS, BLOBS[0])), MalformedError),
        (Commit(3, 1, BASE, (), ()), MalformedError),
        (Inventory(3, 1, b"short", ()), MalformedError),
        (Inventory(3, 1, BASE, (b"short",)), MalformedError),
        (Inventory(3, 1, BASE, (BASE, BASE)), MalformedError),
        (ReducerAssignment(3, 1, BASE, 0, (), (NAMES[0],) * 2), MalformedError),
        (ReducerAssignment(3, 1, BASE, 0, NAMES, ()), MalformedError),
        (ReducerAssignment(3, 1, BASE, 0, NAMES, (NAMES[0],) * 9), MalformedError),
        (ReducerAssignment(3, 1, BASE, 0, NAMES[::-1], NAMES[:2]), MalformedError),
        (ReducerAssignment(3, 1, BASE, 0, NAMES, ("nobody", NAMES[0])), MalformedError),
        (ReducedPart(3, 1, BASE, 0, 2, BLOBS[0], BASE), MalformedError),
        (Inventory(3, 1, BASE, (), b"short"), MalformedError),
        (Acknowledgement(3, 1, b"short"), MalformedError),
        (CommitCertificate(3, 1, BASE, VOTES[::-1]), MalformedError),
        (CommitCertificate(3, 1, BASE, (VOTES[0], VOTES[0])), MalformedError),
        (CommitCertificate(3, 2, BASE, VOTES), ForgedError),
        (CommitCertificate(3, 1, SHAPES, VOTES), ForgedError),
        (replace(OFFER, parts=(BLOBS[0], OTHER_SIZE)), MalformedError),
        (Roster(3, 1, BASE, (*OFFERS[:2], TWIN)), MalformedError),
        (Commit(3, 1, BASE, (*OFFERS[:2], TWIN), ()), MalformedError),
        (Commit(3, 1, BASE, OFFERS[:2], (OTHER_SIZE,)), MalformedError),
        (Commit(3, 1, BASE, OFFERS[:2], (), NAMES[:1]), MalformedError),
        (Commit(3, 1, BASE, OFFERS[:1], (), NAMES[:0:-1]), MalformedError),
        (Commit(3, 1, BASE, OFFERS[:2], (), ("nobody",)), MalformedError),
    ],
)
def test_nonsense_is_refused(body: Body, fault: type[PeerFault]) -> None:
    with pytest.raises(fault):
        parse(signed_message(PEERS[0], body).signed, RUN_ID, TERMS)


def test_a_decision_without_as_many_signatures_is_refused() -> None:
    body = CommitCertificate(3, 1, BASE, VOTES).to_wire()
    del body.signatures[-1]
    with pytest.raises(MalformedError):
        parse(sign(PEERS[0], "decision", RUN_ID, body), RUN_ID, TERMS)


def test_a_decision_of_a_thousand_is_small() -> None:
    assert len(CommitCertificate(3, 1, BASE, VOTES).to_wire().SerializeToString()) < 3 * 120 + 60


def test_the_hard_limit_of_tokens_stands_above_any_terms() -> None:
    generous = replace(TERMS, max_tokens=2**60)
    with pytest.raises(LimitError):
        parse(signed_message(PEERS[0], replace(OFFER, tokens=MAX_TOKENS + 1)).signed, RUN_ID, generous)


def test_too_many_held_blobs_are_refused() -> None:
    blobs = tuple(number.to_bytes(32, "big") for number in range(MAX_HELD_BLOBS + 1))
    with pytest.raises(LimitError):
        parse(signed_message(PEERS[0], Inventory(3, 1, BASE, blobs)).signed, RUN_ID, TERMS)
    parse(signed_message(PEERS[0], Inventory(3, 1, BASE, blobs[1:])).signed, RUN_ID, TERMS)


def _forge(signed: wire.Signed) -> None:
    signed.signature = bytes(64)


def _steal(signed: wire.Signed) -> None:
    signed.peer = NAMES[2]


def _relabel(signed: wire.Signed) -> None:
    signed.kind = "peer"


@pytest.mark.parametrize(
    ("change", "fault"), [(_forge, ForgedError), (_steal, ForgedError), (_relabel, MalformedError)]
)
def test_an_altered_envelope_is_refused(change: Callable[[wire.Signed], None], fault: type[PeerFault]) -> None:
    signed = signed_message(PEERS[0], OFFER).signed
    change(signed)
    with pytest.raises(fault):
        parse(signed, RUN_ID, TERMS)


@pytest.mark.parametrize("kind", ["roster", "commit"])
def test_a_leader_cannot_invent_a_contribution(kind: str) -> None:
    forged = SignedMessage.of(wire.Signed(kind="contribution", peer=NAMES[1], body=OFFERS[1].signed.body), OFFER)
    forged.signed.signature = bytes(64)
    contributions = (OFFERS[0], forged)
    body = Roster(3, 1, BASE, contributions) if kind == "roster" else Commit(3, 1, BASE, contributions, ())
    with pytest.raises(ForgedError):
        parse(signed_message(PEERS[0], body).signed, RUN_ID, TERMS)


def test_a_statement_of_another_run_is_refused() -> None:
    with pytest.raises(ForgedError):
        parse(signed_message(PEERS[0], OFFER).signed, hashlib.sha256(b"other").hexdigest(), TERMS)
