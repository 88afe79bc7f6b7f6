"""Tunnels between socket pairs: order, backpressure, ends, clocks, counts and places."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from protocol.transport.connection_supervisor import (
    ByteCount,
    BytePump,
    ConnectionLimits,
    ConnectionSupervisor,
    TrafficCounter,
    TransferProgress,
    Tunnel,
)
from protocol.transport.libp2p.client import Stream

QUICK = ConnectionLimits(stall=0.2, idle=0.4, linger=0.2, check_interval=0.02)


async def pair() -> tuple[Stream, Stream]:
    """The two ends of one connection."""
    left, right = socket.socketpair()
    return Stream(*await asyncio.open_connection(sock=left)), Stream(*await asyncio.open_connection(sock=right))


@pytest.fixture
async def tunnels() -> AsyncIterator[ConnectionSupervisor]:
    made = ConnectionSupervisor(QUICK, TrafficCounter())
    yield made
    await made.stop()


async def opened(tunnels: ConnectionSupervisor, peer: str) -> tuple[Stream, Stream]:
    """The outer ends of a running tunnel: gRPC's and p2pd's."""
    grpc_end, near = await pair()
    p2pd_end, far = await pair()
    before = len(tunnels)
    tunnels.spawn(tunnels.run_incoming_tunnel(peer, near, far))
    while len(tunnels) == before:
        await asyncio.sleep(0)
    return grpc_end, p2pd_end


async def until_empty(tunnels: ConnectionSupervisor) -> None:
    async with asyncio.timeout(5):
        while len(tunnels):
            await asyncio.sleep(0.01)


def close(*streams: Stream) -> None:
    for stream in streams:
        stream.writer.transport.abort()


async def test_bytes_arrive_in_order_and_are_counted(tunnels: ConnectionSupervisor) -> None:
    grpc_end, p2pd_end = await opened(tunnels, "one")
    out, back = bytes(range(256)) * 4000, b"answer"
    grpc_end.writer.write(out)
    p2pd_end.writer.write(back)
    assert await p2pd_end.reader.readexactly(len(out)) == out
    assert await grpc_end.reader.readexactly(len(back)) == back
    assert tunnels.traffic.by_peer == {"one": ByteCount(len(out), len(back))}
    assert tunnels.traffic.total == ByteCount(len(out), len(back))
    close(grpc_end, p2pd_end)


@pytest.mark.parametrize("first", ["near", "far"])
async def test_the_end_of_one_direction_flushes_it_and_ends_both(tunnels: ConnectionSupervisor, first: str) -> None:
    ends = await opened(tunnels, "one")
    ending, other = ends if first == "near" else ends[::-1]
    ending.writer.write(bytes(1_000_000))
    ending.writer.write_eof()
    assert len(await other.reader.read(-1)) == 1_000_000
    await until_empty(tunnels)
    close(*ends)


async def test_an_answer_may_follow_the_end_of_the_question(tunnels: ConnectionSupervisor) -> None:
    grpc_end, p2pd_end = await opened(tunnels, "one")
    grpc_end.writer.write_eof()
    assert await p2pd_end.reader.read(-1) == b""
    p2pd_end.writer.write(b"late")
    assert await grpc_end.reader.readexactly(4) == b"late"
    close(grpc_end, p2pd_end)
    await until_empty(tunnels)


async def test_a_cut_connection_ends_the_other(tunnels: ConnectionSupervisor) -> None:
    grpc_end, p2pd_end = await opened(tunnels, "one")
    p2pd_end.writer.transport.abort()
    assert await asyncio.wait_for(grpc_end.reader.read(-1), 5) == b""
    await until_empty(tunnels)
    close(grpc_end)


async def test_a_frozen_receiver_is_cut_by_the_clock_and_others_go_on(
    tunnels: ConnectionSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    frozen, working = await opened(tunnels, "frozen"), await opened(tunnels, "working")
    frozen[1].reader._transport.pause_reading()  # type: ignore[attr-defined]
    writing = asyncio.create_task(_write_for_ever(frozen[0]))
    for _ in range(30):  # a moving tunnel is never cut, however long it lives
        working[0].writer.write(b"x")
        assert await working[1].reader.readexactly(1) == b"x"
        await asyncio.sleep(QUICK.stall / 20)
    assert "cutting a connection with frozen: nothing was taken" in caplog.text
    assert tunnels.refusals == {"stream stalled": 1}
    assert "with working" not in caplog.text
    await asyncio.wait({writing}, timeout=5)
    assert isinstance(writing.exception(), ConnectionError)
    close(*frozen, *working)


async def _write_for_ever(stream: Stream) -> None:
    while True:
        stream.writer.write(bytes(65536))
        await stream.writer.drain()


async def test_a_write_to_a_frozen_receiver_blocks_without_a_clock() -> None:
    """The control of the test above: the coroutine that moves the data never comes back by itself."""
    (source, near), (frozen, far) = await pair(), await pair()
    frozen.reader._transport.pause_reading()  # type: ignore[attr-defined]
    moving = asyncio.create_task(BytePump(near.reader, far.writer, lambda size: None).run())
    writing = asyncio.create_task(_write_for_ever(source))
    done, _ = await asyncio.wait({moving, writing}, timeout=5 * QUICK.stall)
    assert not done
    moving.cancel()
    writing.cancel()
    await asyncio.wait({moving, writing})
    close(source, near, frozen, far)


async def test_a_slow_receiver_holds_the_sender_back() -> None:
    offered = 32 * 1024 * 1024
    held = await _held_for_a_frozen_receiver(offered, drains=True)
    assert held < 2 * 1024 * 1024
    assert await _held_for_a_frozen_receiver(offered, drains=False) > offered / 2, "the naive way must fail"


async def _held_for_a_frozen_receiver(offered: int, drains: bool) -> int:
    """Bytes in memory when nothing moves any more."""
    (source, near), (frozen, far) = await pair(), await pair()
    frozen.reader._transport.pause_reading()  # type: ignore[attr-defined]
    direction = BytePump(near.reader, far.writer, lambda size: None)
    moving = asyncio.create_task(direction.run() if drains else _naive(near, far))
    sending = asyncio.create_task(_send(source, offered))
    await asyncio.wait({sending}, timeout=0.3 if drains else 5)
    held = direction.unsent_bytes
    for task in (moving, sending):
        task.cancel()
    await asyncio.wait({moving, sending})
    close(source, near, frozen, far)
    return held


async def _send(stream: Stream, size: int) -> None:
    for _ in range(size // 65536):
        stream.writer.write(bytes(65536))
        await stream.writer.drain()


async def _naive(near: Stream, far: Stream) -> None:
    while data := await near.reader.read(65536):
        far.writer.write(data)


async def test_an_idle_tunnel_is_cut(tunnels: ConnectionSupervisor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    ends = await opened(tunnels, "silent")
    await until_empty(tunnels)
    assert "cutting a connection with silent: idle" in caplog.text
    assert not tunnels.refusals, "nothing of it was refused"
    close(*ends)


def test_a_wait_begins_when_something_waits() -> None:
    progress = TransferProgress(now=0)
    progress.observe(passed=10, waiting=0, now=1)
    progress.observe(passed=10, waiting=0, now=100)
    assert progress.stalled_for(100) == 0, "silence is no stall"
    progress.observe(passed=10, waiting=5, now=200)
    assert progress.stalled_for(230) == 30
    progress.observe(passed=11, waiting=4, now=231)
    assert progress.stalled_for(232) == 1, "one byte is progress"


async def test_places_are_counted_by_peer(caplog: pytest.LogCaptureFixture) -> None:
    tunnels = ConnectionSupervisor(ConnectionLimits(max_incoming_per_peer=2, max_incoming=3), TrafficCounter())
    ends = [*await opened(tunnels, "greedy"), *await opened(tunnels, "greedy")]
    assert not tunnels.try_admit("greedy")
    assert not tunnels.try_admit("greedy")
    assert caplog.text.count("refusing greedy") == 1, "a flood of refusals is not a flood of lines"
    assert tunnels.try_admit("honest")
    ends += await opened(tunnels, "honest")
    assert tunnels.try_admit("newcomer"), "a cap for all must not shut the honest out"
    assert "all 3 connections are in use: cutting the one with greedy" in caplog.text
    assert tunnels.refusals == {"too many streams": 2, "stream gave way": 1}, "every one is counted"
    close(*ends)
    await tunnels.stop()


async def test_a_peer_has_fewer_streams_than_lines(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC keeps of each what has not come whole yet."""
    tunnels, ends = ConnectionSupervisor(ConnectionLimits(), TrafficCounter()), list[Stream]()
    for _ in range(4):
        assert tunnels.try_admit_stream("greedy")
        ends += await opened(tunnels, "greedy")
    assert not tunnels.try_admit_stream("greedy"), "the fifth"
    assert "refusing greedy: it holds 4 tunnels" in caplog.text
    assert tunnels.refusals == {"too many streams": 1}
    assert tunnels.try_admit("greedy"), "a line is none of them"
    assert tunnels.try_admit_stream("modest")
    close(*ends)
    await until_empty(tunnels)
    assert tunnels.try_admit_stream("greedy")
    await tunnels.stop()


