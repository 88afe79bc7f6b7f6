"""All kinds of statements about a round, and how to read one."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from google.protobuf.message import Message

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.errors import MalformedError
from protocol.manifest import RunId
from protocol.records import open_signed
from protocol.rounds.reports import Acknowledgement, CommitCertificate, Inventory, ReducerAssignment, ReducedPart
from protocol.rounds.statements import MAX_MESSAGE_BYTES, Commit, Contribution, Roster, SignedMessage, ContributionLimits

Body = Contribution | Roster | Inventory | ReducerAssignment | ReducedPart | Commit | Acknowledgement | CommitCertificate

KINDS: dict[str, tuple[type[Message], type[Any]]] = {  # the wire type and ours
    "contribution": (wire.Contribution, Contribution),
    "roster": (wire.Roster, Roster),
    "holding": (wire.Holding, Inventory),
    "inclusion": (wire.Inclusion, ReducerAssignment),
    "part": (wire.Part, ReducedPart),
    "commit": (wire.Commit, Commit),
    "acknowledgement": (wire.Acknowledgement, Acknowledgement),
    "decision": (wire.Decision, CommitCertificate),
}
_KIND_BY_TYPE = {body: kind for kind, (_, body) in KINDS.items()}


class NamedBlob(NamedTuple):
    """A blob, and the statement that names it."""

    blob: Blob
    message: SignedMessage[Body]


def kind_of(body: Body) -> str:
    """Return the wire kind of a message body."""
    return _KIND_BY_TYPE[type(body)]


def parse(signed: wire.Signed, run_id: RunId, limits: ContributionLimits) -> SignedMessage[Body]:
    """The checked statement in an envelope. Raises MalformedError, ForgedError or LimitError."""
    if signed.kind not in KINDS:
        raise MalformedError("a statement of a kind that no round knows")
    message, body_type = KINDS[signed.kind]
    body = open_signed(signed, run_id, signed.kind, message, MAX_MESSAGE_BYTES)
    return SignedMessage.of(signed, body_type.from_wire(body, limits, lambda nested: parse(nested, run_id, limits)))


def named_blobs(message: SignedMessage[Body]) -> Iterator[NamedBlob]:
    """Those that a statement, or one inside it, names."""
    body = message.body
    match body:
        case Contribution():
            yield from (NamedBlob(blob, message) for blob in body.parts)
        case Roster():
            yield from (named for nested in body.contributions for named in named_blobs(nested))
        case Commit():
            yield from (NamedBlob(blob, message) for blob in body.parts)
            yield from (named for nested in body.contributions for named in named_blobs(nested))
        case ReducedPart():
            yield NamedBlob(body.blob, message)
