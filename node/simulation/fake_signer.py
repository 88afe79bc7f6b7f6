"""Signed messages without cryptography: one process has no forgers, and real signatures would take most of the time.

A fake signature is a hash of the body, as long as a real one so that messages have their real size. Bodies are parsed
and checked as on the wire, but only once for all receivers.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from node.loop.events import MessagesReceived
from protocol import murmur_pb2 as wire
from protocol.consensus.messages.contributions import ContributionLimits
from protocol.consensus.messages.kinds import KINDS
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import PeerId


class FakeSigner:
    """Signs for every peer of one run, and opens its own signed messages."""

    def __init__(self, limits: ContributionLimits) -> None:
        self._limits = limits
        self._events_by_signature: dict[bytes, MessagesReceived] = {}
        self._signatures_by_round: dict[int, list[bytes]] = {}

    def signer_for(self, peer: PeerId) -> Callable[[str, Message], wire.Signed]:
        """Return the signing function of a peer."""

        def sign(kind: str, body: Message) -> wire.Signed:
            encoded = body.SerializeToString(deterministic=True)
            signature = hashlib.sha512(f"{peer} {kind} ".encode() + encoded).digest()
            return wire.Signed(kind=kind, peer=peer, body=encoded, signature=signature)

        return sign

    def open(self, signed: wire.Signed) -> SignedMessage[Any]:
        """Return the parsed message."""
        return self.received_event(signed).messages[0]

    def received_event(self, signed: wire.Signed) -> MessagesReceived:
        """Return the event of a message; it is the same object for all receivers."""
        key = signed.signature
        event = self._events_by_signature.get(key)
        if event is None:
            wire_type, body_type = KINDS[signed.kind]
            body = body_type.from_wire(wire_type.FromString(signed.body), self._limits, self.open)
            message = SignedMessage.of(signed, body)
            event = self._events_by_signature[key] = MessagesReceived(message.sender, (message,))
            self._signatures_by_round.setdefault(body.round, []).append(key)
        return event

    def forget_before(self, round_number: int) -> None:
        """Drop the messages of earlier rounds."""
        for old in [known for known in self._signatures_by_round if known < round_number]:
            for signature in self._signatures_by_round.pop(old):
                del self._events_by_signature[signature]
