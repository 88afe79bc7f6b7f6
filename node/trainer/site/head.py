"""The first machine of a site: a thread of rank 0 that listens for the other machines."""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from node.monitoring.logs import sanitize
from node.trainer.ipc.channel import ChannelClosed, Crashed, FrameSocket, SiteConfig, TrainerChannel, TrainerWarning
from node.trainer.site.messages import (
    FROM_MACHINE,
    OPENING,
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
    receive,
    send,
)
from node.trainer.site.token import SiteToken, load_site_key
from node.trainer.site.tunnel import CHUNK_BYTES, Streams, TunnelEntrances, detect_loss, join_streams
from protocol.errors import AdmissionError, DeviceError, MalformedError, PortTakenError
from protocol.transport.tls.handshake import ServerHandshake

OPENING_SECONDS: Final = 5.0
DIAL_SECONDS: Final = 10.0
FORWARD_SECONDS: Final = 30.0
MAX_UNAUTHENTICATED: Final = 32  # connections whose secret has not arrived yet
MAX_MACHINES: Final = 63
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class JoinedMachine:
    """A machine that has sent the site's secret."""

    offer: Machine
    address: str
    writer: asyncio.StreamWriter
    channels: dict[int, FrameSocket] = field(default_factory=dict)  # by number of the rank on the machine
    forwarding: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_complete(self) -> bool:
        return len(self.channels) == len(self.offer.devices)


@dataclass(frozen=True)
class SiteRules:
    """The versions and devices that each machine must have."""

    version: str
    devices: int | None  # per machine; None: any number
    kind: str  # cpu or cuda

    def refuse(self, offer: Machine) -> Refused | None:
        """Return why a machine is not admitted; `None` means that it is."""
        if offer.version != self.version:
            return _refuse(f"the first machine has {self.version}, this one {offer.version}; install the same")
        if {device.partition(":")[0] for device in offer.devices} != {self.kind}:
            return _refuse(f"the first machine trains on {self.kind}; give --device or --devices of that kind")
        if self.devices not in (None, len(offer.devices)):
            return _refuse(
                f"each machine of this site needs {self.devices} devices, and this one offers {len(offer.devices)}; "
                "give --devices, or start the first machine with --site-shard all"
            )
        return None


