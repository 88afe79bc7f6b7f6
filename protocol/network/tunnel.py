"""Tunnels: a local Unix connection of gRPC's, carried on as one libp2p stream, and the reverse.

Two coroutines move the bytes of a tunnel, each waiting until its receiver took what it has sent: no buffer grows. The
clock that ends a stuck tunnel is kept outside them, because a receiver that has frozen blocks a write for ever.
p2pd knows no half-open stream, so when one direction ends, the other may end by itself for a moment and is then cut.
All tunnels of a node share its limits of bytes a second (`protocol.network.rates`), which are kept here, where the
bytes of every path pass.
"""

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from protocol.errors import told
from protocol.identity import PeerId
from protocol.network.control import BUFFER_BYTES, Stream
from protocol.network.rates import Flow, Gate

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TunnelLimits:
    """Times in seconds, counts in tunnels, rates in payload bytes a second over all tunnels."""

    dial: float = 10.0  # until a connection and a stream stand
    stall: float = 30.0  # in which a receiver must take at least one byte
    idle: float = 300.0  # without a byte in either direction
    line_idle: float = 1200.0  # without a call; who opened the line closes it sooner
    linger: float = 2.0  # for the other direction, once one has ended
    tick: float = 1.0  # between two looks at the clock
    incoming_per_peer: int = 40  # a peer's calls, and the lanes of what it fetches
    streams_per_peer: int = 4  # of these by libp2p: for what is small, for bulk, and for either the one it had before
    strangers: int = 64  # streams of all whom we do not know yet
    incoming: int = 512
    upload: float = math.inf
    download: float = math.inf


@dataclass
class Count:
    """Payload bytes."""

    sent: int = 0
    received: int = 0


@dataclass
class Traffic:
    """Bytes through tunnels, in total and by peer; the peers longest silent are forgotten, never their bytes."""

    total: Count = field(default_factory=Count)
    by_peer: OrderedDict[PeerId, Count] = field(default_factory=OrderedDict)
    max_peers: int = 4096

    def of(self, peer: PeerId) -> Count:
        count = self.by_peer.setdefault(peer, Count())
        self.by_peer.move_to_end(peer)
        if len(self.by_peer) > self.max_peers:
            self.by_peer.popitem(last=False)
        return count

    def add_sent(self, peer: PeerId, size: int) -> None:
        self.total.sent += size
        self.of(peer).sent += size

    def add_received(self, peer: PeerId, size: int) -> None:
        self.total.received += size
        self.of(peer).received += size


class Direction:
    """Moves bytes from one socket to another, and tells a watcher how far it got."""

    def __init__(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        count: Callable[[int], None],
        gate: Gate | None = None,
    ) -> None:
        self._source = source
        self._sink = sink
        self._count = count
        self._gate = gate
        self._flow = Flow()
        self.taken = 0  # bytes read from the source

    @property
    def pending(self) -> int:
        """Bytes that the receiver has not taken."""
        return self._sink.transport.get_write_buffer_size()

    async def run(self) -> None:
        """Until the source ends; ConnectionError when either side is cut."""
        while data := await self._source.read(self._gate.grant_bytes if self._gate else BUFFER_BYTES):
            self.taken += len(data)
            if self._gate:
                await self._gate.pass_through(self._flow, len(data))
            self._count(len(data))
            self._sink.write(data)
            await self._sink.drain()
        if self._sink.can_write_eof():
            self._sink.write_eof()


class Progress:
    """PURE: when bytes last moved through a direction, and since when they wait."""

    def __init__(self, now: float) -> None:
        self._passed = 0
        self._pending = 0
        self.moved_at = now

    def observe(self, passed: int, pending: int, now: float) -> None:
        """`passed`: bytes that the receiver took so far. The clock of a wait starts when something begins to wait."""
        if passed != self._passed or (pending and not self._pending):
            self.moved_at = now
        self._passed = passed
        self._pending = pending

    def stalled_for(self, now: float) -> float:
        return now - self.moved_at if self._pending else 0.0


