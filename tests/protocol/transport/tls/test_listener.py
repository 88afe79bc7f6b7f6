"""Direct connections over loopback: admission, refusals, and their effect on other peers."""

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from protocol.errors import ForgedError, TransportError, UnreachableError
from protocol.identity import Identity, PeerId
from protocol.transport.dial_policy import MAX_LOOKUPS, MAX_QUEUED_LOOKUPS, Resolver
from protocol.transport.tls import listener
from protocol.transport.tls.connection import TlsConnection
from protocol.transport.tls.handshake import NONCE_BYTES, PROOF_BYTES, make_client_context, make_proof
from protocol.transport.tls.listener import ACCEPTED, DirectEndpoint, TlsDialer, TlsLimits, TlsListener

pytestmark = pytest.mark.slow

LOOPBACK = "127.0.0.1"
QUICK = TlsLimits(handshake=0.5, max_unauthenticated=4, max_unauthenticated_per_host=100)


class EchoListener:
    """A listener that echoes the bytes of every authenticated peer."""

    def __init__(self, limits: TlsLimits) -> None:
        self.identity = Identity.create()
        self.peer_id = self.identity.peer_id
        self.accepted_peers: list[PeerId] = []
        self.listener = TlsListener(self.identity, self._serve_echo, limits)
        self.listener.listen([LOOPBACK], 0)

    @property
    def endpoint(self) -> DirectEndpoint:
        return DirectEndpoint((LOOPBACK,), self.listener.port)

    async def _serve_echo(self, peer: PeerId, connection: TlsConnection, greeting: bytes) -> None:
        self.accepted_peers.append(peer)
        connection.write(greeting)
        with suppress(EOFError):
            while True:
                size = int.from_bytes(await connection.read(4), "big")
                connection.write(await connection.read(size))
                await connection.drain()

    async def wait_for_refusals(self, reason: str, times: int = 1) -> None:
        async with asyncio.timeout(10):
            while self.listener.refusals[reason] < times:
                await asyncio.sleep(0.005)


Build = Callable[..., EchoListener]


@pytest.fixture
async def build() -> AsyncIterator[Build]:
    built: list[EchoListener] = []

    def start(limits: TlsLimits = QUICK) -> EchoListener:
        built.append(EchoListener(limits))
        return built[-1]

    yield start
    for server in built:
        await server.listener.close()


async def dial(listener: EchoListener, caller: Identity, peer: PeerId | None = None) -> TlsConnection:
    connection, host = await TlsDialer(caller, QUICK).dial(peer or listener.peer_id, listener.endpoint)
    assert host == LOOPBACK
    return connection


