"""Manage the blob downloads of one replica; their sources may change during a download.

Some owners are slow, so after a while a download also asks other peers, which may have the blob by now. Between two
peers hidden behind NAT only small messages pass (see `protocol.transport.nat`). If only hidden peers have a blob, the
node asks a reachable peer to fetch it first, and downloads it from there (`node.daemon.peers.blob_relay`).
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from node.daemon.peers.peer_rpc import PeerRpc
from node.daemon.peers.swarm_view import SwarmView
from node.monitoring.status import ErrorRecorder
from protocol.blobs.blob import Blob
from protocol.blobs.download import Downloader
from protocol.consensus.messages.contributions import PartBlob
from protocol.errors import PeerFault, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from protocol.tasks import cancel_and_wait

EXTRA_SOURCES_AFTER_SECONDS = 2.0  # before peers other than the named ones are candidates
MAX_EXTRA_SOURCES = 8
MAX_CIRCUIT_BYTES = 32 * 1024  # fits through a circuit relay, which forwards 128 KiB at a time of all traffic
MAX_RELAYS = 3  # candidates one after another
MAX_REQUESTS_PER_RELAY = 8  # to one relay: messages share its connection and must not wait


@dataclass
class _DownloadRequest:
    sources: tuple[PeerId, ...]
    since: float
    unreachable: frozenset[PeerId]
    relays: list[PeerId] = field(default_factory=list)


class Downloads:
    """The open download requests of one replica; `clock` returns seconds."""

    def __init__(
        self,
        downloader: Downloader,
        swarm_view: SwarmView,
        rpc: PeerRpc,
        errors: ErrorRecorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._downloader = downloader
        self._swarm_view = swarm_view
        self._rpc = rpc
        self._errors = errors
        self._clock = clock
        self._requests: dict[PartBlob, _DownloadRequest] = {}
        self._relay_slots: defaultdict[PeerId, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(MAX_REQUESTS_PER_RELAY)
        )

    def request(self, part_blob: PartBlob, sources: Sequence[PeerId]) -> bool:
        """Open a request, or update the sources of an open one; return whether it is new.

        The same blob as another part is another request, because it is checked as that part. So is the same digest with
        another size, which cannot arrive.
        """
        known = self._requests.get(part_blob)
        if known is not None:
            known.sources = tuple(sources)
            return False
        unreachable = (
            self._swarm_view.unreachable_peers() if part_blob.blob.size > MAX_CIRCUIT_BYTES else frozenset[PeerId]()
        )
        self._requests[part_blob] = _DownloadRequest(tuple(sources), self._clock(), unreachable)
        return True

    async def download(
        self,
        part_blob: PartBlob,
        deadline: float,
        owner_message: Signed | None = None,
        priority: int = 0,
        owners: Sequence[PeerId] = (),
    ) -> None:
        """Download a blob; it is in the store when this returns.

        Errors, `priority` and `owners` are those of Downloader.fetch; in `owner_message` its owner names the blob.
        """
        sources = partial(self._current_sources, part_blob)
        with self._relay_request(part_blob, deadline, owner_message):
            await self._downloader.fetch(part_blob.blob, sources, deadline, priority, owners=owners)

    async def download_from_holders(self, blob: Blob, deadline: float, holders: Sequence[PeerId]) -> None:
        """Download from the live holders, or else from any trainer. Raises GoneError if they lack it."""

        def sources() -> Sequence[PeerId]:
            return self._swarm_view.live_peers(holders) or self._swarm_view.other_trainers()

        await self._downloader.fetch(blob, sources, deadline, wait_if_absent=False)

    def cancel(self, part_blob: PartBlob) -> None:
        self._requests.pop(part_blob, None)

    def cancel_all(self) -> None:
        self._requests.clear()
        self._relay_slots.clear()

    async def download_from_anyone(self, deadline: float, *blobs: Blob) -> None:
        """Download blobs concurrently, the first with priority; the first error ends all.

        Raises GoneError if no peer has one of them any more.
        """
        # No TaskGroup: if one of its tasks fails, Python 3.11 leaves a cancellation counted in this task.
        fetches = [
            asyncio.create_task(
                self._downloader.fetch(blob, self._swarm_view.other_trainers, deadline, turn, wait_if_absent=False),
                name=f"get {blob.name[:12]}",
            )
            for turn, blob in enumerate(blobs)
        ]
        try:
            await asyncio.gather(*fetches)
        finally:
            await cancel_and_wait(fetches)

    def _current_sources(self, part_blob: PartBlob) -> tuple[PeerId, ...]:
        request = self._requests.get(part_blob)
        if request is None or not request.sources:
            return tuple(self._swarm_view.other_trainers())
        candidates = [*request.sources, *request.relays]
        if self._clock() - request.since >= EXTRA_SOURCES_AFTER_SECONDS:
            # Python salts hashes per process: a node asks the same few every time, other nodes ask others.
            candidates += sorted(self._swarm_view.other_trainers(), key=lambda peer: hash((part_blob, peer)))[
                :MAX_EXTRA_SOURCES
            ]
        return tuple(peer for peer in dict.fromkeys(candidates) if peer not in request.unreachable)

    @contextmanager
    def _relay_request(self, part_blob: PartBlob, seconds: float, owner_message: Signed | None) -> Iterator[None]:
        """Ask relays, during the download, for a blob that no reachable peer has."""
        blob, request = part_blob.blob, self._requests.get(part_blob)
        if request is None or not request.sources or not request.unreachable.issuperset(request.sources):
            yield
            return
        relay_task = asyncio.create_task(
            self._request_relays(blob, request, owner_message, seconds), name=f"relay {blob.name[:12]}"
        )
        try:
            yield
        finally:
            relay_task.cancel()

    async def _request_relays(
        self, blob: Blob, request: _DownloadRequest, owner_message: Signed | None, seconds: float
    ) -> None:
        owner, faults = request.sources[0], list[str]()
        for relay in self._swarm_view.relay_candidates(owner)[:MAX_RELAYS]:
            if owner_message is None:
                break
            try:
                async with self._relay_slots[relay]:
                    await self._rpc.request_relay(relay, owner_message, blob.digest, seconds)
            except (UnreachableError, PeerFault) as error:
                faults.append(f"{relay}: {error}")
            else:
                return request.relays.append(relay)
        tried = "; ".join(faults) or "there is no relay to ask"
        self._errors.record_recovered(
            "no relay", f"for blob {blob.name[:12]} of {owner}; asking the owner itself ({tried})"
        )
        request.unreachable = frozenset()
