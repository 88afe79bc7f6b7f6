"""Fetching a blob from whoever holds it, several sources at once.

The piece hashes come first and are checked against the digest; then every piece is checked against its hash before it
is written. A blob of one piece needs no list: its digest follows from the piece. What was written survives a cut, a
cancel and a restart. At any time at most `max_calls` pieces are in memory, whatever the blobs' sizes.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from protocol.blobs.blob import DIGEST_BYTES, MAX_BLOB_BYTES, Blob, digest_of
from protocol.blobs.client import (
    BlobClient,
    ChannelPool,
    RequestFailedError,
    UnattributedMismatchError,
    translate_errors,
)
from protocol.blobs.partial import Partial
from protocol.blobs.scheduler import (
    DownloadPolicy,
    DownloadScheduler,
    InFlightLimit,
    InflowStats,
    PieceRequest,
    RequestFailure,
    SourceSet,
)
from protocol.blobs.store import BlobStore
from protocol.errors import GoneError, MalformedError, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import PiecesReply
from protocol.tasks import cancel_and_wait

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1  # seconds between two looks at late calls, pauses that are over and new sources
SCAN_SECONDS = 20e-6  # of a pause after each look, for each download: one look over thousands takes milliseconds
MAX_LISTED_FAILURES = 8

FindSources = Callable[[], Sequence[PeerId]]
Receive = Callable[[DownloadScheduler, PieceRequest], Awaitable[None]]


class SchedulerRun:
    """A plan that is being carried out."""

    def __init__(self, scheduler: DownloadScheduler, receive: Receive) -> None:
        self.scheduler = scheduler
        self.running: dict[asyncio.Task[None], PieceRequest] = {}
        self._receive = receive
        self._request_ended = asyncio.Event()  # a call has, or more than one
        self._abort_error: BaseException | None = None

    def start_request(self, awaited_elsewhere: Mapping[PeerId, int], now: float, *, idle_only: bool) -> bool:
        """A call, if one makes sense. `elsewhere`: bytes that other errands await of each source; `idle_only`: ask
        only who has nothing to do for us."""
        call = self.scheduler.next_request(now, awaited_elsewhere, idle_only=idle_only)
        if call is None:
            return False
        task = asyncio.ensure_future(self._receive(self.scheduler, call))
        task.add_done_callback(self._on_request_ended)
        self.running[task] = call
        return True

    def _on_request_ended(self, _: asyncio.Task[None]) -> None:
        self._request_ended.set()

    async def wait_for_ended(self) -> list[asyncio.Task[None]]:
        """Waits until a call has ended."""
        await self._request_ended.wait()
        self._request_ended.clear()
        if self._abort_error:
            raise self._abort_error
        return [task for task in self.running if task.done()]

    def abort(self, error: BaseException) -> None:
        """Nobody begins calls any more."""
        self._abort_error = error
        self._request_ended.set()


class Download:
    """One blob being fetched, for all who wait for it."""

    def __init__(self, blob: Blob, priority: int, sources: SourceSet, downloader: "Downloader") -> None:
        self.priority = priority
        self.waiters: list[FindSources] = []
        self.is_ending = False
        self._absent = asyncio.Event()  # while all sources have
        self._next_refresh_at = 0.0
        self.blob = blob
        self._store = downloader.store
        self._client = downloader.client
        self._sources = sources
        self._downloader = downloader
        self.scheduler_run: SchedulerRun | None = None
        self.task = asyncio.create_task(self._run(), name=f"fetch {blob.name[:12]}")

    def describe_failures(self) -> str:
        """Who was asked, and what came of it."""
        troubles = self._sources.last_failures()
        if not troubles:
            return "no source is known"
        named = "; ".join(f"{peer}: {trouble}" for peer, trouble in list(troubles.items())[:MAX_LISTED_FAILURES])
        return f"{len(troubles)} sources tried: {named}{'; ...' if len(troubles) > MAX_LISTED_FAILURES else ''}"

    def add_waiter(self, sources: FindSources) -> None:
        """One more waits for it, and names sources that may have what the others do not."""
        self.waiters.append(sources)
        self._next_refresh_at = 0.0
        self._absent.clear()
        self._downloader.wake_up()

    def refresh_sources(self, now: float) -> None:
        """For new sources, once a tick."""
        if now >= self._next_refresh_at:
            self._next_refresh_at = now + TICK_SECONDS
            self._sources.update_present(peer for sources in self.waiters for peer in sources())
            self._update_absent()

    def _update_absent(self) -> None:
        if self._sources.all_lack_blob:
            self._absent.set()
        else:
            self._absent.clear()

    async def wait_unless_absent(self) -> None:
        """Wait for it. GoneError: nobody has it."""
        denied = asyncio.create_task(self._absent.wait())
        try:
            await asyncio.wait([self.task, denied], return_when=asyncio.FIRST_COMPLETED)
        finally:
            denied.cancel()
        if not self.task.done():
            raise GoneError(f"blob {self.blob.name} is not there any more: {self.describe_failures()}")
        await self.task

    async def _run(self) -> None:
        if self.blob.size == 0:
            return self._store_empty()
        if self.blob.pieces == 1:
            try:
                return await self._run_scheduler(
                    DownloadScheduler({0: self.blob.size}, self._sources), self._receive_whole
                )
            except UnattributedMismatchError:
                logger.info("blob %s: one piece that does not match; asking for its hash", self.blob.name)
        partial = self._store.open_partial(self.blob, await self._fetch_hashes())
        try:
            await asyncio.to_thread(partial.verify_existing)
            lengths = {piece: self.blob.piece_length(piece) for piece in partial.missing}
            await self._run_scheduler(DownloadScheduler(lengths, self._sources), self._receive_into(partial))
            partial.finish()
        finally:
            partial.close()

    def _store_empty(self) -> None:
        if self._store.put(b"") != self.blob:
            raise MalformedError(f"blob {self.blob.name} is not empty")

    async def _fetch_hashes(self) -> bytes:
        known = self._store.partial_hashes(self.blob)
        found = [] if known is None else [known]

        async def receive(plan: DownloadScheduler, call: PieceRequest) -> None:
            reply = await self._client.fetch_hashes(self.blob, call)
            _check_size(self.blob, reply)
            with translate_errors():
                self.blob.check_hashes(reply.pieces)
            found.append(reply.pieces)

        if not found:
            await self._run_scheduler(DownloadScheduler({0: self.blob.pieces * DIGEST_BYTES}, self._sources), receive)
        return found[0]

    async def _receive_whole(self, scheduler: DownloadScheduler, request: PieceRequest) -> None:
        def keep(data: bytearray) -> None:
            if Blob.of(memoryview(data)) != self.blob:
                raise UnattributedMismatchError
            self._store.put_in_memory(memoryview(data))

        await self._client.fetch_piece(self.blob, scheduler, request, keep)

    def _receive_into(self, partial: Partial) -> Receive:
        async def receive(plan: DownloadScheduler, call: PieceRequest) -> None:
            await self._client.fetch_piece(self.blob, plan, call, lambda data: partial.write(call.piece, data))

        return receive

    async def _run_scheduler(self, scheduler: DownloadScheduler, receive: Receive) -> None:
        """Carry out a plan to its end."""
        self.scheduler_run = errand = SchedulerRun(scheduler, receive)
        try:
            while not scheduler.is_done:
                self._downloader.wake_up()
                for task in await errand.wait_for_ended():
                    self._settle_request(errand, task)
        finally:
            self.scheduler_run = None
            await cancel_and_wait(errand.running)
            self._downloader.wake_up()

    def _settle_request(self, run: SchedulerRun, task: asyncio.Task[None]) -> None:
        plan, call, now = run.scheduler, run.running.pop(task), time.monotonic()
        if not plan.is_running(call):
            # Another source was faster; how this call ended no longer matters, but must be looked at.
            _ = task.cancelled() or task.exception()
            return
        failed = _failure_from(task)
        if failed is None:
            others = plan.record_success(call, now)
            self._update_absent()
            for other in [other for other, its_call in run.running.items() if its_call in others]:
                other.cancel()
            return
        plan.record_failure(call, failed.failure, failed.reason, now)
        logger.info("blob %s piece %d from %s: %s", self.blob.name[:12], call.piece, call.peer, failed.reason)
        self._update_absent()
        if failed.failure is RequestFailure.LIED:
            self._downloader.record_lie(call.peer, failed.reason)


class Downloader:
    """Gets blobs into the store, over channels to peers. `refusals` counts the sources' lies."""

    def __init__(
        self,
        store: BlobStore,
        channels: ChannelPool,
        rng: random.Random,
        policy: DownloadPolicy | None = None,
        max_requests: int = 32,
    ) -> None:
        self.store = store
        self._rng = rng
        self._policy = policy or DownloadPolicy()
        self._channels = channels
        self._max_requests = max_requests
        self._in_flight_limit = InFlightLimit()
        self.client = BlobClient(channels, self._policy.stall_seconds, self._in_flight_limit)
        self._downloads: dict[Blob, Download] = {}
        self.refusals: Counter[str] = Counter()
        self._inflow = InflowStats()  # while anything is fetched,
        self._ticker: asyncio.Task[None] | None = None  # and calls are begun
        self._wake_event = asyncio.Event()  # a call has ended, or there is something new

    @property
    def bytes_received(self) -> int:
        """Bytes of pieces and lists that came, used or not."""
        return self.client.bytes_received

    def record_lie(self, peer: PeerId, reason: str) -> None:
        """Count and log a source that served something else than it was asked for."""
        self.refusals["wrong blob"] += 1
        logger.warning("%s served a wrong blob: %s", peer, reason)

    async def fetch(
        self, blob: Blob, sources: FindSources, deadline: float, priority: int = 0, *, wait_if_absent: bool = True
    ) -> None:
        """Returns when the blob is in the store.

        `sources` is asked again and again for the peers (other than ourselves) that may have it; `deadline` is in
        seconds from now. Of blobs of about the same size those of a lower `turn` are asked for first. `patient`: it may
        not be anywhere yet; otherwise GoneError, once all have said that they do not have it. Raises UnreachableError
        when the deadline has passed, StorageError where the disk is full, and MalformedError where the blob's size is
        proved to be another.
        """
        if self._is_here(blob):
            return
        download: Download | None = None
        try:
            async with asyncio.timeout(deadline):
                download = await self._join(blob, sources, priority)
                await (asyncio.shield(download.task) if wait_if_absent else download.wait_unless_absent())
        except TimeoutError as error:
            trouble = download.describe_failures() if download else "an earlier fetch is still ending"
            logger.warning("blob %s not fetched within %g s: %s", blob.name, deadline, trouble)
            raise UnreachableError(f"blob {blob.name} not fetched within {deadline:g} s: {trouble}") from error
        finally:
            if download:
                await self._leave(download, sources)

    def _is_here(self, blob: Blob) -> bool:
        if not self.store.has(blob.digest):
            return False
        if self.store.blob(blob.digest) != blob:
            raise MalformedError("a blob of that digest has another size")
        return True

    async def _join(self, blob: Blob, sources: FindSources, priority: int) -> Download:
        while (download := self._downloads.get(blob)) and download.is_ending:
            await asyncio.wait([download.task])
        if download is None:
            if not self._downloads:
                self._inflow = InflowStats()
            ledger = SourceSet(self._policy, self._rng, self._channels.parallelism, self._inflow)
            download = Download(blob, priority, ledger, self)
            self._downloads[blob] = download
            download.task.add_done_callback(partial(self._on_download_ended, blob))
        download.add_waiter(sources)
        return download

    def _on_download_ended(self, blob: Blob, _: asyncio.Task[None]) -> None:
        del self._downloads[blob]
        self.wake_up()

    def wake_up(self) -> None:
        """Have calls begun soon."""
        self._wake_event.set()
        if self._ticker is None and self._downloads:
            self._ticker = asyncio.create_task(self._tick(), name="ticker of fetches")
            self._ticker.add_done_callback(self._on_ticker_stopped)

    async def _tick(self) -> None:
        """One look for all, at each tick and soon after something has happened; as long as anything is fetched."""
        while self._downloads:
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._wake_event.wait()
            self._wake_event.clear()
            self._start_due_requests(time.monotonic())
            await asyncio.sleep(SCAN_SECONDS * len(self._downloads))

    def _on_ticker_stopped(self, ticker: asyncio.Task[None]) -> None:
        """A fault in our own code, or of who names sources, is told to all who wait."""
        self._ticker = None
        if not ticker.cancelled() and (error := ticker.exception()):
            for download in self._downloads.values():
                if download.scheduler_run:
                    download.scheduler_run.abort(error)

    def _start_due_requests(self, now: float) -> None:
        """Has errands begin what calls they may: lists of hashes first, small blobs before large ones (by powers of
        two, as a round does not wait for a state), among equals whose turn it is, and then what was wanted first."""
        downloads = sorted(self._downloads.values(), key=lambda each: (each.blob.size.bit_length(), each.priority))
        errands = []
        for download in downloads:
            download.refresh_sources(now)
            if download.scheduler_run:
                errands.append(download.scheduler_run)
        errands.sort(key=lambda errand: not errand.scheduler.is_small)
        awaited = Counter[PeerId]()
        for errand in errands:
            awaited.update(errand.scheduler.awaited_bytes(now))
        self._in_flight_limit.observe(now, self.bytes_received, not awaited)
        self._inflow.rate = self._in_flight_limit.rate
        able = [errand for errand in errands if errand.scheduler.can_start_request(now)]
        if able:
            self._start_requests(able, awaited, max(errand.scheduler.max_parallelism for errand in errands), now)

    def _start_requests(
        self, runs: Sequence[SchedulerRun], awaited: Counter[PeerId], parallelism: int, now: float
    ) -> None:
        """`awaited`: bytes of all errands by source; `places`: calls that the source with the most of them needs.

        Who owes nothing is asked for a piece even where no more may be awaited, up to twice as much: slow sources must
        not take up all of that, or little comes, and it stays so little.
        """
        running = sum(
            len(download.scheduler_run.running) for download in self._downloads.values() if download.scheduler_run
        )
        window = self._in_flight_limit.max_bytes(parallelism)
        for errand in runs:
            own = errand.scheduler.awaited_bytes(now)
            awaited.subtract(own)
            while running < self._max_requests and (size := awaited.total() + sum(own.values())) < 2 * window:
                if not errand.start_request(awaited, now, idle_only=size >= window):
                    break
                running, own = running + 1, errand.scheduler.awaited_bytes(now)
            awaited.update(own)

    async def _leave(self, download: Download, sources: FindSources) -> None:
        """The last one to leave ends the download, and waits until its file is closed."""
        download.waiters.remove(sources)
        if not download.waiters and not download.task.done():
            download.is_ending = True
            await cancel_and_wait([download.task])


def _failure_from(task: asyncio.Task[None]) -> RequestFailedError | None:
    # A call ends as cancelled, too, when its channel is closed under it.
    if task.cancelled():
        return RequestFailedError(RequestFailure.LOST, "the channel was closed")
    error = task.exception()
    if error is None or isinstance(error, RequestFailedError):
        return error
    raise error


def _check_size(blob: Blob, reply: PiecesReply) -> None:
    """A list that yields the digest with another size proves that we were told a wrong size: the source is honest."""
    if reply.size == blob.size or reply.size > MAX_BLOB_BYTES:
        return
    if digest_of(reply.pieces, reply.size) == blob.digest:
        raise MalformedError(f"blob {blob.name} has {reply.size} bytes, not {blob.size}")
