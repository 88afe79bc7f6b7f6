"""Transports on real p2pd processes."""

import asyncio
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import psutil
import pytest

from protocol.errors import IdentityError, MalformedError, UnreachableError
from protocol.identity import Identity
from protocol.murmur_pb2 import FetchRequest, PiecesReply, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsStub
from protocol.transport import grpc_bridge
from protocol.transport import transport as transports
from protocol.transport.tls.rpc import MAX_MESSAGE_BYTES
from protocol.transport.transport import Transport, caller
from protocol.transport.tunnel import ConnectionLimits
from tests.protocol.conftest import StartPeer, StartTransport
from tests.protocol.transport.sample_peer import SampleBlobs

pytestmark = pytest.mark.slow

MEBIBYTE = 1024 * 1024
Call = grpc.aio.AioRpcError


async def call_peer(client: Transport, callee: str, timeout: float = 10) -> PiecesReply:
    reply: PiecesReply = await BlobsStub(client.channel(callee)).Pieces(PiecesRequest(), timeout=timeout)
    return reply


async def introduce_peers(client: Transport, callee: Transport) -> None:
    client.introduce(callee.peer_id, await callee.addresses())


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def wait_until_gone(pid: int) -> None:
    async with asyncio.timeout(10):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)


async def test_callee_knows_its_callers(start_transport: StartTransport) -> None:
    callee = await start_transport("callee", [SampleBlobs().add])
    callers = [await start_transport(name) for name in ("one", "two")]
    for node in callers:
        await introduce_peers(node, callee)
        assert (await call_peer(node, callee.peer_id)).pieces.decode() == node.peer_id
    # A connection that the caller opened carries calls in both directions.
    with pytest.raises(Call, match="UNIMPLEMENTED"):
        await call_peer(callee, callers[0].peer_id)


async def test_connection_that_bypasses_the_bridge_has_no_identity(
    start_transport: StartTransport, tmp_path: Path
) -> None:
    await start_transport("callee", [SampleBlobs().add])
    server = tmp_path / "callee" / "sockets" / "server.sock"
    assert server.parent.stat().st_mode & 0o077 == 0
    async with grpc.aio.insecure_channel(f"unix:{server}") as channel:
        with pytest.raises(Call, match="MalformedError.*without an identity"):
            await BlobsStub(channel).Pieces(PiecesRequest(), timeout=5)


async def test_callee_knows_its_callers_without_the_abstract_names_of_linux(
    start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(grpc_bridge, "HAS_ABSTRACT_NAMES", False)
    callee, node = await start_transport("callee", [SampleBlobs().add]), await start_transport("node")
    await introduce_peers(node, callee)
    assert (await call_peer(node, callee.peer_id)).pieces.decode() == node.peer_id
    folder = tmp_path / "callee" / "sockets"
    assert not list(folder.glob("murmur-*"))
    async with grpc.aio.insecure_channel(f"unix:{folder / 'server.sock'}") as channel:
        with pytest.raises(Call, match="MalformedError.*without an identity"):
            await BlobsStub(channel).Pieces(PiecesRequest(), timeout=5)


@pytest.mark.parametrize(
    "name",
    [
        "unix:",
        "unix:/tmp/murmur-x/murmur-{peer}-0a1b",
        "ipv4:127.0.0.1:5000",
        "unix:murmur/{peer}/1",
        "unix-abstract:other/{peer}/1",
        "unix-abstract:murmur/{peer}",
        "unix-abstract:murmur/{peer}/1/2",
        "unix-abstract:murmur/nobody/1",
    ],
)
def test_only_names_of_the_inbound_bridge_are_identities(name: str) -> None:
    peer = Identity.create().peer_id
    assert caller(SimpleNamespace(peer=lambda: f"unix-abstract:murmur/{peer}/1")) == peer
    with pytest.raises(MalformedError):
        caller(SimpleNamespace(peer=lambda: name.format(peer=peer)))


async def test_dead_addresses_do_not_delay_other_calls(start_transport: StartTransport) -> None:
    loop = asyncio.get_running_loop()
    node, other = await start_transport("node"), await start_transport("other", [SampleBlobs().add])
    refused = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.create().peer_id}"
    silent = f"/ip4/192.0.2.1/tcp/4001/p2p/{Identity.create().peer_id}"
    for address in (refused, silent):
        node.introduce(address.rpartition("/")[2], [address])
    waiting = asyncio.create_task(call_peer(node, silent.rpartition("/")[2], timeout=1))
    await introduce_peers(node, other)
    began = loop.time()
    await call_peer(node, other.peer_id)
    with pytest.raises(UnreachableError, match=f"cannot reach {refused}: "):
        await node.connect(refused, timeout=5)
    with pytest.raises(UnreachableError, match=f"cannot reach {silent}: "):
        await node.connect(silent, timeout=0.5)
    assert loop.time() - began < 3
    with pytest.raises(Call, match="DEADLINE_EXCEEDED|UNAVAILABLE"):
        await waiting


