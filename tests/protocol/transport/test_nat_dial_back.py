"""Dial-back probes: only the caller's host, only libp2p, once a minute; each with a control."""

import asyncio
from collections.abc import Sequence

import pytest

from protocol.errors import LimitError, MalformedError
from protocol.transport import nat
from protocol.transport.nat import (
    CALL_PERIOD_SECONDS,
    LIBP2P_GREETING,
    MAX_CALLS_PER_PERIOD,
    DialBackResponder,
    find_direct_host,
    is_libp2p_listening,
)
from tests.protocol.conftest import StartTransport

pytestmark = pytest.mark.slow

ME = "12D3KooWEVEvub4rCrm7Kqwv1Z4yXVKWi7Vmd7b4dsKQdTT3rVHo"
RELAYED = f"/ip4/203.0.113.9/tcp/4001/p2p/{ME}/p2p-circuit"
SEEN = "/ip4/203.0.113.7/tcp/51234"


class DialBackSetup:
    """A responder with fake connections that records its probes."""

    def __init__(self, *remote: str) -> None:
        self.remote = remote
        self.probed = list[tuple[str, int]]()
        self.dial_back = DialBackResponder(self._remote_addresses, self._probe_port)

    async def _remote_addresses(self, _: str) -> Sequence[str]:
        return self.remote

    async def _probe_port(self, host: str, port: int) -> bool:
        self.probed.append((host, port))
        return port == 4001


async def test_only_the_host_of_the_connection_is_probed() -> None:
    setup = DialBackSetup(RELAYED, SEEN)
    reply = await setup.dial_back.probe_ports(ME, [4001, 4002], 0.0)
    assert (reply.seen, list(reply.open)) == (SEEN, [4001])
    assert setup.probed == [("203.0.113.7", 4001), ("203.0.113.7", 4002)]


async def test_relayed_caller_is_not_probed() -> None:
    setup = DialBackSetup(RELAYED)
    reply = await setup.dial_back.probe_ports(ME, [4001], 0.0)
    assert (reply.seen, list(reply.open), setup.probed) == ("", [], [])
    assert (
        find_direct_host([RELAYED]) is None
        and find_direct_host([]) is None
        and find_direct_host(["/dns4/host/tcp/1"]) is None
    )


@pytest.mark.parametrize("ports", [[1, 2, 3], [0], [65536]])
async def test_too_many_or_invalid_ports_are_refused(ports: list[int]) -> None:
    setup = DialBackSetup(SEEN)
    with pytest.raises(MalformedError):
        await setup.dial_back.probe_ports(ME, ports, 0.0)
    assert setup.probed == []
    assert (await setup.dial_back.probe_ports(ME, [4001], 0.0)).open == [4001]


async def test_calls_are_limited_per_caller_and_in_total() -> None:
    setup = DialBackSetup(SEEN)
    await setup.dial_back.probe_ports(ME, [4001], 0.0)
    for now in (0.0, 1.0, CALL_PERIOD_SECONDS - 1):
        with pytest.raises(LimitError, match="once in 60 s"):
            await setup.dial_back.probe_ports(ME, [4001], now)
    await setup.dial_back.probe_ports(ME, [4001], 2 * CALL_PERIOD_SECONDS)
    busy = DialBackSetup(SEEN)
    for index in range(MAX_CALLS_PER_PERIOD):
        await busy.dial_back.probe_ports(f"peer {index}", [4001], 0.0)
    with pytest.raises(LimitError, match="too many others"):
        await busy.dial_back.probe_ports("one more", [4001], 0.0)
    assert len(busy.probed) == MAX_CALLS_PER_PERIOD
    await busy.dial_back.probe_ports(
        "one more", [4001], CALL_PERIOD_SECONDS / MAX_CALLS_PER_PERIOD
    )  # the refused call was not counted


@pytest.mark.parametrize(
    ("greeting", "expected"), [(LIBP2P_GREETING, True), (b"SSH-2.0-OpenSSH_9.2p1 x\n", False), (b"", False)]
)
async def test_only_libp2p_listeners_are_reported(greeting: bytes, expected: bool) -> None:
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server:
        assert await is_libp2p_listening("127.0.0.1", server.sockets[0].getsockname()[1]) is expected


async def test_silent_listener_is_given_up_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.setattr(nat, "PROBE_SECONDS", 0.1)
    release = asyncio.Event()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        assert not await asyncio.wait_for(is_libp2p_listening("127.0.0.1", server.sockets[0].getsockname()[1]), 5)
        release.set()
    assert not await is_libp2p_listening("127.0.0.1", unused_tcp_port)


async def test_real_transport_sees_its_peer_and_finds_its_open_port(start_transport: StartTransport) -> None:
    one, other = await start_transport("one"), await start_transport("other")
    await one.connect((await other.addresses())[0], 10)
    setup = DialBackResponder(other.remote_addresses)
    port = int((await one.addresses())[0].split("/")[4])
    reply = await setup.probe_ports(one.peer_id, [port], 0.0)
    assert reply.seen.startswith("/ip4/127.0.0.1/tcp/") and list(reply.open) == [port]
    assert await other.remote_addresses(ME) == ()
