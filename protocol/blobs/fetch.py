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

from protocol.blobs.blob import DIGEST_BYTES, MAX_BLOB_BYTES, Blob, digest_of
from protocol.blobs.partial import Partial
from protocol.blobs.plan import Call, Failure, Inflow, Pace, Plan, Sources
from protocol.blobs.store import BlobStore
from protocol.blobs.window import Window
from protocol.blobs.wire import CallFailedError, Carrier, UncertainError, Wire, failures
from protocol.errors import GoneError, MalformedError, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import PiecesReply
from protocol.tasks import end

logger = logging.getLogger(__name__)

TICK = 0.1  # seconds between two looks at late calls, pauses that are over and new sources
LOOK_SECONDS = 20e-6  # of a pause after each look, for each download: one look over thousands takes milliseconds
NAMED_TROUBLES = 8

SourcesOf = Callable[[], Sequence[PeerId]]
OnFault = Callable[[PeerId, str], None]
Receive = Callable[[Plan, Call], Awaitable[None]]
Stir = Callable[[], None]


class Errand:
    """A plan that is being carried out."""

    def __init__(self, plan: Plan, receive: Receive) -> None:
        self.plan = plan
        self.running: dict[asyncio.Task[None], Call] = {}
        self._receive = receive
        self._ended = asyncio.Event()  # a call has, or more than one
        self._broken: BaseException | None = None

    def begin(self, elsewhere: Mapping[PeerId, int], now: float, *, idle_only: bool) -> bool:
        """A call, if one makes sense. `elsewhere`: bytes that other errands await of each source; `idle_only`: ask
        only who has nothing to do for us."""
        call = self.plan.next_call(now, elsewhere, idle_only=idle_only)
        if call is None:
            return False
        task = asyncio.ensure_future(self._receive(self.plan, call))
        task.add_done_callback(lambda _: self._ended.set())
        self.running[task] = call
        return True

    async def ended(self) -> list[asyncio.Task[None]]:
        """Waits until a call has ended."""
        await self._ended.wait()
        self._ended.clear()
        if self._broken:
            raise self._broken
        return [task for task in self.running if task.done()]

    def break_off(self, error: BaseException) -> None:
        """Nobody begins calls any more."""
        self._broken = error
        self._ended.set()


