"""Connections over loopback: byte order, few wake-ups, and no wait for bytes that do not arrive."""

import asyncio
import os
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable

import pytest

from protocol.identity import Identity
from protocol.transport.tls import connection as module
from protocol.transport.tls.connection import (
    MAX_TLS_RECORD_BYTES,
    MAX_WAKEUP_BYTES,
    READ_AHEAD_BYTES,
    YIELD_BYTES,
    TlsConnection,
    WakeupThreshold,
)
from protocol.transport.tls.handshake import ServerHandshake, make_client_context

Pair = tuple[TlsConnection, TlsConnection]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Connect two ends over TCP, without TLS."""
    ends = await connect_pair()
    yield ends
    for end in ends:
        end.abort()
        await asyncio.wait_for(end.wait_closed(), 5)


async def connect_pair(secure: bool = False) -> Pair:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    for end in (near, far):
        end.setblocking(False)
    server = ServerHandshake(Identity.create()).context if secure else None
    context, name = (make_client_context(), "") if secure else (None, None)
    accepted, (_, dialled) = await asyncio.gather(
        loop.connect_accepted_socket(TlsConnection, far, ssl=server),
        loop.create_connection(TlsConnection, sock=near, ssl=context, server_hostname=name),
    )
    return dialled, accepted[1]


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("seed", range(3))
async def test_bytes_arrive_in_order(secure: bool, seed: int) -> None:
    here, there = await connect_pair(secure)
    rng = random.Random(seed)
    data = rng.randbytes(3_000_000)

    async def send() -> None:
        start = 0
        while start < len(data):
            size = rng.choice([1, 5, 1000, 16 * 1024, READ_AHEAD_BYTES, 300_000])
            there.write(data[start : start + size])
            await there.drain()
            start += size
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
        assert there._transport
        there._transport.close()

    sending = asyncio.create_task(send())
    received = b""
    while len(received) < len(data):
        received += await here.read(min(rng.choice([1, 5, 4000, READ_AHEAD_BYTES, 262_144]), len(data) - len(received)))
    assert received == data
    with pytest.raises((EOFError, ConnectionError)):
        await here.read(1)
    await sending
    here.abort()
    await asyncio.wait_for(asyncio.gather(here.wait_closed(), there.wait_closed()), 5)


def test_threshold_is_a_twentieth_of_a_second_of_fast_bytes() -> None:
    threshold = WakeupThreshold(100.0)
    assert threshold.bytes == 1
    for step in range(1, 103):
        threshold.record_bytes(1000, 100.0 + step / 1000)
    assert 45_000 < threshold.bytes < 55_000, "a twentieth of a megabyte"
    threshold.record_bytes(1 << 30, 101.0)
    assert threshold.bytes == MAX_WAKEUP_BYTES
    threshold.reset_if_silent(101.4)
    assert threshold.bytes == MAX_WAKEUP_BYTES
    threshold.reset_if_silent(101.6)
    assert threshold.bytes == 1
    threshold.record_bytes(100, 200.0)
    assert threshold.bytes == 1


async def count_wakeups(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the wake-ups of a reader that gets a megabyte in a third of a second, a few kilobytes at a time."""
    here, there = pair
    times, buffer_updated = 0, TlsConnection.buffer_updated

    def count(self: TlsConnection, nbytes: int) -> None:
        nonlocal times
        times += 1
        buffer_updated(self, nbytes)

    async def send() -> None:
        started = time.monotonic()
        for index in range(250):
            there.write(bytes(4000))
            await asyncio.sleep(max(0.0, started + index * 0.0013 - time.monotonic()))

    monkeypatch.setattr(TlsConnection, "buffer_updated", count)
    here._wakeup_threshold.bytes = 40_000
    await asyncio.gather(here.read(1_000_000), send())
    return times


