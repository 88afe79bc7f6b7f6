"""Bulk to and from peers: over several direct connections where there is a direct path, else over libp2p.

A call takes a lease on a channel and gives it back; meanwhile it says what it received and whether it broke. What is
decided from that stands in `paths` (which path) and `lanes` (how many connections); here are the connections.
Nothing waits for a direct path: it is proved beside the calls that go by libp2p, and calls move over when it stands.
"""

import asyncio
import logging
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc

from protocol.errors import UnreachableError
from protocol.identity import PeerId
from protocol.network.arrivals import Arrivals, arrivals, lost_on_the_way
from protocol.network.connection import Connection
from protocol.network.direct import DirectDialer, Place
from protocol.network.lanes import Arrived, Lanes
from protocol.network.line import KEPT_SECONDS, SPARE_SECONDS, LineChannel
from protocol.network.paths import Choice, Path
from protocol.network.tunnel import Tunnels

logger = logging.getLogger(__name__)

TICK = 0.1  # seconds between two looks at the lanes
CALLS_PER_LANE = 2  # so that a lane is never without work
MAX_PLACES = 8192  # that are remembered
MAX_LINKS = 256  # peers to whom bulk went lately


@dataclass(eq=False)
class Lane:
    """One connection of its own."""

    channel: LineChannel = field(init=False)
    calls: int = 0
    connection: socket.socket | None = None  # once it stands
    seen: Arrivals = field(default_factory=Arrivals)

    def look(self) -> int:
        """How many packets show, since the last look, that the link loses some."""
        before, self.seen = self.seen, arrivals(self.connection) if self.connection else Arrivals()
        return lost_on_the_way(before, self.seen)


@dataclass(eq=False)
class Link:
    """All that bulk knows of a peer. `host`: at which it answered last."""

    place: Place | None = None
    host: str = ""
    choice: Choice = field(default_factory=Choice)
    lanes: Lanes = field(default_factory=Lanes)
    open: list[Lane] = field(default_factory=list)
    retired: set[Lane] = field(default_factory=set)  # calls still run on them
    lost: int = 0  # packets so far that show that the link loses some
    is_proving: bool = False

    @property
    def calls(self) -> int:
        return sum(goodput.calls for goodput in self.choice.goodput.values())

    @property
    def busy(self) -> int:
        """Lanes that carry a call."""
        return len(self.retired) + sum(lane.calls > 0 for lane in self.open)

    def observe(self, now: float, peer: int, total: int) -> None:
        """Bytes so far from this peer and from all."""
        self.lost += sum(lane.look() for lane in self.open)
        queued = 2 * sum(lane.seen.queued for lane in self.open) > len(self.open)
        self.lanes.observe(now, self.busy, Arrived(peer, total, self.lost, queued))


class Lease:
    """A channel for one call; enter it for as long as the call runs."""

    def __init__(
        self, bulk: "Bulk", link: Link, path: Path, channel: grpc.aio.Channel | LineChannel, lane: Lane | None
    ) -> None:
        self.channel = channel
        self._bulk = bulk
        self._link = link
        self._path = path
        self._lane = lane
        self._broken = False

    def received(self, size: int) -> None:
        self._link.choice.goodput[self._path].received(size)
        self._bulk.bytes_received[self._path] += size

    def broken(self, reason: str) -> None:
        """The call failed, and the connection may be why."""
        self._broken = True
        if self._path is Path.DIRECT and self._link.choice.is_proved:
            self._bulk.leave_direct(self._link, reason)

    def __enter__(self) -> Self:
        self._link.choice.goodput[self._path].began(_now())
        if self._lane:
            self._lane.calls += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.choice.goodput[self._path].ended(_now())
        if self._path is Path.DIRECT and not self._broken and error is None:
            self._link.choice.delivered()
        if self._lane:
            self._bulk.leave_lane(self._link, self._lane)


