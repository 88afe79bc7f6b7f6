"""Whatever a peer answers, a call ends with what the caller expects, or with a fault of the peer."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from node.daemon.calls import ask_chain, ask_to_carry, deliver
from protocol.errors import MalformedError
from protocol.murmur_pb2 import Signed
from tests.node.small_run import PEERS, RUN_ID
from tests.protocol.garbled import garbled

THEM = PEERS[3].peer_id


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with garbled(tmp_path / "s") as opened:
        yield opened


async def test_answers_that_do_not_parse_are_faults(channel: grpc.aio.Channel) -> None:
    for call in (
        deliver(RUN_ID, lambda _: channel, THEM, [], 5.0),
        ask_chain(RUN_ID, lambda _: channel, THEM, 0),
        ask_to_carry(RUN_ID, lambda _: channel, THEM, Signed(), bytes(32), 5.0),
    ):
        with pytest.raises(MalformedError, match="does not parse"):
            await call
