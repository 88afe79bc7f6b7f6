"""Count the encoded bytes of control messages: everything that peers say to each other but blobs."""

from collections import Counter
from collections.abc import Mapping

from google.protobuf.message import Message

from protocol.consensus.messages.kinds import KINDS
from protocol.murmur_pb2 import Brief, DeliverReply, DeliverRequest, Signed

UNKNOWN_KIND = "unknown"  # a label is never a word of a peer
MESSAGE_TAG_BYTES = 3  # of one message in a call: a tag, and mostly two bytes of length


class ControlTraffic:
    """The bytes that one component sent and received, by the kind of the message or the name of the call.

    Framing, encryption and acknowledgements of the transport are not in them.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    def record_sent(self, call: str, message: Message) -> None:
        """Count a request or reply that this node sends."""
        self.sent.update(bytes_by_kind(call, message))

    def record_received(self, call: str, message: Message) -> None:
        """Count a request or reply of another node."""
        self.received.update(bytes_by_kind(call, message))


def bytes_by_kind(call: str, message: Message) -> Mapping[str, int]:
    """Return the encoded bytes of a request or reply: those of signed messages by their kinds, the rest by the call."""
    counts: Counter[str] = Counter()
    messages: list[Signed | Brief] = []
    if isinstance(message, DeliverRequest | DeliverReply):
        messages += message.statements
    if isinstance(message, DeliverRequest):
        messages += message.briefs
    for signed in messages:
        counts[signed.kind if signed.kind in KINDS else UNKNOWN_KIND] += signed.ByteSize() + MESSAGE_TAG_BYTES
    counts[call] += message.ByteSize() - counts.total()
    return counts
