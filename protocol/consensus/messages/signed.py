"""Signed messages: an envelope with its checked body, its sender and its digest.

The digest covers kind, sender and body, so the same proposal of two leaders makes two different messages.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from protocol import murmur_pb2 as wire
from protocol.identity import PeerId

Digest = bytes  # 32 bytes, SHA-256
OpenNested = Callable[[wire.Signed], "SignedMessage[Any]"]  # checks a message inside another, of any kind

BodyT_co = TypeVar("BodyT_co", covariant=True)


@dataclass(frozen=True)
class SignedMessage(Generic[BodyT_co]):
    """A checked message; `signed` is its envelope, which is forwarded byte for byte."""

    signed: wire.Signed = field(compare=False, repr=False)
    body: BodyT_co
    sender: PeerId
    digest: Digest

    @classmethod
    def of(cls, signed: wire.Signed, body: BodyT_co) -> Self:  # type: ignore[misc]  # the class never changes its body
        """Wrap a checked body."""
        return cls(signed, body, signed.peer, digest_of(signed))


def digest_of(signed: wire.Signed) -> Digest:
    """Return the digest of a message; it covers kind, sender and body."""
    content = b"\0".join((signed.kind.encode(), signed.peer.encode(), signed.body))
    return hashlib.sha256(content).digest()
