"""Detect another running node that uses our key, such as one in a copied folder. No I/O.

Each process names itself by a start id in its peer record, and echoes there the start id of any other process that
publishes records under the same key. A record of our key that echoes our start id was signed by a process that runs
now. An earlier process of ours cannot have signed it, however wrong the clocks are: it ended before our start id
existed. Nobody without the key can sign such a record either.

The process with the lower start id, which started earlier, continues. The other one waits until the first has had time
to notice it too, and then stops.
"""

import logging
import random
from dataclasses import dataclass

from protocol.errors import KeyInUseError
from protocol.murmur_pb2 import PeerRecord

logger = logging.getLogger(__name__)

RANDOM_BITS = 22
RECENT_SECONDS = 60.0  # after its last record the other node counts as gone
MAX_PROCESSES = 16  # that are remembered
YIELD_SECONDS = 10.0  # from the proof until the later node stops


def make_start_id(now: float, rng: random.Random) -> int:
    """Return an id for a process that starts now; ids of later processes are higher."""
    return (max(1, int(now * 1000)) << RANDOM_BITS) | rng.getrandbits(RANDOM_BITS)


@dataclass(frozen=True, slots=True)
class OtherNode:
    """The other node that uses our key, as its newest record describes it."""

    started_earlier: bool
    name: str
    version: str
    address: str

    def describe(self) -> str:
        described = (self.name, self.version and f"version {self.version}", self.address and f"at {self.address}")
        return f"another node uses this node's key: {' '.join(filter(None, described)) or 'its address is unknown'}"


class KeyConflict:
    """Collects the evidence in the records of our own key; times are in seconds, monotonic."""

    def __init__(self, start: int) -> None:
        self._start = start
        self.echo = 0  # the start id of the last foreign record, for our own record
        self._sequences: dict[int, int] = {}  # the newest one of each other process
        self._proved: PeerRecord | None = None  # the newest record of a process that runs now
        self._proved_since = self._seen_at = 0.0
        self._is_reported = False

    def observe(self, record: PeerRecord, now: float) -> bool:
        """Take in a verified record of our key; return whether `echo` has changed."""
        if record.start == self._start or record.sequence <= self._sequences.get(record.start, 0):
            return False  # our own, or repeated: no sign of life
        self._sequences[record.start] = record.sequence
        if len(self._sequences) > MAX_PROCESSES:
            del self._sequences[min(self._sequences)]
        has_proof = record.other_start == self._start
        if has_proof and self.other(now) is None:
            self._proved_since = now
        if has_proof or (self._proved is not None and self._proved.start == record.start):
            self._proved, self._seen_at = record, now
        is_new, self.echo = self.echo != record.start, record.start
        return is_new

    def other(self, now: float) -> OtherNode | None:
        """Return the other node that uses our key, or None if none is known to run."""
        record = self._proved
        if record is None or now - self._seen_at > RECENT_SECONDS:
            return None
        address = record.addresses[0].partition("/p2p/")[0] if record.addresses else ""
        return OtherNode(record.start < self._start, record.name, record.version, address)

    def check(self, now: float) -> None:
        """Warn once of another node with our key.

        Raises KeyInUseError if that one started earlier and has had time to notice this one.
        """
        other = self.other(now)
        if other is not None and not self._is_reported:
            end = "this one stops soon" if other.started_earlier else "that one started later and stops"
            logger.warning("%s; %s", other.describe(), end)
        self._is_reported = other is not None
        if other is not None and self.must_stop(now):
            raise KeyInUseError(
                f"{other.describe()}, and started earlier; stop that one, or give this one a folder of its own (--dir)"
            )

    def must_stop(self, now: float) -> bool:
        """Return whether this node must stop, because the other one started earlier and has had time to notice."""
        other = self.other(now)
        return other is not None and other.started_earlier and now - self._proved_since >= YIELD_SECONDS
