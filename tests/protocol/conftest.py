"""Fixtures that start real transports and stop them after the test."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.transport.transport import Transport

StartTransport = Callable[..., Awaitable[Transport]]
StartPeer = Callable[[str], Awaitable[tuple[subprocess.Popen[bytes], dict[str, Any]]]]


@pytest.fixture
async def start_transport(tmp_path: Path) -> AsyncIterator[StartTransport]:
    """Start a transport in a folder of its own: `await start_transport(name, services, ...)`."""
    started: list[Transport] = []

    async def start(name: str, services: Any = (), **options: Any) -> Transport:
        started.append(await Transport.start(tmp_path / name / "key", tmp_path / name, services, **options))
        return started[-1]

    yield start
    for transport in started:
        await transport.stop()


@pytest.fixture
def start_peer(tmp_path: Path) -> Iterator[StartPeer]:
    """Start `sample_peer` as a process, and return it with the description that it prints."""
    started: list[subprocess.Popen[bytes]] = []
    socket_folders: list[str] = []

    async def start(name: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        command = [sys.executable, "-W", "ignore", "-m", "tests.protocol.transport.sample_peer", str(tmp_path / name)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        started.append(process)
        assert process.stdout
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 30)
        about = json.loads(line)
        socket_folders.append(about["sockets"])
        return process, about

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()
    for folder in socket_folders:
        shutil.rmtree(folder, ignore_errors=True)