class Gates(NamedTuple):
    """None: no limit."""

    upload: Gate | None = None
    download: Gate | None = None


OPEN = Gates()


class Fault(NamedTuple):
    """Why a tunnel or a line must end."""

    is_stalled: bool  # its receiver takes nothing; else nobody needs it any more
    words: str


def fault_of(stalled: float, silent: float, stall: float, idle: float) -> Fault | None:
    """PURE. Seconds: in which nothing was taken of what waits, in which nothing moved, and what is allowed of each."""
    if stalled > stall:
        return Fault(True, f"nothing was taken for {stalled:.0f} s")
    return Fault(False, f"idle for {silent:.0f} s") if silent > idle else None


class Tunnel:
    """`near` is gRPC's connection, `far` is p2pd's stream."""

    def __init__(
        self, peer: PeerId, near: Stream, far: Stream, traffic: Traffic, limits: TunnelLimits, gates: Gates = OPEN
    ) -> None:
        self.peer = peer
        self._writers = (near.writer, far.writer)
        self._limits = limits
        self._directions = (
            Direction(near.reader, far.writer, lambda size: traffic.add_sent(peer, size), gates.upload),
            Direction(far.reader, near.writer, lambda size: traffic.add_received(peer, size), gates.download),
        )
        now = asyncio.get_running_loop().time()
        self._progress = tuple(Progress(now) for _ in self._directions)

    async def run(self) -> None:
        """Until both directions have ended, or `cut`."""
        pumps = {asyncio.create_task(direction.run()) for direction in self._directions}
        try:
            ended, going = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if going and not any(pump.exception() for pump in ended):
                await asyncio.wait(going, timeout=self._limits.linger)
            await self._flush()
        finally:
            self.cut()
            await _ended(pumps)

    async def _flush(self) -> None:
        for writer in self._writers:
            writer.close()
        try:
            async with asyncio.timeout(self._limits.linger):
                for writer in self._writers:
                    await writer.wait_closed()
        except OSError as error:  # also a TimeoutError
            logger.debug("the last bytes of a tunnel with %s were lost: %s", self.peer, told(error))

    def cut(self) -> None:
        """Ends `run` at once, whatever is under way."""
        for writer in self._writers:
            writer.transport.abort()

    @property
    def moved_at(self) -> float:
        return max(progress.moved_at for progress in self._progress)

    def fault(self, now: float) -> Fault | None:
        """If it must end."""
        for direction, progress in zip(self._directions, self._progress, strict=True):
            progress.observe(direction.taken - direction.pending, direction.pending, now)
        waited = max(progress.stalled_for(now) for progress in self._progress)
        return fault_of(waited, now - self.moved_at, self._limits.stall, self._limits.idle)


async def _ended(pumps: set[asyncio.Task[None]]) -> None:
    for pump in pumps:
        pump.cancel()
    await asyncio.wait(pumps)
    for pump in pumps:
        error = None if pump.cancelled() else pump.exception()
        if error and not isinstance(error, OSError):
            raise error


class Carried(Protocol):
    """What the clock looks at: a tunnel, or a line."""

    peer: PeerId

    @property
    def moved_at(self) -> float: ...
    async def run(self) -> None: ...
    def cut(self) -> None: ...
    def fault(self, now: float) -> Fault | None: ...


