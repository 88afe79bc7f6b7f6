"""Downloads of blobs from several sources at once.

The piece hashes are fetched first and checked against the digest; then every piece is checked against its hash before
it is written. A blob of one piece needs no list, because its digest follows from the piece. Written pieces survive a
lost connection, a cancelled download and a restart. At most `max_requests` pieces are in memory at any time, whatever
the sizes of the blobs.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from protocol.blobs.blob import DIGEST_BYTES, MAX_BLOB_BYTES, Blob, digest_of
from protocol.blobs.client import (
    BlobClient,
    ChannelPool,
    UnattributedMismatchError,
    failure_of,
    translate_errors,
)
from protocol.blobs.scheduler import (
    DownloadPolicy,
    DownloadScheduler,
    InFlightLimit,
    InflowStats,
    PieceRequest,
    Receive,
    RequestFailure,
    SchedulerRun,
    SourceSet,
)
from protocol.blobs.storage import Partial
from protocol.blobs.store import BlobStore
from protocol.errors import DeniedError, GoneError, MalformedError, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import PiecesReply
from protocol.tasks import cancel_and_wait

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1  # between two checks for late requests, expired delays and new sources
SCAN_SECONDS = 20e-6  # pause per download after each check, because checking thousands takes milliseconds
MAX_LISTED_FAILURES = 8

FindSources = Callable[[], Sequence[PeerId]]


class Download:
    """The download of one blob, shared by all callers that wait for it."""

    def __init__(self, blob: Blob, priority: int, sources: SourceSet, downloader: "Downloader") -> None:
        self.priority = priority
        self.waiters: list[FindSources] = []
        self.is_ending = False
        self._absent = asyncio.Event()  # set while all sources deny having the blob
        self._denials: dict[PeerId, asyncio.Future[None]] = {}  # of sources that have to have it
        self._next_refresh_at = 0.0
        self.blob = blob
        self._store = downloader.store
        self._client = downloader.client
        self._sources = sources
        self._downloader = downloader
        self.scheduler_run: SchedulerRun | None = None
        self.task = asyncio.create_task(self._run(), name=f"fetch {blob.name[:12]}")

    def describe_failures(self) -> str:
        """Return a text that lists the sources tried and their failures."""
        failures = self._sources.last_failures()
        if not failures:
            return "no source is known"
        listed = "; ".join(f"{peer}: {failure}" for peer, failure in list(failures.items())[:MAX_LISTED_FAILURES])
        return f"{len(failures)} sources tried: {listed}{'; ...' if len(failures) > MAX_LISTED_FAILURES else ''}"

    def add_waiter(self, sources: FindSources) -> None:
        """Add a waiter, whose sources may have a blob that the others lack."""
        self.waiters.append(sources)
        self._next_refresh_at = 0.0
        self._absent.clear()
        self._downloader.wake_up()

    def refresh_sources(self, now: float) -> None:
        """Ask the waiters for their sources, once a tick."""
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
        """Wait for the blob; raise GoneError if no source has it."""
        absent = asyncio.create_task(self._absent.wait())
        try:
            await asyncio.wait([self.task, absent], return_when=asyncio.FIRST_COMPLETED)
        finally:
            absent.cancel()
        if not self.task.done():
            raise GoneError(f"blob {self.blob.name} is not there any more: {self.describe_failures()}")
        await self.task

    async def wait_unless_denied(self, owners: Sequence[PeerId]) -> None:
        """Wait for the blob; raise DeniedError if a source that has to have it says that it lacks it."""
        new_future = asyncio.get_running_loop().create_future
        denials = {owner: self._denials.setdefault(owner, new_future()) for owner in owners}
        await asyncio.wait([self.task, *denials.values()], return_when=asyncio.FIRST_COMPLETED)
        if not self.task.done():
            owner = next(owner for owner, denial in denials.items() if denial.done())
            raise DeniedError(f"{owner} lacks blob {self.blob.name}, which it has named itself", owner)
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
                logger.debug("blob %s: its only piece does not match; fetching its hash", self.blob.name)
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

        async def receive(_scheduler: DownloadScheduler, request: PieceRequest) -> None:
            reply = await self._client.fetch_hashes(self.blob, request)
            _check_size(self.blob, reply)
            with translate_errors():
                self.blob.check_hashes(reply.pieces)
            found.append(reply.pieces)

        if not found:
            await self._run_scheduler(DownloadScheduler({0: self.blob.pieces * DIGEST_BYTES}, self._sources), receive)
        return found[0]

    async def _receive_whole(self, scheduler: DownloadScheduler, request: PieceRequest) -> None:
        def store(data: bytearray) -> None:
            if Blob.of(memoryview(data)) != self.blob:
                raise UnattributedMismatchError
            self._store.put_in_memory(memoryview(data))

        await self._client.fetch_piece(self.blob, scheduler, request, store)

    def _receive_into(self, partial: Partial) -> Receive:
        async def receive(scheduler: DownloadScheduler, request: PieceRequest) -> None:
            await self._client.fetch_piece(
                self.blob, scheduler, request, lambda data: partial.write(request.piece, data)
            )

        return receive

    async def _run_scheduler(self, scheduler: DownloadScheduler, receive: Receive) -> None:
        """Run a scheduler until all its pieces have arrived."""
        self.scheduler_run = run = SchedulerRun(scheduler, receive)
        try:
            while not scheduler.is_done:
                self._downloader.wake_up()
                for task in await run.wait_for_ended():
                    self._settle_request(run, task)
        finally:
            self.scheduler_run = None
            await cancel_and_wait(run.running)
            self._downloader.wake_up()

    def _settle_request(self, run: SchedulerRun, task: asyncio.Task[None]) -> None:
        scheduler, request, now = run.scheduler, run.running.pop(task), time.monotonic()
        if not scheduler.is_running(request):
            # Another source was faster, so this outcome does not matter; retrieve it to avoid asyncio's warning.
            _ = task.cancelled() or task.exception()
            return
        failure = failure_of(task)
        if failure is None:
            others = scheduler.record_success(request, now)
            self._update_absent()
            for other in [other for other, its_request in run.running.items() if its_request in others]:
                other.cancel()
            return
        scheduler.record_failure(request, failure.failure, failure.reason, now)
        logger.debug("blob %s piece %d from %s: %s", self.blob.name[:12], request.piece, request.peer, failure.reason)
        self._update_absent()
        denial = self._denials.get(request.peer) if failure.failure is RequestFailure.ABSENT else None
        if denial is not None and not denial.done():
            denial.set_result(None)
        if failure.failure is RequestFailure.LIED:
            self._downloader.record_lie(request.peer, failure.reason)


class Downloader:
    """Fetches blobs into the store; `refusals` counts the sources that lied."""

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
        self._inflow = InflowStats()  # since the first of the present downloads began
        self._ticker: asyncio.Task[None] | None = None  # starts requests while anything is fetched
        self._wake_event = asyncio.Event()  # a request has ended, or there is new work

    @property
    def bytes_received(self) -> int:
        """Return the bytes of pieces and hash lists received, whether used or not."""
        return self.client.bytes_received

    def record_lie(self, peer: PeerId, reason: str) -> None:
        """Count and log a source that served wrong bytes."""
        self.refusals["wrong blob"] += 1
        logger.warning("%s served a wrong blob: %s", peer, reason)

    async def fetch(
        self,
        blob: Blob,
        sources: FindSources,
        deadline: float,
        priority: int = 0,
        *,
        wait_if_absent: bool = True,
        owners: Sequence[PeerId] = (),
    ) -> None:
        """Return when the blob is in the store.

        `sources` is asked repeatedly for the peers (other than us) that may have the blob; `deadline` is in seconds
        from now. Among blobs of about the same size, those with a lower `priority` go first. Set `wait_if_absent` for a
        blob that may not exist anywhere yet. `owners` have to have it since they named it.

        Raises:
            UnreachableError: The deadline has passed.
            DeniedError: One of the owners denies having the blob.
            GoneError: `wait_if_absent` is false and all sources deny having the blob.
            StorageError: The disk is full.
            MalformedError: The blob is proved to have another size.
        """
        if self._is_here(blob):
            return
        download: Download | None = None
        try:
            async with asyncio.timeout(deadline):
                download = await self._join(blob, sources, priority)
                if owners:
                    await download.wait_unless_denied(owners)
                else:
                    await (asyncio.shield(download.task) if wait_if_absent else download.wait_unless_absent())
        except TimeoutError as error:
            reason = download.describe_failures() if download else "an earlier fetch is still ending"
            logger.warning("blob %s not fetched within %g s: %s", blob.name, deadline, reason)
            raise UnreachableError(f"blob {blob.name} not fetched within {deadline:g} s: {reason}") from error
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
            source_set = SourceSet(self._policy, self._rng, self._channels.parallelism, self._inflow)
            download = Download(blob, priority, source_set, self)
            self._downloads[blob] = download
            download.task.add_done_callback(partial(self._on_download_ended, blob))
        download.add_waiter(sources)
        return download

    def _on_download_ended(self, blob: Blob, _: asyncio.Task[None]) -> None:
        del self._downloads[blob]
        self.wake_up()

    def wake_up(self) -> None:
        """Start requests soon."""
        self._wake_event.set()
        if self._ticker is None and self._downloads:
            self._ticker = asyncio.create_task(self._tick(), name="download ticker")
            self._ticker.add_done_callback(self._on_ticker_stopped)

    async def _tick(self) -> None:
        """Start requests at each tick and after each event, while anything is fetched."""
        while self._downloads:
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._wake_event.wait()
            self._wake_event.clear()
            self._start_due_requests(time.monotonic())
            await asyncio.sleep(SCAN_SECONDS * len(self._downloads))

    def _on_ticker_stopped(self, ticker: asyncio.Task[None]) -> None:
        """Report a fault in our own code, or in a waiter's `sources`, to all waiters."""
        self._ticker = None
        if not ticker.cancelled() and (error := ticker.exception()):
            for download in self._downloads.values():
                if download.scheduler_run:
                    download.scheduler_run.abort(error)

    def _start_due_requests(self, now: float) -> None:
        """Start the due requests, hash lists first, then small blobs before large ones.

        Sizes are compared by powers of two, so a round does not wait for a state. Blobs of equal size go by priority,
        then by age.
        """
        downloads = sorted(self._downloads.values(), key=lambda item: (item.blob.size.bit_length(), item.priority))
        runs = []
        for download in downloads:
            download.refresh_sources(now)
            if download.scheduler_run:
                runs.append(download.scheduler_run)
        runs.sort(key=lambda run: not run.scheduler.is_small)
        awaited = Counter[PeerId]()
        for run in runs:
            awaited.update(run.scheduler.awaited_bytes(now))
        self._in_flight_limit.observe(now, self.bytes_received, not awaited)
        self._inflow.rate = self._in_flight_limit.rate
        startable = [run for run in runs if run.scheduler.can_start_request(now)]
        if startable:
            self._start_requests(startable, awaited, max(run.scheduler.max_parallelism for run in runs), now)

    def _start_requests(
        self, runs: Sequence[SchedulerRun], awaited: Counter[PeerId], parallelism: int, now: float
    ) -> None:
        """Start requests of the given runs within the limit of bytes in flight.

        `awaited` holds the awaited bytes of all runs by source; `parallelism` is the largest number of requests that a
        source can use. An idle source gets a request even above the limit, up to twice as much: slow sources must not
        use up the whole limit, or little arrives and the limit stays low.
        """
        running = sum(
            len(download.scheduler_run.running) for download in self._downloads.values() if download.scheduler_run
        )
        window = self._in_flight_limit.max_bytes(parallelism)
        for run in runs:
            own = run.scheduler.awaited_bytes(now)
            awaited.subtract(own)
            while running < self._max_requests and (size := awaited.total() + sum(own.values())) < 2 * window:
                if not run.start_request(awaited, now, idle_only=size >= window):
                    break
                running, own = running + 1, run.scheduler.awaited_bytes(now)
            awaited.update(own)

    async def _leave(self, download: Download, sources: FindSources) -> None:
        """Remove a waiter; the last one ends the download and closes its file."""
        download.waiters.remove(sources)
        if not download.waiters and not download.task.done():
            download.is_ending = True
            await cancel_and_wait([download.task])


def _check_size(blob: Blob, reply: PiecesReply) -> None:
    """Raise MalformedError if the hashes prove that our size is wrong.

    If they match the digest with the size in the reply, the source is honest.
    """
    if reply.size == blob.size or reply.size > MAX_BLOB_BYTES:
        return
    if digest_of(reply.pieces, reply.size) == blob.digest:
        raise MalformedError(f"blob {blob.name} has {reply.size} bytes, not {blob.size}")
