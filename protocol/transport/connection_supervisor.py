"""Tunnels: a local Unix connection of gRPC's, carried on as one libp2p stream, and the reverse.

Two coroutines move the bytes of a tunnel, each waiting until its receiver took what it has sent: no buffer grows. The
clock that ends a stuck tunnel is kept outside them, because a receiver that has frozen blocks a write for ever.
p2pd knows no half-open stream, so when one direction ends, the other may end by itself for a moment and is then cut.
All tunnels of a node share its limits of bytes a second (`protocol.transport.rate_limit`), which are kept here, where
the bytes of every path pass.
"""

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from protocol.errors import describe_error
from protocol.identity import PeerId
from protocol.transport.libp2p.client import BUFFER_BYTES, Stream
from protocol.transport.rate_limit import Flow, RateLimiter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectionLimits:
    """Times in seconds, counts in tunnels, rates in payload bytes a second over all tunnels."""

    dial: float = 10.0  # until a connection and a stream stand
    stall: float = 30.0  # in which a receiver must take at least one byte
    idle: float = 300.0  # without a byte in either direction
    rpc_idle: float = 1200.0  # without a call; who opened the line closes it sooner
    linger: float = 2.0  # for the other direction, once one has ended
    check_interval: float = 1.0  # between two looks at the clock
    max_incoming_per_peer: int = 40  # a peer's calls, and the lanes of what it fetches
    max_streams_per_peer: int = (
        4  # of these by libp2p: for what is small, for bulk, and for either the one it had before
    )
    max_unknown_streams: int = 64  # streams of all whom we do not know yet
    max_incoming: int = 512
    upload: float = math.inf
    download: float = math.inf


@dataclass
class ByteCount:
    """Payload bytes."""

    sent: int = 0
    received: int = 0


@dataclass
class TrafficCounter:
    """Bytes through tunnels, in total and by peer; the peers longest silent are forgotten, never their bytes."""

    total: ByteCount = field(default_factory=ByteCount)
    by_peer: OrderedDict[PeerId, ByteCount] = field(default_factory=OrderedDict)
    max_peers: int = 4096

    def count_of(self, peer: PeerId) -> ByteCount:
        count = self.by_peer.setdefault(peer, ByteCount())
        self.by_peer.move_to_end(peer)
        if len(self.by_peer) > self.max_peers:
            self.by_peer.popitem(last=False)
        return count

    def add_sent(self, peer: PeerId, size: int) -> None:
        self.total.sent += size
        self.count_of(peer).sent += size

    def add_received(self, peer: PeerId, size: int) -> None:
        self.total.received += size
        self.count_of(peer).received += size