class Bulk:
    """`usual` gives the channel by libp2p."""

    def __init__(self, dialer: DirectDialer, tunnels: Tunnels, usual: Callable[[PeerId], grpc.aio.Channel]) -> None:
        self.bytes_received: Counter[Path] = Counter()  # payload of calls
        self._dialer = dialer
        self._tunnels = tunnels
        self._usual = usual
        self._places: OrderedDict[PeerId, Place] = OrderedDict()
        self._links: OrderedDict[PeerId, Link] = OrderedDict()
        self._lanes: set[Lane] = set()
        tunnels.spawn(self._watch())

    def introduce(self, peer: PeerId, place: Place | None) -> None:
        """Where `peer` takes direct connections now, if it does."""
        if place is None:
            self._places.pop(peer, None)
        else:
            self._places[peer] = place
            self._places.move_to_end(peer)
            if len(self._places) > MAX_PLACES:
                self._places.popitem(last=False)
        link = self._links.get(peer)
        if link and link.place != place:
            self._move(link, place)

    def _move(self, link: Link, place: Place | None) -> None:
        link.place = place
        link.choice.moved()
        self._retire(link, 0)

    def lease(self, peer: PeerId) -> Lease:
        """For one call to `peer`, by the path and the lane that serve it best now."""
        now, link = _now(), self._link(peer)
        if link.place and not link.is_proving and link.choice.wants_proof(now):
            link.is_proving = True
            self._tunnels.spawn(self._prove(peer, link, link.place))
        path = link.choice.next(now)
        if path is Path.LIBP2P:
            return Lease(self, link, path, self._usual(peer), None)
        lane = self._lane(peer, link)
        return Lease(self, link, path, lane.channel, lane)

    def standing(self, peer: PeerId) -> AbstractContextManager[LineChannel | None]:
        """A lane for one call that is no bulk and tells nothing of a path; None where no direct path is proved."""
        link = self._links.get(peer)
        if link is None or not link.place or not link.choice.is_proved:
            return nullcontext()
        return self._on(link, self._lane(peer, link))

    def idle(self, peer: PeerId) -> AbstractContextManager[LineChannel | None]:
        """The same, but on a connection that is open and without work."""
        link = self._links.get(peer)
        if link is None or link.choice.best is not Path.DIRECT:
            return nullcontext()
        free = next((lane for lane in link.open if not lane.calls and lane.channel.stands), None)
        return self._on(link, free) if free else nullcontext()

    @contextmanager
    def _on(self, link: Link, lane: Lane) -> Iterator[LineChannel]:
        lane.calls += 1
        try:
            yield lane.channel
        finally:
            self.leave_lane(link, lane)

    def places(self, peer: PeerId) -> int:
        """How many calls to `peer` may well run at once."""
        link = self._links.get(peer)
        if link is None or link.choice.best is Path.LIBP2P:
            return CALLS_PER_LANE
        # What began by libp2p takes no lane's place.
        return CALLS_PER_LANE * link.lanes.width + link.choice.goodput[Path.LIBP2P].calls

    def paths(self) -> dict[PeerId, str]:
        """How bulk goes to each peer that lately had some, in words."""
        return {peer: _words(link) for peer, link in self._links.items()}

    def forget(self, peer: PeerId) -> None:
        """Its place and its lanes, whatever runs on them."""
        self._places.pop(peer, None)
        if link := self._links.pop(peer, None):
            link.place = None
            self._retire(link, 0)

    async def close(self) -> None:
        lanes, self._lanes = self._lanes, set()
        for lane in lanes:
            await lane.channel.close()

    def leave_direct(self, link: Link, reason: str) -> None:
        """Calls that begin from now on go by libp2p."""
        logger.info("a direct connection to %s broke (%s); libp2p for now", link.host, reason)
        link.choice.failed(_now())
        self._retire(link, 0)

    def leave_lane(self, link: Link, lane: Lane) -> None:
        """A call on it has ended."""
        lane.calls -= 1
        if lane in link.retired:
            self._close_if_unused(link, lane)

    def _link(self, peer: PeerId) -> Link:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = Link(self._places.get(peer))
            self._make_room()
        self._links.move_to_end(peer)
        return link

    def _make_room(self) -> None:
        unused = [peer for peer, link in self._links.items() if not link.calls]
        for peer in unused[: max(0, len(self._links) - MAX_LINKS)]:
            self._retire(self._links.pop(peer), 0)

    def _lane(self, peer: PeerId, link: Link) -> Lane:
        """The least busy; one more is opened where all are busy and there may be more."""
        least = min(link.open, key=lambda lane: lane.calls, default=None)
        if least and (least.calls == 0 or len(link.open) >= link.lanes.width):
            return least
        lane = Lane()
        idle = SPARE_SECONDS if link.open else KEPT_SECONDS
        lane.channel = LineChannel(peer, lambda peer: self._dial(peer, link, lane), self._tunnels, idle)
        link.open.append(lane)
        self._lanes.add(lane)
        return lane

    async def _dial(self, peer: PeerId, link: Link, lane: Lane) -> Connection:
        if not link.place:
            raise UnreachableError("it takes no direct connections any more")
        connection, _ = await self._dialer.dial(peer, Place((link.host,), link.place.port))
        lane.connection = connection.socket
        return connection

    async def _prove(self, peer: PeerId, link: Link, place: Place) -> None:
        try:
            connection, host = await self._dialer.dial(peer, place)
        except UnreachableError as error:
            link.choice.failed(_now())
            logger.info("%s is reached by libp2p: %s", peer, error)
        else:
            connection.abort()
            if link.place == place:
                link.host = host
                link.choice.proved(_now())
                logger.info("%s is reached directly, at %s port %d", peer, host, place.port)
        finally:
            link.is_proving = False

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            total = self._tunnels.traffic.total.received
            for peer, link in self._links.items():
                if link.open or link.retired:
                    link.observe(_now(), self._tunnels.traffic.of(peer).received, total)
                    self._retire(link, link.lanes.width)

    def _retire(self, link: Link, kept: int) -> None:
        while len(link.open) > kept:
            lane = link.open.pop()
            link.retired.add(lane)
            self._close_if_unused(link, lane)

    def _close_if_unused(self, link: Link, lane: Lane) -> None:
        if lane.calls == 0 and lane in self._lanes:
            link.retired.discard(lane)
            self._lanes.discard(lane)
            self._tunnels.spawn(lane.channel.close())


def _now() -> float:
    return asyncio.get_running_loop().time()


def _words(link: Link) -> str:
    if link.choice.best is Path.LIBP2P:
        return str(Path.LIBP2P)
    return f"{Path.DIRECT}, {link.lanes.width} connection{'s' if link.lanes.width > 1 else ''}"
