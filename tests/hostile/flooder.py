"""A process that floods one daemon in every way at once.

It runs at a lower priority than the honest peers, so that they lose the work of answering it, and not the CPU that it
would take from them on a machine that they share.
"""

import asyncio
import contextlib
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from protocol.errors import UnreachableError
from protocol.identity import Identity
from protocol.manifest.reading import load_manifest
from protocol.murmur_pb2 import ChainRequest, DeliverRequest, FetchRequest, GossipRequest, Signed
from protocol.murmur_pb2_grpc import BlobsStub, MembershipStub, RoundsStub
from protocol.transport import transport as transports
from protocol.transport.nat import find_direct_host
from tests.hostile.attackers.stranger import Stranger

STREAMS, STREAM_BYTES = 400, 4 * 1024 * 1024
NICENESS = 3
FLOODERS = 4  # processes that share the streams; each has a key of its own
RECORDS, BATCH = 100_000, 250
IDLE_CONNECTIONS, GARBAGE_CONNECTIONS = 200, 32
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # and empty settings
PING = b"\0\0\x08\6\0\0\0\0\0" + b"flooding"
ERRORS = (UnreachableError, OSError, EOFError, asyncio.IncompleteReadError, ValueError)


class Flood:
    """The floods of one identity; counts what it did."""

    def __init__(self, stranger: Stranger, counts: Counter[str]) -> None:
        self._stranger = stranger
        self._counts = counts
        (self._address,) = stranger.addresses
        self._victim = stranger.victims[0]
        self._run = bytes.fromhex(stranger.run_id)
        message = Signed(kind="contribution", peer=stranger.peer_id, body=bytes(STREAM_BYTES))
        self._large = DeliverRequest(run=self._run, statements=[message])

    async def repeat(self, kind: str, work: Callable[[], Awaitable[object]]) -> None:
        """Do something again and again; count how often it ended well and how often not."""
        while True:
            try:
                await work()
                self._counts[kind] += 1
            except grpc.aio.AioRpcError as error:
                self._counts[f"{kind}: {error.code().name.lower()}"] += 1
            except ERRORS as error:
                self._counts[f"{kind}: {type(error).__name__}"] += 1
            await asyncio.sleep(0)

    def _channel(self) -> grpc.aio.Channel:
        return self._stranger.transport.channel(self._victim)

    async def stream(self) -> None:
        """Send 4 MB in one call."""
        await RoundsStub(self._stranger.transport.bulk_channel(self._victim)).Deliver(self._large, timeout=10)

    async def push_fresh_records(self) -> None:
        records = [self._stranger.record_of(Identity.create()) for _ in range(BATCH)]
        request = GossipRequest(run=self._run, records=records)
        await MembershipStub(self._channel()).Gossip(request, timeout=10)
        self._counts["records"] += BATCH

    async def call_wrong_run(self) -> None:
        await RoundsStub(self._channel()).Chain(ChainRequest(run=bytes(32)), timeout=10)

    async def ask_for_chain(self) -> None:
        await RoundsStub(self._channel()).Chain(ChainRequest(run=self._run), timeout=10)

    async def reset(self) -> None:
        """Begin a call and cancel it at once."""
        call = RoundsStub(self._channel()).Chain(ChainRequest(run=self._run), timeout=10)
        await asyncio.sleep(0)
        call.cancel()

    async def read_slowly(self) -> None:
        """Ask for bytes and do not read them."""
        call = BlobsStub(self._channel()).Fetch(FetchRequest(digest=bytes(32), offset=0, length=1 << 20), timeout=30)
        await asyncio.sleep(5)
        call.cancel()

    async def flood_pings(self) -> None:
        """Write pings of HTTP/2 into a stream, as fast as it takes them."""
        client = self._stranger.transport._p2pd.client
        stream = await client.open_stream(self._victim, transports.PROTOCOL, 10)
        try:
            stream.writer.write(PREFACE)
            for _ in range(1000):
                stream.writer.write(PING * 64)
                await stream.writer.drain()
                self._counts["pings"] += 64
        finally:
            stream.writer.transport.abort()

    async def send_garbage(self, port: int) -> None:
        """Connect without a key, and write noise until cut."""
        async with _connected(self._address, port) as writer:
            for _ in range(64):
                writer.write(random.randbytes(64 * 1024))
                await asyncio.wait_for(writer.drain(), 2)

    async def hold(self, port: int) -> None:
        """Connect without a key, and say nothing."""
        async with _connected(self._address, port):
            await asyncio.sleep(30)


@contextlib.asynccontextmanager
async def _connected(address: str, port: int) -> Any:
    found = find_direct_host([address])
    assert found is not None
    _, writer = await asyncio.wait_for(asyncio.open_connection(found[1], port), 5)
    try:
        yield writer
    finally:
        writer.transport.abort()


def _tasks_of(flood: Flood, share: int, ports: tuple[int, ...]) -> list[Coroutine[Any, Any, None]]:
    """Return the endless tasks of one identity; `ports` take connections without a key."""
    kinds: dict[str, Callable[[], Awaitable[object]]] = {
        "gossip": flood.push_fresh_records, "wrong run": flood.call_wrong_run, "chains": flood.ask_for_chain,
        "resets": flood.reset, "slow readers": flood.read_slowly, "ping floods": flood.flood_pings,
    }  # fmt: skip
    tasks = [flood.repeat("streams", flood.stream) for _ in range(share)]
    tasks += [flood.repeat(kind, work) for kind, work in kinds.items()]
    for port in ports:
        tasks += [flood.repeat("garbage", partial(flood.send_garbage, port)) for _ in range(GARBAGE_CONNECTIONS)]
        tasks += [flood.repeat("idle", partial(flood.hold, port)) for _ in range(IDLE_CONNECTIONS)]
    return tasks


async def _flood(run: str, home: Path, address: str, direct_port: int, number: int) -> None:
    counts: Counter[str] = Counter()
    libp2p_port = int(address.split("/tcp/")[1].split("/")[0])
    ports = tuple(port for port in (libp2p_port, direct_port) if port and number == 0)
    stranger = Stranger(home, load_manifest(Path(run)), (address,), {})
    await stranger.open(gossips=False)
    flood = Flood(stranger, counts)
    running = [asyncio.ensure_future(task) for task in _tasks_of(flood, STREAMS // FLOODERS, ports)]
    while True:
        (home / "counts.tmp").write_text(json.dumps(counts))
        os.replace(home / "counts.tmp", home / "counts.json")
        await asyncio.sleep(0.5)
        if broken := [task for task in running if task.done()]:
            await broken[0]


def main(run: str, home: str, address: str, direct_port: int, number: int, cores: Sequence[int]) -> None:
    """Flood on these cores until killed; the first of FLOODERS also floods without a key."""
    os.sched_setaffinity(0, cores)
    tempfile.tempdir = os.environ["TMPDIR"] = home
    transports.CHANNEL_OPTIONS["grpc.max_send_message_length"] = -1
    asyncio.run(_flood(run, Path(home), address, direct_port, number))
