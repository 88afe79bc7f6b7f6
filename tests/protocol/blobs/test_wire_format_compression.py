"""Compression of pieces: lossless, only where it pays, and safe against a liar's input."""

import random
import struct
from collections.abc import Callable

import numpy as np
import pytest
import zstandard

from protocol.blobs.blob import PIECE_BYTES
from protocol.blobs.wire_format import MIN_COMPRESSED_BYTES, compress_piece, decompress_piece
from protocol.errors import MalformedError

Change = Callable[[bytearray], bytes]


def numbers(kind: str, count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).normal(0, 0.02, count).astype(kind).tobytes()


def make_bfloat16(count: int) -> bytes:
    return (np.frombuffer(numbers("<f4", count), np.uint32) >> 16).astype("<u2").tobytes()


HALVES = numbers("<f2", PIECE_BYTES // 2)
PACKED = compress_piece(HALVES) or b""


@pytest.mark.parametrize(
    ("data", "share"),
    [
        (HALVES, 0.86),
        (numbers("<f4", PIECE_BYTES // 4), 0.86),
        (make_bfloat16(PIECE_BYTES // 2), 0.75),
        (bytes(PIECE_BYTES), 0.01),
    ],
    ids=["fp16", "fp32", "bf16", "zeros"],
)
def test_numbers_are_compressed_without_loss(data: bytes, share: float) -> None:
    packed = compress_piece(data)
    assert packed is not None and len(packed) < share * len(data)
    assert decompress_piece(packed, len(data)) == data


@pytest.mark.parametrize("kind", ["<f2", "<f4"])
@pytest.mark.parametrize("size", [MIN_COMPRESSED_BYTES, MIN_COMPRESSED_BYTES + 1, MIN_COMPRESSED_BYTES + 3, 100_003])
def test_pieces_of_any_size_are_restored(kind: str, size: int) -> None:
    data = numbers(kind, size)[:size]
    packed = compress_piece(memoryview(data))
    assert packed is not None and decompress_piece(packed, size) == data


@pytest.mark.parametrize(
    "data",
    [random.Random(1).randbytes(PIECE_BYTES), b"", bytes(MIN_COMPRESSED_BYTES - 1), zstandard.compress(HALVES)],
    ids=["random", "empty", "small", "coded"],
)
def test_incompressible_piece_is_not_compressed(data: bytes) -> None:
    assert compress_piece(data) is None


def test_piece_with_a_misleading_sample_is_not_compressed() -> None:
    assert compress_piece(bytes(1 << 16) + random.Random(2).randbytes(PIECE_BYTES * 2)) is None


def frame(size: int) -> bytes:
    return zstandard.compress(bytes(size))


def with_frame(part: bytes) -> Change:
    """Replace the compressed plane of frequent bytes of HALVES by `part`."""
    return lambda packed: struct.pack("<B2I", 2, len(HALVES) // 2, len(part)) + packed[9 : 9 + len(HALVES) // 2] + part


@pytest.mark.parametrize(
    "change",
    [
        lambda packed: b"",
        lambda packed: bytes(packed[:5]),
        lambda packed: b"\x03" + packed[1:],
        lambda packed: packed[:-1],
        lambda packed: packed + b"\0",
        with_frame(frame(len(HALVES) // 2 - 1)),
        with_frame(frame(1 << 30)),
        with_frame(frame(len(HALVES) // 2) + b"more"),
        with_frame(b"no frame at all"),
        with_frame(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(len(HALVES) // 2))),
    ],
    ids=["empty", "cut", "width", "short", "long", "less", "bomb", "more", "other", "unsaid"],
)
def test_invalid_compressed_pieces_are_refused(change: Change) -> None:
    with pytest.raises(MalformedError):
        decompress_piece(change(bytearray(PACKED)), len(HALVES))


def test_piece_of_another_size_is_refused() -> None:
    with pytest.raises(MalformedError):
        decompress_piece(PACKED, len(HALVES) + 2)