class Download:
    """One blob being fetched, for all who wait for it."""

    def __init__(
        self, blob: Blob, turn: int, store: BlobStore, wire: Wire, sources: Sources, on_fault: OnFault, stir: Stir
    ) -> None:
        """`stir`: have calls begun soon."""
        self.turn = turn
        self.wanted: list[SourcesOf] = []
        self.ending = False
        self._denied = asyncio.Event()  # while all sources have
        self._next_look = 0.0
        self.blob = blob
        self._store = store
        self._wire = wire
        self._sources = sources
        self._on_fault = on_fault
        self._stir = stir
        self.errand: Errand | None = None
        self.task = asyncio.create_task(self._run(), name=f"fetch {blob.name[:12]}")

    def trouble(self) -> str:
        """Who was asked, and what came of it."""
        troubles = self._sources.troubles()
        if not troubles:
            return "no source is known"
        named = "; ".join(f"{peer}: {trouble}" for peer, trouble in list(troubles.items())[:NAMED_TROUBLES])
        return f"{len(troubles)} sources tried: {named}{'; ...' if len(troubles) > NAMED_TROUBLES else ''}"

    def want(self, sources: SourcesOf) -> None:
        """One more waits for it, and names sources that may have what the others do not."""
        self.wanted.append(sources)
        self._next_look = 0.0
        self._denied.clear()
        self._stir()

    def look(self, now: float) -> None:
        """For new sources, once a tick."""
        if now >= self._next_look:
            self._next_look = now + TICK
            self._sources.offer(peer for sources in self.wanted for peer in sources())
            self._note_denial()

    def _note_denial(self) -> None:
        if self._sources.are_without:
            self._denied.set()
        else:
            self._denied.clear()

    async def unless_denied(self) -> None:
        """Wait for it. GoneError: nobody has it."""
        denied = asyncio.create_task(self._denied.wait())
        try:
            await asyncio.wait([self.task, denied], return_when=asyncio.FIRST_COMPLETED)
        finally:
            denied.cancel()
        if not self.task.done():
            raise GoneError(f"blob {self.blob.name} is not there any more: {self.trouble()}")
        await self.task

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
            reply = await self._wire.hashes(self.blob, call)
            _check_size(self.blob, reply)
            with failures():
                self.blob.check_hashes(reply.pieces)
            found.append(reply.pieces)

        if not found:
            await self._work(Plan({0: self.blob.pieces * DIGEST_BYTES}, self._sources), receive)
        return found[0]

    async def _receive_whole(self, plan: Plan, call: Call) -> None:
        def keep(data: bytearray) -> None:
            if Blob.of(memoryview(data)) != self.blob:
                raise UncertainError
            self._store.hold(memoryview(data))

        await self._wire.piece(self.blob, plan, call, keep)

    def _receive_into(self, partial: Partial) -> Receive:
        async def receive(plan: Plan, call: Call) -> None:
            await self._wire.piece(self.blob, plan, call, lambda data: partial.write(call.piece, data))

        return receive

    async def _work(self, plan: Plan, receive: Receive) -> None:
        """Carry out a plan to its end."""
        self.errand = errand = Errand(plan, receive)
        try:
            while not plan.done:
                self._stir()
                for task in await errand.ended():
                    self._settle(errand, task)
        finally:
            self.errand = None
            await end(errand.running)
            self._stir()

    def _settle(self, errand: Errand, task: asyncio.Task[None]) -> None:
        plan, call, now = errand.plan, errand.running.pop(task), time.monotonic()
        if not plan.runs(call):
            # Another source was faster; how this call ended no longer matters, but must be looked at.
            _ = task.cancelled() or task.exception()
            return
        failed = _failure_of(task)
        if failed is None:
            others = plan.succeeded(call, now)
            self._note_denial()
            for other in [other for other, its_call in errand.running.items() if its_call in others]:
                other.cancel()
            return
        plan.failed(call, failed.failure, failed.trouble, now)
        logger.info("blob %s piece %d from %s: %s", self.blob.name[:12], call.piece, call.peer, failed.trouble)
        self._note_denial()
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
        self._max_calls = max_calls
        self._wire = Wire(carrier, self._pace.stall, lambda: self._window.is_slow)
        self._window = Window()
        self._downloads: dict[Blob, Download] = {}
        self._inflow = Inflow()  # while anything is fetched,
        self._ticker: asyncio.Task[None] | None = None  # and calls are begun
        self._stirred = asyncio.Event()  # a call has ended, or there is something new

    @property
    def bytes_received(self) -> int:
        """Bytes of pieces and lists that came, used or not."""
        return self._wire.bytes_received

    async def fetch(
        self, blob: Blob, sources: SourcesOf, deadline: float, turn: int = 0, *, patient: bool = True
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
                download = await self._join(blob, sources, turn)
                await (asyncio.shield(download.task) if patient else download.unless_denied())
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

    async def _join(self, blob: Blob, sources: SourcesOf, turn: int) -> Download:
        while (download := self._downloads.get(blob)) and download.ending:
            await asyncio.wait([download.task])
        if download is None:
            if not self._downloads:
                self._inflow = Inflow()
            ledger = Sources(self._pace, self._rng, self._carrier.places, self._inflow)
            download = Download(blob, turn, self._store, self._wire, ledger, self._on_fault, self._stir)
            self._downloads[blob] = download
            download.task.add_done_callback(lambda _: self._ended(blob))
        download.want(sources)
        return download

    def _ended(self, blob: Blob) -> None:
        del self._downloads[blob]
        self._stir()

    def _stir(self) -> None:
        """Have calls begun soon."""
        self._stirred.set()
        if self._ticker is None and self._downloads:
            self._ticker = asyncio.create_task(self._tick(), name="ticker of fetches")
            self._ticker.add_done_callback(self._stopped)

    async def _tick(self) -> None:
        """One look for all, at each tick and soon after something has happened; as long as anything is fetched."""
        while self._downloads:
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK):
                    await self._stirred.wait()
            self._stirred.clear()
            self._share(time.monotonic())
            await asyncio.sleep(LOOK_SECONDS * len(self._downloads))

    def _stopped(self, ticker: asyncio.Task[None]) -> None:
        """A fault in our own code, or of who names sources, is told to all who wait."""
        self._ticker = None
        if not ticker.cancelled() and (error := ticker.exception()):
            for download in self._downloads.values():
                if download.errand:
                    download.errand.break_off(error)

    def _share(self, now: float) -> None:
        """Has errands begin what calls they may: lists of hashes first, small blobs before large ones (by powers of
        two, as a round does not wait for a state), among equals whose turn it is, and then what was wanted first."""
        downloads = sorted(self._downloads.values(), key=lambda each: (each.blob.size.bit_length(), each.turn))
        errands = []
        for download in downloads:
            download.look(now)
            if download.errand:
                errands.append(download.errand)
        errands.sort(key=lambda errand: not errand.plan.is_small)
        awaited = Counter[PeerId]()
        for errand in errands:
            awaited.update(errand.plan.awaited(now))
        self._window.observe(now, self.bytes_received, not awaited)
        self._inflow.rate = self._window.rate
        able = [errand for errand in errands if errand.plan.may_begin(now)]
        if able:
            self._begin(able, awaited, max(errand.plan.most_places for errand in errands), now)

    def _begin(self, able: Sequence[Errand], awaited: Counter[PeerId], places: int, now: float) -> None:
        """`awaited`: bytes of all errands by source; `places`: calls that the source with the most of them needs.

        Who owes nothing is asked for a piece even where no more may be awaited, up to twice as much: slow sources must
        not take up all of that, or little comes, and it stays so little.
        """
        running = sum(len(download.errand.running) for download in self._downloads.values() if download.errand)
        window = self._window.bytes(places)
        for errand in able:
            own = errand.plan.awaited(now)
            awaited.subtract(own)
            while running < self._max_calls and (size := awaited.total() + sum(own.values())) < 2 * window:
                if not errand.begin(awaited, now, idle_only=size >= window):
                    break
                running, own = running + 1, errand.plan.awaited(now)
            awaited.update(own)

    async def _leave(self, download: Download, sources: SourcesOf) -> None:
        """The last one to leave ends the download, and waits until its file is closed."""
        download.wanted.remove(sources)
        if not download.wanted and not download.task.done():
            download.ending = True
            await end([download.task])


def _failure_of(task: asyncio.Task[None]) -> CallFailedError | None:
    # A call ends as cancelled, too, when its channel is closed under it.
    if task.cancelled():
        return CallFailedError(Failure.LOST, "the channel was closed")
    error = task.exception()
    if error is None or isinstance(error, CallFailedError):
        return error
    raise error


def _check_size(blob: Blob, reply: PiecesReply) -> None:
    """A list that yields the digest with another size proves that we were told a wrong size: the source is honest."""
    if reply.size == blob.size or reply.size > MAX_BLOB_BYTES:
        return
    if digest_of(reply.pieces, reply.size) == blob.digest:
        raise MalformedError(f"blob {blob.name} has {reply.size} bytes, not {blob.size}")
