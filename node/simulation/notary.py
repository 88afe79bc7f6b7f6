"""Statements without cryptography: inside one process nobody forges, and signatures would take most of the time.

A signature here is a hash of what it signs, as long as a real one so that statements have their real size. Bodies are
parsed and checked as on the wire, but only once, whoever receives them.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from protocol import murmur_pb2 as wire
from protocol.identity import PeerId
from protocol.rounds.events import Received
from protocol.rounds.kinds import KINDS
from protocol.rounds.statements import Statement, Terms


class Notary:
    """Signs for every peer of one run, and opens what it signed."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._opened: dict[bytes, Received] = {}
        self._signed_in: dict[int, list[bytes]] = {}

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
            message, from_wire = KINDS[signed.kind]
            body = from_wire(message.FromString(signed.body), self._terms, self.open)
            event = self._opened[key] = Received(Statement.of(signed, body))
            self._signed_in.setdefault(body.round, []).append(key)
        return event

    def forget_before(self, number: int) -> None:
        """Drop what was said in the rounds before that one."""
        for old in [known for known in self._signed_in if known < number]:
            for signature in self._signed_in.pop(old):
                del self._opened[signature]
