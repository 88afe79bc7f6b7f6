"""A further machine of a site: it dials the first one, starts a rank on each device, and comes back after a loss."""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import psutil
from pydantic import TypeAdapter

from node.monitoring.logs import sanitize
from node.processes.process import python_environment
from node.trainer.ipc.channel import Crashed, Failed
from node.trainer.ipc.frames import ChannelClosed, FrameSocket
from node.trainer.site.messages import (
    TO_MACHINE,
    Answer,
    Dial,
    Forward,
    Forwarding,
    Machine,
    Opening,
    RankChannel,
    Refused,
    Target,
    Tunnel,
    Welcome,
    own_host,
    receive,
    send,
)
from node.trainer.site.pauses import End, Pauses
from node.trainer.site.token import SiteToken
from node.trainer.site.tunnel import CHUNK_BYTES, Streams, TunnelEntrances, join_streams, keep_alive
from protocol.errors import AdmissionError, ForgedError, MalformedError, error_with_code
from protocol.transport.tls.handshake import check_certificate, make_client_context

RANK_MODULE: Final = "node.trainer.ranks"
CONNECT_SECONDS: Final = 10.0
EXIT_SECONDS: Final = 10.0  # from the end of a connection or a rank until all ranks have exited
ENDED: Final = 0
logger = logging.getLogger(__name__)
END: TypeAdapter[Failed | Crashed] = TypeAdapter(Failed | Crashed)


@dataclass(frozen=True)
class SiteMember:
    """The options of this machine."""

    host: str
    port: int
    token: SiteToken
    devices: tuple[str, ...]
    names: tuple[str, ...]
    version: str
    threads: int


@dataclass(frozen=True)
class _RankProcess:
    process: asyncio.subprocess.Process
    last_words: FrameSocket

    def listens_at(self, target: Target) -> bool:
        """Return whether this is the process behind a target."""
        with contextlib.suppress(psutil.Error):
            found = (connection.laddr for connection in psutil.Process(self.process.pid).net_connections("tcp"))
            return any(tuple(at) == (target.address, target.port) for at in found)
        return False

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()


class SiteAgent:
    """Offers this machine's devices to the first one until that ends the training."""

    def __init__(self, member: SiteMember) -> None:
        self._member = member

    async def run(self) -> None:
        """Take part until the first machine ends it. Raises MurmurError if it cannot go on."""
        pauses, said = Pauses(), ""
        while True:
            began = time.monotonic()
            end = await self._take_part()
            if end == "all told to end":
                return
            if end != said:
                logger.info("%s", end_text(end, self._member))
            said = end
            now = time.monotonic()
            await asyncio.sleep(pauses.after(end, now, now - began))

    async def _take_part(self) -> End:
        """Make one attempt; return how it ended."""
        attempt = _Attempt(self._member)
        try:
            async with attempt.open():
                return await attempt.run()
        except (ChannelClosed, MalformedError, OSError, TimeoutError) as error:
            logger.debug("%s", error)
            return "no connection"


