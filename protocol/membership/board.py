"""The keys of the DHT that a node keeps values for, and what may stand under each. PURE.

A value is signed by whoever it is of, and says itself until when it holds; both bind the place that it is stored at:
it cannot be kept for longer, or under another's name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.message import DecodeError
from hivemind.dht.routing import DHTID

from protocol.errors import MalformedError
from protocol.murmur_pb2 import Signed

EXPIRATION_OFFSET_SECONDS = 1e10  # seconds since the epoch: the year 2286, later than any wrong clock


class Announcement(NamedTuple):
    """`place`: the subkey; `expires` in swarm time, seconds since the epoch."""

    subkey: str
    value: bytes
    expires: float

    @property
    def dht_expiration(self) -> float:
        """The time to give hivemind."""
        return EXPIRATION_OFFSET_SECONDS + self.expires


def parse_envelope(value: bytes, max_bytes: int, title: str) -> Signed:
    """Nothing in it is checked yet. Raises MalformedError, which begins with `title`."""
    if len(value) > max_bytes:
        raise MalformedError(f"{title} has {len(value)} bytes")
    try:
        return Signed.FromString(value)
    except DecodeError as error:
        raise MalformedError(f"{title} does not parse") from error


@dataclass(frozen=True)
class Topic:
    """`read` gives the notice that a value is, or raises PeerFault."""

    name: str
    parse: Callable[[bytes], Announcement]

    @property
    def key(self) -> DHTID:
        return DHTID.generate(source=f"murmur/1/{self.name}")
