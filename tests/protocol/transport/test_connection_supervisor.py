"""Tunnels between socket pairs: byte order, backpressure, ends, timeouts, byte counts and admission."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from protocol.recent import RecentTable
from protocol.transport.connection_supervisor import ConnectionSupervisor
from protocol.transport.p2pd import Stream
from protocol.transport.tunnel import ByteCount, BytePump, ConnectionLimits, TrafficCounter, TransferProgress, Tunnel

pytestmark = pytest.mark.slow

QUICK = ConnectionLimits(stall=0.2, idle=0.4, linger=0.2, check_interval=0.02)


async def pair() -> tuple[Stream, Stream]:
    """Return the two ends of one connection."""
    left, right = socket.socketpair()
    return Stream(*await asyncio.open_connection(sock=left)), Stream(*await asyncio.open_connection(sock=right))


@pytest.fixture
async def supervisor() -> AsyncIterator[ConnectionSupervisor]:
    supervisor = ConnectionSupervisor(QUICK, TrafficCounter())
    yield supervisor
    await supervisor.stop()


async def open_tunnel(supervisor: ConnectionSupervisor, peer: str) -> tuple[Stream, Stream]:
    """Start a tunnel and return its outer ends: gRPC's and p2pd's."""
    grpc_end, near = await pair()
    p2pd_end, far = await pair()
    before = len(supervisor)
    supervisor.spawn(supervisor.run_incoming_tunnel(peer, near, far))
    while len(supervisor) == before:
        await asyncio.sleep(0)
    return grpc_end, p2pd_end


async def until_empty(supervisor: ConnectionSupervisor) -> None:
    async with asyncio.timeout(5):
        while len(supervisor):
            await asyncio.sleep(0.01)


def close(*streams: Stream) -> None:
    for stream in streams:
        stream.writer.transport.abort()


async def test_tunnel_carries_bytes_in_order_and_counts_them(supervisor: ConnectionSupervisor) -> None:
    grpc_end, p2pd_end = await open_tunnel(supervisor, "one")
    out, back = bytes(range(256)) * 4000, b"answer"
    grpc_end.writer.write(out)
    p2pd_end.writer.write(back)
    assert await p2pd_end.reader.readexactly(len(out)) == out
    assert await grpc_end.reader.readexactly(len(back)) == back
    assert supervisor.traffic.by_peer == {"one": ByteCount(len(out), len(back))}
    assert supervisor.traffic.total == ByteCount(len(out), len(back))
    close(grpc_end, p2pd_end)


@pytest.mark.parametrize("first", ["near", "far"])
async def test_end_of_one_direction_flushes_it_and_ends_both(supervisor: ConnectionSupervisor, first: str) -> None:
    ends = await open_tunnel(supervisor, "one")
    ending, other = ends if first == "near" else ends[::-1]
    ending.writer.write(bytes(1_000_000))
    ending.writer.write_eof()
    assert len(await other.reader.read(-1)) == 1_000_000
    await until_empty(supervisor)
    close(*ends)


async def test_answer_may_follow_the_end_of_the_request(supervisor: ConnectionSupervisor) -> None:
    grpc_end, p2pd_end = await open_tunnel(supervisor, "one")
    grpc_end.writer.write_eof()
    assert await p2pd_end.reader.read(-1) == b""
    p2pd_end.writer.write(b"late")
    assert await grpc_end.reader.readexactly(4) == b"late"
    close(grpc_end, p2pd_end)
    await until_empty(supervisor)


async def test_cut_connection_ends_the_other_side(supervisor: ConnectionSupervisor) -> None:
    grpc_end, p2pd_end = await open_tunnel(supervisor, "one")
    p2pd_end.writer.transport.abort()
    assert await asyncio.wait_for(grpc_end.reader.read(-1), 5) == b""
    await until_empty(supervisor)
    close(grpc_end)


async def test_frozen_receiver_is_cut_and_other_tunnels_continue(
    supervisor: ConnectionSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    frozen, working = await open_tunnel(supervisor, "frozen"), await open_tunnel(supervisor, "working")
    frozen[1].reader._transport.pause_reading()  # type: ignore[attr-defined]
    writing = asyncio.create_task(_write_for_ever(frozen[0]))
    for _ in range(30):  # an active tunnel is never cut, however long it lives
        working[0].writer.write(b"x")
        assert await working[1].reader.readexactly(1) == b"x"
        await asyncio.sleep(QUICK.stall / 20)
    assert "cutting a connection with frozen: nothing was taken" in caplog.text
    assert supervisor.refusals == {"stream stalled": 1}
    assert "with working" not in caplog.text
    await asyncio.wait({writing}, timeout=5)
    assert isinstance(writing.exception(), ConnectionError)
    close(*frozen, *working)


async def _write_for_ever(stream: Stream) -> None:
    while True:
        stream.writer.write(bytes(65536))
        await stream.writer.drain()


async def test_write_to_a_frozen_receiver_blocks_without_a_timeout() -> None:
    """Control of the test above: the coroutine that moves the data never returns by itself."""
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


async def test_slow_receiver_pauses_the_sender() -> None:
    offered = 32 * 1024 * 1024
    held = await _bytes_held_for_a_frozen_receiver(offered, drains=True)
    assert held < 2 * 1024 * 1024
    assert await _bytes_held_for_a_frozen_receiver(offered, drains=False) > offered / 2, (
        "copying without drain must fail"
    )


async def _bytes_held_for_a_frozen_receiver(offered: int, drains: bool) -> int:
    """Return the bytes in memory when nothing moves any more."""
    (source, near), (frozen, far) = await pair(), await pair()
    frozen.reader._transport.pause_reading()  # type: ignore[attr-defined]
    pump = BytePump(near.reader, far.writer, lambda size: None)
    moving = asyncio.create_task(pump.run() if drains else _copy_without_drain(near, far))
    sending = asyncio.create_task(_send(source, offered))
    await asyncio.wait({sending}, timeout=0.3 if drains else 5)
    held = pump.unsent_bytes
    for task in (moving, sending):
        task.cancel()
    await asyncio.wait({moving, sending})
    close(source, near, frozen, far)
    return held


async def _send(stream: Stream, size: int) -> None:
    for _ in range(size // 65536):
        stream.writer.write(bytes(65536))
        await stream.writer.drain()


async def _copy_without_drain(near: Stream, far: Stream) -> None:
    while data := await near.reader.read(65536):
        far.writer.write(data)


async def test_idle_tunnel_is_cut(supervisor: ConnectionSupervisor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    ends = await open_tunnel(supervisor, "silent")
    await until_empty(supervisor)
    assert "cutting a connection with silent: idle" in caplog.text
    assert not supervisor.refusals, "an idle tunnel does not count as refused"
    close(*ends)


def test_stall_begins_with_the_first_waiting_byte() -> None:
    progress = TransferProgress(now=0)
    progress.observe(passed=10, waiting=0, now=1)
    progress.observe(passed=10, waiting=0, now=100)
    assert progress.stalled_for(100) == 0, "silence is not a stall"
    progress.observe(passed=10, waiting=5, now=200)
    assert progress.stalled_for(230) == 30
    progress.observe(passed=11, waiting=4, now=231)
    assert progress.stalled_for(232) == 1, "one byte is progress"


async def test_connections_are_limited_per_peer_and_in_total(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = ConnectionSupervisor(ConnectionLimits(max_incoming_per_peer=2, max_incoming=3), TrafficCounter())
    ends = [*await open_tunnel(supervisor, "greedy"), *await open_tunnel(supervisor, "greedy")]
    assert not supervisor.try_admit("greedy")
    assert not supervisor.try_admit("greedy")
    assert caplog.text.count("refusing greedy") == 1, "a flood of refusals is logged once"
    assert supervisor.try_admit("honest")
    ends += await open_tunnel(supervisor, "honest")
    assert supervisor.try_admit("newcomer"), "the total limit must not shut out honest peers"
    assert "all 3 connections are in use: cutting the one with greedy" in caplog.text
    assert supervisor.refusals == {"too many streams": 2, "stream evicted": 1}, "every refusal is counted"
    close(*ends)
    await supervisor.stop()


async def test_a_peer_may_open_fewer_streams_than_direct_connections(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC keeps incomplete calls of each stream in memory."""
    supervisor, ends = ConnectionSupervisor(ConnectionLimits(), TrafficCounter()), list[Stream]()
    for _ in range(4):
        assert supervisor.try_admit_stream("greedy")
        ends += await open_tunnel(supervisor, "greedy")
    assert not supervisor.try_admit_stream("greedy"), "the fifth stream"
    assert "refusing greedy: it holds 4 connections" in caplog.text
    assert supervisor.refusals == {"too many streams": 1}
    assert supervisor.try_admit("greedy"), "direct connections have another limit"
    assert supervisor.try_admit_stream("modest")
    close(*ends)
    await until_empty(supervisor)
    assert supervisor.try_admit_stream("greedy")
    await supervisor.stop()


