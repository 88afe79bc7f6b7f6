"""All kinds of statements about a round, and how to read one."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from google.protobuf.message import Message

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.errors import MalformedError
from protocol.manifest import RunId
from protocol.records import open_signed
from protocol.rounds.reports import Acknowledgement, Decision, Holding, Inclusion, Part
from protocol.rounds.statements import MAX_STATEMENT_BYTES, Commit, Contribution, Roster, Statement, Terms

Body = Contribution | Roster | Holding | Inclusion | Part | Commit | Acknowledgement | Decision

KINDS: dict[str, tuple[type[Message], Callable[..., Body]]] = {
    "contribution": (wire.Contribution, Contribution.from_wire),
    "roster": (wire.Roster, Roster.from_wire),
    "holding": (wire.Holding, Holding.from_wire),
    "inclusion": (wire.Inclusion, Inclusion.from_wire),
    "part": (wire.Part, Part.from_wire),
    "commit": (wire.Commit, Commit.from_wire),
    "acknowledgement": (wire.Acknowledgement, Acknowledgement.from_wire),
    "decision": (wire.Decision, Decision.from_wire),
}


class Named(NamedTuple):
    """A blob, and the statement that names it."""

    blob: Blob
    statement: Statement[Body]


def kind_of(body: Body) -> str:
    return type(body).__name__.lower()


def parse(signed: wire.Signed, run_id: RunId, terms: Terms) -> Statement[Body]:
    """The checked statement in an envelope. Raises MalformedError, ForgedError or LimitError."""
    if signed.kind not in KINDS:
        raise MalformedError("a statement of a kind that no round knows")
    message, from_wire = KINDS[signed.kind]
    body = open_signed(signed, run_id, signed.kind, message, MAX_STATEMENT_BYTES)
    return Statement.of(signed, from_wire(body, terms, lambda nested: parse(nested, run_id, terms)))


def named_blobs(statement: Statement[Body]) -> Iterator[Named]:
    """Those that a statement, or one inside it, names."""
    body = statement.body
    match body:
        case Contribution():
            yield from (Named(blob, statement) for blob in body.parts)
        case Roster():
            yield from (named for nested in body.contributions for named in named_blobs(nested))
        case Commit():
            yield from (Named(blob, statement) for blob in body.parts)
            yield from (named for nested in body.contributions for named in named_blobs(nested))
        case Part():
            yield Named(body.blob, statement)
