"""The blobs that are wanted now and who may have them; sources may change while a fetch is under way.

Some owners are slow: what stays open is asked of some others as well, who may have fetched it by now. Between two peers
that are both hidden behind routers only small things pass (see `protocol.transport.nat`): for what only hidden ones
have, one that can be called is asked to fetch it first, and then gives it to us (`node.daemon.blob_relay`).
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from node.monitoring.status import ErrorRecorder
from protocol.blobs.blob import Blob
from protocol.blobs.download import Downloader
from protocol.consensus.messages import Digest, PartBlob
from protocol.errors import PeerFault, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from protocol.tasks import cancel_and_wait

EXTRA_SOURCES_AFTER_SECONDS = 2.0  # seconds for those who are named, before others are asked as well
MAX_EXTRA_SOURCES = 8
MAX_CIRCUIT_BYTES = 32 * 1024  # goes through a relay, which passes on 128 KiB at a time, beside what else is said
MAX_RELAYS = 3  # are asked, one after the other
MAX_REQUESTS_PER_RELAY = 8  # of one carrier: what is said to it goes by the same connection, and must not wait for them


class SourceView(Protocol):
    """The peers that may have a blob; a SwarmView."""

    def other_trainers(self) -> Sequence[PeerId]: ...

    def unreachable_peers(self) -> frozenset[PeerId]:
        """Return the peers that only small messages reach, if there are others who can relay."""

    def relay_candidates(self, owner: PeerId) -> Sequence[PeerId]:
        """Return the peers that may relay from that peer to us, best first."""


class RelayClient(Protocol):
    async def request_relay(self, relay: PeerId, message: Signed, digest: Digest, seconds: float) -> None:
        """Return when the relay has the blob. UnreachableError or PeerFault: it does not get it."""


@dataclass
class _DownloadRequest:
    sources: tuple[PeerId, ...]
    since: float
    unreachable: frozenset[PeerId]
    relays: list[PeerId] = field(default_factory=list)


class Downloads:
    """The blobs that one replica wants now. `clock` in seconds."""

    def __init__(
        self,
        downloader: Downloader,
        swarm: SourceView,
        relays: RelayClient,
        errors: ErrorRecorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._downloader = downloader
        self._swarm = swarm
        self._relays = relays
        self._errors = errors
        self._clock = clock
        self._requests: dict[PartBlob, _DownloadRequest] = {}
        self._relay_slots: defaultdict[PeerId, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(MAX_REQUESTS_PER_RELAY)
        )

    def request(self, portion: PartBlob, sources: Sequence[PeerId]) -> bool:
        """Whether this is a new wish; otherwise only its sources are renewed. The same blob as another part is another
        wish, for it is to be checked as that, and so is the same digest with another size, which cannot come."""
        known = self._requests.get(portion)
        if known is not None:
            known.sources = tuple(sources)
            return False
        beyond = self._swarm.unreachable_peers() if portion.blob.size > MAX_CIRCUIT_BYTES else frozenset[PeerId]()
        self._requests[portion] = _DownloadRequest(tuple(sources), self._clock(), beyond)
        return True

    async def download(
        self,
        portion: PartBlob,
        deadline: float,
        owner_message: Signed | None = None,
        priority: int = 0,
    ) -> None:
        """The blob is in the store when this returns; errors and `priority` are those of Downloader.fetch.
        `owner_message`: by which its owner names it."""
        with self._relay_request(portion, deadline, owner_message):
            await self._downloader.fetch(portion.blob, partial(self._current_sources, portion), deadline, priority)

    async def download_from_holders(self, blob: Blob, deadline: float, holders: Sequence[PeerId]) -> None:
        """From those of the holders that live, or else from anyone. GoneError: they do not have it any more."""

        def sources() -> tuple[PeerId, ...]:
            live = tuple(self._swarm.other_trainers())
            return tuple(peer for peer in holders if peer in live) or live

        await self._downloader.fetch(blob, sources, deadline, wait_if_absent=False)

    def cancel(self, portion: PartBlob) -> None:
        """It is no longer wanted."""
        self._requests.pop(portion, None)

    def cancel_all(self) -> None:
        """Nothing is wanted any more."""
        self._requests.clear()
        self._relay_slots.clear()

    async def download_from_anyone(self, deadline: float, *blobs: Blob) -> None:
        """All at once, the first ones first; the first error ends all. GoneError: nobody has one of them any more."""
        # No TaskGroup: where one of its tasks fails, Python 3.11 leaves a cancel counted in ours for good.
        fetches = [
            asyncio.create_task(
                self._downloader.fetch(blob, self._swarm.other_trainers, deadline, turn, wait_if_absent=False),
                name=f"get {blob.name[:12]}",
            )
            for turn, blob in enumerate(blobs)
        ]
        try:
            await asyncio.gather(*fetches)
        finally:
            await cancel_and_wait(fetches)

    def _current_sources(self, portion: PartBlob) -> tuple[PeerId, ...]:
        wish = self._requests.get(portion)
        if wish is None or not wish.sources:
            return tuple(self._swarm.other_trainers())
        asked = [*wish.sources, *wish.relays]
        if self._clock() - wish.since >= EXTRA_SOURCES_AFTER_SECONDS:
            # Python's hash has a salt of its own in each process: the same few at every look, others for other nodes.
            asked += sorted(self._swarm.other_trainers(), key=lambda peer: hash((portion, peer)))[:MAX_EXTRA_SOURCES]
        return tuple(peer for peer in dict.fromkeys(asked) if peer not in wish.unreachable)

    @contextmanager
    def _relay_request(self, portion: PartBlob, seconds: float, owner_message: Signed | None) -> Iterator[None]:
        """While inside, somebody is asked to carry what we cannot fetch ourselves."""
        blob, wish = portion.blob, self._requests.get(portion)
        if wish is None or not wish.sources or not wish.unreachable.issuperset(wish.sources):
            yield
            return
        asking = asyncio.create_task(
            self._request_relays(blob, wish, owner_message, seconds), name=f"carry {blob.name[:12]}"
        )
        try:
            yield
        finally:
            asking.cancel()

    async def _request_relays(
        self, blob: Blob, request: _DownloadRequest, owner_message: Signed | None, seconds: float
    ) -> None:
        owner, faults = request.sources[0], list[str]()
        for carrier in self._swarm.relay_candidates(owner)[:MAX_RELAYS]:
            if owner_message is None:
                break
            try:
                async with self._relay_slots[carrier]:
                    await self._relays.request_relay(carrier, owner_message, blob.digest, seconds)
            except (UnreachableError, PeerFault) as error:
                faults.append(f"{carrier}: {error}")
            else:
                return request.relays.append(carrier)
        tried = "; ".join(faults) or "there is nobody to ask"
        self._errors.record_recovered(
            "no relay", f"of blob {blob.name[:12]} of {owner}, which is asked now ({tried})"
        )
        request.unreachable = frozenset()
