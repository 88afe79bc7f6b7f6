"""The name of a blob follows from its bytes, and bytes that do not match it are refused."""

import random

import pytest
from blake3 import blake3

from protocol.blobs.blob import MAX_BLOB_BYTES, PIECE_BYTES, Blob, piece_hashes
from protocol.errors import LimitError, MalformedError, PeerFault
from protocol.murmur_pb2 import BlobRef


def test_digest_follows_the_documented_formula() -> None:
    data = random.Random(1).randbytes(PIECE_BYTES + 7)
    pieces = blake3(data[:PIECE_BYTES]).digest() + blake3(data[PIECE_BYTES:]).digest()
    assert Blob.of(data) == Blob(blake3(pieces + len(data).to_bytes(8, "big")).digest(), len(data))


@pytest.mark.parametrize(
    ("size", "lengths"),
    [
        (0, []),
        (1, [1]),
        (PIECE_BYTES, [PIECE_BYTES]),
        (PIECE_BYTES + 1, [PIECE_BYTES, 1]),
        (3 * PIECE_BYTES, [PIECE_BYTES] * 3),
    ],
)
def test_pieces_cover_the_bytes(size: int, lengths: list[int]) -> None:
    data = bytes(size)
    blob = Blob.of(data)
    assert [blob.piece_length(piece) for piece in range(blob.pieces)] == lengths
    assert len(piece_hashes(data)) == 32 * len(lengths)


def test_name_depends_on_every_bit_and_on_the_size() -> None:
    data = bytearray(random.Random(2).randbytes(PIECE_BYTES + 100))
    names = {Blob.of(bytes(data)).digest}
    for position in (0, PIECE_BYTES - 1, PIECE_BYTES, len(data) - 1):
        data[position] ^= 1
        names.add(Blob.of(bytes(data)).digest)
        data[position] ^= 1
    names.add(Blob.of(bytes(data) + b"\0").digest)
    names.add(Blob.of(bytes(data[:-1])).digest)
    assert len(names) == 7


def test_blob_survives_serialization() -> None:
    blob = Blob.of(b"starling")
    assert Blob.from_wire(BlobRef.FromString(blob.to_wire().SerializeToString())) == blob


@pytest.mark.parametrize(
    ("wire", "fault"),
    [
        (BlobRef(), MalformedError),
        (BlobRef(digest=b"x" * 31, size=1), MalformedError),
        (BlobRef(digest=b"x" * 33, size=1), MalformedError),
        (BlobRef(digest=b"x" * 32, size=MAX_BLOB_BYTES + 1), LimitError),
        (BlobRef(digest=b"x" * 32, size=2**64 - 1), LimitError),
    ],
)
def test_invalid_blob_on_the_wire_is_refused(wire: BlobRef, fault: type[PeerFault]) -> None:
    with pytest.raises(fault):
        Blob.from_wire(wire)


def test_hashes_are_checked_against_the_digest() -> None:
    data = random.Random(3).randbytes(2 * PIECE_BYTES + 1)
    blob, hashes = Blob.of(data), piece_hashes(data)
    blob.check_hashes(hashes)
    with pytest.raises(LimitError):
        blob.check_hashes(hashes + bytes(32))
    for wrong in (b"", hashes[:-1], hashes[:-32], hashes[32:] + hashes[:32], bytes(len(hashes))):
        with pytest.raises(MalformedError):
            blob.check_hashes(wrong)
    # The control: the right list with another size is another blob.
    with pytest.raises(MalformedError):
        Blob(blob.digest, blob.size + 1).check_hashes(hashes)
