"""The order of concurrent downloads, and the detection of silent sources on a shared connection."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from protocol.blobs.blob import CHUNK_BYTES, PIECE_BYTES, Blob, piece_hashes
from protocol.blobs.client import BlobClient
from protocol.blobs.download import TICK_SECONDS, Downloader
from protocol.blobs.scheduler import MIN_PIECES, DownloadPolicy, DownloadScheduler
from protocol.errors import UnreachableError
from protocol.murmur_pb2 import Chunk, FetchRequest, PiecesReply, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsServicer
from tests.protocol.blobs.fake_sources import DATA, ScriptedSource, SourcePool

POLICY = DownloadPolicy(stall_seconds=1.5, late_after_seconds=1.5)
PARTS = [random.Random(index).randbytes(4 * PIECE_BYTES) for index in range(6)]


class RecordingSource(BlobsServicer):
    """A slow source of several blobs; `asked` lists the index of the blob of each piece request, in order."""

    def __init__(self, *blobs: bytes) -> None:
        self.blobs = {Blob.of(data).digest: data for data in blobs}
        self.asked: list[int] = []

    async def Pieces(self, request: PiecesRequest, context: Any) -> PiecesReply:  # noqa: N802
        data = self.blobs[request.digest]
        return PiecesReply(size=len(data), pieces=piece_hashes(data))

    async def Fetch(self, request: FetchRequest, context: Any) -> AsyncIterator[Chunk]:  # noqa: N802
        self.asked.append(list(self.blobs).index(request.digest))
        data = self.blobs[request.digest][request.offset : request.offset + request.length]
        for start in range(0, len(data), CHUNK_BYTES):
            await asyncio.sleep(0.03)
            yield Chunk(data=data[start : start + CHUNK_BYTES])


class SilentSource(RecordingSource):
    """A source that never sends a byte."""

    async def Fetch(self, request: FetchRequest, context: Any) -> AsyncIterator[Chunk]:  # noqa: N802
        self.asked.append(list(self.blobs).index(request.digest))
        await asyncio.sleep(60.0)
        yield Chunk()


class SerialSource(ScriptedSource):
    """A source that answers one call after the other, as a single connection does."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._lock = asyncio.Lock()

    async def Fetch(self, request: FetchRequest, context: Any) -> AsyncIterator[Chunk]:  # noqa: N802
        self.calls += 1
        async with self._lock:
            for start in range(request.offset, request.offset + request.length, CHUNK_BYTES):
                await asyncio.sleep(0.25 * POLICY.stall_seconds)
                yield Chunk(data=self.data[start : min(start + CHUNK_BYTES, request.offset + request.length)])


@pytest.mark.parametrize("others_count", [True, False])
async def test_blobs_complete_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others_count: bool
) -> None:
    if not others_count:
        monkeypatch.setattr(DownloadScheduler, "awaited_bytes", lambda *_: {})
    swarm, source = SourcePool(tmp_path), RecordingSource(*PARTS)
    swarm.fetcher = swarm.new_fetcher(POLICY)
    try:
        await swarm.add_source("source", source)
        await asyncio.gather(*(swarm.fetch(Blob.of(part)) for part in PARTS))
    finally:
        await swarm.stop()
    counts = [Counter(source.asked[:index]) for index in range(len(source.asked))]
    most = max(sum(0 < asked < 4 for asked in count.values()) for count in counts)
    if others_count:
        assert most <= 3, f"too many blobs are in progress at once: {source.asked}"
    else:
        assert most == len(PARTS), "the control: all at once, and none before the end"


@pytest.mark.parametrize("priorities", [range(6), range(6, 0, -1)])
async def test_blobs_are_fetched_by_priority(tmp_path: Path, priorities: range) -> None:
    swarm, source = SourcePool(tmp_path), RecordingSource(*PARTS)
    swarm.fetcher = swarm.new_fetcher(POLICY)
    try:
        await swarm.add_source("source", source)
        requests = zip(PARTS, priorities, strict=True)
        await asyncio.gather(
            *(swarm.fetcher.fetch(Blob.of(part), swarm.sources, 30.0, priority) for part, priority in requests)
        )
    finally:
        await swarm.stop()
    begun = list(dict.fromkeys(source.asked))
    expected = sorted(range(6), key=list(priorities).__getitem__)
    assert begun[2:] == [part for part in expected if part in begun[2:]], (
        "the first blobs with hash lists began at once"
    )


