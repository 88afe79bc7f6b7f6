"""Downloads from sources that die, freeze or arrive late, over plain gRPC on Unix sockets."""

import asyncio
import errno
import itertools
import os
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
import pytest

from protocol.blobs.blob import CHUNK_BYTES, PIECE_BYTES, Blob, piece_hashes
from protocol.blobs.scheduler import DownloadPolicy, InFlightLimit
from protocol.blobs.server import BlobService, CallerLimits
from protocol.blobs.store import BlobStore
from protocol.errors import DeniedError, GoneError, StorageError, UnreachableError
from protocol.murmur_pb2 import Chunk, FetchRequest
from tests.protocol.blobs.fake_sources import BLOB, DATA, ROOM, SHORT_TIMEOUTS, SMALL, ScriptedSource, SourcePool


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("data", [b"", b"x", SMALL, DATA[:PIECE_BYTES], DATA[: PIECE_BYTES + 1], DATA], ids=len)
async def test_blob_of_any_size_is_fetched(swarm: SourcePool, data: bytes) -> None:
    await swarm.add_honest("one", data)
    await swarm.fetch(Blob.of(data))
    assert swarm.store.read(Blob.of(data).digest) == data
    await swarm.fetch(Blob.of(data))  # already stored
    assert swarm.fetcher.bytes_received <= len(data) + len(piece_hashes(data))
    assert swarm.faults == []


