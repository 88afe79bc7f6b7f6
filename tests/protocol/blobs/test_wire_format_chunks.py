"""Chunks are encoded and decoded exactly as by protobuf, and invalid ones are refused."""

import random

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protocol import murmur_pb2 as wire
from protocol.blobs import wire_format as chunks
from protocol.blobs.blob import CHUNK_BYTES
from protocol.blobs.wire_format import Chunk, parse_chunk

SIZES = [0, 1, 127, 128, 16_383, 16_384, CHUNK_BYTES]
NUMBERS = [0, 1, 127, 128, 2**21 - 1, 2**21, 2**32 - 1]
contents = st.binary(max_size=300)
numbers = st.integers(0, 2**32 - 1)


def parse_with_protobuf(raw: bytes) -> tuple[bytes, int] | None:
    try:
        message = wire.Chunk.FromString(raw)
    except DecodeError:
        return None
    return message.data, message.squeezed


def parse_with_our_code(raw: bytes | bytearray) -> tuple[bytes, int] | None:
    try:
        chunk = parse_chunk(raw)
    except DecodeError:
        return None
    return bytes(chunk.data), chunk.squeezed


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("squeezed", NUMBERS)
def test_chunks_are_written_and_read_as_by_protobuf(size: int, squeezed: int) -> None:
    data = random.Random(size).randbytes(size)
    expected = wire.Chunk(data=data, squeezed=squeezed).SerializeToString()
    assert Chunk(data, squeezed).serialize() == Chunk(memoryview(data), squeezed).serialize() == expected
    assert parse_with_our_code(expected) == parse_with_our_code(bytearray(expected)) == (data, squeezed)


@given(contents, numbers)
def test_any_chunk_survives_a_round_trip(data: bytes, squeezed: int) -> None:
    assert parse_with_our_code(Chunk(data, squeezed).serialize()) == (data, squeezed)


@given(st.binary(max_size=40))
def test_any_bytes_are_parsed_as_by_protobuf(raw: bytes) -> None:
    assert parse_with_our_code(raw) == parse_with_protobuf(raw)


@given(contents, numbers, st.randoms(use_true_random=False))
def test_damaged_chunk_is_parsed_as_by_protobuf(data: bytes, squeezed: int, rng: random.Random) -> None:
    raw = bytearray(Chunk(data, squeezed).serialize())
    for _ in range(rng.randrange(1, 4)):
        offset = rng.randrange(len(raw) + 1)
        raw[offset : offset + rng.randrange(2)] = rng.randbytes(rng.randrange(3))
    assert parse_with_our_code(raw) == parse_with_protobuf(bytes(raw))


@pytest.mark.parametrize(
    "raw",
    [
        b"\x10\x05\x0a\x02ab",  # fields in reverse order
        b"\x0a\x02ab\x0a\x01c",  # the last value counts
        b"\x0a\x02ab\x1a\x01x",  # an unknown field
        b"\x0a\x82\x00ab",  # a length in more bytes than necessary
        b"\x0a\x00\x10\x05",
        b"",
    ],
)
def test_unusual_encodings_are_left_to_protobuf(raw: bytes) -> None:
    assert parse_with_protobuf(raw) is not None
    assert parse_with_our_code(raw) == parse_with_protobuf(raw)


def test_parsing_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = bytearray(wire.Chunk(data=bytes(CHUNK_BYTES), squeezed=9).SerializeToString())
    monkeypatch.setattr(chunks, "wire", None)  # protobuf is not used
    chunk = parse_chunk(raw)
    raw[10] = 7
    assert bytes(chunk.data).count(7) == 1
