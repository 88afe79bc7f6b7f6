"""Fetching a blob from whoever holds it, several sources at once.

The piece hashes come first and are checked against the digest; then every piece is checked against its hash before it
is written. A blob of one piece needs no list: its digest follows from the piece. What was written survives a cut, a
cancel and a restart. At any time at most `max_calls` pieces are in memory, whatever the blobs' sizes.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, cast

import grpc

from protocol.blobs.blob import CHUNK_BYTES, DIGEST_BYTES, MAX_BLOB_BYTES, PIECE_BYTES, Blob, digest_of
from protocol.blobs.plan import Call, Failure, Pace, Plan, Sources
from protocol.blobs.store import BlobStore, Partial
from protocol.errors import LimitError, MalformedError, PeerFault, TransportError, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import Chunk, FetchRequest, PiecesReply, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsStub

logger = logging.getLogger(__name__)

TICK = 0.1  # seconds between two looks at late calls, pauses that are over and new sources
NAMED_TROUBLES = 8

SourcesOf = Callable[[], Sequence[PeerId]]
OnFault = Callable[[PeerId, str], None]
Receive = Callable[[Plan, Call], Awaitable[None]]

_FAILURES = {
    grpc.StatusCode.NOT_FOUND: Failure.ABSENT,
    # The size we were told may be wrong: no reason to blame the source.
    grpc.StatusCode.OUT_OF_RANGE: Failure.ABSENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Failure.BUSY,
    grpc.StatusCode.DEADLINE_EXCEEDED: Failure.SLOW,
}


class CallFailedError(Exception):
    """A call that did not deliver, and why."""

    def __init__(self, failure: Failure, trouble: str) -> None:
        super().__init__(trouble)
        self.failure = failure
        self.trouble = trouble


class UncertainError(Exception):
    """A blob of one piece came out wrong: either its source or whoever told its size lied."""


class Lease(Protocol):
    """A channel for one call, and what its lender is to hear of the call."""

    @property
    def channel(self) -> grpc.aio.Channel: ...
    def received(self, size: int) -> None: ...
    def broken(self, reason: str) -> None: ...


class Carrier(Protocol):
    """What a fetch needs of the network: channels for its calls, and how many at once are of use to a peer's link."""

    def lease(self, peer: PeerId) -> AbstractContextManager[Lease]: ...
    def places(self, peer: PeerId) -> int: ...


class Wire:
    """The two calls, each with a deadline; at most `max_calls` at once."""

    def __init__(self, carrier: Carrier, stall: float, max_calls: int) -> None:
        self.bytes_received = 0
        self._carrier = carrier
        self._stall = stall
        self._slots = asyncio.Semaphore(max_calls)

    async def hashes(self, blob: Blob, plan: Plan, call: Call) -> PiecesReply:
        """Unchecked."""
        async with self._slots:
            plan.began(call, time.monotonic())
            with self._leased(call) as lease:
                request = PiecesRequest(digest=blob.digest)
                reply = await BlobsStub(lease.channel).Pieces(request, timeout=call.seconds)
                lease.received(len(reply.pieces))
            self.bytes_received += len(reply.pieces)
            return cast(PiecesReply, reply)

    async def piece(self, blob: Blob, plan: Plan, call: Call, keep: Callable[[bytearray], object]) -> None:
        """`keep` checks the piece and writes it, in a thread; the piece takes up memory until it has."""
        async with self._slots:
            plan.began(call, time.monotonic())
            with self._leased(call) as lease:
                data = await self._stream(blob, plan, call, lease)
            with _failures():
                await asyncio.to_thread(keep, data)

    async def _stream(self, blob: Blob, plan: Plan, call: Call, lease: Lease) -> bytearray:
        data, received, clock = bytearray(blob.piece_length(call.piece)), 0, asyncio.get_running_loop().time
        request = FetchRequest(digest=blob.digest, offset=call.piece * PIECE_BYTES, length=len(data))
        end = clock() + call.seconds
        stream = BlobsStub(lease.channel).Fetch(request, timeout=call.seconds)
        try:
            async with asyncio.timeout_at(min(end, clock() + self._stall)) as limit:
                async for chunk in stream:
                    received = _place(data, received, chunk)
                    # Empty chunks are no progress.
                    if chunk.data:
                        limit.reschedule(min(end, clock() + self._stall))
                        self.bytes_received += len(chunk.data)
                        lease.received(len(chunk.data))
                        plan.received(call, len(chunk.data))
        finally:
            stream.cancel()
        if received != len(data):
            raise MalformedError("fewer bytes than were asked for")
        return data

    @contextmanager
    def _leased(self, call: Call) -> Iterator[Lease]:
        with _failures(), self._carrier.lease(call.peer) as lease:
            try:
                with _failures():
                    yield lease
            except CallFailedError as error:
                if error.failure in (Failure.LOST, Failure.SLOW):
                    lease.broken(error.trouble)
                raise