async def test_returning_peer_is_reached_at_once(
    start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC backs off longer after each failed dial; news of the peer end that."""
    monkeypatch.setitem(transports.CHANNEL_OPTIONS, "grpc.initial_reconnect_backoff_ms", 60_000)
    monkeypatch.setitem(transports.CHANNEL_OPTIONS, "grpc.max_reconnect_backoff_ms", 60_000)
    node, other = await start_transport("node"), await start_transport("other", [SampleBlobs().add])
    node.introduce(other.peer_id, [f"/ip4/127.0.0.1/tcp/1/p2p/{other.peer_id}"])
    with pytest.raises(Call, match="UNAVAILABLE"):
        await call_peer(node, other.peer_id)
    (address,) = await node.addresses()
    await other.connect(address, timeout=5)
    with pytest.raises(Call, match="UNAVAILABLE"):  # the control: the peer is connected, but gRPC still backs off
        await call_peer(node, other.peer_id)
    await introduce_peers(node, other)
    assert (await call_peer(node, other.peer_id)).pieces.decode() == node.peer_id


async def test_peer_that_never_answers_holds_no_socket_for_ever(
    start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "MAX_OUTBOUND_BRIDGES", 8)
    node, other = await start_transport("node"), await start_transport("other", [SampleBlobs().add])
    await introduce_peers(node, other)
    await call_peer(node, other.peer_id)
    channel, before = node.channel(other.peer_id), count_descriptors()
    for _ in range(40):
        node.channel(Identity.create().peer_id)
    assert node.channel(other.peer_id) is channel, "an open connection is kept"
    async with asyncio.timeout(10):
        while count_descriptors() > before + 8:
            await asyncio.sleep(0.02)


async def test_one_known_address_is_enough(start_transport: StartTransport) -> None:
    node, other = await start_transport("node"), await start_transport("other", [SampleBlobs().add])
    (address,) = await other.addresses()
    assert await node.connect(address, timeout=5) == other.peer_id
    await call_peer(node, other.peer_id)
    impostor = address.replace(other.peer_id, Identity.create().peer_id)
    with pytest.raises(UnreachableError):
        await node.connect(impostor, timeout=5)
    with pytest.raises(UnreachableError, match="must end in /p2p/"):
        await node.connect("127.0.0.1:4001", timeout=5)


async def test_introduced_addresses_are_validated(start_transport: StartTransport) -> None:
    node, peer = await start_transport("node"), Identity.create().peer_id
    own, others = f"/ip4/192.0.2.1/tcp/1/p2p/{node.peer_id}", f"/ip4/192.0.2.1/tcp/1/p2p/{peer}"
    for addresses in (["nonsense"], [own], [others] * 9):
        with pytest.raises(MalformedError):
            node.introduce(peer, addresses)
    with pytest.raises(MalformedError):
        node.channel("../../etc/passwd")


async def test_calls_recover_after_p2pd_dies(start_transport: StartTransport) -> None:
    callee, client = await start_transport("callee", [SampleBlobs().add]), await start_transport("caller")
    await introduce_peers(client, callee)
    await call_peer(client, callee.peer_id)
    for victim in (callee, client):
        restarted = asyncio.Event()
        victim.on_restart(restarted.set)
        os.kill(victim._p2pd.pid, signal.SIGKILL)
        await asyncio.wait_for(restarted.wait(), 10)
        async with asyncio.timeout(10):
            while not await _answers(client, callee.peer_id):
                await asyncio.sleep(0.05)


async def _answers(client: Transport, callee: str) -> bool:
    try:
        return (await call_peer(client, callee)).pieces.decode() == client.peer_id
    except Call:
        return False


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
async def test_killed_node_leaves_no_process_and_restarts(
    start_peer: StartPeer, start_transport: StartTransport, signal_number: signal.Signals
) -> None:
    process, about = await start_peer("node")
    os.kill(about["p2pd"], signal.SIGSTOP)  # so that p2pd cannot notice the death and exit by itself
    process.send_signal(signal_number)
    await asyncio.to_thread(process.wait, 10)
    await wait_until_gone(about["p2pd"])
    again = await start_transport("node", [SampleBlobs().add])
    assert again.peer_id == about["peer"]
    assert not Path(about["sockets"]).exists(), "the next start removes what the killed one left"


async def test_frozen_peer_does_not_delay_others(
    start_peer: StartPeer, start_transport: StartTransport, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    limits = ConnectionLimits(stall=1.0, check_interval=0.1)
    process, about = await start_peer("frozen")
    node, other = await start_transport("node", limits=limits), await start_transport("other", [SampleBlobs().add])
    node.introduce(about["peer"], about["addresses"])
    await introduce_peers(node, other)
    await call_peer(node, about["peer"])
    process.send_signal(signal.SIGSTOP)
    os.kill(about["p2pd"], signal.SIGSTOP)
    began, writing = time.monotonic(), asyncio.create_task(_upload(node, about["peer"], timeout=2))
    for _ in range(20):
        await call_peer(node, other.peer_id, timeout=1)
    assert await writing <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
    assert time.monotonic() - began < 4
    async with asyncio.timeout(5):
        while "nothing was taken" not in caplog.text:
            await asyncio.sleep(0.02)
    await node.stop()
    os.kill(about["p2pd"], signal.SIGCONT)


async def _upload(node: Transport, peer: str, timeout: float) -> set[grpc.StatusCode]:
    """Send far more than sockets and windows hold, and return how the calls ended."""
    stub, request = BlobsStub(node.channel(peer)), PiecesRequest(digest=bytes(MEBIBYTE))
    results = await asyncio.gather(*(stub.Pieces(request, timeout=timeout) for _ in range(24)), return_exceptions=True)
    assert all(isinstance(result, Call) for result in results), results
    return {result.code() for result in results if isinstance(result, Call)}


async def test_long_stream_is_counted_and_needs_little_memory(start_transport: StartTransport) -> None:
    service = SampleBlobs()
    sender, receiver = await start_transport("sender", [service.add]), await start_transport("receiver")
    await introduce_peers(receiver, sender)
    stub, process = BlobsStub(receiver.channel(sender.peer_id)), psutil.Process()
    await call_peer(receiver, sender.peer_id)
    before, most, received = process.memory_info().rss, 0, 0
    async for chunk in stub.Fetch(FetchRequest(length=64 * MEBIBYTE), timeout=60):
        received += len(chunk.data)
        most = max(most, process.memory_info().rss)
    assert received == 64 * MEBIBYTE
    assert most - before < 48 * MEBIBYTE, "both ends run in this process"
    assert received < receiver.bytes_received < 1.02 * received
    assert receiver.traffic.by_peer[sender.peer_id].received == receiver.bytes_received
    async with asyncio.timeout(5):  # the last few bytes are in flight
        while (sender.bytes_sent, sender.bytes_received) != (receiver.bytes_received, receiver.bytes_sent):
            await asyncio.sleep(0.01)
    assert sender.traffic.by_peer[receiver.peer_id].sent == sender.bytes_sent


async def test_paused_reader_pauses_the_sender(start_transport: StartTransport) -> None:
    service = SampleBlobs()
    sender, receiver = await start_transport("sender", [service.add]), await start_transport("receiver")
    await introduce_peers(receiver, sender)
    call = BlobsStub(receiver.channel(sender.peer_id)).Fetch(FetchRequest(length=256 * MEBIBYTE), timeout=60)
    await call.read()
    yielded, quiet = -1, 0
    while quiet < 10:
        quiet = quiet + 1 if yielded == service.yielded else 0
        yielded = service.yielded
        await asyncio.sleep(0.05)
    assert yielded < 32 * MEBIBYTE, "a pausing reader must not make the sender read all of a blob into memory"
    call.cancel()


async def test_oversized_message_is_refused_by_the_receiver(start_transport: StartTransport) -> None:
    callee, client = await start_transport("callee", [SampleBlobs().add]), await start_transport("caller")
    await introduce_peers(client, callee)
    await introduce_peers(callee, client)  # strangers send slowly
    stub = BlobsStub(client.channel(callee.peer_id))
    assert (await stub.Pieces(PiecesRequest(digest=bytes(MEBIBYTE)), timeout=5)).size == MEBIBYTE
    with pytest.raises(Call, match="RESOURCE_EXHAUSTED"):
        await stub.Pieces(PiecesRequest(digest=bytes(MAX_MESSAGE_BYTES + 1)), timeout=5)


async def test_one_peer_cannot_take_all_tunnels(
    start_transport: StartTransport, caplog: pytest.LogCaptureFixture
) -> None:
    limits = ConnectionLimits(max_incoming_per_peer=1)
    callee = await start_transport("callee", [SampleBlobs().add], limits=limits)
    greedy, honest = await start_transport("greedy"), await start_transport("honest")
    for client in (greedy, honest):
        await introduce_peers(client, callee)
    await call_peer(greedy, callee.peer_id)
    stream = await greedy._dial(callee.peer_id)
    assert await asyncio.wait_for(stream.reader.read(-1), 5) == b""
    assert f"refusing {greedy.peer_id}: it holds 1 connections" in caplog.text
    stream.writer.transport.abort()
    await call_peer(honest, callee.peer_id)
    await call_peer(greedy, callee.peer_id)


async def test_forgotten_peer_is_cut_and_may_return(start_transport: StartTransport) -> None:
    callee, client = await start_transport("callee", [SampleBlobs().add]), await start_transport("caller")
    await introduce_peers(client, callee)
    call = BlobsStub(client.channel(callee.peer_id)).Fetch(FetchRequest(length=256 * MEBIBYTE), timeout=30)
    await call.read()
    client.forget(callee.peer_id)
    with pytest.raises((Call, asyncio.CancelledError)):
        while await call.read():
            pass
    await introduce_peers(client, callee)
    await call_peer(client, callee.peer_id)


async def test_unsafe_key_prevents_the_start_and_leaves_nothing(
    start_transport: StartTransport, tmp_path: Path
) -> None:
    node = await start_transport("node")
    await node.stop()
    (tmp_path / "node" / "key").chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        await start_transport("node")
    assert os.listdir(tmp_path / "node") == ["key"]


async def test_channel_may_be_created_before_open(start_transport: StartTransport, tmp_path: Path) -> None:
    callee = await start_transport("callee", [SampleBlobs().add])
    node = Transport.create(tmp_path / "node" / "key", tmp_path / "node")
    await introduce_peers(node, callee)
    with pytest.raises(Call, match="UNAVAILABLE"):
        await call_peer(node, callee.peer_id, timeout=5)
    await node.open([])
    async with asyncio.timeout(10):
        while not await _answers(node, callee.peer_id):
            await asyncio.sleep(0.05)
    await node.stop()
    unopened = Transport.create(tmp_path / "node" / "key", tmp_path / "node")
    unopened.channel(callee.peer_id)
    await unopened.stop()
    assert os.listdir(tmp_path / "node") == ["key"]


async def test_stop_leaves_no_process_task_or_socket(start_transport: StartTransport, tmp_path: Path) -> None:
    process = psutil.Process()
    before = {*process.net_connections("inet")}  # of other tests
    callee, client = await start_transport("callee", [SampleBlobs().add]), await start_transport("caller")
    await introduce_peers(client, callee)
    folders = [(tmp_path / name / "sockets").readlink() for name in ("callee", "caller")]
    pids = [callee._p2pd.pid, client._p2pd.pid]
    await call_peer(client, callee.peer_id)
    for transport in (callee, client):
        await asyncio.wait_for(transport.stop(), 5)
    assert not any(map(psutil.pid_exists, pids))
    assert not any(folder.exists() for folder in folders)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert {*process.net_connections("inet")} <= before
