"""Blob chunks on the wire (protobuf's `Chunk`, without copies), and the compression of pieces.

protobuf copies the bytes of a field twice on each side, and a large merge consists of little else. This module writes
the bytes that protobuf would write, and reads its usual encoding in place; any other valid `Chunk` is left to protobuf.

A piece of numbers can be compressed without loss for slow links:

    numbers of 2 or 4 bytes -> a plane of all their first bytes, one of all their second bytes, ...; planes in which
    some values are much more frequent than others (sign and exponent) go through zstd, the others stay as they are

This saves a sixth of fp16 and fp32 (weights and gradients: ZipNN, arXiv 2411.05239) and nothing of encoded messages;
looking at a sample decides. A compressed piece is

    width (1 byte), then for each byte plane the length of its compressed form (4 bytes, little-endian), then these;
    a form as long as the plane itself is the plane unchanged.
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
DATA_TAG, SQUEEZED_TAG = b"\x0a", b"\x10"  # tags of field 1 (length-delimited) and of field 2 (varint)
MAX_VARINT_BYTES = 5  # for 32 bits


class Chunk(NamedTuple):
    """A chunk of a piece.

    If `squeezed` is not 0, the piece is compressed and all its chunks together have that many bytes.
    """

    data: Bytes
    squeezed: int = 0

    def serialize(self) -> bytes:
        """Encode as `Chunk.SerializeToString` does."""
        data = (DATA_TAG, _encode_varint(len(self.data)), self.data) if self.data else ()
        return b"".join((*data, *((SQUEEZED_TAG, _encode_varint(self.squeezed)) if self.squeezed else ())))


def parse_chunk(raw: bytes | bytearray) -> Chunk:
    """Parse a chunk that refers to `raw`, which must not change.

    Raises DecodeError if it is invalid.
    """
    try:
        return _parse_plain_chunk(raw)
    except (ValueError, IndexError):
        message = wire.Chunk.FromString(bytes(raw))
        return Chunk(message.data, message.squeezed)


def _parse_plain_chunk(raw: bytes | bytearray) -> Chunk:
    """Parse protobuf's usual encoding; raise ValueError or IndexError for any other."""
    if raw[:1] != DATA_TAG:
        raise ValueError("the first field is not the data")
    length, start = _decode_varint(raw, 1)
    end, squeezed = start + length, 0
    if length and raw[end : end + 1] == SQUEEZED_TAG:
        squeezed, stop = _decode_varint(raw, end + 1)
    else:
        stop = end
    if not length or stop != len(raw):
        raise ValueError("bytes are missing or left over")
    return Chunk(memoryview(raw)[start:end], squeezed)


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _decode_varint(raw: bytes | bytearray, offset: int) -> tuple[int, int]:
    """Return the number and the offset of its end."""
    value = 0
    for shift in range(MAX_VARINT_BYTES):
        byte = raw[offset + shift]
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            if value >> 32:
                raise ValueError("a varint of more than 32 bits")
            return value, offset + shift + 1
    raise ValueError("a varint without an end")


HEADERS: Final = {width: struct.Struct(f"<B{width}I") for width in (2, 4)}
ZSTD_LEVEL = 1
MIN_COMPRESSED_BYTES = 4096
SAMPLE_BYTES = 1 << 15
MAX_RATIO = 0.95  # compressed bytes of a piece or plane, as a share of the original
WIDE_ADVANTAGE = 0.98  # required ratio of wide to narrow: smaller samples are less even by chance
BytePlanes = Sequence[NDArray[np.uint8]]


def compress_piece(data: Bytes) -> bytes | None:
    """Compress a piece, or return None if that does not pay."""
    if len(data) < MIN_COMPRESSED_BYTES:
        return None
    values = np.frombuffer(data, np.uint8)
    narrow, wide = (
        [_entropy_share(plane) for plane in _byte_planes(values[:SAMPLE_BYTES], width)] for width in HEADERS
    )
    ratios = wide if fmean(wide) < WIDE_ADVANTAGE * fmean(narrow) else narrow
    if fmean(ratios) > MAX_RATIO:
        return None
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    planes = zip(_byte_planes(values, len(ratios)), ratios, strict=True)
    parts = [_compress_plane(plane, compressor) if ratio < MAX_RATIO else plane.tobytes() for plane, ratio in planes]
    if sum(map(len, parts)) > MAX_RATIO * len(data):
        return None
    return b"".join([HEADERS[len(parts)].pack(len(parts), *map(len, parts)), *parts])


def decompress_piece(packed: Bytes, size: int) -> bytearray:
    """Return the piece of `size` bytes, using no more memory than that.

    Raises MalformedError if the compressed piece is invalid.
    """
    head = HEADERS.get(packed[0]) if packed else None
    if head is None or len(packed) < head.size:
        raise MalformedError("a compressed piece has an invalid header")
    width, *lengths = head.unpack_from(packed)
    if head.size + sum(lengths) != len(packed):
        raise MalformedError("a compressed piece is not as long as its header says")
    data, start = bytearray(size), head.size
    for plane, length in zip(_byte_planes(np.frombuffer(data, np.uint8), width), lengths, strict=True):
        plane[:] = _decompress_plane(bytes(packed[start : start + length]), plane.size)
        start += length
    return data


def _byte_planes(values: NDArray[np.uint8], width: int) -> BytePlanes:
    return [values[offset::width] for offset in range(width)]


def _entropy_share(plane: NDArray[np.uint8]) -> float:
    """Return the entropy of the bytes as a share of their size.

    Each byte takes -log2(its frequency) bits.
    """
    counts = np.bincount(plane, minlength=256)
    frequencies = counts[counts > 0] / plane.size
    return float(-(frequencies * np.log2(frequencies)).sum()) / 8


def _compress_plane(plane: NDArray[np.uint8], compressor: zstandard.ZstdCompressor) -> bytes:
    raw = plane.tobytes()
    compressed = compressor.compress(raw)
    return compressed if len(compressed) < len(raw) else raw


def _decompress_plane(part: bytes, size: int) -> NDArray[np.uint8]:
    """Return a plane of `size` bytes."""
    if len(part) == size:
        return np.frombuffer(part, np.uint8)
    try:
        # zstd allocates the size in the frame, whatever the actual output is.
        if zstandard.frame_content_size(part) != size:
            raise MalformedError("a compressed piece has another size")
        raw = zstandard.ZstdDecompressor(max_window_size=1 << 21).decompress(part, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedError("a compressed piece cannot be decompressed") from error
    return np.frombuffer(raw, np.uint8)
