"""The supervisor of all connections of a node: who may open one, and the check of their timeouts.

All connections share the node's rate limits (`protocol.transport.rate_limit`), which live here because the bytes of
every path pass here. Calls of peers without standing have a rate of their own.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from typing import Protocol
from weakref import WeakValueDictionary

from protocol.identity import PeerId
from protocol.recent import RecentTable
from protocol.tasks import run_periodically
from protocol.transport.p2pd import Stream
from protocol.transport.rate_limit import Flow, RateLimiter, SharedTokenBuckets, TokenBuckets
from protocol.transport.tunnel import ConnectionLimits, CutReason, RateLimiters, TrafficCounter, Tunnel

logger = logging.getLogger(__name__)

STRANGERS_BYTES_PER_SECOND = 128 * 1024.0  # that all peers without standing send in calls
STREAM_BURST, STREAMS_PER_SECOND = 32, 2.0  # that a peer opens
BAN_SECONDS, MAX_BANNED = 30.0, 4096


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
        self._strangers_limiter = RateLimiter(min(STRANGERS_BYTES_PER_SECOND, limits.download))
        self._stream_opens = TokenBuckets(STREAM_BURST, STREAMS_PER_SECOND)
        self._strangers_opens = SharedTokenBuckets(
            TokenBuckets(STREAM_BURST, STREAMS_PER_SECOND), TokenBuckets(8 * STREAM_BURST, 8 * STREAMS_PER_SECOND)
        )
        self._banned_until = RecentTable[PeerId, float](MAX_BANNED)
        self._flows: WeakValueDictionary[tuple[PeerId, str], Flow] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._incoming: set[SupervisedConnection] = set()
        self._outgoing: set[SupervisedConnection] = set()
        self.refusals: Counter[str] = Counter()
        self._warned_peers: set[PeerId] = set()
        self._check_task = asyncio.create_task(
            run_periodically(self.limits.check_interval, self._cut_timed_out), name="tunnel watcher"
        )

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
        await self.supervise_outgoing(Tunnel(peer, near, far, self.traffic, self.limits, lambda: self.limiters))

    async def run_incoming_tunnel(self, peer: PeerId, near: Stream, far: Stream) -> None:
        tunnel = Tunnel(peer, near, far, self.traffic, self.limits, lambda: self._limiters_of(peer))
        await self.supervise_incoming(tunnel)

    def _limiters_of(self, peer: PeerId) -> RateLimiters:
        """Return the limiters of the calls of a peer: all peers without standing share a small rate of what they send.

        Bytes of HTTP/2 cost work before any call can be charged: pings, resets and settings.
        """
        has_standing = self.has_standing(peer)
        return self.limiters if has_standing else self.limiters._replace(download=self._strangers_limiter)

    def ban(self, peer: PeerId) -> None:
        """Cut a peer's connections, and refuse its streams for BAN_SECONDS."""
        self.refusals["cut for flooding"] += 1
        logger.warning("%s floods this node with calls; it is not answered for %.0f s", peer, BAN_SECONDS)
        self._banned_until[peer] = asyncio.get_running_loop().time() + BAN_SECONDS
        self.cut_peer(peer)

    def may_open_stream(self, peer: PeerId) -> bool:
        """Return whether a peer may open a stream now: it is not banned, and has not opened many a moment ago."""
        now = asyncio.get_running_loop().time()
        if now < self._banned_until.get(peer, 0.0):
            is_allowed = False
        elif self.has_standing(peer):
            is_allowed = self._stream_opens.try_take(peer, now)
        else:
            is_allowed = self._strangers_opens.charge(peer, now) is None
        if not is_allowed:
            self.refusals["too many streams"] += 1
        return is_allowed

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

    def _cut_timed_out(self) -> None:
        now = asyncio.get_running_loop().time()
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
        for limiter in (*self.limiters, self._strangers_limiter):
            if limiter:
                limiter.close()
