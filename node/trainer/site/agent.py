"""`murmur rank`, a further machine of a site: connect to the first machine and start a rank on each device."""

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
from typing import Any, Final, Literal, TypeAlias

import psutil
import torch
from pydantic import TypeAdapter

from node.flags import MachineFlags
from node.monitoring.display import configure_logs
from node.monitoring.logs import sanitize
from node.options import TrainerOptions, parse_options
from node.processes.process import handle_stop_signals, python_environment, raise_fd_limit
from node.trainer.devices.device import choose_devices, device_name
from node.trainer.ipc.channel import ChannelClosed, Crashed, Failed, FrameSocket
from node.trainer.site.messages import (
    TO_MACHINE,
    Dial,
    DialedConnection,
    Forward,
    Forwarding,
    Machine,
    Opening,
    OpenTunnel,
    RankChannel,
    Refused,
    Target,
    Welcome,
    own_host,
    own_version,
    receive,
    send,
)
from node.trainer.site.token import SiteToken
from node.trainer.site.tunnel import CHUNK_BYTES, Streams, TunnelEntrances, detect_loss, join_streams
from node.units import parse_host_port
from protocol.errors import AdmissionError, ForgedError, MalformedError, UsageError, error_with_code
from protocol.transport.tls.handshake import check_certificate, make_client_context

logger = logging.getLogger(__name__)

RANK_MODULE: Final = "node.trainer.ranks"
CONNECT_SECONDS: Final = 10.0
EXIT_SECONDS: Final = 10.0  # from the end of a connection or a rank until all ranks have exited
ENDED: Final = 0
END: TypeAdapter[Failed | Crashed] = TypeAdapter(Failed | Crashed)
End: TypeAlias = Literal["finished", "first machine restarts", "no connection", "ranks ended"]
SHORT_PAUSE_SECONDS: Final = 0.5  # well below the time that a start waits for machines
LONG_PAUSE_SECONDS: Final = 2.0  # once the first machine has been away for longer than a start takes
START_SECONDS: Final = 120.0
MAX_PAUSE_SECONDS: Final = 60.0  # after failures of our own ranks
STEADY_SECONDS: Final = 60.0  # a failure after longer work counts as the first one


class Pauses:
    """The pauses of one machine between its attempts to join. PURE.

    The first machine starts its trainer again when a machine joins or is lost, and then waits a few seconds for
    machines that come back; one that comes later makes it start again. So a machine that lost its connection comes back
    at once, however often that happens: with growing pauses it would miss each start by more, and cause the next one.
    Pauses grow only after this machine's own ranks have failed.
    """

    def __init__(self) -> None:
        self._failures = 0  # of our ranks, in a row
        self._left_at: float | None = None

    def after(self, end: End, now: float, lasted: float) -> float:
        """Return the pause after an attempt that ended at `now` and lasted `lasted`, all in seconds."""
        if end != "no connection" or self._left_at is None:
            self._left_at = now
        if end == "ranks ended":
            self._failures = 1 if lasted > STEADY_SECONDS else self._failures + 1
            return float(min(MAX_PAUSE_SECONDS, SHORT_PAUSE_SECONDS * 2 ** (self._failures - 1)))
        return SHORT_PAUSE_SECONDS if now - self._left_at < START_SECONDS else LONG_PAUSE_SECONDS


@dataclass(frozen=True)
class SiteMember:
    """The first machine's address and token, and what this machine offers."""

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
    end_channel: FrameSocket  # for the reason of its end

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
    """Offers this machine's devices to the first machine until the training ends."""

    def __init__(self, member: SiteMember) -> None:
        self._member = member

    async def run(self) -> None:
        """Train until the first machine ends the training. Raises MurmurError if this machine cannot continue."""
        pauses, logged = Pauses(), ""
        while True:
            began = time.monotonic()
            end = await self._attempt()
            if end == "finished":
                return
            if end != logged:
                logger.info("%s", end_text(end, self._member))
            logged = end
            now = time.monotonic()
            await asyncio.sleep(pauses.after(end, now, now - began))

    async def _attempt(self) -> End:
        attempt = _Attempt(self._member)
        try:
            async with attempt.open():
                return await attempt.run()
        except (ChannelClosed, MalformedError, OSError, TimeoutError) as error:
            logger.debug("%s", error)
            return "no connection"


