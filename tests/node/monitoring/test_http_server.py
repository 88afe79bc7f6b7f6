"""Connections that cost their other side nothing, over real sockets: how many there may be, and for how long."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from node.monitoring import http_server
from node.monitoring.http_server import MIN_CONNECTIONS_PER_HOST, is_loopback, open_listener, serve

LONG = 60.0
ASK = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


class Site:
    """A page, and a stream that goes on when it is told to."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.application = Starlette(routes=[Route("/", self.page), Route("/stream", self.stream)])

    async def page(self, _: Request) -> Response:
        return PlainTextResponse("here")

    async def stream(self, _: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"first"
            await self.go_on.wait()
            yield b"second"

        return StreamingResponse(parts())


class Guest:
    """One connection to the site."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self) -> bytes:
        """The answer's body; empty where the connection is closed."""
        with contextlib.suppress(ConnectionError):
            self.writer.write(ASK)
            return await self.read("here")
        return b""

    async def read(self, end: str) -> bytes:
        try:
            async with asyncio.timeout(10):
                return (await self.reader.readuntil(end.encode()))[-len(end) :]
        except asyncio.IncompleteReadError:
            return b""

    async def leave(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def closed(self) -> bool:
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read() == b""
        return True


Arrive = Callable[[int], Awaitable[Guest]]


@pytest.fixture
async def arrive() -> AsyncIterator[Arrive]:
    """Opens a connection to a port of this machine; all of them are closed at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def arrived(port: int) -> Guest:
            guest = Guest(*await asyncio.open_connection("127.0.0.1", port))
            stack.push_async_callback(guest.leave)
            return guest

        yield arrived


async def test_silent_connections_leave_room_for_the_rest(arrive: Arrive) -> None:
    async with serve(Site().application, open_listener("127.0.0.1", 0, "--http"), 3, LONG) as port:
        guests = [await arrive(port) for _ in range(3)]
        late = await arrive(port)
        assert await late.closed(), "nobody answers it: it is not held either"
        assert await guests[0].ask() == b"here", "who is there is served on"
        await guests[1].leave()
        while await (after := await arrive(port)).ask() != b"here":
            await after.leave()  # until it is noticed that one has gone


async def test_of_one_address_no_more_than_its_share(arrive: Arrive, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a proxy on this machine has them all."""
    async with serve(Site().application, open_listener("127.0.0.1", 0, "--http"), 16, LONG) as port:
        proxied = [await arrive(port) for _ in range(16)]
        assert [await guest.ask() for guest in proxied] == [b"here"] * 16
    monkeypatch.setattr(http_server, "is_loopback", lambda _: False)
    async with serve(Site().application, open_listener("127.0.0.1", 0, "--http"), 16, LONG) as port:
        guests = [await arrive(port) for _ in range(MIN_CONNECTIONS_PER_HOST)]
        assert [await guest.ask() for guest in guests] == [b"here"] * MIN_CONNECTIONS_PER_HOST
        assert await (await arrive(port)).closed()


@pytest.mark.parametrize("begun", [b"", b"GET / HT", ASK + ASK[:-2], b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"])
async def test_what_brings_no_whole_request_is_closed(arrive: Arrive, begun: bytes) -> None:
    async with serve(Site().application, open_listener("127.0.0.1", 0, "--http"), 8, 0.02) as port:
        guest = await arrive(port)
        guest.writer.write(begun)
        async with asyncio.timeout(4):  # less than a connection is kept after its answer
            with contextlib.suppress(ConnectionError):
                await guest.reader.read()


async def test_an_answer_takes_as_long_as_it_takes(arrive: Arrive) -> None:
    site = Site()
    async with serve(site.application, open_listener("127.0.0.1", 0, "--http"), 8, 0.02) as port:
        reader = await arrive(port)
        reader.writer.write(ASK.replace(b"/ ", b"/stream "))
        assert await reader.read("first") == b"first"
        for _ in range(5):  # each takes as long as the patience
            assert await (await arrive(port)).closed()
        site.go_on.set()
        assert await reader.read("second") == b"second"


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("192.0.2.1", False), ("", False)],
)
def test_what_is_of_this_machine(host: str, own: bool) -> None:
    assert is_loopback(host) == own
