"""p2pd, hivemind's libp2p daemon, as a supervised child process, and the requests to it.

We start p2pd ourselves instead of letting hivemind do so, for these reasons: it must stop with us even on SIGKILL; it
must start without seeds, because a seed that is gone would prevent its start; it must neither open router ports nor
relay much for strangers; and it must be restarted when it stops. hivemind's `P2P` is attached to the running process
afterwards.

The messages on its control socket are hivemind's `p2pd_pb2`, each preceded by its length as a varint. hivemind's own
client has no deadlines, and a cancelled request leaves its socket half open; here each request has a deadline and
closes its socket.
"""

import asyncio
import logging
import math
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

import base58
import hivemind.hivemind_cli
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from protocol.errors import MalformedError, PortTakenError, TransportError, UnreachableError
from protocol.identity import PeerId, public_key
from protocol.transport.local_sockets import retry_while_port_taken

logger = logging.getLogger(__name__)

BUFFER_BYTES = 256 * 1024  # a reader holds at most twice this
REPLY_SECONDS = 10.0  # p2pd answers requests that need no network at once
MAX_ERROR_CHARACTERS = 300
OWN_ADDRESS_ERROR = "dial to self attempted"  # omitted next to other errors: peers behind routers often share addresses
KNOWN_ERRORS: Final = MappingProxyType(
    {"dial backoff": "nothing answered there a moment ago", OWN_ADDRESS_ERROR: "its address is one of ours"}
)
MAX_ADDRESS_LENGTH = 512
P2P_CODE = b"\xa5\x03"  # multicodec of the /p2p/ part of a multiaddress
HOST_PROTOCOLS = ("ip4", "ip6", "dns", "dns4", "dns6")
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
# that a gRPC thread held. PR_SET_PDEATHSIG is 1, and Linux's alone. The check catches a parent that died before it.
LAUNCHER = """
import ctypes, os, signal, sys
is_tied = sys.platform != "linux" or not ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if not is_tied or os.getppid() != int(sys.argv[1]):
    sys.exit("cannot tie p2pd to its parent")
os.execv(sys.argv[2], sys.argv[2:])
"""