async def test_strangers_have_few_streams_between_them() -> None:
    """As many names as one likes make no more."""
    tunnels, ends = ConnectionSupervisor(ConnectionLimits(max_unknown_streams=2), TrafficCounter()), list[Stream]()
    tunnels.is_known = lambda peer: peer.startswith("known")
    for peer in ("known 1", "known 2", "stranger 1", "stranger 2", "known 3"):
        assert tunnels.try_admit_stream(peer)
        ends += await opened(tunnels, peer)
    assert tunnels.refusals == {} and len(tunnels) == 5
    assert tunnels.try_admit_stream("stranger 3")
    assert tunnels.refusals == {"stream gave way": 1}
    assert await asyncio.wait_for(ends[4].reader.read(-1), 5) == b"", "the first stranger's"
    assert len(tunnels) == 4
    close(*ends)
    await tunnels.stop()


async def test_a_peer_is_cut_off_alone(tunnels: ConnectionSupervisor) -> None:
    bad, good = await opened(tunnels, "bad"), await opened(tunnels, "good")
    tunnels.cut_peer("bad")
    assert await asyncio.wait_for(bad[0].reader.read(-1), 5) == b""
    good[0].writer.write(b"x")
    assert await good[1].reader.readexactly(1) == b"x"
    close(*bad, *good)


def test_counts_of_strangers_do_not_pile_up() -> None:
    traffic = TrafficCounter(max_peers=2)
    for peer in ("a", "b", "a", "c"):
        traffic.add_sent(peer, 1)
    assert list(traffic.by_peer) == ["a", "c"]
    assert traffic.total.sent == 4


async def test_a_tunnel_ends_when_it_is_cancelled() -> None:
    (grpc_end, near), (p2pd_end, far) = await pair(), await pair()
    running = asyncio.create_task(Tunnel("one", near, far, TrafficCounter(), QUICK).run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert await asyncio.wait_for(grpc_end.reader.read(-1), 5) == b""
    assert await asyncio.wait_for(p2pd_end.reader.read(-1), 5) == b""
    close(grpc_end, p2pd_end)
