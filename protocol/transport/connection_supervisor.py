"""Tunnels that carry gRPC's local Unix connections over libp2p streams, and the supervisor of all connections.

Two coroutines move the bytes of a tunnel, and each waits until its receiver has taken the bytes it sent, so no buffer
grows. The timeouts of a stuck tunnel are checked outside them, because a frozen receiver blocks a write for ever. p2pd
has no half-open streams, so when one direction ends, the other gets a moment to end by itself and is then cut. All
tunnels of a node share its rate limits (`protocol.transport.rate_limit`), which live in the supervisor because the
bytes of every path pass here.
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
    """Limits of all connections.

    Times are in seconds, counts in connections, rates in payload bytes a second over all of them.
    """

    dial: float = 10.0  # until a connection and a stream are open
    stall: float = 30.0  # in which a receiver must take at least one byte
    idle: float = 300.0  # without a byte in either direction
    rpc_idle: float = 1200.0  # without a call, for accepted direct connections; the dialling side closes them sooner
    linger: float = 2.0  # for the other direction, once one has ended
    check_interval: float = 1.0  # between two checks of the timeouts
    max_incoming_per_peer: int = 40  # a peer's calls and its bulk connections
    max_streams_per_peer: int = 4  # libp2p streams: one for small calls, one for bulk, and the predecessor of each
    max_unknown_streams: int = 64  # streams of all unknown peers together
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
    """Bytes through all connections, in total and by peer.

    At most `max_peers` peers are kept; forgetting the one longest silent does not change the total.
    """

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
    """Copies bytes between two sockets, reporting each chunk to `record_bytes`."""

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
        self.bytes_read = 0

    @property
    def unsent_bytes(self) -> int:
        """Return the number of bytes that the receiver has not taken."""
        return self._sink.transport.get_write_buffer_size()

    async def run(self) -> None:
        """Copy until the source ends; raise ConnectionError if either side is cut."""
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
    """Tracks when bytes last moved in one direction, and since when they wait.

    The caller passes the time.
    """

    def __init__(self, now: float) -> None:
        self._passed = 0
        self._waiting = 0
        self.last_progress_at = now

    def observe(self, passed: int, waiting: int, now: float) -> None:
        """Record the bytes that the receiver took so far and those that wait.

        A wait begins with its first byte.
        """
        if passed != self._passed or (waiting and not self._waiting):
            self.last_progress_at = now
        self._passed = passed
        self._waiting = waiting

    def stalled_for(self, now: float) -> float:
        return now - self.last_progress_at if self._waiting else 0.0


class RateLimiters(NamedTuple):
    """Rate limiters of a node; `None` means no limit."""

    upload: RateLimiter | None = None
    download: RateLimiter | None = None


UNLIMITED = RateLimiters()


class CutReason(NamedTuple):
    """Why a connection must end."""

    is_stalled: bool  # the receiver takes nothing; otherwise the connection is idle
    text: str


def cut_reason_for(
    stalled_seconds: float, silent_seconds: float, max_stalled: float, max_silent: float
) -> CutReason | None:
    """Return why a connection must end, or None.

    The arguments are its stalled and silent seconds and the allowed maximum of each.
    """
    if stalled_seconds > max_stalled:
        return CutReason(True, f"nothing was taken for {stalled_seconds:.0f} s")
    return CutReason(False, f"idle for {silent_seconds:.0f} s") if silent_seconds > max_silent else None


class Tunnel:
    """One gRPC connection (`near`) carried over one p2pd stream (`far`)."""

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
        """Move bytes until both directions have ended, or until `cut`."""
        pumps = {asyncio.create_task(pump.run()) for pump in self._pumps}
        try:
            done, pending = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if pending and not any(pump.exception() for pump in done):
                await asyncio.wait(pending, timeout=self._limits.linger)
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
        """End `run` at once, dropping bytes in flight."""
        for writer in self._writers:
            writer.transport.abort()

    @property
    def last_progress_at(self) -> float:
        return max(progress.last_progress_at for progress in self._progress)

    def find_cut_reason(self, now: float) -> CutReason | None:
        """Return why this tunnel must end, or None."""
        for pump, progress in zip(self._pumps, self._progress, strict=True):
            progress.observe(pump.bytes_read - pump.unsent_bytes, pump.unsent_bytes, now)
        stalled = max(progress.stalled_for(now) for progress in self._progress)
        return cut_reason_for(stalled, now - self.last_progress_at, self._limits.stall, self._limits.idle)


async def _cancel_pumps(pumps: set[asyncio.Task[None]]) -> None:
    for pump in pumps:
        pump.cancel()
    await asyncio.wait(pumps)
    for pump in pumps:
        error = None if pump.cancelled() else pump.exception()
        if error and not isinstance(error, OSError):
            raise error


class SupervisedConnection(Protocol):
    """A connection with timeouts: a tunnel or a framed direct connection."""

    peer: PeerId

    @property
    def last_progress_at(self) -> float: ...
    async def run(self) -> None: ...
    def cut(self) -> None: ...
    def find_cut_reason(self, now: float) -> CutReason | None: ...


class ConnectionSupervisor:
    """All tunnels and direct connections of a node, and the check of their timeouts.

    `refusals` counts refused and cut streams by reason.
    """

    def __init__(self, limits: ConnectionLimits, traffic: TrafficCounter) -> None:
        self.limits = limits
        self.traffic = traffic
        self.is_known: Callable[[PeerId], bool] = lambda peer: True  # unknown peers share a smaller quota
        self.voters: frozenset[PeerId] = frozenset()  # empty while nobody has a vote yet
        self.limiters = RateLimiters(
            *(RateLimiter(rate) if rate < math.inf else None for rate in (limits.upload, limits.download))
        )
        for direction, rate in (("upload", limits.upload), ("download", limits.download)):
            if rate < math.inf:
                logger.info("limiting the %s of all connections together to %.0f kB/s", direction, rate / 1000)
        self._flows: WeakValueDictionary[tuple[PeerId, str], Flow] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._incoming: set[SupervisedConnection] = set()
        self._outgoing: set[SupervisedConnection] = set()
        self.refusals: Counter[str] = Counter()
        self._warned_peers: set[PeerId] = set()
        self._check_task = asyncio.create_task(self._check_loop(), name="tunnel watcher")

    def __len__(self) -> int:
        return len(self._incoming) + len(self._outgoing)

    def has_standing(self, peer: PeerId) -> bool:
        """Return whether a peer has a vote or, while nobody has one, whether it is known."""
        return peer in self.voters if self.voters else self.is_known(peer)

    def flow_of(self, peer: PeerId, use: str) -> Flow:
        """Return the flow shared by all its holders.

        A limited rate is thus divided by peer, not by connection.
        """
        flow = self._flows.get((peer, use))
        if flow is None:
            flow = self._flows[peer, use] = Flow()
        return flow

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine in a task that `stop` cancels."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run_outgoing_tunnel(self, peer: PeerId, near: Stream, far: Stream) -> None:
        await self.supervise_outgoing(Tunnel(peer, near, far, self.traffic, self.limits, self.limiters))

    async def run_incoming_tunnel(self, peer: PeerId, near: Stream, far: Stream) -> None:
        await self.supervise_incoming(Tunnel(peer, near, far, self.traffic, self.limits, self.limiters))

    async def supervise_outgoing(self, connection: SupervisedConnection) -> None:
        """Run an outgoing connection under the timeouts until it ends."""
        await self._supervise(connection, self._outgoing)

    async def supervise_incoming(self, connection: SupervisedConnection) -> None:
        """Run an incoming connection under the timeouts until it ends."""
        await self._supervise(connection, self._incoming)

    async def _supervise(self, connection: SupervisedConnection, group: set[SupervisedConnection]) -> None:
        group.add(connection)
        try:
            await connection.run()
        finally:
            group.discard(connection)

    def try_admit_stream(self, peer: PeerId) -> bool:
        """Decide as `try_admit` does, with a lower limit for libp2p streams.

        Behind each stream gRPC keeps up to a megabyte for every call that is not complete yet.
        """
        streams = [tunnel for tunnel in self._incoming if isinstance(tunnel, Tunnel)]
        if sum(tunnel.peer == peer for tunnel in streams) >= self.limits.max_streams_per_peer:
            return self._refuse(peer, self.limits.max_streams_per_peer)
        if not self.is_known(peer):
            self._evict_least_active(
                [tunnel for tunnel in streams if not self.is_known(tunnel.peer)], self.limits.max_unknown_streams
            )
        return self.try_admit(peer)

    def try_admit(self, peer: PeerId) -> bool:
        """Return whether `peer` may open one more connection.

        If all slots are taken, the least active connection is cut, but none of a peer with standing before the others.
        """
        if sum(tunnel.peer == peer for tunnel in self._incoming) >= self.limits.max_incoming_per_peer:
            return self._refuse(peer, self.limits.max_incoming_per_peer)
        self._warned_peers.discard(peer)
        self._evict_least_active(self._incoming, self.limits.max_incoming)
        return True

    def _refuse(self, peer: PeerId, open_count: int) -> bool:
        self.refusals["too many streams"] += 1
        if peer not in self._warned_peers:  # log once per flood, not once per stream
            self._warned_peers.add(peer)
            logger.warning("refusing %s: it holds %d connections", peer, open_count)
        return False

    def _evict_least_active(self, group: Collection[SupervisedConnection], limit: int) -> None:
        if len(group) >= limit:
            victim = min(group, key=lambda tunnel: (self.has_standing(tunnel.peer), tunnel.last_progress_at))
            self.refusals["stream evicted"] += 1
            logger.warning("all %d connections are in use: cutting the one with %s", limit, victim.peer)
            self._incoming.discard(victim)
            victim.cut()

    def cut_peer(self, peer: PeerId) -> None:
        """Cut all connections with a peer."""
        for tunnel in self._incoming | self._outgoing:
            if tunnel.peer == peer:
                tunnel.cut()

    async def _check_loop(self) -> None:
        while True:
            await asyncio.sleep(self.limits.check_interval)
            self._cut_timed_out(asyncio.get_running_loop().time())

    def _cut_timed_out(self, now: float) -> None:
        for tunnel in self._incoming | self._outgoing:
            if reason := tunnel.find_cut_reason(now):
                if reason.is_stalled:
                    self.refusals["stream stalled"] += 1
                logger.debug("cutting a connection with %s: %s", tunnel.peer, reason.text)
                tunnel.cut()
        self._warned_peers &= {tunnel.peer for tunnel in self._incoming}

    async def stop(self) -> None:
        tasks = {self._check_task, *self._tasks}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for limiter in self.limiters:
            if limiter:
                limiter.close()