class SiteHead:
    """Listens at the site's address, admits machines by the token, and relays their connections."""

    def __init__(self, config: SiteConfig, rules: SiteRules, daemon: TrainerChannel) -> None:
        self._socket = _listen(config.host, config.port)
        identity = load_site_key(Path(config.key))
        self._token = SiteToken.of(identity)
        self._tls = ServerHandshake(identity).context
        self._rules = rules
        self._daemon = daemon
        self._host = own_host()
        self._machines: dict[str, JoinedMachine] = {}
        self._used: tuple[JoinedMachine, ...] | None = None
        self._is_closing = False
        self._unauthenticated = 0
        self._targets: dict[int, tuple[Target, JoinedMachine | None]] = {}
        self._dials: dict[int, asyncio.Future[Streams]] = {}
        self._dial_numbers = itertools.count()
        self._entrances = TunnelEntrances(self._dial)
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="site", daemon=True)
        self._thread.start()

    def gather(self, seconds: float) -> tuple[JoinedMachine, ...]:
        """Wait for machines, and return the ones to train with; a later one makes all ranks start again."""
        time.sleep(seconds)
        deadline = time.monotonic() + OPENING_SECONDS
        while time.monotonic() < deadline and not all(m.is_complete for m in list(self._machines.values())):
            time.sleep(0.05)  # some ranks of a machine have connected, the others are about to

        async def choose() -> tuple[JoinedMachine, ...]:
            self._used = tuple(machine for machine in self._machines.values() if machine.is_complete)
            return self._used

        return self._call(choose(), OPENING_SECONDS)

    @property
    def newcomer(self) -> str:
        """Return the address of a machine that joined after `gather`; empty if there is none."""
        if self._used is None:
            return ""
        machines = list(self._machines.values())
        return next((m.address for m in machines if m.is_complete and m not in self._used), "")

    def forward(self, targets: Sequence[tuple[Target, JoinedMachine | None]]) -> None:
        """Make targets available on all machines but their own; `None` stands for this machine."""
        self._call(self._forward(targets), FORWARD_SECONDS)

    def close(self, seconds: float) -> None:
        """Wait until the machines have left, then stop listening."""
        self._is_closing = True
        deadline = time.monotonic() + seconds
        while self._machines and time.monotonic() < deadline:
            time.sleep(0.05)
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(max(0.0, deadline + OPENING_SECONDS - time.monotonic()))

    def _call(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._accept, sock=self._socket, ssl=self._tls, ssl_handshake_timeout=OPENING_SECONDS, limit=CHUNK_BYTES
        )
        await self._stop.wait()
        server.close()
        self._entrances.close()
        for machine in self._machines.values():
            for channel in machine.channels.values():
                channel.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opening = await self._admit(reader, writer)
        if opening is None:
            writer.close()
            return
        detect_loss(writer)
        streams = reader, writer
        try:
            match opening.what:
                case Machine() as offer:
                    await self._serve_machine(offer, streams)
                case RankChannel() as channel:
                    await self._serve_channel(channel, streams)
                case OpenTunnel(target=number) if number in self._targets:
                    await join_streams(streams, await self._connect(*self._targets[number]))
                case DialedConnection(dial=number) if number in self._dials:
                    self._dials.pop(number).set_result(streams)
                case _:
                    writer.close()
        except (ChannelClosed, MalformedError, OSError, TimeoutError) as error:
            logger.info("a connection of this site ended: %s", error)
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Opening | None:
        """Return the first message of a caller with the right secret; `None` after a refusal."""
        if self._unauthenticated >= MAX_UNAUTHENTICATED:
            return None
        self._unauthenticated += 1
        try:
            opening = await receive(reader, OPENING, OPENING_SECONDS)
            if self._token.admits(opening.secret):
                return opening
            self._report(writer, "it has another token than this site")
            text = "the first machine refused the token; copy the line that it prints"
            await send(writer, Refused(reason=text, exit_code=AdmissionError.exit_code))
        except (ChannelClosed, MalformedError) as error:
            self._report(writer, str(error))
        finally:
            self._unauthenticated -= 1
        return None

    async def _serve_machine(self, offer: Machine, streams: Streams) -> None:
        reader, writer = streams
        refusal = self._rules.refuse(offer)
        if len(self._machines) >= MAX_MACHINES or offer.machine in self._machines:
            refusal = _refuse(f"this site has {len(self._machines)} machines; at most {MAX_MACHINES}")
        if refusal:
            await send(writer, refusal)
            self._report(writer, refusal.reason)
            writer.close()
            return
        # Before the reply is sent: a second machine that offers itself meanwhile is counted with this one.
        machine = self._machines[offer.machine] = JoinedMachine(offer, _address(writer), writer)
        try:
            await send(writer, Welcome())
            while True:
                message = await receive(reader, FROM_MACHINE, None)
                if isinstance(message, Forwarding):
                    machine.forwarding.set()
                elif message.halve:
                    self._daemon.send(message)
        finally:
            self._lose(machine)

    async def _serve_channel(self, channel: RankChannel, streams: Streams) -> None:
        machine = self._machines.get(channel.machine)
        if machine is None or channel.index in machine.channels or channel.index >= len(machine.offer.devices):
            streams[1].close()
            return
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        inner = await asyncio.open_unix_connection(sock=theirs, limit=CHUNK_BYTES)
        machine.channels[channel.index] = FrameSocket(ours)
        if machine.is_complete:
            logger.info("%s offers %s", machine.address, sanitize(", ".join(machine.offer.names)))
        try:
            await join_streams(streams, inner)
        finally:
            self._lose(machine)

    def _report(self, writer: asyncio.StreamWriter, reason: str) -> None:
        """Report a refusal to the daemon, which counts and logs it."""
        line = f"--site refused {_address(writer)}: {sanitize(reason)}"
        self._daemon.send(TrainerWarning(reason="machine refused", line=line))

    def _lose(self, machine: JoinedMachine) -> None:
        """Forget a machine; if ranks of it train, all ranks must start again."""
        self._machines.pop(machine.offer.machine, None)
        machine.writer.close()
        if self._used and machine in self._used and not self._is_closing:
            reason = f"the machine {machine.address} of this site is gone; all ranks start again without it"
            logger.error("%s", reason)
            with contextlib.suppress(ChannelClosed):
                self._daemon.send(Crashed(reason=reason, exit_code=DeviceError.exit_code))
            os._exit(1)

    async def _forward(self, targets: Sequence[tuple[Target, JoinedMachine | None]]) -> None:
        self._targets = {target.number: (target, machine) for target, machine in targets}
        hosts = {self._host}
        await self._entrances.open([target for target, _ in targets if target.host != self._host])
        for machine in self._used or ():
            # Processes that share a loopback interface need one set of listeners.
            is_first = machine.offer.host not in hosts
            hosts.add(machine.offer.host)
            away = [target for target, _ in targets if target.host != machine.offer.host]
            await send(machine.writer, Forward(targets=tuple(away if is_first else ())))
        for machine in self._used or ():
            await machine.forwarding.wait()

    async def _dial(self, target: Target) -> Streams:
        return await self._connect(*self._targets[target.number])

    async def _connect(self, target: Target, machine: JoinedMachine | None) -> Streams:
        """Connect to a target on this machine, or request the connection from the target's machine."""
        if machine is None:
            return await asyncio.open_connection(target.address, target.port, limit=CHUNK_BYTES)
        number = next(self._dial_numbers)
        answer = self._dials[number] = self._loop.create_future()
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                await send(machine.writer, Dial(dial=number, target=target))
                streams: Streams = await answer
                return streams
        finally:
            self._dials.pop(number, None)


def _refuse(reason: str) -> Refused:
    return Refused(reason=reason, exit_code=DeviceError.exit_code)


def _address(writer: asyncio.StreamWriter) -> str:
    return str(writer.get_extra_info("peername", ("an unknown address",))[0])


def _listen(host: str, port: int) -> socket.socket:
    """Listen at the site's address. Raises PortTakenError."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        text = f"--site: cannot listen at {host}:{port}: {error.strerror}"
        raise PortTakenError(f"{text}; name an address of this machine and a free port") from error
