"""Valid frames of every kind, from seeded keys, so that a seed names the same frames on every machine."""

import hashlib
from dataclasses import replace

from google.protobuf.message import Message

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.conduct import Proof
from protocol.consensus.locks import Bounds, Vote
from protocol.consensus.messages.contributions import NO_ROSTER, Commit, Contribution, ContributionLimits, Roster
from protocol.consensus.messages.kinds import (
    KINDS,
    Acknowledgement,
    Body,
    CommitCertificate,
    Inventory,
    Justification,
    Promise,
    ReducedPart,
    ReducerAssignment,
    kind_of,
)
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import Identity
from protocol.signing import sign
from protocol.steering import REVISION_KIND, Revision
from tests.node.small_run import PEERS, RUN_ID

BASE = hashlib.sha256(b"base").digest()
SHAPES = hashlib.sha256(b"shapes").digest()
IDENTITIES = sorted(PEERS[:3], key=lambda identity: identity.peer_id)
NAMES = tuple(identity.peer_id for identity in IDENTITIES)
LIMITS = ContributionLimits(
    codec="int8", shapes=SHAPES, parts=2, max_tokens=1000, max_blob_bytes=64, organiser=NAMES[0]
)
BLOBS = (Blob.of(b"first"), Blob.of(b"second"))
OFFER = Contribution(3, BASE, "int8", SHAPES, 500, 10, 2.5, BLOBS, work=Blob.of(b"work"))


def signed_as(identity: Identity, body: Body) -> SignedMessage[Body]:
    return SignedMessage.of(sign(identity, kind_of(body), RUN_ID, body.to_wire()), body)


OFFERS = tuple(signed_as(identity, OFFER) for identity in IDENTITIES)
VOTES = tuple(signed_as(identity, Acknowledgement(3, 1, BASE)) for identity in IDENTITIES)
BINDING = Vote(SHAPES, 0, BASE)
LOCK = CommitCertificate.of(
    [signed_as(identity, Acknowledgement(3, 0, SHAPES, content=BASE)) for identity in IDENTITIES]  # type: ignore[misc]
)
PROMISE = Promise(3, 1, BASE, Bounds(BINDING, BINDING))
PROMISES = tuple(signed_as(identity, PROMISE) for identity in IDENTITIES)
TWIN = signed_as(IDENTITIES[0], replace(OFFER, tokens=501))
BODIES: tuple[Body, ...] = (
    Proof(*sorted((OFFERS[0], TWIN), key=lambda entry: entry.digest)),
    OFFER,
    replace(OFFER, age=2, parts=BLOBS[:1], work=None),
    Roster(3, 1, BASE, OFFERS),  # type: ignore[arg-type]
    Inventory(3, 1, NO_ROSTER, tuple(sorted((BASE, SHAPES)))),
    ReducerAssignment(3, 1, BASE, 2, NAMES, (NAMES[2], NAMES[0])),
    ReducedPart(3, 1, BASE, 2, 1, BLOBS[0], BASE),
    Commit(3, 1, BASE, OFFERS[:2], BLOBS),  # type: ignore[arg-type]
    Commit(3, 1, BASE, OFFERS[:2], (), NAMES[2:]),  # type: ignore[arg-type]
    Acknowledgement(3, 1, BASE),
    CommitCertificate(3, 1, BASE, VOTES),  # type: ignore[arg-type]
    PROMISE,
    Justification(3, BASE, 1, BASE, SHAPES, 1, PROMISES, LOCK),  # type: ignore[arg-type]
)
assert {kind_of(body) for body in BODIES} == KINDS.keys()


def wire_bodies() -> list[tuple[str, Message]]:
    """Return the kind and the wire message of each sample."""
    return [(kind_of(body), body.to_wire()) for body in BODIES]


def revision() -> wire.Revision:
    return Revision(1, b"", 5, '{"target.rounds":200}', 1.7e9).to_wire()


REVISION = (REVISION_KIND, revision)
