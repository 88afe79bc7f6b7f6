"""p2pd, hivemind's libp2p daemon, as a supervised child process.

We start p2pd ourselves instead of letting hivemind do so, for these reasons: it must die with us even on SIGKILL; it
must start without seeds, because a dead seed would prevent its start; it must neither open router ports nor relay much
for strangers; and it must be restarted when it dies. hivemind's `P2P` is attached to the running process afterwards.
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
use_hivemind_log_handler("nowhere")  # its records propagate to our handlers

BINARY = Path(hivemind.hivemind_cli.__file__).with_name("p2pd")
START_SECONDS = 120.0  # a busy machine may need most of it; a p2pd that exits is noticed at once
SLOW_START_SECONDS = 10.0
STOP_SECONDS = 3.0
MIN_RESTART_DELAY_SECONDS = 0.1  # doubles with each restart up to the maximum
MAX_RESTART_DELAY_SECONDS = 30.0
STABLE_SECONDS = 60.0  # after this uptime the next death counts as the first

# By default p2pd dials from the port on which it listens. Two peers that dial each other at the same moment, as all do
# when they learn of a decision together over a long link, would then share one connection in which both want to be the
# dialler. It fails, and for seconds neither tries again (go-libp2p, issue 2925).
ENVIRONMENT: Final = {"GOLOG_LOG_LEVEL": "error", "LIBP2P_TCP_REUSEPORT": "false"}

# Runs between fork and p2pd in its own interpreter, because our code between fork and exec could deadlock on a lock
# that a gRPC thread held. PR_SET_PDEATHSIG is 1. The check catches a parent that died before the call.
LAUNCHER = """
import ctypes, os, signal, sys
if ctypes.CDLL(None).prctl(1, int(signal.SIGKILL)) or os.getppid() != int(sys.argv[1]):
    sys.exit("cannot tie p2pd to its parent")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class P2pdOptions:
    """Addresses of p2pd as multiaddresses.

    A port 0 is chosen once and kept over restarts.
    """

    identity_path: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()  # peers that may relay to us if nobody can reach us directly


