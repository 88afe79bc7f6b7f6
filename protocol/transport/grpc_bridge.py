"""Bridges between gRPC and the tunnels: one inbound bridge for all callers, and an outbound bridge per called peer.

gRPC's server listens on a Unix socket in a private folder. For each incoming stream whose peer is authenticated, the
inbound bridge connects to it once, from a socket bound to the abstract name `\0murmur/<peer id>/<random>`. gRPC shows
that name to the servicer as its peer, so the servicer learns the caller's authenticated identity. The permissions of
the folder keep other users out. Only Linux has abstract names; elsewhere the socket is bound to a file in the folder.
"""

import asyncio
import logging
import re
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc

from protocol.errors import MalformedError, TransportError, UnreachableError, describe_error
from protocol.identity import PeerId, public_key
from protocol.transport.connection_supervisor import ConnectionSupervisor
from protocol.transport.p2pd import BUFFER_BYTES, Stream, read_stream_peer

logger = logging.getLogger(__name__)

SOCKET_NAMESPACE = "murmur"
HAS_ABSTRACT_NAMES = sys.platform == "linux"
ABSTRACT_CALLER = re.compile(rf"unix-abstract:{SOCKET_NAMESPACE}/([^/]+)/[^/]+")
FILE_CALLER = re.compile(rf"unix:.+/{SOCKET_NAMESPACE}-([^/-]+)-[0-9a-f]+")
Dial = Callable[[PeerId], Awaitable[Stream]]
UNKNOWN_CALLER = "somebody unknown"  # a caller without an identity, in logs


def caller(context: grpc.aio.ServicerContext) -> PeerId:
    """Return the authenticated peer id of an incoming call.

    Raises MalformedError if it has none.
    """
    name = str(context.peer())
    found = ABSTRACT_CALLER.fullmatch(name) or (None if HAS_ABSTRACT_NAMES else FILE_CALLER.fullmatch(name))
    if found is None:
        raise MalformedError(f"a call without an identity came from {name!r}")
    public_key(found[1])
    return found[1]


class InboundBridge:
    """Carries incoming streams to gRPC's server.

    p2pd connects to `path` for each stream; `server` is the path of gRPC's socket.
    """

    def __init__(self, path: Path, server: Path, supervisor: ConnectionSupervisor) -> None:
        self._path = path
        self._server = server
        self._supervisor = supervisor

    async def open(self) -> None:
        self._listener = await asyncio.start_unix_server(self._on_connection, self._path, limit=BUFFER_BYTES)

    def close(self) -> None:
        self._listener.close()

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._supervisor.spawn(self._handle_stream(Stream(reader, writer)))

    async def _handle_stream(self, far: Stream) -> None:
        try:
            peer = await read_stream_peer(far)
        except MalformedError as error:
            self._supervisor.refusals["malformed stream"] += 1
            logger.warning("refusing an incoming stream: %s", error)
        except (OSError, EOFError) as error:
            self._supervisor.refusals["stream lost"] += 1
            logger.warning("an incoming stream was lost: %s", describe_error(error))
        else:
            await self._bridge_stream(peer, far)
        finally:
            far.writer.transport.abort()

    async def _bridge_stream(self, peer: PeerId, far: Stream) -> None:
        """Carry a stream of an authenticated peer until it ends."""
        if not self._supervisor.may_open_stream(peer):
            return
        try:
            near = await self._connect_to_server(peer)
        except OSError as error:
            self._supervisor.refusals["stream not accepted"] += 1
            logger.warning("gRPC's server refuses a stream of %s: %s", peer, error)
            return
        try:
            if self._supervisor.try_admit_stream(peer):
                await self._supervisor.run_incoming_tunnel(peer, near, far)
        finally:
            near.writer.transport.abort()

    async def _connect_to_server(self, peer: PeerId) -> Stream:
        near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            near.setblocking(False)
            path = _bind_caller(near, peer, self._server.parent)
            await asyncio.get_running_loop().sock_connect(near, str(self._server))
            if path is not None:
                path.unlink()  # the connection keeps its name
            return Stream(*await asyncio.open_unix_connection(sock=near, limit=BUFFER_BYTES))
        except BaseException:
            near.close()
            raise


def _bind_caller(near: socket.socket, peer: PeerId, folder: Path) -> Path | None:
    """Bind a socket to a name that shows its peer; return its file, if it has one."""
    # A random suffix, because all nodes on a machine share its abstract names and know the same peers.
    suffix = secrets.token_hex(8)
    if HAS_ABSTRACT_NAMES:
        near.bind(f"\0{SOCKET_NAMESPACE}/{peer}/{suffix}")
        return None
    path = folder / f"{SOCKET_NAMESPACE}-{peer}-{suffix[:4]}"  # names of sockets have at most 103 bytes on macOS
    near.bind(str(path))
    return path


class OutboundBridge:
    """A Unix socket whose connections are tunnelled to one peer, with its channel."""

    def __init__(
        self, peer: PeerId, path: Path, dial: Dial, supervisor: ConnectionSupervisor, options: list[tuple[str, int]]
    ) -> None:
        self._peer = peer
        self._path = path
        self._dial = dial
        self._supervisor = supervisor
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(path))
        listening.listen(4)  # gRPC may connect before the event loop accepts
        self._opening = asyncio.ensure_future(
            asyncio.start_unix_server(self._on_connection, sock=listening, limit=BUFFER_BYTES)
        )
        self.channel = grpc.aio.insecure_channel(f"unix:{path}", options=options)

    @property
    def has_failed(self) -> bool:
        """Return whether gRPC backs off after failed attempts.

        For some seconds all calls fail at once then.
        """
        return self.channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    @property
    def is_connected(self) -> bool:
        """Return whether a connection exists or is being established."""
        state = self.channel.get_state()
        return state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.CONNECTING)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._supervisor.spawn(self._bridge_to_peer(Stream(reader, writer)))

    async def _bridge_to_peer(self, near: Stream) -> None:
        try:
            far = await self._dial(self._peer)
            await self._supervisor.run_outgoing_tunnel(self._peer, near, far)
        except (UnreachableError, TransportError) as error:
            logger.debug("cannot reach %s: %s", self._peer, error)
        finally:
            near.writer.transport.abort()

    async def close(self, grace: float | None = None) -> None:
        """Remove the socket and cancel calls that do not end within `grace` seconds."""
        (await self._opening).close()
        self._path.unlink(missing_ok=True)
        await self.channel.close(grace)
