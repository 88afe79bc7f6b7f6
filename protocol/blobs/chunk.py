"""Chunks of a blob on the wire: protobuf's `Chunk`, read and written without a copy of what it carries.

protobuf copies the bytes of a field twice on each side, and a large merge is made of little else. What it would write
is written here, and what it has written is read where it lies; anything else that is a `Chunk` is left to it.
"""

from typing import Final, NamedTuple

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Bytes

BLOBS_SERVICE: Final = wire.DESCRIPTOR.services_by_name["Blobs"].full_name
FETCH_METHOD: Final = f"/{BLOBS_SERVICE}/Fetch"
DATA_TAG, SQUEEZED_TAG = b"\x0a", b"\x10"  # the fields' tags: 1, by its length, and 2, a varint
MAX_VARINT_BYTES = 5  # of 32 bits


class Chunk(NamedTuple):
    """`squeezed`: not 0 where all that comes has so many bytes, and is a squeezed piece."""

    data: Bytes
    squeezed: int = 0

    def serialize(self) -> bytes:
        """As `Chunk.SerializeToString` does it."""
        data = (DATA_TAG, _encode_varint(len(self.data)), self.data) if self.data else ()
        return b"".join((*data, *((SQUEEZED_TAG, _encode_varint(self.squeezed)) if self.squeezed else ())))


def parse_chunk(raw: bytes | bytearray) -> Chunk:
    """`raw` lives as long as the chunk, and must not change. DecodeError: it is none."""
    try:
        return _parse_plain_chunk(raw)
    except (ValueError, IndexError):
        message = wire.Chunk.FromString(bytes(raw))
        return Chunk(message.data, message.squeezed)


def _parse_plain_chunk(raw: bytes | bytearray) -> Chunk:
    """ValueError or IndexError: protobuf would not have written it so."""
    if raw[:1] != DATA_TAG:
        raise ValueError("another field comes first")
    length, start = _decode_varint(raw, 1)
    end, squeezed = start + length, 0
    if length and raw[end : end + 1] == SQUEEZED_TAG:
        squeezed, stop = _decode_varint(raw, end + 1)
    else:
        stop = end
    if not length or stop != len(raw):
        raise ValueError("more comes, or less")
    return Chunk(memoryview(raw)[start:end], squeezed)


def _encode_varint(number: int) -> bytes:
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def _decode_varint(raw: bytes | bytearray, place: int) -> tuple[int, int]:
    """The number, and where it ends."""
    number = 0
    for shift in range(MAX_VARINT_BYTES):
        byte = raw[place + shift]
        number |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            if number >> 32:
                raise ValueError("more than 32 bits")
            return number, place + shift + 1
    raise ValueError("a number without an end")