class Download:
    """One blob being fetched, for all who wait for it."""

    def __init__(self, blob: Blob, store: BlobStore, wire: Wire, sources: Sources, on_fault: OnFault) -> None:
        self.wanted: list[SourcesOf] = []
        self.ending = False
        self._next_look = 0.0
        self.blob = blob
        self._store = store
        self._wire = wire
        self._sources = sources
        self._on_fault = on_fault
        self.task = asyncio.create_task(self._run(), name=f"fetch {blob.name[:12]}")

    def trouble(self) -> str:
        """Who was asked, and what came of it."""
        troubles = self._sources.troubles()
        if not troubles:
            return "no source is known"
        named = "; ".join(f"{peer}: {trouble}" for peer, trouble in list(troubles.items())[:NAMED_TROUBLES])
        return f"{len(troubles)} sources tried: {named}{'; ...' if len(troubles) > NAMED_TROUBLES else ''}"

    async def _run(self) -> None:
        if self.blob.size == 0:
            return self._make_empty()
        if self.blob.pieces == 1:
            try:
                return await self._work(Plan({0: self.blob.size}, self._sources), self._receive_whole)
            except UncertainError:
                logger.info("blob %s: one piece that does not match; asking for its hash", self.blob.name)
        partial = self._store.open_partial(self.blob, await self._hashes())
        try:
            await asyncio.to_thread(partial.recheck)
            lengths = {piece: self.blob.piece_length(piece) for piece in partial.missing}
            await self._work(Plan(lengths, self._sources), self._receive_into(partial))
            partial.finish()
        finally:
            partial.close()

    def _make_empty(self) -> None:
        if self._store.put(b"") != self.blob:
            raise MalformedError(f"blob {self.blob.name} is not empty")

    async def _hashes(self) -> bytes:
        known = self._store.partial_hashes(self.blob)
        found = [] if known is None else [known]

        async def receive(plan: Plan, call: Call) -> None:
            reply = await self._wire.hashes(self.blob, plan, call)
            _check_size(self.blob, reply)
            with _failures():
                self.blob.check_hashes(reply.pieces)
            found.append(reply.pieces)

        if not found:
            await self._work(Plan({0: self.blob.pieces * DIGEST_BYTES}, self._sources), receive)
        return found[0]

    async def _receive_whole(self, plan: Plan, call: Call) -> None:
        def keep(data: bytearray) -> None:
            if Blob.of(memoryview(data)) != self.blob:
                raise UncertainError
            self._store.put(memoryview(data))

        await self._wire.piece(self.blob, plan, call, keep)

    def _receive_into(self, partial: Partial) -> Receive:
        async def receive(plan: Plan, call: Call) -> None:
            await self._wire.piece(self.blob, plan, call, lambda data: partial.write(call.piece, data))

        return receive

    async def _work(self, plan: Plan, receive: Receive) -> None:
        """Carry out a plan to its end."""
        tasks: dict[asyncio.Task[None], Call] = {}
        try:
            while not plan.done:
                self._look_for_sources()
                while (call := plan.next_call(time.monotonic())) is not None:
                    tasks[asyncio.ensure_future(receive(plan, call))] = call
                if not tasks:
                    await asyncio.sleep(TICK)
                    continue
                finished, _ = await asyncio.wait(tasks, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    self._settle(plan, tasks, task)
        finally:
            await _cancel(list(tasks))

    def _look_for_sources(self) -> None:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + TICK
            self._sources.offer(peer for sources in self.wanted for peer in sources())

    def _settle(self, plan: Plan, tasks: dict[asyncio.Task[None], Call], task: asyncio.Task[None]) -> None:
        call, now = tasks.pop(task), time.monotonic()
        if not plan.runs(call):
            # Another source was faster; how this call ended no longer matters, but must be looked at.
            _ = task.cancelled() or task.exception()
            return
        failed = _failure_of(task)
        if failed is None:
            others = plan.succeeded(call, now)
            for other in [other for other, its_call in tasks.items() if its_call in others]:
                other.cancel()
            return
        plan.failed(call, failed.failure, failed.trouble, now)
        logger.info("blob %s piece %d from %s: %s", self.blob.name[:12], call.piece, call.peer, failed.trouble)
        if failed.failure is Failure.LIED:
            self._on_fault(call.peer, failed.trouble)


class Fetcher:
    """Gets blobs into the store.

    `carrier` gives channels to peers; `on_fault` hears of every source that lied, with the reason in words.
    """

    def __init__(
        self,
        store: BlobStore,
        carrier: Carrier,
        on_fault: OnFault,
        rng: random.Random,
        pace: Pace | None = None,
        max_calls: int = 32,
    ) -> None:
        self._store = store
        self._on_fault = on_fault
        self._rng = rng
        self._pace = pace or Pace()
        self._carrier = carrier
        self._wire = Wire(carrier, self._pace.stall, max_calls)
        self._downloads: dict[Blob, Download] = {}

    @property
    def bytes_received(self) -> int:
        """Bytes of pieces and lists that came, used or not."""
        return self._wire.bytes_received

    async def fetch(self, blob: Blob, sources: SourcesOf, deadline: float) -> None:
        """Returns when the blob is in the store.

        `sources` is asked again and again for the peers (other than ourselves) that may have it; `deadline` is in
        seconds from now. Raises UnreachableError when it has passed, StorageError where the disk is full, and
        MalformedError where the blob's size is proved to be another.
        """
        if self._is_here(blob):
            return
        download: Download | None = None
        try:
            async with asyncio.timeout(deadline):
                download = await self._join(blob, sources)
                await asyncio.shield(download.task)
        except TimeoutError as error:
            trouble = download.trouble() if download else "an earlier fetch is still ending"
            logger.warning("blob %s not fetched within %g s: %s", blob.name, deadline, trouble)
            raise UnreachableError(f"blob {blob.name} not fetched within {deadline:g} s: {trouble}") from error
        finally:
            if download:
                await self._leave(download, sources)

    def _is_here(self, blob: Blob) -> bool:
        if not self._store.has(blob.digest):
            return False
        if self._store.blob(blob.digest) != blob:
            raise MalformedError("a blob of that digest has another size")
        return True

    async def _join(self, blob: Blob, sources: SourcesOf) -> Download:
        while (download := self._downloads.get(blob)) and download.ending:
            await asyncio.wait([download.task])
        if download is None:
            ledger = Sources(self._pace, self._rng, self._carrier.places)
            download = Download(blob, self._store, self._wire, ledger, self._on_fault)
            self._downloads[blob] = download
            download.task.add_done_callback(lambda _: self._downloads.pop(blob))
        download.wanted.append(sources)
        return download

    async def _leave(self, download: Download, sources: SourcesOf) -> None:
        """The last one to leave ends the download, and waits until its file is closed."""
        download.wanted.remove(sources)
        if not download.wanted and not download.task.done():
            download.ending = True
            await _cancel([download.task])


@contextmanager
def _failures() -> Iterator[None]:
    """Turns what may go wrong with a source into a CallFailedError; a fault of our own disk passes."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        failure = _FAILURES.get(error.code(), Failure.LOST)
        raise CallFailedError(failure, f"{failure} ({error.code().name})") from error
    except TimeoutError as error:
        raise CallFailedError(Failure.SLOW, "no bytes for too long") from error
    except PeerFault as fault:
        raise CallFailedError(Failure.LIED, str(fault)) from fault
    except (TransportError, UnreachableError, grpc.aio.UsageError) as error:
        raise CallFailedError(Failure.LOST, str(error)) from error


def _failure_of(task: asyncio.Task[None]) -> CallFailedError | None:
    # A call ends as cancelled, too, when its channel is closed under it.
    if task.cancelled():
        return CallFailedError(Failure.LOST, "the channel was closed")
    error = task.exception()
    if error is None or isinstance(error, CallFailedError):
        return error
    raise error


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _place(data: bytearray, received: int, chunk: Chunk) -> int:
    """Behind the bytes received so far; how many there are then."""
    stop = received + len(chunk.data)
    if len(chunk.data) > CHUNK_BYTES or stop > len(data):
        raise LimitError("more bytes than were asked for")
    data[received:stop] = chunk.data
    return stop


def _check_size(blob: Blob, reply: PiecesReply) -> None:
    """A list that yields the digest with another size proves that we were told a wrong size: the source is honest."""
    if reply.size == blob.size or reply.size > MAX_BLOB_BYTES:
        return
    if digest_of(reply.pieces, reply.size) == blob.digest:
        raise MalformedError(f"blob {blob.name} has {reply.size} bytes, not {blob.size}")
