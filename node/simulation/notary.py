"""Statements without cryptography: inside one process nobody forges, and signatures would take most of the time.

A signature here is a hash of what it signs, as long as a real one so that statements have their real size. Bodies are
parsed and checked as on the wire, but only once, whoever receives them.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import Message

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.rounds.events import Received
from protocol.rounds.kinds import KINDS
from protocol.rounds.reports import Decision, Part, acknowledging
from protocol.rounds.statements import Commit, Contribution, Digest, Roster, Statement, Terms


class Notary:
    """Signs for every peer of one run, and opens what it signed."""

    def __init__(self, run_id: RunId, terms: Terms) -> None:
        self._run_id, self._terms = run_id, terms
        self._opened: dict[bytes, Received] = {}
        self._signed_in: dict[int, list[bytes]] = {}
        self._parts: dict[Digest, int] = {}

    def signer(self, peer: PeerId) -> Callable[[str, Message], wire.Signed]:
        def sign(kind: str, body: Message) -> wire.Signed:
            encoded = body.SerializeToString(deterministic=True)
            signature = hashlib.sha512(f"{peer} {kind} ".encode() + encoded).digest()
            return wire.Signed(kind=kind, peer=peer, body=encoded, signature=signature)

        return sign

    def open(self, signed: wire.Signed) -> Statement[Any]:
        return self.received(signed).statement

    def received(self, signed: wire.Signed) -> Received:
        """The same event for all who hear it."""
        key = signed.signature
        event = self._opened.get(key)
        if event is None:
            event = Received(Statement.of(signed, self._body(signed)))
            self._opened[key] = event
            self._signed_in.setdefault(event.statement.body.round, []).append(key)
            self._parts.update(_places(event.statement.body))
        return event

    def part_of(self, blob: Blob) -> int:
        """Which part of the model that blob holds, by what was said of it."""
        return self._parts.get(blob.digest, 0)

    def forget_before(self, number: int) -> None:
        """Drop what was said in the rounds before that one."""
        for old in [known for known in self._signed_in if known < number]:
            for signature in self._signed_in.pop(old):
                for digest, _ in _places(self._opened.pop(signature).statement.body):
                    self._parts.pop(digest, None)

    def _body(self, signed: wire.Signed) -> Any:
        message, from_wire = KINDS[signed.kind]
        body: Any = message()
        body.ParseFromString(signed.body)
        if signed.kind == "roster":
            return Roster(body.round, body.view, body.base, self._all(body.contributions))
        if signed.kind == "commit":
            parts = tuple(Blob.from_wire(part) for part in body.parts)
            contributions, left_out = self._all(body.contributions), tuple(body.left_out)
            return Commit(body.round, body.view, body.base, contributions, parts, left_out)
        if signed.kind == "decision":
            return Decision(body.round, body.view, body.proposal, self._all(acknowledging(body)))
        return from_wire(body, self._run_id, self._terms)

    def _all(self, envelopes: Iterable[wire.Signed]) -> tuple[Statement[Any], ...]:
        return tuple(self.open(signed) for signed in envelopes)


def _places(body: Any) -> Iterable[tuple[Digest, int]]:
    match body:
        case Contribution(parts=parts):
            return ((blob.digest, part) for part, blob in enumerate(parts))
        case Part(part=part, blob=blob):
            return ((blob.digest, part),)
    return ()