@pytest.mark.parametrize("is_shared", [True, False])
async def test_idle_source_is_used_though_the_in_flight_limit_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """A slow source that owes many bytes must not keep us from using the others."""
    if not is_shared:
        original = DownloadScheduler.next_request
        monkeypatch.setattr(
            DownloadScheduler, "next_request", lambda *arguments, idle_only: None if idle_only else original(*arguments)
        )
    slow, quick = SilentSource(*PARTS[:3]), RecordingSource(PARTS[3])
    swarm = SourcePool(tmp_path)
    swarm.fetcher = swarm.new_fetcher(DownloadPolicy(stall_seconds=20.0, late_after_seconds=20.0, pieces_per_source=8))
    try:
        await swarm.add_source("slow", slow)
        await swarm.add_source("quick", quick)
        waiting = [asyncio.create_task(swarm.fetcher.fetch(Blob.of(p), lambda: ["slow"], 30.0)) for p in PARTS[:3]]
        async with asyncio.timeout(10):
            while len(slow.asked) < MIN_PIECES:
                await asyncio.sleep(0.01)
        with nullcontext() if is_shared else pytest.raises(UnreachableError):
            await swarm.fetcher.fetch(Blob.of(PARTS[3]), lambda: ["quick"], 10.0 if is_shared else 2.0)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
    finally:
        await swarm.stop()


async def test_idle_sources_get_at_most_twice_the_in_flight_limit(tmp_path: Path) -> None:
    """This holds for any number of sources: on a thin link all would deliver late and be taken for silent."""
    pieces = [part[start : start + PIECE_BYTES] for part in PARTS[:3] for start in range(0, len(part), PIECE_BYTES)]
    sources = {f"source {index}": SilentSource(piece) for index, piece in enumerate(pieces)}
    swarm = SourcePool(tmp_path)
    swarm.fetcher = swarm.new_fetcher(DownloadPolicy(stall_seconds=20.0, late_after_seconds=20.0))
    try:
        for name, source in sources.items():
            await swarm.add_source(name, source)
        fetches = [
            swarm.fetcher.fetch(Blob.of(piece), lambda name=name: [name], 2.0)  # type: ignore[misc]
            for name, piece in zip(sources, pieces, strict=True)
        ]
        ended = await asyncio.gather(*fetches, return_exceptions=True)
    finally:
        await swarm.stop()
    assert all(isinstance(error, UnreachableError) for error in ended)
    assert len(sources) > 2 * MIN_PIECES == sum(len(source.asked) for source in sources.values())


async def test_small_blob_does_not_wait_for_a_large_one(tmp_path: Path) -> None:
    swarm, source = SourcePool(tmp_path), RecordingSource(DATA, PARTS[0])
    swarm.fetcher = swarm.new_fetcher(POLICY)
    try:
        await swarm.add_source("source", source)
        large = asyncio.create_task(swarm.fetch(Blob.of(DATA)))
        async with asyncio.timeout(10):
            while not source.asked:
                await asyncio.sleep(0.01)
        await swarm.fetch(Blob.of(PARTS[0]))
        assert not large.done()
        await large
    finally:
        await swarm.stop()


@pytest.mark.parametrize("is_shared", [True, False])
async def test_source_that_answers_another_call_first_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    data = DATA[: 2 * PIECE_BYTES]
    if not is_shared:
        monkeypatch.setattr(BlobClient, "_extend_timeouts", lambda *_: None)
    swarm, serial = SourcePool(tmp_path), SerialSource(data)
    swarm.fetcher = swarm.new_fetcher(POLICY)
    try:
        await swarm.add_source("serial", serial)
        fetching = asyncio.create_task(swarm.fetch(Blob.of(data), deadline=30.0))
        async with asyncio.timeout(20):
            while not fetching.done() and serial.calls < 3:
                await asyncio.sleep(0.01)
        fetching.cancel()
        await asyncio.wait([fetching])
    finally:
        await swarm.stop()
    assert serial.calls == 2 if is_shared else serial.calls > 2, "the control asks again and makes it worse"


async def test_one_check_per_tick_covers_all_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check goes over all downloads: with one per blob, a thousand blobs would take all the CPU time."""
    swarm, checks, enough = SourcePool(tmp_path), list[float](), asyncio.Event()
    start_due_requests, clock = Downloader._start_due_requests, asyncio.get_running_loop().time

    def count_checks(fetcher: Downloader, now: float) -> None:
        checks.append(clock())
        start_due_requests(fetcher, now)
        if len(checks) == 6:
            enough.set()

    monkeypatch.setattr(Downloader, "_start_due_requests", count_checks)
    blobs = [Blob.of(index.to_bytes(2)) for index in range(1000)]
    waiting = [asyncio.create_task(swarm.fetcher.fetch(blob, list, 60.0)) for blob in blobs]
    await asyncio.wait_for(enough.wait(), 30)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await swarm.stop()
    # The first check may come while the downloads start, and the second soon after.
    assert checks[5] - checks[1] >= 4 * TICK_SECONDS


async def test_error_of_a_sources_callback_reaches_the_waiters(tmp_path: Path) -> None:
    def sources() -> list[str]:
        raise ValueError("a fault of ours")

    swarm = SourcePool(tmp_path)
    try:
        with pytest.raises(ValueError, match="a fault of ours"):
            await swarm.fetcher.fetch(Blob.of(DATA), sources, 30.0)
        await swarm.add_source("source", RecordingSource(DATA))
        await swarm.fetch(Blob.of(DATA))  # the next caller is served
    finally:
        await swarm.stop()
