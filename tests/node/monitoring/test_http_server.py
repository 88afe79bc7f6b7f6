"""The HTTP server limits idle connections in number and time; tested over real sockets."""

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

LONG_SECONDS = 60.0
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


class Pages:
    """A page, and a stream whose second chunk waits for `resume`."""

    def __init__(self) -> None:
        self.resume = asyncio.Event()
        self.application = Starlette(routes=[Route("/", self.page), Route("/stream", self.stream)])

    async def page(self, _: Request) -> Response:
        return PlainTextResponse("here")

    async def stream(self, _: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"first"
            await self.resume.wait()
            yield b"second"

        return StreamingResponse(parts())


class Client:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self) -> bytes:
        """Return the response body; empty if the connection is closed."""
        with contextlib.suppress(ConnectionError):
            self.writer.write(REQUEST)
            return await self.read("here")
        return b""

    async def read(self, end: str) -> bytes:
        try:
            async with asyncio.timeout(10):
                return (await self.reader.readuntil(end.encode()))[-len(end) :]
        except asyncio.IncompleteReadError:
            return b""

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def is_closed(self) -> bool:
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read() == b""
        return True


Connect = Callable[[int], Awaitable[Client]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Return a function that opens a connection to a local port; all are closed at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_client(port: int) -> Client:
            client = Client(*await asyncio.open_connection("127.0.0.1", port))
            stack.push_async_callback(client.close)
            return client

        yield open_client


async def test_connections_above_the_limit_are_closed(connect: Connect) -> None:
    async with serve(Pages().application, open_listener("127.0.0.1", 0, "--http"), 3, LONG_SECONDS) as port:
        clients = [await connect(port) for _ in range(3)]
        late = await connect(port)
        assert await late.is_closed(), "a connection above the limit is closed"
        assert await clients[0].request() == b"here", "established connections are still served"
        await clients[1].close()
        while await (after := await connect(port)).request() != b"here":
            await after.close()  # until the server notices that one has gone


async def test_one_address_gets_a_quarter_of_the_connections(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a proxy on this machine may open all of them."""
    async with serve(Pages().application, open_listener("127.0.0.1", 0, "--http"), 16, LONG_SECONDS) as port:
        proxied = [await connect(port) for _ in range(16)]
        assert [await client.request() for client in proxied] == [b"here"] * 16
    monkeypatch.setattr(http_server, "is_loopback", lambda _: False)
    async with serve(Pages().application, open_listener("127.0.0.1", 0, "--http"), 16, LONG_SECONDS) as port:
        clients = [await connect(port) for _ in range(MIN_CONNECTIONS_PER_HOST)]
        assert [await client.request() for client in clients] == [b"here"] * MIN_CONNECTIONS_PER_HOST
        assert await (await connect(port)).is_closed()


@pytest.mark.parametrize(
    "begun", [b"", b"GET / HT", REQUEST + REQUEST[:-2], b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"]
)
async def test_connection_without_a_whole_request_is_closed(connect: Connect, begun: bytes) -> None:
    async with serve(Pages().application, open_listener("127.0.0.1", 0, "--http"), 8, 0.02) as port:
        client = await connect(port)
        client.writer.write(begun)
        async with asyncio.timeout(4):  # less than a connection is kept after a response
            with contextlib.suppress(ConnectionError):
                await client.reader.read()


async def test_slow_response_is_not_cut(connect: Connect) -> None:
    site = Pages()
    async with serve(site.application, open_listener("127.0.0.1", 0, "--http"), 8, 0.02) as port:
        reader = await connect(port)
        reader.writer.write(REQUEST.replace(b"/ ", b"/stream "))
        assert await reader.read("first") == b"first"
        for _ in range(5):  # each lasts as long as the request timeout
            assert await (await connect(port)).is_closed()
        site.resume.set()
        assert await reader.read("second") == b"second"


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("192.0.2.1", False), ("", False)],
)
def test_is_loopback(host: str, own: bool) -> None:
    assert is_loopback(host) == own
