"""PURE: a piece of numbers in fewer bytes, for slow lines; what comes out at the other end is the same bit for bit.

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
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from protocol.blobs.blob import Bytes
from protocol.errors import MalformedError

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
    narrow, wide = ([_entropy_share(place) for place in _byte_planes(values[:SAMPLE_BYTES], width)] for width in HEADERS)
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
