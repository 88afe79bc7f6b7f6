"""Keep the groups that a rollout peer serves in a file, so that it goes on at the same group after its death.

    header   b"murmur groups 1" and a newline, the run id and a newline
    records  4 bytes of length, 8 of BLAKE2b, and a signed group; each in little-endian order

Records are appended before a group is served. A killed writer may leave a part of one at the end; a file that is
damaged is cut before the damage, with a line in the log. The groups that are lost are drawn again, to the same bits,
while the weights are the same; otherwise the next round begins.
"""

import hashlib
import logging
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf.message import DecodeError

from node.rollout.outbox import HeldGroup
from protocol.errors import PeerFault, StorageError
from protocol.files import write_atomically
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.murmur_pb2 import Signed
from protocol.rollout_groups import MAX_GROUP_BYTES, GroupLimits, open_group

logger = logging.getLogger(__name__)

FILE_NAME = "groups.log"
_HEAD = struct.Struct("<I8s")
MAX_RECORD_BYTES = MAX_GROUP_BYTES + 1024
COMPACT_FACTOR = 4  # times the bytes of its groups; a longer file is rewritten


class GroupJournal:
    """The file. Methods raise StorageError if the disk refuses."""

    def __init__(self, path: Path, run_id: RunId) -> None:
        self._path = path
        self._header = f"murmur groups 1\n{run_id}\n".encode()
        self._bytes = 0

    def load(self, maker: PeerId, limits: GroupLimits) -> list[HeldGroup]:
        """Return the groups in the file, and cut off what is damaged; a file of another kind is replaced."""
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
