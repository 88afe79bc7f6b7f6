"""What a blob is: bytes named by their hash, cut into pieces that can each be checked alone.

    pieces = the bytes in runs of 1 MiB (the last one may be shorter)
    digest = BLAKE3(BLAKE3(piece 0) + BLAKE3(piece 1) + ... + size as 8 bytes, big-endian)

Who knows digest and size can check the list of piece hashes, and with it every piece, before using a byte. Every
byte of a run is hashed by each peer that sends or gets it, and BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn 2020)
takes a quarter of SHA-256's time where the processor knows SHA-256, and an eighth elsewhere.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from blake3 import blake3

from protocol.errors import LimitError, MalformedError
from protocol.murmur_pb2 import BlobRef

PIECE_BYTES = 1 << 20
CHUNK_BYTES = 1 << 18
DIGEST_BYTES = 32
# The hashes of the largest blob fill half a mebibyte: they fit into one message.
MAX_BLOB_BYTES = 1 << 34
Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Blob:
    """The name of a blob: `digest` has 32 bytes, `size` is in bytes."""

    digest: bytes
    size: int

    def __post_init__(self) -> None:
        check_digest(self.digest)
        if not 0 <= self.size <= MAX_BLOB_BYTES:
            raise LimitError("a blob has at most 16 GiB")

    @classmethod
    def of(cls, *data: Bytes) -> Self:
        """Of all of them, one after the other."""
        return cls.from_hashes(piece_hashes(*data), total_size(data))

    @classmethod
    def from_hashes(cls, hashes: bytes, size: int) -> Self:
        return cls(digest_of(hashes, size), size)

    @classmethod
    def from_wire(cls, wire: BlobRef) -> Self:
        return cls(wire.digest, wire.size)

    def to_wire(self) -> BlobRef:
        return BlobRef(digest=self.digest, size=self.size)

    @property
    def name(self) -> str:
        return self.digest.hex()

    @property
    def pieces(self) -> int:
        """How many pieces there are."""
        return -(-self.size // PIECE_BYTES)

    def piece_length(self, piece: int) -> int:
        return min(PIECE_BYTES, self.size - piece * PIECE_BYTES)

    def check_hashes(self, hashes: bytes) -> None:
        """Raises LimitError where there are too many, MalformedError where they are not this blob's."""
        if len(hashes) > self.pieces * DIGEST_BYTES:
            raise LimitError("more piece hashes than the blob has pieces")
        if digest_of(hashes, self.size) != self.digest:
            raise MalformedError("piece hashes do not match the digest")


def check_digest(digest: bytes) -> None:
    if len(digest) != DIGEST_BYTES:
        raise MalformedError("a digest has 32 bytes")


def hash_of(piece: Bytes) -> bytes:
    return blake3(piece).digest()


def digest_of(hashes: bytes, size: int) -> bytes:
    return hash_of(hashes + size.to_bytes(8, "big"))


def total_size(data: Iterable[Bytes]) -> int:
    return sum(memoryview(part).nbytes for part in data)


def piece_hashes(*data: Bytes) -> bytes:
    """The 32-byte hashes of all pieces of `data`, taken one after the other; nothing is copied."""
    digests, hashed, room = [], blake3(), PIECE_BYTES
    for view in (memoryview(part).cast("B") for part in data):
        while view:
            hashed.update(view[:room])
            taken = min(room, len(view))
            view, room = view[taken:], room - taken
            if not room:
                digests.append(hashed.digest())
                hashed, room = blake3(), PIECE_BYTES
    return b"".join([*digests, hashed.digest()] if room < PIECE_BYTES else digests)