class BytePump:
    """Moves bytes from one socket to another, and tells a watcher how far it got."""

    def __init__(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        record_bytes: Callable[[int], None],
        limiter: RateLimiter | None = None,
    ) -> None:
        self._source = source
        self._sink = sink
        self._record_bytes = record_bytes
        self._limiter = limiter
        self._flow = Flow()
        self.bytes_read = 0  # bytes read from the source

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the receiver has not taken."""
        return self._sink.transport.get_write_buffer_size()

    async def run(self) -> None:
        """Until the source ends; ConnectionError when either side is cut."""
        while data := await self._source.read(self._limiter.grant_bytes if self._limiter else BUFFER_BYTES):
            self.bytes_read += len(data)
            if self._limiter:
                await self._limiter.acquire(self._flow, len(data))
            self._record_bytes(len(data))
            self._sink.write(data)
            await self._sink.drain()
        if self._sink.can_write_eof():
            self._sink.write_eof()


class TransferProgress:
    """PURE: when bytes last moved through a direction, and since when they wait."""

    def __init__(self, now: float) -> None:
        self._passed = 0
        self._waiting = 0
        self.last_progress_at = now

    def observe(self, passed: int, waiting: int, now: float) -> None:
        """`passed`: bytes that the receiver took so far. The clock of a wait starts when something begins to wait."""
        if passed != self._passed or (waiting and not self._waiting):
            self.last_progress_at = now
        self._passed = passed
        self._waiting = waiting

    def stalled_for(self, now: float) -> float:
        return now - self.last_progress_at if self._waiting else 0.0


class RateLimiters(NamedTuple):
    """None: no limit."""

    upload: RateLimiter | None = None
    download: RateLimiter | None = None


UNLIMITED = RateLimiters()


class CutReason(NamedTuple):
    """Why a tunnel or a line must end."""

    is_stalled: bool  # its receiver takes nothing; else nobody needs it any more
    text: str


def cut_reason_for(
    stalled_seconds: float, silent_seconds: float, max_stalled: float, max_silent: float
) -> CutReason | None:
    """PURE. Seconds: in which nothing was taken of what waits, in which nothing moved, and what is allowed of each."""
    if stalled_seconds > max_stalled:
        return CutReason(True, f"nothing was taken for {stalled_seconds:.0f} s")
    return CutReason(False, f"idle for {silent_seconds:.0f} s") if silent_seconds > max_silent else None


class Tunnel:
    """`near` is gRPC's connection, `far` is p2pd's stream."""

    def __init__(
        self,
        peer: PeerId,
        near: Stream,
        far: Stream,
        traffic: TrafficCounter,
        limits: ConnectionLimits,
        limiters: RateLimiters = UNLIMITED,
    ) -> None:
        self.peer = peer
        self._writers = (near.writer, far.writer)
        self._limits = limits
        self._pumps = (
            BytePump(near.reader, far.writer, lambda size: traffic.add_sent(peer, size), limiters.upload),
            BytePump(far.reader, near.writer, lambda size: traffic.add_received(peer, size), limiters.download),
        )
        now = asyncio.get_running_loop().time()
        self._progress = tuple(TransferProgress(now) for _ in self._pumps)

    async def run(self) -> None:
        """Until both directions have ended, or `cut`."""
        pumps = {asyncio.create_task(direction.run()) for direction in self._pumps}
        try:
            ended, going = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if going and not any(pump.exception() for pump in ended):
                await asyncio.wait(going, timeout=self._limits.linger)
            await self._flush()
        finally:
            self.cut()
            await _cancel_pumps(pumps)

    async def _flush(self) -> None:
        for writer in self._writers:
            writer.close()
        try:
            async with asyncio.timeout(self._limits.linger):
                for writer in self._writers:
                    await writer.wait_closed()
        except OSError as error:  # also a TimeoutError
            logger.debug("the last bytes of a tunnel with %s were lost: %s", self.peer, describe_error(error))

    def cut(self) -> None:
        """Ends `run` at once, whatever is under way."""
        for writer in self._writers:
            writer.transport.abort()

    @property
    def last_progress_at(self) -> float:
        return max(progress.last_progress_at for progress in self._progress)

    def find_cut_reason(self, now: float) -> CutReason | None:
        """If it must end."""
        for direction, progress in zip(self._pumps, self._progress, strict=True):
            progress.observe(direction.bytes_read - direction.unsent_bytes, direction.unsent_bytes, now)
        waited = max(progress.stalled_for(now) for progress in self._progress)
        return cut_reason_for(waited, now - self.last_progress_at, self._limits.stall, self._limits.idle)


async def _cancel_pumps(pumps: set[asyncio.Task[None]]) -> None:
    for pump in pumps:
        pump.cancel()
    await asyncio.wait(pumps)
    for pump in pumps:
        error = None if pump.cancelled() else pump.exception()
        if error and not isinstance(error, OSError):
            raise error


class SupervisedConnection(Protocol):
    """What the clock looks at: a tunnel, or a line."""

    peer: PeerId

    @property
    def last_progress_at(self) -> float: ...
    async def run(self) -> None: ...
    def cut(self) -> None: ...
    def find_cut_reason(self, now: float) -> CutReason | None: ...


class ConnectionSupervisor:
    """All tunnels and lines of a node, and the clock over them. `refusals`: streams that were not taken, or cut, by
    reason."""

    def __init__(self, limits: ConnectionLimits, traffic: TrafficCounter) -> None:
        self.limits = limits
        self.traffic = traffic
        self.is_known: Callable[[PeerId], bool] = lambda peer: True  # who is no stranger
        self.limiters = RateLimiters(
            *(RateLimiter(rate) if rate < math.inf else None for rate in (limits.upload, limits.download))
        )
        for way, rate in (("upload", limits.upload), ("download", limits.download)):
            if rate < math.inf:
                logger.info("%s of all connections together: at most %.0f kB a second", way, rate / 1000)
        self._flows: WeakValueDictionary[tuple[PeerId, str], Flow] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._incoming: set[SupervisedConnection] = set()
        self._outgoing: set[SupervisedConnection] = set()
        self.refusals: Counter[str] = Counter()
        self._warned_peers: set[PeerId] = set()
        self._check_task = asyncio.create_task(self._check_loop(), name="tunnel watcher")

    def __len__(self) -> int:
        return len(self._incoming) + len(self._outgoing)

    def flow_of(self, peer: PeerId, use: str) -> Flow:
        """One for all that hold it, so that a limited rate is shared by peers and not by their connections."""
        flow = self._flows.get((peer, use))
        if flow is None:
            flow = self._flows[peer, use] = Flow()
        return flow

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run it until `stop`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run_outgoing_tunnel(self, peer: PeerId, near: Stream, far: Stream) -> None:
        await self.supervise_outgoing(Tunnel(peer, near, far, self.traffic, self.limits, self.limiters))

    async def run_incoming_tunnel(self, peer: PeerId, near: Stream, far: Stream) -> None:
        await self.supervise_incoming(Tunnel(peer, near, far, self.traffic, self.limits, self.limiters))

    async def supervise_outgoing(self, connection: SupervisedConnection) -> None:
        """Under the clock for as long as it lasts."""
        await self._supervise(connection, self._outgoing)

    async def supervise_incoming(self, connection: SupervisedConnection) -> None:
        """The same, for what a peer has opened."""
        await self._supervise(connection, self._incoming)

    async def _supervise(self, connection: SupervisedConnection, group: set[SupervisedConnection]) -> None:
        group.add(connection)
        try:
            await connection.run()
        finally:
            group.discard(connection)

    def try_admit_stream(self, peer: PeerId) -> bool:
        """The same as `admits`, for a stream of libp2p's. Behind each gRPC keeps a megabyte of every call that has not
        come whole yet, so it takes fewer of them."""
        streams = [tunnel for tunnel in self._incoming if isinstance(tunnel, Tunnel)]
        if sum(tunnel.peer == peer for tunnel in streams) >= self.limits.max_streams_per_peer:
            return self._refuse(peer, self.limits.max_streams_per_peer)
        if not self.is_known(peer):
            self._evict_least_active(
                [tunnel for tunnel in streams if not self.is_known(tunnel.peer)], self.limits.max_unknown_streams
            )
        return self.try_admit(peer)

    def try_admit(self, peer: PeerId) -> bool:
        """Whether `peer` may open one more; where all places are taken, the tunnel that moved least lately yields."""
        if sum(tunnel.peer == peer for tunnel in self._incoming) >= self.limits.max_incoming_per_peer:
            return self._refuse(peer, self.limits.max_incoming_per_peer)
        self._warned_peers.discard(peer)
        self._evict_least_active(self._incoming, self.limits.max_incoming)
        return True

    def _refuse(self, peer: PeerId, open_count: int) -> bool:
        self.refusals["too many streams"] += 1
        if peer not in self._warned_peers:  # one line for a flood, not one a stream
            self._warned_peers.add(peer)
            logger.warning("refusing %s: it holds %d tunnels", peer, open_count)
        return False

    def _evict_least_active(self, group: Collection[SupervisedConnection], limit: int) -> None:
        if len(group) >= limit:
            yielding = min(group, key=lambda tunnel: tunnel.last_progress_at)
            self.refusals["stream gave way"] += 1
            logger.warning("all %d tunnels are taken: cutting that of %s", limit, yielding.peer)
            self._incoming.discard(yielding)
            yielding.cut()

    def cut_peer(self, peer: PeerId) -> None:
        """End all tunnels with a peer."""
        for tunnel in self._incoming | self._outgoing:
            if tunnel.peer == peer:
                tunnel.cut()

    async def _check_loop(self) -> None:
        while True:
            await asyncio.sleep(self.limits.check_interval)
            self._cut_timed_out(asyncio.get_running_loop().time())

    def _cut_timed_out(self, now: float) -> None:
        for tunnel in self._incoming | self._outgoing:
            if fault := tunnel.find_cut_reason(now):
                if fault.is_stalled:
                    self.refusals["stream stalled"] += 1
                logger.info("cutting a tunnel with %s: %s", tunnel.peer, fault.text)
                tunnel.cut()
        self._warned_peers &= {tunnel.peer for tunnel in self._incoming}

    async def stop(self) -> None:
        tasks = {self._check_task, *self._tasks}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for gate in self.limiters:
            if gate:
                gate.close()