class Stream(NamedTuple):
    """A bidirectional byte stream."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class P2pdClient:
    """Client of the p2pd at a Unix socket.

    Raises TransportError if p2pd does not answer, and UnreachableError if it refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """Return our peer id and our addresses, without /p2p/."""
        answer = await self._request(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), REPLY_SECONDS)
        addresses = tuple(str(Multiaddr(address)) for address in answer.identify.addrs)
        return base58.b58encode(answer.identify.id).decode(), addresses

    async def connect(self, peer: PeerId, addresses: Sequence[str], timeout: float) -> None:
        """Connect to a peer within `timeout` seconds.

        Returns at once if a connection exists.
        """
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(
                peer=base58.b58decode(peer),
                addrs=list(map(_encode_address, addresses)),
                timeout=math.ceil(timeout),
            ),
        )
        await self._request(request, timeout)

    async def disconnect(self, peer: PeerId) -> None:
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.DISCONNECT,
            disconnect=p2pd_pb2.DisconnectRequest(peer=base58.b58decode(peer)),
        )
        await self._request(request, REPLY_SECONDS)

    async def remote_addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Return the remote ends of our present connections with a peer."""
        answer = await self._request(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), REPLY_SECONDS)
        raw_id = base58.b58decode(peer)
        return tuple(str(Multiaddr(raw)) for found in answer.peers if found.id == raw_id for raw in found.addrs)

    async def register_stream_handler(self, protocol: str, listener: Path) -> None:
        """Ask p2pd to connect to `listener` for each incoming stream.

        See `read_stream_peer`.
        """
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_HANDLER,
            streamHandler=p2pd_pb2.StreamHandlerRequest(
                addr=Multiaddr(f"/unix{listener}").to_bytes(), proto=[protocol], balanced=False
            ),
        )
        await self._request(request, REPLY_SECONDS)

    async def open_stream(self, peer: PeerId, protocol: str, timeout: float) -> Stream:
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(
                peer=base58.b58decode(peer), proto=[protocol], timeout=math.ceil(timeout)
            ),
        )
        stream, _ = await self._connect_and_request(request, timeout)
        return stream

    async def _request(self, request: Any, timeout: float) -> Any:
        stream, answer = await self._connect_and_request(request, timeout)
        stream.writer.transport.abort()
        return answer

    async def _connect_and_request(self, request: Any, timeout: float) -> tuple[Stream, Any]:
        """Return the answer and its open socket; on failure close the socket."""
        answer = p2pd_pb2.Response()
        stream: Stream | None = None
        try:
            async with asyncio.timeout(timeout):
                stream = Stream(*await asyncio.open_unix_connection(str(self._path), limit=BUFFER_BYTES))
                await write_pbmsg(stream.writer, request)
                await read_pbmsg_safe(stream.reader, answer)
            if answer.type == p2pd_pb2.Response.ERROR:
                raise UnreachableError(summarize_error(answer.error.msg))
        except BaseException as error:
            if stream:
                stream.writer.transport.abort()
            if isinstance(error, TimeoutError):
                raise UnreachableError(f"no answer within {timeout:g} s") from error
            if isinstance(error, OSError | EOFError):
                raise TransportError("p2pd does not answer; it is being restarted") from error
            raise
        return stream, answer


async def read_stream_peer(stream: Stream) -> PeerId:
    """Read the peer that opened a stream from p2pd.

    Raises MalformedError if it has no Ed25519 key.
    """
    information = p2pd_pb2.StreamInfo()
    async with asyncio.timeout(REPLY_SECONDS):
        await read_pbmsg_safe(stream.reader, information)
    peer = base58.b58encode(information.peer).decode()
    public_key(peer)
    return peer


def summarize_error(message: str) -> str:
    """Summarize p2pd's error on one line.

    Failed dials are reduced to their distinct reasons.
    """
    line = " ".join(message.split())
    if "all dials failed" not in line:
        return line[:MAX_ERROR_CHARACTERS]
    reasons = dict.fromkeys(entry.rpartition(": ")[2].split(" * ")[0].strip() for entry in line.split("] ")[1:])
    reasons.pop("", None)
    known = [KNOWN_ERRORS.get(reason, reason) for reason in reasons if reason != OWN_ADDRESS_ERROR or len(reasons) == 1]
    return (", ".join(known) or line)[:MAX_ERROR_CHARACTERS]


def _encode_address(address: str) -> bytes:
    """Encode an address for p2pd.

    hivemind encodes a peer id in the middle of an address as a CID, which p2pd's Go cannot read.
    """
    route, *relays = address.split("/p2p/")
    encoded: bytes = Multiaddr(route).to_bytes()
    for relay in relays:
        peer, _, rest = relay.partition("/")
        identity = base58.b58decode(peer)
        encoded += P2P_CODE + bytes([len(identity)]) + identity
        encoded += Multiaddr(f"/{rest}").to_bytes() if rest else b""
    return encoded


def split_address(address: str) -> tuple[PeerId, str]:
    """Split a multiaddress that ends in /p2p/<peer id> into peer id and route.

    Raises:
        MalformedError: The address is invalid, or p2pd could not encode it.
    """
    route, separator, peer = address.rpartition("/p2p/")
    if not separator or len(address) > MAX_ADDRESS_LENGTH:
        raise MalformedError(f"{address[:100]!r} is not a peer's address: it must end in /p2p/<peer id>")
    public_key(peer)
    with suppress(ValueError, LookupError):
        if Multiaddr(route).protocols()[0].name in HOST_PROTOCOLS and _encode_address(route):
            return peer, route
    raise MalformedError(f"{address[:100]!r} does not begin with a host and port, like /ip4/192.0.2.1/tcp/4001")


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
