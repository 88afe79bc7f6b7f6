"""Checks that the bodies of several kinds of messages share. Each raises MalformedError or LimitError."""

from collections.abc import Iterable, Sequence

from protocol.blobs.blob import Blob, check_digest
from protocol.errors import LimitError, MalformedError
from protocol.signing import MAX_ROUND


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
