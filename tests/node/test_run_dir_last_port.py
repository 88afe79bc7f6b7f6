"""Which port a node takes that was given none: that of its last start, as long as it can be had."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.run_dir import RunDir, reuse_last_port
from protocol.transport import local_sockets

LISTEN = ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1")


@pytest.fixture
def held() -> Iterator[socket.socket]:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        yield other


def resumed(folder: Path, port: int) -> RunDir:
    node = RunDir(folder)
    node.write_node_info("me", (f"/ip4/127.0.0.1/tcp/{port}/p2p/me",), 99)
    return node


async def test_the_first_start_takes_any(tmp_path: Path) -> None:
    assert await reuse_last_port(RunDir(tmp_path), LISTEN) == LISTEN


async def test_a_port_that_was_asked_for_is_left_alone(tmp_path: Path, held: socket.socket) -> None:
    asked = ("/ip4/127.0.0.1/tcp/4001",)
    async with asyncio.timeout(local_sockets.PORT_RETRY_SECONDS / 2):
        assert await reuse_last_port(resumed(tmp_path, held.getsockname()[1]), asked) == asked


async def test_a_port_that_is_let_go_is_waited_for(
    tmp_path: Path, held: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sockets, "PORT_RETRY_SECONDS", 60.0)
    port = held.getsockname()[1]
    asking = asyncio.create_task(reuse_last_port(resumed(tmp_path, port), LISTEN))
    async with asyncio.timeout(30):
        while "which was ours; trying again" not in caplog.text:
            await asyncio.sleep(0.02)
    held.close()
    assert await asyncio.wait_for(asking, 30) == (f"/ip4/127.0.0.1/tcp/{port}", LISTEN[1])


async def test_another_port_is_taken_where_it_stays_taken(
    tmp_path: Path, held: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sockets, "PORT_RETRY_SECONDS", 0.3)
    assert await reuse_last_port(resumed(tmp_path, held.getsockname()[1]), LISTEN) == LISTEN
    assert "links to this node change" in caplog.text