class _Attempt:
    """The ranks of this machine from their start to their end, and their connections."""

    def __init__(self, member: SiteMember) -> None:
        self._member = member
        self._name = secrets.token_hex(8)
        self._ranks: list[_RankProcess] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._entrances = TunnelEntrances(self._enter)
        self._control: Streams | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Connect, and end everything at the end."""
        try:
            await self._connect_as_machine()
            logger.info("connected with %s:%d", self._member.host, self._member.port)
            yield
        finally:
            self._entrances.close()
            for rank in self._ranks:
                rank.kill()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, *(r.process.wait() for r in self._ranks), return_exceptions=True)
            for rank in self._ranks:
                rank.last_words.close()
            if self._control is not None:
                await _close(self._control[1])

    async def run(self) -> End:
        """Start a rank on each device; return how they ended."""
        assert self._control is not None
        for index in range(len(self._member.devices)):
            await self._start_rank(index)
        orders = asyncio.create_task(self._obey(*self._control))
        ends = {asyncio.create_task(rank.process.wait()): rank for rank in self._ranks}
        waiting = asyncio.gather(*ends)
        try:
            await asyncio.wait([orders, *ends], return_when=asyncio.FIRST_COMPLETED)
            was_left = orders.done()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_SECONDS):
                    await asyncio.shield(waiting)
            await self._report_ends()
            if all(rank.process.returncode == ENDED for rank in self._ranks):
                return "all told to end"
            return "left" if was_left else "ranks ended"
        finally:
            orders.cancel()
            for end in ends:
                end.cancel()
            await asyncio.gather(orders, waiting, return_exceptions=True)

    async def _connect_as_machine(self) -> None:
        member = self._member
        offer = Machine(
            machine=self._name, host=own_host(), version=member.version, devices=member.devices, names=member.names
        )
        reader, writer = self._control = await self._dial(offer)
        answer = await receive(reader, TO_MACHINE)
        if isinstance(answer, Refused):
            raise error_with_code(answer.exit_code, sanitize(answer.reason))
        if not isinstance(answer, Welcome):
            raise MalformedError("the first machine gave orders before it said welcome")

    async def _dial(self, what: Machine | RankChannel | Tunnel | Answer) -> Streams:
        """Connect with the first machine, check its key, and show the token."""
        member = self._member
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(
                member.host, member.port, ssl=make_client_context(), limit=CHUNK_BYTES
            )
        connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
        try:
            check_certificate(member.token.head, connection.getpeercert(binary_form=True))
        except ForgedError as error:
            await _close(writer)
            text = f"{member.host}:{member.port} has another key than the token names; copy the line that the first"
            raise AdmissionError(f"{text} machine prints") from error
        keep_alive(writer)
        await send(writer, Opening(secret=member.token.secret, what=what))
        return reader, writer

    async def _start_rank(self, index: int) -> None:
        """Start the process of a rank, and connect its channel with rank 0."""
        ours, theirs = socket.socketpair()
        our_words, their_words = socket.socketpair()
        with theirs, their_words:
            fds = theirs.fileno(), their_words.fileno()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", RANK_MODULE, *map(str, (os.getpid(), *fds))),
                pass_fds=fds,
                stdin=asyncio.subprocess.DEVNULL,
                env={**python_environment(), "OMP_NUM_THREADS": str(self._member.threads)},
            )
        self._ranks.append(_RankProcess(process, FrameSocket(our_words)))
        ours.setblocking(False)
        inner = await asyncio.open_unix_connection(sock=ours, limit=CHUNK_BYTES)
        outer = await self._dial(RankChannel(machine=self._name, index=index))
        self._begin(join_streams(inner, outer))

    async def _obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry out the orders of the first machine until it is gone."""
        with contextlib.suppress(ChannelClosed):
            while True:
                order = await receive(reader, TO_MACHINE, None)
                if isinstance(order, Forward):
                    await self._entrances.open(order.targets)
                    await send(writer, Forwarding())
                elif isinstance(order, Dial):
                    self._begin(self._answer(order))

    async def _answer(self, order: Dial) -> None:
        target = order.target
        if not any(rank.listens_at(target) for rank in self._ranks):
            raise MalformedError(
                f"the first machine asked for {target.address}:{target.port}, which is not a rank here"
            )
        far = await self._dial(Answer(dial=order.dial))
        near = await asyncio.open_connection(target.address, target.port, limit=CHUNK_BYTES)
        await join_streams(near, far)

    async def _enter(self, target: Target) -> Streams:
        return await self._dial(Tunnel(target=target.number))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report_ends(self) -> None:
        """Report errors of our ranks. Raises the error of one that cannot go on on this machine."""
        for rank in self._ranks:
            if rank.process.returncode in (None, ENDED):
                continue
            end = _last_message(rank.last_words)
            if isinstance(end, Failed):
                raise error_with_code(end.exit_code, end.reason)
            if end is not None and self._control is not None:
                logger.warning("a rank ended: %s", end.reason)
                with contextlib.suppress(ChannelClosed):
                    await send(self._control[1], end)


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close a connection, and wait until its socket is closed."""
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_SECONDS):
            await writer.wait_closed()


def end_text(end: End, member: SiteMember) -> str:
    """Return the line about the end of an attempt."""
    if end == "no connection":
        return f"no connection with {member.host}:{member.port}; trying again"
    return "the ranks ended; coming back" if end == "ranks ended" else "the first machine starts again; coming back"


def _last_message(channel: FrameSocket) -> Failed | Crashed | None:
    try:
        return channel.receive_as(END, 0.0)
    except (ChannelClosed, MalformedError):
        return None