class Tunnels:
    """All tunnels and lines of a node, and the clock over them. `refusals`: streams that were not taken, or cut, by
    reason."""

    def __init__(self, limits: TunnelLimits, traffic: Traffic) -> None:
        self.limits = limits
        self.traffic = traffic
        self.knows: Callable[[PeerId], bool] = lambda peer: True  # who is no stranger
        self.gates = Gates(*(Gate(rate) if rate < math.inf else None for rate in (limits.upload, limits.download)))
        for way, rate in (("upload", limits.upload), ("download", limits.download)):
            if rate < math.inf:
                logger.info("%s of all connections together: at most %.0f kB a second", way, rate / 1000)
        self._flows: WeakValueDictionary[tuple[PeerId, str], Flow] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._incoming: set[Carried] = set()
        self._outgoing: set[Carried] = set()
        self.refusals: Counter[str] = Counter()
        self._refused: set[PeerId] = set()
        self._watcher = asyncio.create_task(self._watch(), name="tunnel watcher")

    def __len__(self) -> int:
        return len(self._incoming) + len(self._outgoing)

    def flow(self, peer: PeerId, use: str) -> Flow:
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

    async def carry_out(self, peer: PeerId, near: Stream, far: Stream) -> None:
        await self.keep_out(Tunnel(peer, near, far, self.traffic, self.limits, self.gates))

    async def carry_in(self, peer: PeerId, near: Stream, far: Stream) -> None:
        await self.keep_in(Tunnel(peer, near, far, self.traffic, self.limits, self.gates))

    async def keep_out(self, carried: Carried) -> None:
        """Under the clock for as long as it lasts."""
        await self._keep(carried, self._outgoing)

    async def keep_in(self, carried: Carried) -> None:
        """The same, for what a peer has opened."""
        await self._keep(carried, self._incoming)

    async def _keep(self, carried: Carried, group: set[Carried]) -> None:
        group.add(carried)
        try:
            await carried.run()
        finally:
            group.discard(carried)

    def admits_stream(self, peer: PeerId) -> bool:
        """The same as `admits`, for a stream of libp2p's. Behind each gRPC keeps a megabyte of every call that has not
        come whole yet, so it takes fewer of them."""
        streams = [tunnel for tunnel in self._incoming if isinstance(tunnel, Tunnel)]
        if sum(tunnel.peer == peer for tunnel in streams) >= self.limits.streams_per_peer:
            return self._refuse(peer, self.limits.streams_per_peer)
        if not self.knows(peer):
            self._make_room([tunnel for tunnel in streams if not self.knows(tunnel.peer)], self.limits.strangers)
        return self.admits(peer)

    def admits(self, peer: PeerId) -> bool:
        """Whether `peer` may open one more; where all places are taken, the tunnel that moved least lately yields."""
        if sum(tunnel.peer == peer for tunnel in self._incoming) >= self.limits.incoming_per_peer:
            return self._refuse(peer, self.limits.incoming_per_peer)
        self._refused.discard(peer)
        self._make_room(self._incoming, self.limits.incoming)
        return True

    def _refuse(self, peer: PeerId, held: int) -> bool:
        self.refusals["too many streams"] += 1
        if peer not in self._refused:  # one line for a flood, not one a stream
            self._refused.add(peer)
            logger.warning("refusing %s: it holds %d tunnels", peer, held)
        return False

    def _make_room(self, group: Collection[Carried], most: int) -> None:
        if len(group) >= most:
            yielding = min(group, key=lambda tunnel: tunnel.moved_at)
            self.refusals["stream gave way"] += 1
            logger.warning("all %d tunnels are taken: cutting that of %s", most, yielding.peer)
            self._incoming.discard(yielding)
            yielding.cut()

    def cut(self, peer: PeerId) -> None:
        """End all tunnels with a peer."""
        for tunnel in self._incoming | self._outgoing:
            if tunnel.peer == peer:
                tunnel.cut()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.limits.tick)
            self._look(asyncio.get_running_loop().time())

    def _look(self, now: float) -> None:
        for tunnel in self._incoming | self._outgoing:
            if fault := tunnel.fault(now):
                if fault.is_stalled:
                    self.refusals["stream stalled"] += 1
                logger.info("cutting a tunnel with %s: %s", tunnel.peer, fault.words)
                tunnel.cut()
        self._refused &= {tunnel.peer for tunnel in self._incoming}

    async def stop(self) -> None:
        tasks = {self._watcher, *self._tasks}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for gate in self.gates:
            if gate:
                gate.close()
