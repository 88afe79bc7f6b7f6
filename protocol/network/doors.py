"""Where gRPC meets the tunnels: one entrance for all callers, and exits to the peers that we call.

gRPC's server listens on a Unix socket in a private folder. The entrance connects to it once for each incoming stream
whose peer is proved, from a socket bound to the abstract name `\\0murmur/<peer id>/<random>`: gRPC shows that name to
the servicer as its peer, so the caller's authenticated identity arrives with no more ado. The folder keeps others out.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc

from protocol.errors import MalformedError, TransportError, UnreachableError, told
from protocol.identity import PeerId, public_key
from protocol.network.control import BUFFER_BYTES, Stream, accept
from protocol.network.tunnel import Tunnels

logger = logging.getLogger(__name__)

NAME = "murmur"
Dial = Callable[[PeerId], Awaitable[Stream]]
SOMEBODY = "somebody unknown"  # stands for a caller without an identity, in logs


def caller(context: grpc.aio.ServicerContext) -> PeerId:
    """The authenticated peer id of an incoming call. MalformedError: it did not come through the entrance."""
    scheme, _, name = str(context.peer()).partition(":")
    parts = name.split("/")
    if scheme != "unix-abstract" or len(parts) != 3 or parts[0] != NAME:
        raise MalformedError(f"a call without an identity came from {context.peer()!r}")
    public_key(parts[1])
    return parts[1]


class Entrance:
    """Listens on `path`, to which p2pd connects for each incoming stream; `server` is gRPC's socket."""

    def __init__(self, path: Path, server: Path, tunnels: Tunnels) -> None:
        self._path = path
        self._server = server
        self._tunnels = tunnels

    async def open(self) -> None:
        self._listener = await asyncio.start_unix_server(self._accepted, self._path, limit=BUFFER_BYTES)

    def close(self) -> None:
        self._listener.close()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tunnels.spawn(self._admit(Stream(reader, writer)))

    async def _admit(self, far: Stream) -> None:
        try:
            peer = await accept(far)
        except MalformedError as error:
            self._tunnels.refusals["malformed stream"] += 1
            logger.warning("refusing a stream: %s", error)
        except (OSError, EOFError) as error:
            self._tunnels.refusals["stream lost"] += 1
            logger.warning("an incoming stream was lost: %s", told(error))
        else:
            await self._welcome(peer, far)
        finally:
            far.writer.transport.abort()

    async def _welcome(self, peer: PeerId, far: Stream) -> None:
        """Carry a stream of a peer who has proved its identity, as long as it lasts."""
        try:
            near = await self._connect(peer)
        except OSError as error:
            self._tunnels.refusals["stream not taken"] += 1
            logger.warning("gRPC's server does not take a stream of %s: %s", peer, error)
            return
        try:
            if self._tunnels.admits_stream(peer):
                await self._tunnels.carry_in(peer, near, far)
        finally:
            near.writer.transport.abort()

    async def _connect(self, peer: PeerId) -> Stream:
        near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            near.setblocking(False)
            # Random: abstract names are the whole machine's, and other nodes on it know the same peers.
            near.bind(f"\0{NAME}/{peer}/{secrets.token_hex(8)}")
            await asyncio.get_running_loop().sock_connect(near, str(self._server))
            return Stream(*await asyncio.open_unix_connection(sock=near, limit=BUFFER_BYTES))
        except BaseException:
            near.close()
            raise


class Exit:
    """A Unix socket whose every connection is carried to one peer, and gRPC's channel to it."""

    def __init__(self, peer: PeerId, path: Path, dial: Dial, tunnels: Tunnels, options: list[tuple[str, int]]) -> None:
        self._peer = peer
        self._path = path
        self._dial = dial
        self._tunnels = tunnels
        self._trouble = ""  # that was told last: gRPC tries again and again
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(path))
        listening.listen(4)  # gRPC may connect before the loop comes round to accept
        self._opening = asyncio.ensure_future(
            asyncio.start_unix_server(self._accepted, sock=listening, limit=BUFFER_BYTES)
        )
        self.channel = grpc.aio.insecure_channel(f"unix:{path}", options=options)

    @property
    def has_failed(self) -> bool:
        """Whether gRPC pauses after attempts that failed: seconds, in which calls fail unasked."""
        return self.channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    @property
    def is_connected(self) -> bool:
        """Or about to be."""
        state = self.channel.get_state()
        return state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.CONNECTING)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tunnels.spawn(self._leave(Stream(reader, writer)))

    async def _leave(self, near: Stream) -> None:
        try:
            far = await self._dial(self._peer)
            self._trouble = ""
            await self._tunnels.carry_out(self._peer, near, far)
        except (UnreachableError, TransportError) as error:
            self._tell(str(error))
        finally:
            near.writer.transport.abort()

    def _tell(self, trouble: str) -> None:
        """Once, until it has been reached."""
        level = logging.DEBUG if self._trouble else logging.INFO
        self._trouble = trouble
        logger.log(level, "cannot reach %s: %s", self._peer, trouble)

    async def close(self, grace: float | None = None) -> None:
        """Calls that are open end as cancelled, but for what ends within `grace` seconds."""
        (await self._opening).close()
        self._path.unlink(missing_ok=True)
        await self.channel.close(grace)
