"""Tunnels that carry gRPC's local Unix connections over libp2p streams.

Two coroutines move the bytes of a tunnel, and each waits until its receiver has taken the bytes it sent, so no buffer
grows. The timeouts of a stuck tunnel are checked outside them, because a frozen receiver blocks a write for ever. p2pd
has no half-open streams, so when one direction ends, the other gets a moment to end by itself and is then cut.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.errors import describe_error
from protocol.identity import PeerId
from protocol.recent import RecentTable
from protocol.transport.p2pd import BUFFER_BYTES, Stream
from protocol.transport.rate_limit import Flow, RateLimiter

logger = logging.getLogger(__name__)

MAX_COUNTED_PEERS = 4096


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

    At most MAX_COUNTED_PEERS peers are kept; forgetting the one longest silent does not change the total.
    """

    total: ByteCount = field(default_factory=ByteCount)
    by_peer: RecentTable[PeerId, ByteCount] = field(default_factory=lambda: RecentTable(MAX_COUNTED_PEERS))

    def count_of(self, peer: PeerId) -> ByteCount:
        count = self.by_peer[peer] = self.by_peer.get(peer) or ByteCount()
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
        choose_limiter: "Callable[[], RateLimiter | None]" = lambda: None,
    ) -> None:
        self._source = source
        self._sink = sink
        self._record_bytes = record_bytes
        self._choose_limiter = choose_limiter
        self._flow = Flow()
        self.bytes_read = 0

    @property
    def unsent_bytes(self) -> int:
        """Return the number of bytes that the receiver has not taken."""
        return self._sink.transport.get_write_buffer_size()

    async def run(self) -> None:
        """Copy until the source ends; raise ConnectionError if either side is cut."""
        while data := await self._read():
            self.bytes_read += len(data)
            if limiter := self._choose_limiter():
                await limiter.acquire(self._flow, len(data))
            self._record_bytes(len(data))
            self._sink.write(data)
            await self._sink.drain()
        if self._sink.can_write_eof():
            self._sink.write_eof()

    async def _read(self) -> bytes:
        limiter = self._choose_limiter()
        return await self._source.read(limiter.grant_bytes if limiter else BUFFER_BYTES)


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
        choose_limiters: Callable[[], RateLimiters] = RateLimiters,
    ) -> None:
        """Carry a connection; `choose_limiters` gives the limiters of each chunk."""
        self.peer = peer
        self._writers = (near.writer, far.writer)
        self._limits = limits
        self._pumps = (
            BytePump(
                near.reader, far.writer, lambda size: traffic.add_sent(peer, size), lambda: choose_limiters().upload
            ),
            BytePump(
                far.reader,
                near.writer,
                lambda size: traffic.add_received(peer, size),
                lambda: choose_limiters().download,
            ),
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
