"""A reply that does not parse is a fault of its sender."""

from pathlib import Path

import pytest

from protocol.errors import MalformedError, require_reply
from protocol.murmur_pb2 import Chunk, FetchRequest, PiecesReply, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsStub
from tests.protocol.garbled_server import garbled_channel


def test_parsed_reply_is_returned() -> None:
    reply = PiecesReply(size=3)
    assert require_reply(reply) is reply


async def test_unparsable_reply_is_refused(tmp_path: Path) -> None:
    """The control is gRPC itself, which returns None without an error."""
    async with garbled_channel(tmp_path / "s") as channel:
        stub = BlobsStub(channel)
        reply = await stub.Pieces(PiecesRequest(), timeout=10)
        assert reply is None
        with pytest.raises(MalformedError, match="does not parse"):
            require_reply(reply)
        chunks: list[Chunk | None] = [chunk async for chunk in stub.Fetch(FetchRequest(), timeout=10)]
        assert chunks == [None]
