"""How many unknown keys a directory learns of, and by whose word they count as live. No I/O.

Creating a key costs nothing, and each new peer costs every other peer work for as long as its record lasts. So beyond
the first few keys the directory takes 8 a minute from one connection and 4 a second from all connections together. Keys
that speak for themselves, keys that a voucher passes on, and keys that anybody else passes on do not compete for these
places, so a flood of one kind delays no other.

A record proves only that somebody has a key. The key counts as live once it has spoken to us on an authenticated
stream, or once a voucher has passed its record on: a voter, or a peer that the user or the manifest names. While
nobody has a vote yet, each peer that has spoken to us vouches.
"""

from dataclasses import dataclass
from typing import Literal

from protocol.identity import PeerId
from protocol.transport.rate_limit import SharedTokenBuckets, TokenBuckets

UNLIMITED_KEYS = 64  # known keys below which every newcomer is taken
KEYS_PER_MINUTE = 8  # from one connection
KEYS_PER_SECOND = 4.0  # from all connections together
KEY_BURST = 8
Origin = Literal["itself", "voucher", "other"]  # who passed a record on


class NewcomerQuota:
    """The places for unknown keys; times are in seconds, monotonic."""

    def __init__(self) -> None:
        self._buckets: dict[Origin, SharedTokenBuckets] = {
            origin: SharedTokenBuckets(
                TokenBuckets(KEYS_PER_MINUTE, KEYS_PER_MINUTE / 60), TokenBuckets(KEY_BURST, KEYS_PER_SECOND)
            )
            for origin in ("itself", "voucher", "other")
        }

    def try_take(self, sender: PeerId, origin: Origin, known_count: int, now: float) -> bool:
        """Return whether one more unknown key may be learned from this sender, beside `known_count` known ones."""
        return known_count < UNLIMITED_KEYS or self._buckets[origin].charge(sender, now) is None


@dataclass(frozen=True)
class CheckLimits:
    """Signatures that may be verified at once and a second, for one sender and for all; each takes 0.1 ms."""

    burst: float
    rate: float
    all_burst: float
    all_rate: float


CHECK_LIMITS: dict[Origin, CheckLimits] = {
    "itself": CheckLimits(256, 64, 2048, 1024),
    "voucher": CheckLimits(8192, 1024, 16384, 2048),
    "other": CheckLimits(512, 64, 2048, 512),
}


class CheckQuota:
    """Limits the signatures of records that are verified for each sender."""

    def __init__(self) -> None:
        self._buckets = {
            origin: SharedTokenBuckets(
                TokenBuckets(limits.burst, limits.rate), TokenBuckets(limits.all_burst, limits.all_rate)
            )
            for origin, limits in CHECK_LIMITS.items()
        }

    def try_take(self, sender: PeerId, origin: Origin, now: float) -> bool:
        """Return whether a signature that this sender passed on may be verified."""
        return self._buckets[origin].charge(sender, now) is None
