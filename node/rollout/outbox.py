"""Hold the groups of a rollout peer: which one comes next, which ones a trainer may fetch, when to pause.

Groups of a round have the serials 0, 1, 2 ... without gaps; a new round begins at 0 again. The peer makes at most
`limit` groups in a round, and its share of as many that no trainer has fetched: a peer that nobody asks does no work in
vain, and many peers together do not draw so much that groups grow old before a trainer learns them. A trainer that asks
from a place on has all groups before it. `GroupOutbox` decides this and is pure.

`GroupJournal` keeps the groups in a file, so that the peer goes on at the same group after its death:

    header   b"murmur groups 1" and a newline, the run id and a newline
    records  4 bytes of length, 8 of BLAKE2b, and a signed group; each in little-endian order

Records are appended before a group is served. A killed writer may leave a part of one at the end; a file that is
damaged is cut before the damage, with a line in the log. The groups that are lost are drawn again, to the same bits,
while the weights are the same; otherwise the next round begins.
"""

import hashlib
import logging
import math
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from protocol.errors import PeerFault, StorageError
from protocol.files import write_atomically
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.murmur_pb2 import Signed
from protocol.recent import RecentTable
from protocol.rollout_groups import MAX_GROUP_BYTES, GroupLimits, Place, open_group

logger = logging.getLogger(__name__)

MAX_TRAINERS = 256  # whose places are remembered
FILE_NAME = "groups.log"
MAX_RECORD_BYTES = MAX_GROUP_BYTES + 1024
COMPACT_FACTOR = 4  # times the bytes of its groups; a longer file is rewritten
_HEAD = struct.Struct("<I8s")


@dataclass(frozen=True)
class HeldGroup:
    """A signed group and its place."""

    place: Place
    signed: Signed


class GroupOutbox:
    """The groups of the last rounds, in the order of their places.

    Args:
        limit: groups of one round, until a round has another one.
        max_age: rounds for which groups are kept.
        held: the groups of an earlier process.
    """

    def __init__(self, limit: int, max_age: int, held: Iterable[HeldGroup] = ()) -> None:
        self._limit = self._most_waiting = limit
        self._max_age = max_age
        self._held = deque(held)
        self._next = self._held[-1].place.next if self._held else Place()
        self._asked = RecentTable[PeerId, Place](MAX_TRAINERS)
        self.made = 0  # by this process

    def begin_round(self, number: int, limit: int | None = None, share: float = 1.0) -> None:
        """Begin with the weights after `number` rounds, and drop the groups that are too old.

        Args:
            limit: groups of the round.
            share: of `limit` that may wait for a trainer; less than 1 where other makers have groups for it too.
        """
        self._limit = self._limit if limit is None else limit
        self._most_waiting = max(1, math.ceil(share * self._limit))
        if number > self._next.round:
            self._next = Place(number, 0)
        while self._held and self._held[0].place.round < number - self._max_age:
            self._held.popleft()

    @property
    def round(self) -> int:
        """Return the round whose groups are made now."""
        return self._next.round

    def next_places(self, count: int) -> list[Place]:
        """Return the places of the next groups, at most `count`; none while the peer has to pause."""
        room = min(count, self._limit - self._next.serial, self._most_waiting - self.waiting)
        return [Place(self._next.round, self._next.serial + index) for index in range(room)]

    def add(self, made: Iterable[HeldGroup]) -> None:
        """Add groups at the next places, in their order."""
        for group in made:
            if group.place != self._next:
                raise ValueError(f"group {group.place} does not follow {self._next}")
            self._held.append(group)
            self._next = group.place.next
            self.made += 1

    def serve(self, trainer: PeerId, since: Place) -> Iterator[Signed]:
        """Yield the groups from a place on, for a trainer that has all before it."""
        self._asked[trainer] = since
        return (group.signed for group in self._held if group.place >= since)

    @property
    def waiting(self) -> int:
        """Return the number of groups that no trainer has fetched."""
        fetched = max(self._asked.values(), default=Place())
        return sum(group.place >= fetched for group in self._held)

    @property
    def groups(self) -> tuple[HeldGroup, ...]:
        return tuple(self._held)


class GroupJournal:
    """The file. Methods raise StorageError if the disk refuses."""

    def __init__(self, path: Path, run_id: RunId) -> None:
        self._path = path
        self._header = f"murmur groups 1\n{run_id}\n".encode()
        self._bytes = 0

    def load(self, maker: PeerId, limits: GroupLimits) -> list[HeldGroup]:
        """Return the groups in the file, and cut off damaged bytes; a file of another kind is replaced."""
        data = self._read()
        end, found = len(self._header), list[HeldGroup]()
        if data.startswith(self._header):
            for signed, stop in _records(data, end):
                try:
                    group = open_group(signed, self._header.split(b"\n")[1].decode(), maker, limits).group
                except PeerFault:
                    break
                if found and group.place <= found[-1].place:
                    break
                found.append(HeldGroup(group.place, signed))
                end = stop
        if data and end != len(data):
            logger.warning("%s is damaged or cut; it goes on after its first %d groups", self._path, len(found))
        if end != len(data):
            self.rewrite(found)
        self._bytes = end
        return found

    def append(self, groups: Iterable[HeldGroup], held: Iterable[HeldGroup]) -> None:
        """Append groups; once most of the file is old, write only those that are `held` with them."""
        records = b"".join(_encode(group.signed) for group in groups)
        kept = tuple(held)
        size = len(self._header) + sum(_HEAD.size + group.signed.ByteSize() for group in kept)
        if self._bytes + len(records) > COMPACT_FACTOR * size:
            self.rewrite(kept)
            return
        try:
            with self._path.open("ab", buffering=0) as file:
                if file.write(records) != len(records):
                    raise StorageError(f"cannot write {self._path}: no space left; free some space")
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}; free some space") from error
        self._bytes += len(records)

    def rewrite(self, held: Iterable[HeldGroup]) -> None:
        data = self._header + b"".join(_encode(group.signed) for group in held)
        write_atomically(self._path, data)
        self._bytes = len(data)

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes() if self._path.exists() else b""
        except OSError as error:
            raise StorageError(f"cannot read {self._path}: {error.strerror}; fix its permissions") from error


def _encode(signed: Signed) -> bytes:
    body = signed.SerializeToString(deterministic=True)
    return _HEAD.pack(len(body), _digest(body)) + body


def _records(data: bytes, start: int) -> Iterator[tuple[Signed, int]]:
    """Yield the readable records and the end of each, up to the first that is damaged."""
    while start + _HEAD.size <= len(data):
        size, digest = _HEAD.unpack_from(data, start)
        body = data[start + _HEAD.size : start + _HEAD.size + size]
        if size > MAX_RECORD_BYTES or len(body) != size or _digest(body) != digest:
            return
        try:
            signed = Signed.FromString(body)
        except DecodeError:
            return
        start += _HEAD.size + size
        yield signed, start


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=8).digest()
