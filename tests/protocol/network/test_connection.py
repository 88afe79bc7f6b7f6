"""Connections over sockets of this machine: every byte in its place, few wakes, and no wait for what does not come."""

import asyncio
import os
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable

import pytest

from protocol.identity import Identity
from protocol.network import connection as module
from protocol.network.connection import MOST_QUIET_BYTES, RECORD_BYTES, SPILL_BYTES, YIELD_BYTES, Connection, Quiet
from protocol.network.proof import ServerProof, client_context

Pair = tuple[Connection, Connection]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Over TCP, without TLS."""
    made = await joined()
    yield made
    for end in made:
        end.abort()
        await asyncio.wait_for(end.wait_closed(), 5)


async def joined(secure: bool = False) -> Pair:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    for end in (near, far):
        end.setblocking(False)
    server = ServerProof(Identity.create()).context if secure else None
    context, name = (client_context(), "") if secure else (None, None)
    accepted, (_, dialled) = await asyncio.gather(
        loop.connect_accepted_socket(Connection, far, ssl=server),
        loop.create_connection(Connection, sock=near, ssl=context, server_hostname=name),
    )
    return dialled, accepted[1]


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("seed", range(3))
async def test_every_byte_comes_in_its_place(secure: bool, seed: int) -> None:
    here, there = await joined(secure)
    rng = random.Random(seed)
    data = rng.randbytes(3_000_000)

    async def send() -> None:
        start = 0
        while start < len(data):
            size = rng.choice([1, 5, 1000, 16 * 1024, SPILL_BYTES, 300_000])
            there.write(data[start : start + size])
            await there.drain()
            start += size
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
        assert there._transport
        there._transport.close()

    sending = asyncio.create_task(send())
    came = b""
    while len(came) < len(data):
        came += await here.read(min(rng.choice([1, 5, 4000, SPILL_BYTES, 262_144]), len(data) - len(came)))
    assert came == data
    with pytest.raises((EOFError, ConnectionError)):
        await here.read(1)
    await sending
    here.abort()
    await asyncio.wait_for(asyncio.gather(here.wait_closed(), there.wait_closed()), 5)


def test_what_comes_fast_wakes_nobody_for_a_twentieth_of_a_second() -> None:
    quiet = Quiet(100.0)
    assert quiet.bytes == 1
    for step in range(1, 103):
        quiet.came(1000, 100.0 + step / 1000)
    assert 45_000 < quiet.bytes < 55_000, "of a megabyte a second"
    quiet.came(1 << 30, 101.0)
    assert quiet.bytes == MOST_QUIET_BYTES
    quiet.look(101.4)
    assert quiet.bytes == MOST_QUIET_BYTES
    quiet.look(101.6)
    assert quiet.bytes == 1
    quiet.came(100, 200.0)
    assert quiet.bytes == 1


async def wakes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of who gets a megabyte in a third of a second, a few kilobytes at a time."""
    here, there = pair
    times, buffer_updated = 0, Connection.buffer_updated

    def count(self: Connection, nbytes: int) -> None:
        nonlocal times
        times += 1
        buffer_updated(self, nbytes)

    async def send() -> None:
        began = time.monotonic()
        for number in range(250):
            there.write(bytes(4000))
            await asyncio.sleep(max(0.0, began + number * 0.0013 - time.monotonic()))

    monkeypatch.setattr(Connection, "buffer_updated", count)
    here._quiet.bytes = 40_000
    await asyncio.gather(here.read(1_000_000), send())
    return times


@pytest.mark.skipif(not module.CAN_BE_QUIET, reason="the kernel would wake us late")
async def test_few_wakes_for_much(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    few = await wakes(pair, monkeypatch)
    monkeypatch.setattr(module, "CAN_BE_QUIET", False)
    pair[0]._hush()
    many = await wakes(pair, monkeypatch)
    assert few < 80 and few < many / 2, (few, many)


async def test_the_last_bytes_are_not_waited_for_in_vain(pair: Pair) -> None:
    here, there = pair
    here._quiet.bytes = MOST_QUIET_BYTES
    for size in (1, RECORD_BYTES, RECORD_BYTES + 1, 2 * RECORD_BYTES, MOST_QUIET_BYTES + 1, 300_000):
        reading = asyncio.create_task(here.read(size))
        await asyncio.sleep(0)
        there.write(bytes(size))
        assert len(await asyncio.wait_for(reading, 5)) == size


@pytest.mark.skipif(not module.CAN_BE_QUIET, reason="the kernel would wake us late")
async def test_what_comes_slowly_after_a_fast_time_is_heard(pair: Pair) -> None:
    here, there = pair
    here._quiet.bytes = MOST_QUIET_BYTES
    reading = asyncio.create_task(here.read(1_000_000))
    await asyncio.sleep(0)
    there.write(bytes(5000))
    await asyncio.sleep(0.1)
    assert here.placed == 0, "the control: less than was worth a wake"
    here._quiet.look(time.monotonic() + 10)
    here.look()
    await until(lambda: here.placed == 5000)
    reading.cancel()


async def test_who_is_cancelled_knows_how_much_came(pair: Pair) -> None:
    here, there = pair
    view = memoryview(bytearray(10))
    filling = asyncio.create_task(here.fill(view))
    there.write(b"abcd")
    await until(lambda: here.placed == 4)
    filling.cancel()
    await asyncio.wait([filling])
    assert here.placed == 4
    there.write(b"efghij")
    await here.fill(view[4:])
    assert bytes(view) == b"abcdefghij"


async def test_who_reads_nothing_stops_the_sender(pair: Pair) -> None:
    here, there = pair
    sent = 0

    async def send() -> None:
        nonlocal sent
        while True:
            there.write(bytes(100_000))
            await there.drain()
            sent += 100_000

    sending = asyncio.create_task(send())
    await until(lambda: there.pending)
    before = -1
    while before != sent:
        before = sent
        await asyncio.sleep(0.1)
    assert here._stop == SPILL_BYTES
    assert before < 1 << 25
    assert await asyncio.wait_for(here.read(before), 10) == bytes(before)
    sending.cancel()


async def test_an_end_in_the_middle_is_told_to_who_reads_and_who_writes(pair: Pair) -> None:
    here, there = pair
    there.write(b"half")
    reading = asyncio.create_task(here.read(8))
    await until(lambda: here.placed == 4)
    there.abort()
    with pytest.raises((EOFError, ConnectionError)):
        await reading
    assert here.has_ended
    await asyncio.wait_for(here.wait_closed(), 5)
    with pytest.raises(ConnectionError):
        await here.drain()


@pytest.mark.parametrize("secure", [False, True])
async def test_who_only_writes_hears_of_a_reset(secure: bool) -> None:
    """TLS swallows what is written behind it: a writer that lets nobody speak would go on for ever."""
    here, there = await joined(secure)
    reset(there)
    written = 0
    with pytest.raises(ConnectionError):
        while written < 200 * YIELD_BYTES:
            here.write(bytes(SPILL_BYTES))
            written += SPILL_BYTES
            await here.drain()
    assert written <= 2 * YIELD_BYTES
    for end in (here, there):
        end.abort()


def reset(end: Connection) -> None:
    """At once, and without a word to the event loop."""
    number = end.socket.fileno()
    end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), number)