class _Attempt:
    """One start of this machine's ranks, with their connections."""

    def __init__(self, member: SiteMember) -> None:
        self._member = member
        self._name = secrets.token_hex(8)
        self._ranks: list[_RankProcess] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._entrances = TunnelEntrances(self._enter)
        self._control: Streams | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Connect to the first machine; end all ranks and connections on exit."""
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
                rank.end_channel.close()
            if self._control is not None:
                await _close(self._control[1])

    async def run(self) -> End:
        """Start a rank on each device, and return how they ended."""
        assert self._control is not None
        for index in range(len(self._member.devices)):
            await self._start_rank(index)
        orders = asyncio.create_task(self._handle_orders(*self._control))
        ends = {asyncio.create_task(rank.process.wait()): rank for rank in self._ranks}
        waiting = asyncio.gather(*ends)
        try:
            await asyncio.wait([orders, *ends], return_when=asyncio.FIRST_COMPLETED)
            is_disconnected = orders.done()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_SECONDS):
                    await asyncio.shield(waiting)
            await self._report_ends()
            if all(rank.process.returncode == ENDED for rank in self._ranks):
                return "finished"
            return "first machine restarts" if is_disconnected else "ranks ended"
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
            raise MalformedError("the first machine sent a command before Welcome")

    async def _dial(self, what: Machine | RankChannel | OpenTunnel | DialedConnection) -> Streams:
        """Connect to the first machine, check its key, and send what the connection is for."""
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
        detect_loss(writer)
        await send(writer, Opening(secret=member.token.secret, what=what))
        return reader, writer

    async def _start_rank(self, index: int) -> None:
        """Start a rank's process, and connect its channel to rank 0."""
        ours, theirs = socket.socketpair()
        our_end, their_end = socket.socketpair()
        with theirs, their_end:
            fds = theirs.fileno(), their_end.fileno()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", RANK_MODULE, *map(str, (os.getpid(), *fds))),
                pass_fds=fds,
                stdin=asyncio.subprocess.DEVNULL,
                env={**python_environment(), "OMP_NUM_THREADS": str(self._member.threads)},
            )
        self._ranks.append(_RankProcess(process, FrameSocket(our_end)))
        ours.setblocking(False)
        inner = await asyncio.open_unix_connection(sock=ours, limit=CHUNK_BYTES)
        outer = await self._dial(RankChannel(machine=self._name, index=index))
        self._begin(join_streams(inner, outer))

    async def _handle_orders(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry out the commands of the first machine until it is gone."""
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
        far = await self._dial(DialedConnection(dial=order.dial))
        near = await asyncio.open_connection(target.address, target.port, limit=CHUNK_BYTES)
        await join_streams(near, far)

    async def _enter(self, target: Target) -> Streams:
        return await self._dial(OpenTunnel(target=target.number))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report_ends(self) -> None:
        """Report crashes of our ranks to the first machine. Raises the error of a rank that cannot continue here."""
        for rank in self._ranks:
            if rank.process.returncode in (None, ENDED):
                continue
            end = _last_message(rank.end_channel)
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
    """Return the log line about the end of an attempt."""
    if end == "no connection":
        return f"no connection with {member.host}:{member.port}; trying again"
    return "the ranks ended; coming back" if end == "ranks ended" else "the first machine starts again; coming back"


def _last_message(channel: FrameSocket) -> Failed | Crashed | None:
    try:
        return channel.receive_as(END, 0.0)
    except (ChannelClosed, MalformedError):
        return None


@dataclass(frozen=True)
class RankOptions:
    """The command line of `murmur rank`, unparsed."""

    address: str
    token: str
    device: str
    devices: str | None
    threads: int | None


def serve_site(options: RankOptions) -> None:
    """Run `murmur rank` until the training or Ctrl-C ends it. Raises MurmurError."""
    member = _member_of(options)
    raise_fd_limit()
    with configure_logs(as_json=False, verbose=False) as display:
        asyncio.run(_run_until_stopped(SiteAgent(member)))
        display.close()


async def _run_until_stopped(agent: SiteAgent) -> None:
    stopped = asyncio.Event()
    handle_stop_signals(asyncio.get_running_loop(), stopped.set)
    work, stop = asyncio.create_task(agent.run()), asyncio.create_task(stopped.wait())
    await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if work.done():
        work.result()
        logger.info("the first machine has ended the training")
        return
    work.cancel()
    await asyncio.wait((work,))


def _member_of(options: RankOptions) -> SiteMember:
    host, port = parse_host_port(options.address, "HOST:PORT")
    if not options.token:
        raise UsageError("--token is missing; copy the line that the first machine prints")
    flags = MachineFlags(device=options.device, devices=options.devices, threads=options.threads)
    checked = parse_options(TrainerOptions, flags)
    devices = choose_devices(checked)
    return SiteMember(
        host=host,
        port=port,
        token=SiteToken.parse(options.token),
        devices=tuple(map(str, devices)),
        names=tuple(map(device_name, devices)),
        version=own_version(torch.__version__),
        threads=max(1, checked.thread_count // len(devices)),
    )
