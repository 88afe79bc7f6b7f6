"""Chunks as protobuf writes and reads them, to the byte, and what is no chunk."""

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
datas = st.binary(max_size=300)
numbers = st.integers(0, 2**32 - 1)


def by_protobuf(raw: bytes) -> tuple[bytes, int] | None:
    try:
        message = wire.Chunk.FromString(raw)
    except DecodeError:
        return None
    return message.data, message.squeezed


def by_us(raw: bytes | bytearray) -> tuple[bytes, int] | None:
    try:
        chunk = parse_chunk(raw)
    except DecodeError:
        return None
    return bytes(chunk.data), chunk.squeezed


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("squeezed", NUMBERS)
def test_written_and_read_as_protobuf_does_it(size: int, squeezed: int) -> None:
    data = random.Random(size).randbytes(size)
    theirs = wire.Chunk(data=data, squeezed=squeezed).SerializeToString()
    assert Chunk(data, squeezed).serialize() == Chunk(memoryview(data), squeezed).serialize() == theirs
    assert by_us(theirs) == by_us(bytearray(theirs)) == (data, squeezed)


@given(datas, numbers)
def test_any_chunk_there_and_back(data: bytes, squeezed: int) -> None:
    assert by_us(Chunk(data, squeezed).serialize()) == (data, squeezed)


@given(st.binary(max_size=40))
def test_whatever_comes_is_read_as_protobuf_reads_it(raw: bytes) -> None:
    assert by_us(raw) == by_protobuf(raw)


@given(datas, numbers, st.randoms(use_true_random=False))
def test_what_is_damaged_is_read_as_protobuf_reads_it(data: bytes, squeezed: int, draw: random.Random) -> None:
    raw = bytearray(Chunk(data, squeezed).serialize())
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(raw) + 1)
        raw[place : place + draw.randrange(2)] = draw.randbytes(draw.randrange(3))
    assert by_us(raw) == by_protobuf(bytes(raw))


@pytest.mark.parametrize(
    "raw",
    [
        b"\x10\x05\x0a\x02ab",  # the other way round
        b"\x0a\x02ab\x0a\x01c",  # the last one counts
        b"\x0a\x02ab\x1a\x01x",  # a field that we do not know
        b"\x0a\x82\x00ab",  # a length in more bytes than it takes
        b"\x0a\x00\x10\x05",
        b"",
    ],
)
def test_what_protobuf_may_write_otherwise_is_left_to_it(raw: bytes) -> None:
    assert by_protobuf(raw) is not None
    assert by_us(raw) == by_protobuf(raw)


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = bytearray(wire.Chunk(data=bytes(CHUNK_BYTES), squeezed=9).SerializeToString())
    monkeypatch.setattr(chunks, "wire", None)  # not asked
    chunk = parse_chunk(raw)
    raw[10] = 7
    assert bytes(chunk.data).count(7) == 1
