"""What is fetched first where several blobs are wanted, and what is taken for silence where they share a connection."""

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

PACE = DownloadPolicy(stall_seconds=1.5, late_after_seconds=1.5)
PARTS = [random.Random(number).randbytes(4 * PIECE_BYTES) for number in range(6)]


class RecordingSource(BlobsServicer):
    """A source of several blobs that takes its time; `asked` is of whom it was asked for a piece, in order."""

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
    """Of its blobs nothing comes."""

    async def Fetch(self, request: FetchRequest, context: Any) -> AsyncIterator[Chunk]:  # noqa: N802
        self.asked.append(list(self.blobs).index(request.digest))
        await asyncio.sleep(60.0)
        yield Chunk()


class SerialSource(ScriptedSource):
    """It answers one call after the other, as they come over one connection."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._line = asyncio.Lock()

    async def Fetch(self, request: FetchRequest, context: Any) -> AsyncIterator[Chunk]:  # noqa: N802
        self.calls += 1
        async with self._line:
            for start in range(request.offset, request.offset + request.length, CHUNK_BYTES):
                await asyncio.sleep(0.25 * PACE.stall_seconds)
                yield Chunk(data=self.data[start : min(start + CHUNK_BYTES, request.offset + request.length)])


@pytest.mark.parametrize("others_count", [True, False])
async def test_blobs_come_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others_count: bool
) -> None:
    if not others_count:
        monkeypatch.setattr(DownloadScheduler, "awaited_bytes", lambda *_: {})
    swarm, shelf = SourcePool(tmp_path), RecordingSource(*PARTS)
    swarm.fetcher = swarm.new_fetcher(PACE)
    try:
        await swarm.add_source("shelf", shelf)
        await asyncio.gather(*(swarm.fetch(Blob.of(part)) for part in PARTS))
    finally:
        await swarm.stop()
    counts = [Counter(shelf.asked[:number]) for number in range(len(shelf.asked))]
    most = max(sum(0 < asked < 4 for asked in count.values()) for count in counts)
    if others_count:
        assert most <= 3, f"of few is some asked and some not: {shelf.asked}"
    else:
        assert most == len(PARTS), "the control: all at once, and none before the end"


@pytest.mark.parametrize("turns", [range(6), range(6, 0, -1)])
async def test_blobs_come_in_their_turns(tmp_path: Path, turns: range) -> None:
    swarm, shelf = SourcePool(tmp_path), RecordingSource(*PARTS)
    swarm.fetcher = swarm.new_fetcher(PACE)
    try:
        await swarm.add_source("shelf", shelf)
        wanted = zip(PARTS, turns, strict=True)
        await asyncio.gather(*(swarm.fetcher.fetch(Blob.of(part), swarm.sources, 30.0, turn) for part, turn in wanted))
    finally:
        await swarm.stop()
    begun = list(dict.fromkeys(shelf.asked))
    expected = sorted(range(6), key=list(turns).__getitem__)
    assert begun[2:] == [part for part in expected if part in begun[2:]], "the first to have their lists began at once"


@pytest.mark.parametrize("is_shared", [True, False])
async def test_who_is_idle_is_asked_though_others_have_all_that_may_be_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """What one slow source owes must not keep us from the others."""
    if not is_shared:
        usual = DownloadScheduler.next_request
        monkeypatch.setattr(
            DownloadScheduler, "next_request", lambda *words, idle_only: None if idle_only else usual(*words)
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


async def test_idle_sources_are_asked_for_no_more_than_twice_what_may_be_awaited(tmp_path: Path) -> None:
    """However many there are: on a thin link all would come late, and be taken for silent."""
    pieces = [part[start : start + PIECE_BYTES] for part in PARTS[:3] for start in range(0, len(part), PIECE_BYTES)]
    sources = {f"source {number}": SilentSource(piece) for number, piece in enumerate(pieces)}
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


async def test_a_small_blob_does_not_wait_for_a_large_one(tmp_path: Path) -> None:
    swarm, shelf = SourcePool(tmp_path), RecordingSource(DATA, PARTS[0])
    swarm.fetcher = swarm.new_fetcher(PACE)
    try:
        await swarm.add_source("shelf", shelf)
        large = asyncio.create_task(swarm.fetch(Blob.of(DATA)))
        async with asyncio.timeout(10):
            while not shelf.asked:
                await asyncio.sleep(0.01)
        await swarm.fetch(Blob.of(PARTS[0]))
        assert not large.done()
        await large
    finally:
        await swarm.stop()


@pytest.mark.parametrize("hears", [True, False])
async def test_who_answers_another_call_first_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hears: bool
) -> None:
    data = DATA[: 2 * PIECE_BYTES]
    if not hears:
        monkeypatch.setattr(BlobClient, "_extend_timeouts", lambda *_: None)
    swarm, serial = SourcePool(tmp_path), SerialSource(data)
    swarm.fetcher = swarm.new_fetcher(PACE)
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
    assert serial.calls == 2 if hears else serial.calls > 2, "the control asks again, and makes it worse"


async def test_one_look_a_tick_is_over_all_that_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look goes over all: with one for each blob, a thousand of them would take all the time there is."""
    swarm, looks, enough = SourcePool(tmp_path), list[float](), asyncio.Event()
    share, clock = Downloader._start_due_requests, asyncio.get_running_loop().time

    def counted(fetcher: Downloader, now: float) -> None:
        looks.append(clock())
        share(fetcher, now)
        if len(looks) == 6:
            enough.set()

    monkeypatch.setattr(Downloader, "_start_due_requests", counted)
    blobs = [Blob.of(number.to_bytes(2)) for number in range(1000)]
    waiting = [asyncio.create_task(swarm.fetcher.fetch(blob, list, 60.0)) for blob in blobs]
    await asyncio.wait_for(enough.wait(), 30)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await swarm.stop()
    # The first may come while they begin, and the second soon after.
    assert looks[5] - looks[1] >= 4 * TICK_SECONDS


async def test_a_fault_of_who_names_sources_is_told_to_who_waits(tmp_path: Path) -> None:
    def sources() -> list[str]:
        raise ValueError("a fault of ours")

    swarm = SourcePool(tmp_path)
    try:
        with pytest.raises(ValueError, match="a fault of ours"):
            await swarm.fetcher.fetch(Blob.of(DATA), sources, 30.0)
        await swarm.add_source("shelf", RecordingSource(DATA))
        await swarm.fetch(Blob.of(DATA))  # and whoever comes next is served
    finally:
        await swarm.stop()