@pytest.mark.parametrize("is_slow", [True, False])
async def test_numbers_are_compressed_on_a_slow_link(
    swarm: SourcePool, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    monkeypatch.setattr(InFlightLimit, "is_slow", is_slow)
    data = np.random.default_rng(1).normal(0, 0.02, PIECE_BYTES).astype("<f4").tobytes() + b"and a few"
    await swarm.add_honest("one", data)
    await swarm.fetch(Blob.of(data))
    assert swarm.store.read(Blob.of(data).digest) == data
    assert (swarm.fetcher.bytes_received < 0.87 * len(data)) == is_slow
    assert swarm.faults == []


class CompressingSource(ScriptedSource):
    """Claims that everything it sends is compressed to `claimed` bytes."""

    claimed = 0

    async def Fetch(self, request: FetchRequest, context: Any) -> AsyncIterator[Chunk]:  # noqa: N802
        async for chunk in super().Fetch(request, context):
            yield Chunk(data=chunk.data[: self.claimed], squeezed=self.claimed)


@pytest.mark.parametrize("data", [DATA[:PIECE_BYTES], DATA], ids=len)
@pytest.mark.parametrize("claimed", [1, 9, CHUNK_BYTES - 1])
async def test_invalid_compressed_piece_counts_as_a_lie(swarm: SourcePool, data: bytes, claimed: int) -> None:
    liar = CompressingSource(data)
    liar.claimed = claimed
    await swarm.add_source("liar", liar)
    with pytest.raises(UnreachableError):
        await swarm.fetch(Blob.of(data), deadline=0.5)
    assert {peer for peer, _ in swarm.faults} == {"liar"}
    await swarm.add_honest("honest", data)
    await swarm.fetch(Blob.of(data))


async def test_sources_share_the_pieces_and_no_byte_arrives_twice(swarm: SourcePool) -> None:
    services = [await swarm.add_honest(name, DATA) for name in ("one", "two", "three")]
    await swarm.fetch()
    assert swarm.store.read(BLOB.digest) == DATA
    assert swarm.fetcher.bytes_received == len(DATA) + len(piece_hashes(DATA))
    assert sum(service.total_bytes_served > PIECE_BYTES for service in services) >= 2


async def test_dead_source_costs_only_the_bytes_in_flight(swarm: SourcePool) -> None:
    mortal = ScriptedSource(DATA)
    mortal.frozen_after = 3.5 * PIECE_BYTES
    await swarm.add_source("mortal", mortal)
    fetching = asyncio.create_task(swarm.fetch())
    await wait_until(lambda: mortal.bytes_sent >= mortal.frozen_after)
    honest = await swarm.add_honest("honest", DATA)
    await swarm.servers["mortal"].stop(None)
    await fetching
    assert swarm.store.read(BLOB.digest) == DATA
    lost = swarm.fetcher.bytes_received - len(DATA)
    assert lost <= SHORT_TIMEOUTS.pieces_per_source * PIECE_BYTES + 2 * len(piece_hashes(DATA))
    assert honest.total_bytes_served < len(DATA) - PIECE_BYTES
    assert swarm.faults == []


@pytest.mark.parametrize("restart", [False, True])
async def test_interrupted_fetch_is_resumed(swarm: SourcePool, restart: bool) -> None:
    first = ScriptedSource(DATA)
    first.frozen_after = 7 * PIECE_BYTES
    await swarm.add_source("first", first)
    with pytest.raises(UnreachableError, match=r"1 sources tried: first: "):
        await swarm.fetch(deadline=1.0)
    assert not swarm.store.has(BLOB.digest)
    await swarm.servers.pop("first").stop(None)
    if restart:
        swarm.store = BlobStore(swarm.folder / "fetched", ROOM)
    swarm.fetcher = swarm.new_fetcher()
    second = await swarm.add_honest("second", DATA)
    await swarm.fetch()
    assert swarm.store.read(BLOB.digest) == DATA
    # At least five whole pieces arrived before the cut; two of the seven may have been halves.
    assert second.total_bytes_served <= len(DATA) - 5 * PIECE_BYTES


@pytest.mark.parametrize("after", [0, PIECE_BYTES // 2, 4 * PIECE_BYTES])
async def test_frozen_sources_do_not_stop_others(swarm: SourcePool, after: int) -> None:
    for name in ("frozen 1", "frozen 2", "frozen 3"):
        frozen = ScriptedSource(DATA)
        frozen.frozen_after = after
        await swarm.add_source(name, frozen)
    await swarm.add_honest("honest", DATA)
    await asyncio.wait_for(swarm.fetch(), 15)
    assert swarm.store.read(BLOB.digest) == DATA
    assert swarm.faults == [], "slow is not a lie"


async def test_slow_source_that_makes_progress_is_kept(swarm: SourcePool) -> None:
    class Slow(ScriptedSource):
        async def Fetch(self, request: FetchRequest, context: Any) -> AsyncIterator[Chunk]:  # noqa: N802
            async for chunk in super().Fetch(request, context):
                await asyncio.sleep(0.4 * SHORT_TIMEOUTS.stall_seconds)
                yield chunk

    data = DATA[:PIECE_BYTES]
    slow = Slow(data)
    await swarm.add_source("slow", slow)
    await swarm.fetch(Blob.of(data))
    assert slow.calls == 1, "the whole took longer than a stall, no chunk did"


async def test_fetch_from_frozen_sources_ends_at_its_deadline(swarm: SourcePool) -> None:
    frozen = ScriptedSource(DATA)
    frozen.frozen_after = 0
    await swarm.add_source("frozen", frozen)
    swarm.fetcher = swarm.new_fetcher(DownloadPolicy())  # its timeouts are far longer than the deadline
    started = asyncio.get_running_loop().time()
    with pytest.raises(UnreachableError, match="not fetched within 0.5 s: 1 sources tried: frozen: "):
        await swarm.fetch(deadline=0.5)
    assert asyncio.get_running_loop().time() - started < 3


async def test_fetch_without_sources_reports_that(swarm: SourcePool) -> None:
    with pytest.raises(UnreachableError, match="no source is known"):
        await swarm.fetch(deadline=0.2)


async def test_blob_that_is_not_there_yet_is_requested_again(swarm: SourcePool) -> None:
    late = BlobStore(swarm.folder / "late", ROOM)
    await swarm.add_source("late", BlobService(late, lambda context: "fetcher"))
    swarm.servers["gone"] = grpc.aio.server()  # never started
    fetching = asyncio.create_task(swarm.fetch())
    await asyncio.wait([fetching], timeout=0.6)
    assert not fetching.done()
    late.put(DATA)
    await fetching
    assert swarm.store.read(BLOB.digest) == DATA


@pytest.mark.parametrize("wait_if_absent", [False, True])
async def test_absent_blob_is_given_up_unless_the_caller_waits_for_it(swarm: SourcePool, wait_if_absent: bool) -> None:
    for name in "abc":
        await swarm.add_source(name, BlobService(BlobStore(swarm.folder / name, ROOM), lambda context: "fetcher"))
    fetching = swarm.fetcher.fetch(BLOB, swarm.sources, 3.0 if wait_if_absent else 30.0, wait_if_absent=wait_if_absent)
    with pytest.raises(UnreachableError if wait_if_absent else GoneError) as caught:
        await fetching
    assert isinstance(caught.value, GoneError) != wait_if_absent


async def test_owner_that_denies_its_blob_is_named_at_once_and_others_may_still_have_it(swarm: SourcePool) -> None:
    """A source that is no owner may get the blob later, so that its first denial says nothing."""
    await swarm.add_source("owner", BlobService(BlobStore(swarm.folder / "owner", ROOM), lambda context: "fetcher"))
    patient = asyncio.create_task(swarm.fetcher.fetch(BLOB, swarm.sources, 30.0))
    with pytest.raises(DeniedError) as caught:
        await swarm.fetcher.fetch(BLOB, swarm.sources, 30.0, owners=["owner"])
    assert caught.value.peer == "owner" and not patient.done()
    with pytest.raises(UnreachableError) as other:
        await swarm.fetcher.fetch(BLOB, swarm.sources, 0.5, owners=["another"])
    assert not isinstance(other.value, DeniedError)
    await swarm.add_honest("holder", DATA)
    await patient
    await swarm.fetcher.fetch(BLOB, swarm.sources, 30.0, owners=["owner"])


async def test_later_waiter_may_add_a_source_for_an_absent_blob(swarm: SourcePool) -> None:
    await swarm.add_source("empty", BlobService(BlobStore(swarm.folder / "empty", ROOM), lambda context: "fetcher"))
    patient = asyncio.create_task(swarm.fetcher.fetch(BLOB, lambda: ["empty"], 30.0))
    with pytest.raises(GoneError):
        await swarm.fetcher.fetch(BLOB, lambda: ["empty"], 30.0, wait_if_absent=False)
    await swarm.add_honest("one", DATA)
    await swarm.fetcher.fetch(BLOB, lambda: ["one"], 30.0, wait_if_absent=False)
    await patient


async def test_unreachable_source_does_not_count_as_a_denial(swarm: SourcePool) -> None:
    await swarm.add_source("empty", BlobService(BlobStore(swarm.folder / "empty", ROOM), lambda context: "fetcher"))
    swarm.servers["gone"] = grpc.aio.server()  # never started
    with pytest.raises(UnreachableError) as caught:
        await swarm.fetcher.fetch(BLOB, swarm.sources, 2.0, wait_if_absent=False)
    assert not isinstance(caught.value, GoneError)
    await swarm.add_honest("newcomer", DATA)
    await swarm.fetcher.fetch(BLOB, swarm.sources, 10.0, wait_if_absent=False)
    assert swarm.store.has(BLOB.digest)


async def test_new_source_is_noticed(swarm: SourcePool) -> None:
    fetching = asyncio.create_task(swarm.fetch())
    await asyncio.wait([fetching], timeout=0.2)
    await swarm.add_honest("newcomer", DATA)
    await fetching
    assert swarm.store.has(BLOB.digest)


async def test_busy_source_is_asked_again(swarm: SourcePool) -> None:
    await swarm.add_honest("busy", DATA, limits=CallerLimits(calls=1))
    await swarm.fetch()
    assert swarm.store.read(BLOB.digest) == DATA
    assert swarm.faults == []


async def test_closed_channel_counts_as_a_failure_not_a_cancellation(swarm: SourcePool) -> None:
    frozen = ScriptedSource(DATA)
    frozen.frozen_after = 2 * PIECE_BYTES
    await swarm.add_source("frozen", frozen)
    fetching = asyncio.create_task(swarm.fetch())
    await wait_until(lambda: frozen.bytes_sent >= frozen.frozen_after)
    await swarm.channel("frozen").close()
    await swarm.add_honest("honest", DATA)
    await fetching
    assert swarm.store.read(BLOB.digest) == DATA


async def test_fetches_of_one_blob_share_a_download(swarm: SourcePool) -> None:
    services = [await swarm.add_honest(name, DATA) for name in ("one", "two")]
    await asyncio.gather(*(swarm.fetch() for _ in range(5)))
    assert sum(service.total_bytes_served for service in services) == len(DATA) + len(piece_hashes(DATA))


async def test_waiter_that_gives_up_leaves_the_download_to_others(swarm: SourcePool) -> None:
    frozen = ScriptedSource(DATA)
    frozen.frozen_after = 5 * PIECE_BYTES
    await swarm.add_source("frozen", frozen)
    patient = asyncio.create_task(swarm.fetch())
    hasty = asyncio.create_task(swarm.fetch(deadline=0.3))
    cancelled = asyncio.create_task(swarm.fetch())
    await wait_until(lambda: frozen.bytes_sent >= frozen.frozen_after)
    cancelled.cancel()
    results = await asyncio.gather(hasty, cancelled, return_exceptions=True)
    assert [type(result) for result in results] == [UnreachableError, asyncio.CancelledError]
    assert not patient.done()
    honest = await swarm.add_honest("honest", DATA)
    await patient
    assert swarm.store.read(BLOB.digest) == DATA
    assert honest.total_bytes_served < len(DATA) - PIECE_BYTES


async def test_cancelled_fetch_leaves_no_task_and_can_restart_at_once(swarm: SourcePool) -> None:
    await swarm.add_honest("one", DATA)
    rng = random.Random(11)
    for _ in range(15):
        before = swarm.fetcher.bytes_received
        enough = before + rng.randrange(3 * PIECE_BYTES)
        fetching = asyncio.create_task(swarm.fetch())
        await wait_until(lambda: fetching.done() or swarm.fetcher.bytes_received > enough)  # noqa: B023
        fetching.cancel()
        again = asyncio.create_task(swarm.fetch())
        await asyncio.wait([fetching])
        await asyncio.wait([again], timeout=0.02)
        assert not again.cancelled(), "the next fetch does not inherit the cancellation"
        again.cancel()
        await asyncio.wait([again])
        left = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("fetch ")]
        assert left == []
    await swarm.fetch()
    assert swarm.store.read(BLOB.digest) == DATA


async def test_full_disk_ends_the_fetch_which_resumes_when_there_is_room(
    swarm: SourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await swarm.add_honest("one", DATA)
    written = itertools.count()
    write = os.pwrite

    def fill_up(descriptor: int, data: bytes, offset: int) -> int:
        if next(written) >= 5:
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, data, offset)

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="no space left"):
        patch.setattr(os, "pwrite", fill_up)
        await swarm.fetch()
    assert swarm.faults == []
    before = swarm.fetcher.bytes_received
    await swarm.fetch()
    assert swarm.store.read(BLOB.digest) == DATA
    assert swarm.fetcher.bytes_received - before == len(DATA) - 5 * PIECE_BYTES


async def test_concurrent_fetches_of_many_blobs_fetch_each_byte_once(swarm: SourcePool) -> None:
    contents = [random.Random(seed).randbytes(300_000 + seed) for seed in range(40)]
    services = [await swarm.add_honest(name, *contents) for name in ("one", "two", "three")]
    swarm.fetcher = swarm.new_fetcher(DownloadPolicy(late_after_seconds=10.0))  # a busy machine makes no source late
    await asyncio.gather(*(swarm.fetch(Blob.of(data)) for data in contents))
    assert all(swarm.store.read(Blob.of(data).digest) == data for data in contents)
    assert sum(service.total_bytes_served for service in services) == sum(map(len, contents))
