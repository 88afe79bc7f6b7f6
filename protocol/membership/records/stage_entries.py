"""Checks of the fields of a peer record that list an entry for each of several stages.

They are one field of bytes each, because an update of a record replaces a field as a whole. An entry names its stage
from 1 on, and has the head of its chain.
"""

from collections.abc import Sequence
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import DIGEST_BYTES
from protocol.errors import MalformedError
from protocol.manifest.sections import MAX_STAGES
from protocol.signing import MAX_CHAIN_TOKENS, MAX_ROUND

MAX_FIELD_BYTES: Final = 1024
Listing = TypeVar("Listing", bound=Message)


def read_field(listing: Listing, data: bytes) -> Listing:
    """Read a field into a message of its kind, and return it. Raises MalformedError."""
    if len(data) > MAX_FIELD_BYTES:
        raise MalformedError("a list of stages that is too long")
    try:
        listing.ParseFromString(data)
    except DecodeError as error:
        raise MalformedError("a list of stages that is not readable") from error
    return listing


def require_head(entry: wire.KeptState | wire.ServedStage) -> None:
    """Raise MalformedError unless stage, round, tokens and digests are in their ranges; both digests may be empty."""
    if not 0 < entry.stage <= MAX_STAGES or entry.round > MAX_ROUND or entry.chain_tokens > MAX_CHAIN_TOKENS:
        raise MalformedError("an entry whose stage, round or tokens are out of range")
    if len(entry.digest) not in (0, DIGEST_BYTES) or len(entry.state_digest) not in (0, DIGEST_BYTES):
        raise MalformedError("an entry of a stage with a digest of the wrong length")


def require_order(stages: Sequence[int], most: int) -> None:
    """Raise MalformedError unless there are at most so many stages, each once and in ascending order."""
    if len(stages) > most or list(stages) != sorted(set(stages)):
        raise MalformedError("stages that are too many or not in their order")
