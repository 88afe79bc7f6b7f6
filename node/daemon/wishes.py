"""The blobs that are wanted now and who may have them; sources may change while a fetch is under way.

Some owners are slow: what stays open is asked of some others as well, who may have fetched it by now. Between two peers
that are both hidden behind routers only small things pass (see `protocol.network.reach`): for what only hidden ones
have, one that can be called is asked to fetch it first, and then gives it to us (`node.daemon.carrying`).
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from node.daemon.metrics import Setback
from protocol.blobs.blob import Blob
from protocol.blobs.fetch import Fetcher
from protocol.errors import PeerFault, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from protocol.rounds.statements import Digest, Portion
from protocol.tasks import end

PATIENCE = 2.0  # seconds for those who are named, before others are asked as well
OTHERS = 8
SMALL_BYTES = 32 * 1024  # goes through a relay, which passes on 128 KiB at a time, beside what else is said
CARRIERS = 3  # are asked, one after the other
ASKED_AT_ONCE = 8  # of one carrier: what is said to it goes by the same connection, and must not wait for them


@dataclass(frozen=True)
class Porters:
    """`beyond`: peers that are out of our reach for all but small things, while there are some who can carry.
    `between`: who may carry from that peer to us, best first. `ask(carrier, its owner's offer, digest, seconds)`
    returns when the carrier has the blob; UnreachableError or PeerFault where it does not get it. `set_back` hears
    where nobody gets it."""

    beyond: Callable[[], frozenset[PeerId]]
    between: Callable[[PeerId], Sequence[PeerId]]
    ask: Callable[[PeerId, Signed, Digest, float], Awaitable[None]]
    set_back: Callable[[Setback, str], None]


async def _ask_nobody(carrier: PeerId, *_: object) -> None:
    raise UnreachableError(f"{carrier} is not to be asked")


NOBODY = Porters(frozenset, lambda owner: (), _ask_nobody, lambda reason, line: None)


@dataclass
class _Wish:
    sources: tuple[PeerId, ...]
    since: float
    beyond: frozenset[PeerId]
    carriers: list[PeerId] = field(default_factory=list)


class Wishes:
    """`everyone` is asked for peers that may have a blob besides those named; `clock` in seconds."""

    def __init__(
        self, fetcher: Fetcher, everyone: Callable[[], Iterable[PeerId]], porters: Porters = NOBODY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._fetcher = fetcher
        self._everyone = everyone
        self._porters = porters
        self._clock = clock
        self._open: dict[Portion, _Wish] = {}
        self._places: defaultdict[PeerId, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(ASKED_AT_ONCE))

    def want(self, portion: Portion, sources: Sequence[PeerId]) -> bool:
        """Whether this is a new wish; otherwise only its sources are renewed. The same blob as another part is another
        wish, for it is to be checked as that, and so is the same digest with another size, which cannot come."""
        known = self._open.get(portion)
        if known is not None:
            known.sources = tuple(sources)
            return False
        beyond = self._porters.beyond() if portion.blob.size > SMALL_BYTES else frozenset[PeerId]()
        self._open[portion] = _Wish(tuple(sources), self._clock(), beyond)
        return True

    async def get(
        self, portion: Portion, deadline: float, offer: Callable[[], Signed | None] = lambda: None, turn: int = 0
    ) -> None:
        """The blob is in the store when this returns; errors and `turn` are those of Fetcher.fetch. `offer`: its
        owner's."""
        with self._asking(portion, deadline, offer):
            await self._fetcher.fetch(portion.blob, lambda: self._among(portion), deadline, turn)

    async def get_named(self, blob: Blob, deadline: float, holders: Sequence[PeerId]) -> None:
        """From those of the holders that live, or else from anyone. GoneError: they do not have it any more."""

        def sources() -> tuple[PeerId, ...]:
            live = tuple(self._everyone())
            return tuple(peer for peer in holders if peer in live) or live

        await self._fetcher.fetch(blob, sources, deadline, patient=False)

    def drop(self, portion: Portion) -> None:
        """It is no longer wanted."""
        self._open.pop(portion, None)

    def clear(self) -> None:
        """Nothing is wanted any more."""
        self._open.clear()
        self._places.clear()

    async def get_from_anyone(self, deadline: float, *blobs: Blob) -> None:
        """All at once, the first ones first; the first error ends all. GoneError: nobody has one of them any more."""
        # No TaskGroup: where one of its tasks fails, Python 3.11 leaves a cancel counted in ours for good.
        fetches = [
            asyncio.create_task(
                self._fetcher.fetch(blob, lambda: tuple(self._everyone()), deadline, turn, patient=False),
                name=f"get {blob.name[:12]}",
            )
            for turn, blob in enumerate(blobs)
        ]
        try:
            await asyncio.gather(*fetches)
        finally:
            await end(fetches)

    def _among(self, portion: Portion) -> tuple[PeerId, ...]:
        wish = self._open.get(portion)
        if wish is None or not wish.sources:
            return tuple(self._everyone())
        asked = [*wish.sources, *wish.carriers]
        if self._clock() - wish.since >= PATIENCE:
            # Python's hash has a salt of its own in each process: the same few at every look, others for other nodes.
            asked += sorted(self._everyone(), key=lambda peer: hash((portion, peer)))[:OTHERS]
        return tuple(peer for peer in dict.fromkeys(asked) if peer not in wish.beyond)

    @contextmanager
    def _asking(self, portion: Portion, seconds: float, offer: Callable[[], Signed | None]) -> Iterator[None]:
        """While inside, somebody is asked to carry what we cannot fetch ourselves."""
        blob, wish = portion.blob, self._open.get(portion)
        if wish is None or not wish.sources or not wish.beyond.issuperset(wish.sources):
            yield
            return
        asking = asyncio.create_task(self._ask(blob, wish, offer(), seconds), name=f"carry {blob.name[:12]}")
        try:
            yield
        finally:
            asking.cancel()

    async def _ask(self, blob: Blob, wish: _Wish, offer: Signed | None, seconds: float) -> None:
        owner, faults = wish.sources[0], list[str]()
        for carrier in self._porters.between(owner)[:CARRIERS]:
            if offer is None:
                break
            try:
                async with self._places[carrier]:
                    await self._porters.ask(carrier, offer, blob.digest, seconds)
            except (UnreachableError, PeerFault) as error:
                faults.append(f"{carrier}: {error}")
            else:
                return wish.carriers.append(carrier)
        tried = "; ".join(faults) or "there is nobody to ask"
        self._porters.set_back("no carrier", f"of blob {blob.name[:12]} of {owner}, which is asked now ({tried})")
        wish.beyond = frozenset()
