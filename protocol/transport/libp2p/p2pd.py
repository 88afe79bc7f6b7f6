"""p2pd (hivemind's libp2p daemon) as a supervised child.

We start it ourselves instead of letting hivemind do so: it must die with us even by SIGKILL, start without seeds
(dead ones would keep it from starting), neither open ports in a router nor relay much for strangers, and be
started again when it dies. hivemind's `P2P` is attached to the running process afterwards.
"""

import asyncio
import logging
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import hivemind.hivemind_cli
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from protocol.errors import PortTakenError, TransportError, UnreachableError
from protocol.identity import PeerId
from protocol.transport.libp2p.client import P2pdClient
from protocol.transport.local_sockets import retry_while_port_taken

logger = logging.getLogger(__name__)
use_hivemind_log_handler("nowhere")  # its records go where ours go

BINARY = Path(hivemind.hivemind_cli.__file__).with_name("p2pd")
START_SECONDS = 15.0
STOP_SECONDS = 3.0
MIN_RESTART_DELAY_SECONDS = 0.1  # seconds before a restart; doubles up to
MAX_RESTART_DELAY_SECONDS = 30.0
STABLE_SECONDS = 60.0  # after this long alive, the next death counts as the first

# It would call from the port on which it listens. Two that call each other at the same moment, as all do who learn of a
# decision together on a long line, then have one connection instead of two, in which both want to be the caller: it
# fails, and for seconds neither tries again (go-libp2p, issue 2925).
ENVIRONMENT: Final = {"GOLOG_LOG_LEVEL": "error", "LIBP2P_TCP_REUSEPORT": "false"}