class P2pd:
    """The running p2pd; a restart replaces `p2p`.

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
        """Start p2pd in a private folder with a short path.

        `streams` maps protocol names to the Unix sockets to which p2pd connects for incoming streams.

        Raises:
            PortTakenError: The port is still taken after some seconds.
            TransportError: p2pd cannot be started; the message includes its last output.
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
        """Call `callback` after each restart, once `p2p` is the new one."""
        self._callbacks.append(callback)

    async def stop(self) -> None:
        """Stop p2pd within a few seconds, killing it if necessary."""
        if self._supervisor:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        await self._stop_process()

    async def _supervise(self) -> None:
        delay, loop = MIN_RESTART_DELAY_SECONDS, asyncio.get_running_loop()
        while True:
            assert self._process
            started = loop.time()
            code = await self._process.wait()
            delay = MIN_RESTART_DELAY_SECONDS if loop.time() - started > STABLE_SECONDS else delay
            logger.warning("p2pd exited with code %s; restarting it", code)
            await self._stop_process()
            while not await self._try_relaunch(delay):
                delay = min(2 * delay, MAX_RESTART_DELAY_SECONDS)
            delay = min(2 * delay, MAX_RESTART_DELAY_SECONDS)
            for callback in self._callbacks:
                asyncio.get_running_loop().call_soon(callback)  # not called here: its failure must not end this loop

    async def _try_relaunch(self, delay: float) -> bool:
        await asyncio.sleep(delay)
        try:
            await self._launch_or_clean_up()
        except TransportError as error:
            logger.warning("%s; next attempt in %.1f s", error, min(2 * delay, MAX_RESTART_DELAY_SECONDS))
            self._listen = self._options.listen  # another program may have taken our chosen port
            return False
        return True

    async def _launch_or_clean_up(self) -> None:
        """Launch p2pd, or leave nothing of a failed attempt."""
        try:
            await self._launch()
        except TransportError:
            await self._stop_process()
            raise

    async def _launch(self) -> None:
        (self._folder / "p2pd.sock").unlink(missing_ok=True)  # left by a killed p2pd
        try:
            async with asyncio.timeout(START_SECONDS):
                notice = asyncio.get_running_loop().call_later(SLOW_START_SECONDS, self._log_slow_start)
                try:
                    await self._spawn()
                    await self._attach()
                finally:
                    notice.cancel()
        except TimeoutError as error:
            raise TransportError(
                f"p2pd is not ready after {START_SECONDS:g} s; close programs that keep the machine busy and try again"
            ) from error
        except OSError as error:
            raise TransportError(f"p2pd cannot be started: {error}; reinstall hivemind") from error
        except (EOFError, P2PDaemonError, UnreachableError) as error:
            listen = ", ".join(self._listen)
            if "address already in use" in str(error):
                raise PortTakenError(f"another program uses {listen}; choose another --listen") from error
            raise TransportError(
                f"p2pd exited: {error}; choose another --listen than {listen}, or restore the key"
            ) from error

    def _log_slow_start(self) -> None:
        logger.info("p2pd has not started after %g s because the machine is busy; waiting", SLOW_START_SECONDS)

    async def _spawn(self) -> None:
        launcher = (sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()))
        # A process group of its own: Ctrl-C in the terminal is for us, and we still need p2pd to say goodbye.
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
        self.peer_id, addresses = await self._identify()
        self._listen = with_bound_ports(self._listen, addresses)
        for protocol, listener in self._streams.items():
            await self.client.register_stream_handler(protocol, listener)
        # By default hivemind puts a socket of its own into /tmp.
        attached: Any = type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{self._folder}/"})
        self.p2p = await attached.replicate(Multiaddr(f"/unix{self._folder}/p2pd.sock"))

    async def _identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """Ask p2pd for its addresses, again while it lives: on a busy machine one answer may take long."""
        while True:
            try:
                return await self.client.identify()
            except UnreachableError:
                if self._process is None or self._process.returncode is not None:
                    raise

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
        if self._output_task:  # asyncio releases the process only when this task ends
            await asyncio.wait({self._output_task}, timeout=STOP_SECONDS)
            self._output_task.cancel()


def command_line(options: P2pdOptions, listen: tuple[str, ...], folder: Path) -> list[str]:
    """Return p2pd's command line.

    It overrides each default that would contact or admit strangers.
    """
    flags = {
        "id": options.identity_path.absolute(),
        "listen": f"/unix{folder}/p2pd.sock",
        "hostAddrs": ",".join(listen),
        "b": 0,  # no seeds: a dead one would end p2pd
        "dhtServer": 1,  # finds addresses of peers that hivemind's DHT names only by id
        "natPortMap": 0,
        "autonat": 0,
        "autoRelay": int(bool(options.relays)),
        # Enables dialling through relays. p2pd also relays for others regardless, each for two minutes and 128 KiB.
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
    """Replace each port 0 in `listen` by the bound port.

    A restart thus keeps our addresses valid.
    """
    pattern = re.compile(r"/(ip[46])/[^/]+/(tcp|udp)/([0-9]+)")
    ports = {match[1] + match[2]: match[3] for match in map(pattern.match, addresses) if match}

    def bind(address: str) -> str:
        match = pattern.match(address)
        if not match or match[3] != "0":
            return address
        return address[: match.start(3)] + ports.get(match[1] + match[2], "0") + address[match.end(3) :]

    return tuple(map(bind, listen))


async def _read_output(output: asyncio.StreamReader, ready: asyncio.Future[None]) -> None:
    """Read p2pd's output, because it blocks otherwise.

    Reports the last line if p2pd exits before it is ready.
    """
    last = "no output"
    while True:
        try:
            line = await output.readline()
        except ValueError:  # a line longer than the reader's limit, which the reader has dropped
            continue
        if not line:
            break
        last = line.decode(errors="replace").strip()[:300] or last
        logger.debug("p2pd: %s", last)
        if last.startswith("Peer ID:") and not ready.done():
            ready.set_result(None)
    if not ready.done():
        ready.set_exception(P2PDaemonError(last))
