"""A node without a fixed port reuses the port of its last start if that is free."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.run_dir import RunDir, reuse_last_port
from protocol.transport import local_sockets

pytestmark = pytest.mark.slow

LISTEN = ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1")


@pytest.fixture
def busy_port() -> Iterator[socket.socket]:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        yield other


def restarted(folder: Path, port: int) -> RunDir:
    node = RunDir(folder)
    node.write_node_info("me", (f"/ip4/127.0.0.1/tcp/{port}/p2p/me",), 99)
    return node


async def test_first_start_uses_any_port(tmp_path: Path) -> None:
    assert await reuse_last_port(RunDir(tmp_path), LISTEN) == LISTEN


async def test_both_families_get_one_port_and_keep_it(tmp_path: Path) -> None:
    everywhere = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
    ports = [address.split("/")[4] for address in await reuse_last_port(RunDir(tmp_path), everywhere)]
    assert ports[0] == ports[1] != "0"
    again = await reuse_last_port(restarted(tmp_path, int(ports[0])), everywhere)
    assert again == (f"/ip4/0.0.0.0/tcp/{ports[0]}", f"/ip6/::/tcp/{ports[0]}")


async def test_fixed_port_is_not_replaced(tmp_path: Path, busy_port: socket.socket) -> None:
    fixed = ("/ip4/127.0.0.1/tcp/4001",)
    async with asyncio.timeout(local_sockets.PORT_RETRY_SECONDS / 2):
        assert await reuse_last_port(restarted(tmp_path, busy_port.getsockname()[1]), fixed) == fixed


async def test_last_port_is_used_once_it_is_released(
    tmp_path: Path, busy_port: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sockets, "PORT_RETRY_SECONDS", 60.0)
    port = busy_port.getsockname()[1]
    pending = asyncio.create_task(reuse_last_port(restarted(tmp_path, port), LISTEN))
    async with asyncio.timeout(30):
        while "which this node used before; trying again" not in caplog.text:
            await asyncio.sleep(0.02)
    busy_port.close()
    assert await asyncio.wait_for(pending, 30) == (f"/ip4/127.0.0.1/tcp/{port}", LISTEN[1])


async def test_another_port_is_used_while_the_last_one_is_taken(
    tmp_path: Path, busy_port: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sockets, "PORT_RETRY_SECONDS", 0.3)
    assert await reuse_last_port(restarted(tmp_path, busy_port.getsockname()[1]), LISTEN) == LISTEN
    assert "the address of this node changes" in caplog.text