# Runs between fork and p2pd, in its own interpreter: code of ours between fork and exec could deadlock on a lock that
# a gRPC thread held. PR_SET_PDEATHSIG is 1. The check catches a parent that died before the call.
LAUNCHER = """
import ctypes, os, signal, sys
if ctypes.CDLL(None).prctl(1, int(signal.SIGKILL)) or os.getppid() != int(sys.argv[1]):
    sys.exit("cannot tie p2pd to its parent")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class P2pdOptions:
    """How p2pd is reached. Addresses are multiaddresses; port 0 is chosen once and kept over restarts."""

    identity_path: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()  # who may relay to us, where nobody can call us


class P2pd:
    """The living p2pd. `p2p` and `control` change at a restart.

    The thread that calls `start` must live on: the kernel ties p2pd to the thread that started it.
    """

    peer_id: PeerId
    p2p: Any  # hivemind's P2P

    def __init__(self, options: P2pdOptions, folder: Path, streams: Mapping[str, Path]) -> None:
        self._options = options
        self._folder = folder
        self._streams = streams
        self._listen = options.listen
        self._callbacks: list[Callable[[], None]] = []
        self._process: Process | None = None
        self._output_task: asyncio.Task[None] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self.client = P2pdClient(folder / "p2pd.sock")

    @classmethod
    async def start(cls, options: P2pdOptions, folder: Path, streams: Mapping[str, Path]) -> Self:
        """`streams`: where p2pd shall connect to for incoming streams, by protocol name.

        `folder` is private and its path short. PortTakenError: after some seconds
        its port is still another's. TransportError: p2pd cannot be started, and its last words.
        """
        self = cls(options, folder, streams)
        try:
            await retry_while_port_taken(self._launch_or_clean_up)
        except BaseException:
            await self.stop()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="p2pd supervisor")
        return self

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def on_restart(self, callback: Callable[[], None]) -> None:
        """Called after each restart, when `p2p` is the new one."""
        self._callbacks.append(callback)

    async def stop(self) -> None:
        """Bounded by a few seconds; leaves no process."""
        if self._supervisor:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        await self._stop_process()

    async def _supervise(self) -> None:
        delay, loop = MIN_RESTART_DELAY_SECONDS, asyncio.get_running_loop()
        while True:
            assert self._process
            began = loop.time()
            code = await self._process.wait()
            delay = MIN_RESTART_DELAY_SECONDS if loop.time() - began > STABLE_SECONDS else delay
            logger.warning("p2pd ended with code %s; it is started again", code)
            await self._stop_process()
            while not await self._try_relaunch(delay):
                delay = min(2 * delay, MAX_RESTART_DELAY_SECONDS)
            delay = min(2 * delay, MAX_RESTART_DELAY_SECONDS)
            for callback in self._callbacks:
                asyncio.get_running_loop().call_soon(callback)  # its failure must not end this loop

    async def _try_relaunch(self, delay: float) -> bool:
        await asyncio.sleep(delay)
        try:
            await self._launch_or_clean_up()
        except TransportError as error:
            logger.warning("%s; next attempt in %.1f s", error, min(2 * delay, MAX_RESTART_DELAY_SECONDS))
            self._listen = self._options.listen  # the port that was ours may be another's by now
            return False
        return True

    async def _launch_or_clean_up(self) -> None:
        """Or nothing is left of the attempt."""
        try:
            await self._launch()
        except TransportError:
            await self._stop_process()
            raise

    async def _launch(self) -> None:
        (self._folder / "p2pd.sock").unlink(missing_ok=True)  # a killed p2pd leaves it
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._spawn()
                await self._attach()
        except TimeoutError as error:
            raise TransportError(
                f"p2pd is not up after {START_SECONDS:g} s; close programs that keep the machine busy, and try again"
            ) from error
        except OSError as error:
            raise TransportError(f"p2pd cannot be started: {error}; install hivemind again") from error
        except (EOFError, P2PDaemonError, UnreachableError) as error:
            listen = ", ".join(self._listen)
            if "address already in use" in str(error):
                raise PortTakenError(f"another program has {listen}; give another --listen") from error
            raise TransportError(
                f"p2pd ended: {error}; give another --listen than {listen}, or restore the key"
            ) from error

    async def _spawn(self) -> None:
        launcher = (sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()))
        # Its own process group: a Ctrl-C in the terminal is for us, and we still need p2pd to say goodbye.
        self._process = await asyncio.create_subprocess_exec(
            *launcher,
            *command_line(self._options, self._listen, self._folder),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env=os.environ | ENVIRONMENT,
            process_group=0,
        )
        assert self._process.stdout
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._output_task = asyncio.create_task(_read_output(self._process.stdout, ready), name="p2pd output")
        await ready

    async def _attach(self) -> None:
        self.peer_id, addresses = await self.client.identify()
        self._listen = with_bound_ports(self._listen, addresses)
        for protocol, listener in self._streams.items():
            await self.client.register_stream_handler(protocol, listener)
        # hivemind puts a socket of its own into /tmp, unless told a better place.
        attached: Any = type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{self._folder}/"})
        self.p2p = await attached.replicate(Multiaddr(f"/unix{self._folder}/p2pd.sock"))

    async def _stop_process(self) -> None:
        if hasattr(self, "p2p"):
            await self.p2p.shutdown()
        process = self._process
        if process and process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                logger.warning("p2pd did not end within %g s; killing it", STOP_SECONDS)
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._output_task:  # its end is also when asyncio lets go of the process
            await asyncio.wait({self._output_task}, timeout=STOP_SECONDS)
            self._output_task.cancel()


def command_line(options: P2pdOptions, listen: tuple[str, ...], folder: Path) -> list[str]:
    """p2pd's command line. Whatever has a default that reaches out or lets in is set."""
    flags = {
        "id": options.identity_path.absolute(),
        "listen": f"/unix{folder}/p2pd.sock",
        "hostAddrs": ",".join(listen),
        "b": 0,  # no seeds: one that is dead would end p2pd
        "dhtServer": 1,  # finds addresses of peers that hivemind's DHT names by id only
        "natPortMap": 0,
        "autonat": 0,
        "autoRelay": int(bool(options.relays)),
        # Dials circuits. Whatever is said here, p2pd also carries those of others, each for two minutes and 128 KiB.
        "relay": 1,
        "relayService": 0,
        "relayDiscovery": 0,
        "connManager": 1,
        "tls": 1,
        "idleTimeout": "30s",  # a second way to die with us
    }
    if options.relays:
        flags["forceReachabilityPrivate"] = 1
        flags["trustedRelays"] = ",".join(options.relays)
    if options.announce:
        flags["announceAddrs"] = ",".join(options.announce)
    return [str(BINARY), *(f"-{name}={value}" for name, value in flags.items())]


def with_bound_ports(listen: tuple[str, ...], addresses: tuple[str, ...]) -> tuple[str, ...]:
    """`listen` with each port 0 replaced by the one that was given, so that a restart keeps our addresses true."""
    pattern = re.compile(r"/(ip[46])/[^/]+/(tcp|udp)/([0-9]+)")
    ports = {match[1] + match[2]: match[3] for match in map(pattern.match, addresses) if match}

    def kept(address: str) -> str:
        match = pattern.match(address)
        if not match or match[3] != "0":
            return address
        return address[: match.start(3)] + ports.get(match[1] + match[2], "0") + address[match.end(3) :]

    return tuple(map(kept, listen))


async def _read_output(output: asyncio.StreamReader, ready: asyncio.Future[None]) -> None:
    """p2pd blocks when nobody reads; its last line is the reason where it ends before it is ready."""
    last = "it said nothing"
    while True:
        try:
            line = await output.readline()
        except ValueError:  # longer than the reader's limit, which it has dropped
            continue
        if not line:
            break
        last = line.decode(errors="replace").strip()[:300] or last
        logger.debug("p2pd: %s", last)
        if last.startswith("Peer ID:") and not ready.done():
            ready.set_result(None)
    if not ready.done():
        ready.set_exception(P2PDaemonError(last))
