"""Forward the listeners of other machines to this one's loopback interface."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from node.trainer.ipc.channel import ChannelClosed
from node.trainer.site.messages import Target
from protocol.errors import MurmurError
from protocol.transport.tls.listener import keep_alive, limit_unacknowledged

CHUNK_BYTES: Final = 256 * 1024
KEEPALIVE_SECONDS: Final = 5
PROBES: Final = 3
UNACKNOWLEDGED_SECONDS: Final = 20.0  # after which unacknowledged bytes mean that the other machine is gone
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
logger = logging.getLogger(__name__)


def detect_loss(writer: asyncio.StreamWriter) -> None:
    """Detect a lost machine within twenty seconds, and send small messages without delay."""
    connection = writer.get_extra_info("socket")
    limit_unacknowledged(connection, UNACKNOWLEDGED_SECONDS)
    keep_alive(connection, KEEPALIVE_SECONDS)
    for option, value in ((socket.TCP_KEEPCNT, PROBES), (socket.TCP_NODELAY, 1)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def join_streams(first: Streams, second: Streams) -> None:
    """Copy both ways until one side ends, then close both."""
    copies = [
        asyncio.create_task(_copy(first[0], second[1])),
        asyncio.create_task(_copy(second[0], first[1])),
    ]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        for _, writer in (first, second):
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


class TunnelEntrances:
    """Listens on this machine's loopback interface for targets on other machines; `dial` connects to one."""

    def __init__(self, dial: Callable[[Target], Awaitable[Streams]]) -> None:
        self._dial = dial
        self._servers: list[asyncio.Server] = []

    async def open(self, targets: Sequence[Target]) -> None:
        """Listen for each target. Raises MurmurError if an address is taken."""
        for target in targets:
            self._servers.append(await self._listen(target))

    async def _listen(self, target: Target) -> asyncio.Server:
        async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                far = await self._dial(target)
            except (OSError, TimeoutError, ChannelClosed) as error:
                logger.warning("no connection to rank %d of this site: %s", target.number, error)
                writer.close()
                return
            await join_streams((reader, writer), far)

        try:
            return await asyncio.start_server(enter, target.address, target.port, limit=CHUNK_BYTES)
        except OSError as error:
            raise MurmurError(f"cannot listen at {target.address}:{target.port} for this site: {error}") from error

    def close(self) -> None:
        """Stop listening."""
        for server in self._servers:
            server.close()