@pytest.mark.skipif(not module.HAS_LOW_WATERMARK, reason="the kernel would wake us late")
async def test_fast_transfer_causes_few_wakeups(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    few = await count_wakeups(pair, monkeypatch)
    monkeypatch.setattr(module, "HAS_LOW_WATERMARK", False)
    pair[0]._set_low_watermark()
    many = await count_wakeups(pair, monkeypatch)
    assert few < 80 and few < many / 2, (few, many)


async def test_last_bytes_wake_the_reader(pair: Pair) -> None:
    here, there = pair
    here._wakeup_threshold.bytes = MAX_WAKEUP_BYTES
    for size in (
        1,
        MAX_TLS_RECORD_BYTES,
        MAX_TLS_RECORD_BYTES + 1,
        2 * MAX_TLS_RECORD_BYTES,
        MAX_WAKEUP_BYTES + 1,
        300_000,
    ):
        reading = asyncio.create_task(here.read(size))
        await asyncio.sleep(0)
        there.write(bytes(size))
        assert len(await asyncio.wait_for(reading, 5)) == size


@pytest.mark.skipif(not module.HAS_LOW_WATERMARK, reason="the kernel would wake us late")
async def test_slow_bytes_after_a_fast_phase_wake_the_reader(pair: Pair) -> None:
    here, there = pair
    here._wakeup_threshold.bytes = MAX_WAKEUP_BYTES
    reading = asyncio.create_task(here.read(1_000_000))
    await asyncio.sleep(0)
    there.write(bytes(5000))
    await asyncio.sleep(0.1)
    assert here.filled_bytes == 0, "the control: too few bytes for a wake-up"
    here._wakeup_threshold.reset_if_silent(time.monotonic() + 10)
    here.check_silence()
    await until(lambda: here.filled_bytes == 5000)
    reading.cancel()


async def test_cancelled_fill_reports_received_bytes(pair: Pair) -> None:
    here, there = pair
    view = memoryview(bytearray(10))
    filling = asyncio.create_task(here.fill(view))
    there.write(b"abcd")
    await until(lambda: here.filled_bytes == 4)
    filling.cancel()
    await asyncio.wait([filling])
    assert here.filled_bytes == 4
    there.write(b"efghij")
    await here.fill(view[4:])
    assert bytes(view) == b"abcdefghij"


async def test_reader_that_pauses_stops_the_sender(pair: Pair) -> None:
    here, there = pair
    sent = 0

    async def send() -> None:
        nonlocal sent
        while True:
            there.write(bytes(100_000))
            await there.drain()
            sent += 100_000

    sending = asyncio.create_task(send())
    await until(lambda: there.unsent_bytes)
    before = -1
    while before != sent:
        before = sent
        await asyncio.sleep(0.1)
    assert here._read_ahead_end == READ_AHEAD_BYTES
    assert before < 1 << 25
    assert await asyncio.wait_for(here.read(before), 10) == bytes(before)
    sending.cancel()


async def test_lost_connection_raises_for_reader_and_writer(pair: Pair) -> None:
    here, there = pair
    there.write(b"half")
    reading = asyncio.create_task(here.read(8))
    await until(lambda: here.filled_bytes == 4)
    there.abort()
    with pytest.raises((EOFError, ConnectionError)):
        await reading
    assert here.has_ended
    await asyncio.wait_for(here.wait_closed(), 5)
    with pytest.raises(ConnectionError):
        await here.drain()


@pytest.mark.parametrize("secure", [False, True])
async def test_writer_notices_a_reset(secure: bool) -> None:
    """TLS swallows writes after a reset, so a writer that never yields would continue for ever."""
    here, there = await connect_pair(secure)
    reset(there)
    written = 0
    with pytest.raises(ConnectionError):
        while written < 200 * YIELD_BYTES:
            here.write(bytes(READ_AHEAD_BYTES))
            written += READ_AHEAD_BYTES
            await here.drain()
    assert written <= 2 * YIELD_BYTES
    for end in (here, there):
        end.abort()


def reset(end: TlsConnection) -> None:
    """Reset the connection without notifying the event loop."""
    descriptor = end.socket.fileno()
    end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), descriptor)
