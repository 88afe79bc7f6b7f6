"""Signed messages whose bodies are checked, and the checks that all bodies share."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob, check_digest
from protocol.errors import LimitError, MalformedError
from protocol.identity import PeerId
from protocol.signing import MAX_ROUND

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


def check_sizes(blobs: Iterable[Blob]) -> None:
    """Check that no digest comes with two sizes, because inventories name blobs by digest alone."""
    sizes: dict[bytes, int] = {}
    if any(sizes.setdefault(blob.digest, blob.size) != blob.size for blob in blobs):
        raise MalformedError("a blob with two different sizes")


def check_round(number: int, digest: bytes) -> None:
    """Check a round number, and a digest that comes with it."""
    if number > MAX_ROUND:
        raise MalformedError(f"round {number} is out of range")
    check_digest(digest)


def check_count(count: int, limit: int, name: str) -> None:
    """Check the length of a list."""
    if count > limit:
        raise LimitError(f"{count} {name}, at most {limit} are allowed")


def check_ascending(values: Sequence[bytes] | Sequence[str], name: str) -> None:
    """Check that a list is in ascending order without duplicates."""
    if any(first >= second for first, second in zip(values, values[1:], strict=False)):  # type: ignore[operator]
        raise MalformedError(f"{name} are not in ascending order, or occur twice")
