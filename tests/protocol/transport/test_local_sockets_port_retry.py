"""Retries while another program uses a port, for direct connections and for any other bind."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from protocol.errors import PortTakenError, TransportError
from protocol.transport import local_sockets
from protocol.transport.local_sockets import retry_while_port_taken
from tests.protocol.conftest import StartTransport

pytestmark = pytest.mark.slow


@pytest.fixture
def taken_port() -> Iterator[socket.socket]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other


async def wait_for_retry(caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(30):
        while "trying again for" not in caplog.text:
            await asyncio.sleep(0.02)


async def test_listener_waits_for_a_taken_port(
    start_transport: StartTransport, taken_port: socket.socket, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(local_sockets, "PORT_RETRY_SECONDS", 60.0)
    port = taken_port.getsockname()[1]
    starting = asyncio.ensure_future(start_transport("node", direct=port))
    await wait_for_retry(caplog)
    assert not starting.done()
    taken_port.close()
    node = await asyncio.wait_for(starting, 30)
    assert node.direct_port == port
    assert caplog.text.count("trying again for") == 1


async def test_retries_end_after_the_limit(
    start_transport: StartTransport, taken_port: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sockets, "PORT_RETRY_SECONDS", 0.3)
    with pytest.raises(PortTakenError, match="Address already in use; choose another --direct") as refused:
        await asyncio.wait_for(start_transport("node", direct=taken_port.getsockname()[1]), 30)
    assert refused.value.exit_code == TransportError.exit_code


async def test_other_errors_are_not_retried() -> None:
    calls: list[int] = []

    async def bind() -> None:
        calls.append(1)
        raise TransportError("no such interface")

    with pytest.raises(TransportError, match="no such interface"):
        await retry_while_port_taken(bind)
    assert len(calls) == 1