async def test_unknown_peers_share_a_small_number_of_streams() -> None:
    """Creating more identities gives no more streams."""
    supervisor, ends = ConnectionSupervisor(ConnectionLimits(max_unknown_streams=2), TrafficCounter()), list[Stream]()
    supervisor.is_known = lambda peer: peer.startswith("known")
    for peer in ("known 1", "known 2", "stranger 1", "stranger 2", "known 3"):
        assert supervisor.try_admit_stream(peer)
        ends += await open_tunnel(supervisor, peer)
    assert supervisor.refusals == {} and len(supervisor) == 5
    assert supervisor.try_admit_stream("stranger 3")
    assert supervisor.refusals == {"stream evicted": 1}
    assert await asyncio.wait_for(ends[4].reader.read(-1), 5) == b"", "the first stranger's stream is cut"
    assert len(supervisor) == 4
    close(*ends)
    await supervisor.stop()


async def test_cutting_a_peer_leaves_the_others_connected(supervisor: ConnectionSupervisor) -> None:
    bad, good = await open_tunnel(supervisor, "bad"), await open_tunnel(supervisor, "good")
    supervisor.cut_peer("bad")
    assert await asyncio.wait_for(bad[0].reader.read(-1), 5) == b""
    good[0].writer.write(b"x")
    assert await good[1].reader.readexactly(1) == b"x"
    close(*bad, *good)


def test_number_of_counted_peers_is_bounded() -> None:
    traffic = TrafficCounter(by_peer=RecentTable(2))
    for peer in ("a", "b", "a", "c"):
        traffic.add_sent(peer, 1)
    assert list(traffic.by_peer) == ["a", "c"]
    assert traffic.total.sent == 4


async def test_cancelled_tunnel_closes_both_connections() -> None:
    (grpc_end, near), (p2pd_end, far) = await pair(), await pair()
    running = asyncio.create_task(Tunnel("one", near, far, TrafficCounter(), QUICK).run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert await asyncio.wait_for(grpc_end.reader.read(-1), 5) == b""
    assert await asyncio.wait_for(p2pd_end.reader.read(-1), 5) == b""
    close(grpc_end, p2pd_end)
