"""Chunks of a blob on the wire: protobuf's `Chunk`, read and written without a copy of what it carries.

protobuf copies the bytes of a field twice on each side, and a large merge is made of little else. What it would write
is written here, and what it has written is read where it lies; anything else that is a `Chunk` is left to it.

PURE: a piece of numbers in fewer bytes, for slow lines; what comes out at the other end is the same bit for bit.

    numbers of 2 or 4 bytes -> all their first bytes, all their second ones, ...; of these, those in which some values
    are much more frequent than others (sign and exponent) through zstd, the others as they are

Of fp16 and fp32 a sixth falls away (weights and gradients: ZipNN, arXiv 2411.05239), of messages that are coded
already nothing; a look at a sample tells. Squeezed, a piece is

    width (1 byte), then by place in the number the length of what it became (4 bytes, little-endian), then these;
    one as long as the place itself is the place as it is.
"""

import struct
from collections.abc import Sequence
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Bytes
from protocol.errors import MalformedError

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


HEADERS: Final = {width: struct.Struct(f"<B{width}I") for width in (2, 4)}
ZSTD_LEVEL = 1
MIN_COMPRESSED_BYTES = 4096
SAMPLE_BYTES = 1 << 15
MAX_RATIO = 0.95  # of the bytes of a piece, or of one place
WIDE_ADVANTAGE = 0.98  # that the wider numbers must come to: by chance a smaller sample is less even
BytePlanes = Sequence[NDArray[np.uint8]]


def compress_piece(data: Bytes) -> bytes | None:
    """None: it does not pay."""
    if len(data) < MIN_COMPRESSED_BYTES:
        return None
    values = np.frombuffer(data, np.uint8)
    narrow, wide = (
        [_entropy_share(place) for place in _byte_planes(values[:SAMPLE_BYTES], width)] for width in HEADERS
    )
    left = wide if fmean(wide) < WIDE_ADVANTAGE * fmean(narrow) else narrow
    if fmean(left) > MAX_RATIO:
        return None
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    places = zip(_byte_planes(values, len(left)), left, strict=True)
    parts = [_compress_plane(place, compressor) if share < MAX_RATIO else place.tobytes() for place, share in places]
    if sum(map(len, parts)) > MAX_RATIO * len(data):
        return None
    return b"".join([HEADERS[len(parts)].pack(len(parts), *map(len, parts)), *parts])


def decompress_piece(packed: Bytes, size: int) -> bytearray:
    """The piece, which has `size` bytes. Raises MalformedError; never takes up more than that."""
    head = HEADERS.get(packed[0]) if packed else None
    if head is None or len(packed) < head.size:
        raise MalformedError("a squeezed piece has no such head")
    width, *lengths = head.unpack_from(packed)
    if head.size + sum(lengths) != len(packed):
        raise MalformedError("a squeezed piece is not as long as its head says")
    data, start = bytearray(size), head.size
    for place, length in zip(_byte_planes(np.frombuffer(data, np.uint8), width), lengths, strict=True):
        place[:] = _decompress_plane(bytes(packed[start : start + length]), place.size)
        start += length
    return data


def _byte_planes(values: NDArray[np.uint8], width: int) -> BytePlanes:
    return [values[number::width] for number in range(width)]


def _entropy_share(plane: NDArray[np.uint8]) -> float:
    """As a share, where each byte takes -log2(its frequency) bits."""
    counts = np.bincount(plane, minlength=256)
    shares = counts[counts > 0] / plane.size
    return float(-(shares * np.log2(shares)).sum()) / 8


def _compress_plane(plane: NDArray[np.uint8], compressor: zstandard.ZstdCompressor) -> bytes:
    plain = plane.tobytes()
    found = compressor.compress(plain)
    return found if len(found) < len(plain) else plain


def _decompress_plane(part: bytes, size: int) -> NDArray[np.uint8]:
    """Of one place that has so many bytes."""
    if len(part) == size:
        return np.frombuffer(part, np.uint8)
    try:
        # The size in the frame is what would be taken up, whatever comes out.
        if zstandard.frame_content_size(part) != size:
            raise MalformedError("a squeezed piece has another size")
        found = zstandard.ZstdDecompressor(max_window_size=1 << 21).decompress(part, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedError("a squeezed piece does not open") from error
    return np.frombuffer(found, np.uint8)
