"""A port that somebody else has: for a moment, and for good; for direct connections, and whatever else claims one."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from protocol.errors import PortTakenError, TransportError
from protocol.transport import local_sockets
from protocol.transport.local_sockets import retry_while_port_taken
from tests.protocol.conftest import StartTransport


@pytest.fixture
def held() -> Iterator[socket.socket]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other


async def said(caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(30):
        while "trying again for" not in caplog.text:
            await asyncio.sleep(0.02)


async def test_a_direct_port_that_is_let_go_is_taken(
    start_transport: StartTransport, held: socket.socket, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(local_sockets, "PORT_RETRY_SECONDS", 60.0)
    port = held.getsockname()[1]
    starting = asyncio.ensure_future(start_transport("node", direct=port))
    await said(caplog)
    assert not starting.done()
    held.close()
    node = await asyncio.wait_for(starting, 30)
    assert node.direct_port == port
    assert caplog.text.count("trying again for") == 1


async def test_patience_ends(
    start_transport: StartTransport, held: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sockets, "PORT_RETRY_SECONDS", 0.3)
    with pytest.raises(PortTakenError, match="Address already in use; choose another --direct") as refused:
        await asyncio.wait_for(start_transport("node", direct=held.getsockname()[1]), 30)
    assert refused.value.exit_code == TransportError.exit_code


async def test_what_is_no_taken_port_is_said_at_once() -> None:
    calls: list[int] = []

    async def claim() -> None:
        calls.append(1)
        raise TransportError("no such interface")

    with pytest.raises(TransportError, match="no such interface"):
        await retry_while_port_taken(claim)
    assert len(calls) == 1