async def connect_without_proof(listener: EchoListener, **security: Any) -> TlsConnection:
    """Connect without sending a proof."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(TlsConnection, LOOPBACK, listener.listener.port, **security)
    return connection


async def start_tls_without_proof(listener: EchoListener) -> tuple[TlsConnection, bytes, bytes]:
    """Start TLS without sending a proof, and return the connection, the certificate and the nonce."""
    connection = await connect_without_proof(listener, ssl=make_client_context(), server_hostname="")
    return connection, connection.peer_certificate(), await connection.read(NONCE_BYTES)


async def is_cut(connection: TlsConnection) -> bool:
    """Return whether the other side closes the connection without sending another byte."""
    try:
        await asyncio.wait_for(connection.read(1), 5)
    except (EOFError, ConnectionError):
        return True
    return False


async def echoes(connection: TlsConnection, data: bytes = b"hello") -> bool:
    connection.write(len(data).to_bytes(4, "big") + data)
    return await asyncio.wait_for(connection.read(len(data)), 5) == data


def close(*connections: TlsConnection) -> None:
    for connection in connections:
        connection.abort()


async def test_both_ends_are_authenticated(build: Build) -> None:
    server, callers = build(), [Identity.create() for _ in range(3)]
    connections = [await dial(server, caller) for caller in callers]
    assert server.accepted_peers == [caller.peer_id for caller in callers]
    for connection in connections:
        assert await echoes(connection, os.urandom(1 << 20))
        assert connection.ssl_object.version() == "TLSv1.3"
    assert not server.listener.refusals
    close(*connections)


async def test_server_with_another_key_gets_no_proof(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    middle, wanted, caller = build(), Identity.create(), Identity.create()
    with pytest.raises(UnreachableError, match="forged"):
        await dial(middle, caller, wanted.peer_id)
    await middle.wait_for_refusals("cut")
    assert not middle.accepted_peers
    # The control: a client that accepts any certificate reveals its identity to the man in the middle.
    monkeypatch.setattr(listener, "check_certificate", lambda server, certificate: None)
    with pytest.raises(UnreachableError):
        await dial(middle, caller, wanted.peer_id)
    await middle.wait_for_refusals("forged")  # the client sent a proof, which could therefore be judged


async def test_man_in_the_middle_cannot_pass_on_a_proof(build: Build) -> None:
    """He connects to the server himself, and passes its nonce to a client that dials him."""
    server, middle, victim = build(), Identity.create(), Identity.create()
    connection, certificate, nonce = await start_tls_without_proof(server)
    connection.write(make_proof(victim, middle.peer_id, certificate, nonce))
    assert await is_cut(connection)
    await server.wait_for_refusals("forged")
    assert not server.accepted_peers
    close(connection)


async def test_replayed_proof_is_refused(build: Build) -> None:
    server, caller = build(), Identity.create()
    connection, certificate, nonce = await start_tls_without_proof(server)
    proof = make_proof(caller, server.peer_id, certificate, nonce)
    connection.write(proof)
    assert await connection.read(1) == ACCEPTED, "the control: the proof is valid the first time"
    again, _, _ = await start_tls_without_proof(server)
    again.write(proof)
    assert await is_cut(again)
    await server.wait_for_refusals("forged")
    assert server.accepted_peers == [caller.peer_id]
    close(connection, again)


async def test_another_peers_name_is_refused(build: Build) -> None:
    server, thief, victim = build(), Identity.create(), Identity.create()
    connection, certificate, nonce = await start_tls_without_proof(server)
    connection.write(victim.peer_id.encode() + make_proof(thief, server.peer_id, certificate, nonce)[-64:])
    assert await is_cut(connection)
    assert not server.accepted_peers
    close(connection)


@pytest.mark.parametrize("sent", [b"", bytes(10), bytes(PROOF_BYTES - 1)])
async def test_connection_without_proof_is_cut_soon(
    build: Build, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    server = build()
    connection, _, _ = await start_tls_without_proof(server)
    connection.write(sent)
    assert await is_cut(connection)
    await server.wait_for_refusals("too slow")
    assert caplog.text.count("refusing a direct connection from 127.0.0.1: too slow") == 1
    honest = await dial(server, Identity.create())
    assert await echoes(honest)
    close(connection, honest)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"\x16\x03\x01\xff\xff" + os.urandom(2000)]
)
async def test_garbage_is_refused(build: Build, garbage: bytes) -> None:
    server = build()
    connection = await connect_without_proof(server)
    connection.write(garbage)
    async with asyncio.timeout(5):
        while not server.listener.refusals:
            await asyncio.sleep(0.005)
    assert not server.accepted_peers
    close(connection)


async def test_bytes_instead_of_a_proof_are_refused_and_not_stored(build: Build) -> None:
    server = build()
    connection, _, _ = await start_tls_without_proof(server)
    connection.write(os.urandom(64 << 20))
    assert await is_cut(connection)
    assert server.listener.refusals.total() == 1
    close(connection)


async def test_an_older_tls_is_refused(build: Build) -> None:
    server, context = build(), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError):  # a TLS alert, or the end of the connection before it was read
        await asyncio.open_connection(LOOPBACK, server.listener.port, ssl=context, server_hostname="")
    await server.wait_for_refusals("other protocol")


async def test_silent_connections_shut_nobody_out(build: Build) -> None:
    """With more silent connections than slots, the oldest are evicted and an honest peer is admitted at once."""
    server = build(TlsLimits(handshake=30.0, max_unauthenticated=4, max_unauthenticated_per_host=100))
    silent = [await connect_without_proof(server) for _ in range(10)]
    await server.wait_for_refusals("evicted", 6)
    assert [await is_cut(connection) for connection in silent[:6]] == [True] * 6
    honest = await asyncio.wait_for(dial(server, Identity.create()), 2)
    assert await echoes(honest)
    close(honest, *silent)


async def test_one_host_has_few_unauthenticated_connections(build: Build) -> None:
    server = build(TlsLimits(handshake=30.0, max_unauthenticated=64, max_unauthenticated_per_host=3))
    silent = [await connect_without_proof(server) for _ in range(5)]
    await server.wait_for_refusals("too many from one host", 2)
    assert await is_cut(silent[-1])
    close(*silent)
    async with asyncio.timeout(5):
        while not await _can_authenticate(server):
            await asyncio.sleep(0.01)


async def _can_authenticate(listener: EchoListener) -> bool:
    try:
        close(await dial(listener, Identity.create()))
    except UnreachableError:
        return False
    return True


async def test_many_peers_connect_at_once(build: Build) -> None:
    server = build(TlsLimits())
    callers = [Identity.create() for _ in range(12)]
    connections = await asyncio.gather(*(dial(server, caller) for caller in callers))
    assert sorted(server.accepted_peers) == sorted(caller.peer_id for caller in callers)
    close(*connections)


async def frozen_server() -> tuple[socket.socket, DirectEndpoint]:
    """Return a listener that accepts connections in the kernel and never answers."""
    listening = socket.create_server((LOOPBACK, 0))
    return listening, DirectEndpoint((LOOPBACK,), listening.getsockname()[1])


async def test_silent_server_is_given_up_in_time() -> None:
    listening, endpoint = await frozen_server()
    began = asyncio.get_running_loop().time()
    with pytest.raises(UnreachableError, match="too slow"):
        await TlsDialer(Identity.create(), QUICK).dial(Identity.create().peer_id, endpoint)
    assert asyncio.get_running_loop().time() - began < 4 * QUICK.handshake
    listening.close()


async def test_first_host_to_answer_is_used(build: Build) -> None:
    server = build()
    endpoint = DirectEndpoint(("192.0.2.1", "no such host", "x" * 300, "::1", LOOPBACK), server.listener.port)
    began = asyncio.get_running_loop().time()
    connection, host = await TlsDialer(Identity.create(), TlsLimits()).dial(server.peer_id, endpoint)
    assert host == LOOPBACK and await echoes(connection)
    assert asyncio.get_running_loop().time() - began < 3, "the silent host is not waited for"
    close(connection)
    for hosts in ((), ("x" * 300,)):
        with pytest.raises(UnreachableError, match="no direct connection: "):
            await TlsDialer(Identity.create(), QUICK).dial(server.peer_id, DirectEndpoint(hosts, server.listener.port))


@pytest.mark.parametrize("found", [[LOOPBACK], ["127.0.0.77", LOOPBACK]], ids=["one address", "the second answers"])
async def test_host_name_is_resolved(build: Build, found: list[str]) -> None:
    server, asked = build(), list[tuple[object, ...]]()

    def lookup(host: str, port: int, **_: object) -> list[Any]:
        asked.append((host, port))
        return [(None, None, 0, "", (address, port)) for address in found]

    endpoint = DirectEndpoint(("house.example",), server.listener.port)
    connection, host = await TlsDialer(Identity.create(), QUICK, Resolver(lookup)).dial(server.peer_id, endpoint)
    assert host == "house.example" and asked == [(host, server.listener.port)]
    assert await echoes(connection)
    close(connection)


async def test_unknown_host_name_is_unreachable() -> None:
    def lookup(*_: object, **__: object) -> list[Any]:
        raise socket.gaierror("no such name")

    dialer = TlsDialer(Identity.create(), QUICK, Resolver(lookup))
    with pytest.raises(UnreachableError, match="nowhere.example port 1: cut"):
        await dialer.dial("peer", DirectEndpoint(("nowhere.example",), 1))


async def test_hanging_lookups_do_not_delay_anything_else(build: Build) -> None:
    """Such a lookup cannot be cancelled, and any announcing peer chooses the name."""
    server, over, looking = build(), threading.Event(), list[str]()

    def lookup(host: str, port: int, **_: object) -> list[Any]:
        looking.append(host)
        over.wait(60)
        raise socket.gaierror("no answer")

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    dialer, peer = TlsDialer(Identity.create(), QUICK, Resolver(lookup)), server.peer_id
    hosts = tuple(f"host {index}.example" for index in range(2 * MAX_QUEUED_LOOKUPS))
    try:
        with pytest.raises(UnreachableError, match="too slow"):
            await dialer.dial(peer, DirectEndpoint(hosts[:10], 1))
        with pytest.raises(UnreachableError, match="too many names"):
            await dialer.dial(peer, DirectEndpoint(hosts[::-1], 1))
        assert len(looking) == MAX_LOOKUPS
        assert await asyncio.wait_for(asyncio.to_thread(len, "vow"), 5) == 3
        connection, _ = await dialer.dial(peer, server.endpoint)  # an address needs no lookup
        close(connection)
    finally:
        over.set()
    with pytest.raises(UnreachableError, match="cut"):  # the slots are free again
        await dialer.dial(peer, DirectEndpoint(("another.example",), 1))
    assert looking[-1] == "another.example"


async def test_closed_listener_cuts_its_connections(build: Build) -> None:
    server = build()
    connection = await dial(server, Identity.create())
    assert await echoes(connection)
    await server.listener.close()
    assert await is_cut(connection)
    close(connection)


async def test_taken_port_names_the_option_to_change(build: Build) -> None:
    server, other = build(), TlsListener(Identity.create(), _never, QUICK)
    with pytest.raises(TransportError, match="--direct off"):
        other.listen([LOOPBACK], server.listener.port)
    await other.close()


async def _never(peer: PeerId, connection: TlsConnection, greeting: bytes) -> None:
    raise AssertionError(peer)


async def test_close_leaves_no_task_and_no_socket(build: Build) -> None:
    server = build(TlsLimits(handshake=30.0))
    guest, silent = await dial(server, Identity.create()), await start_tls_without_proof(server)
    raw = await connect_without_proof(server)
    await server.listener.close()
    assert await is_cut(guest) and await is_cut(silent[0]) and await is_cut(raw)
    close(guest, silent[0], raw)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    with pytest.raises(OSError):
        await asyncio.open_connection(LOOPBACK, server.listener.port)


async def test_without_the_proof_check_a_thief_would_be_admitted(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of all refusals above: a listener that believes every name admits a thief under another name."""
    server, thief, victim = build(), Identity.create(), Identity.create()

    def believe(peer: PeerId, message: bytes, signature: bytes) -> None:
        pass

    async def is_admitted() -> bool:
        connection, certificate, nonce = await start_tls_without_proof(server)
        connection.write(victim.peer_id.encode() + make_proof(thief, server.peer_id, certificate, nonce)[-64:])
        cut = await is_cut(connection)
        close(connection)
        return not cut

    assert not await is_admitted()
    monkeypatch.setattr("protocol.transport.tls.handshake.verify", believe)
    assert await is_admitted() and server.accepted_peers == [victim.peer_id]


def test_refusal_reasons_and_host_groups() -> None:
    assert listener._refusal_reason(ForgedError("x")) == "forged"
    assert listener._host_group("2001:db8::1") == listener._host_group("2001:db8::ffff")
    assert listener._host_group("2001:db8::1") != listener._host_group("2001:db8:0:1::1")
    assert listener._host_group("192.0.2.1") != listener._host_group("192.0.2.2")
