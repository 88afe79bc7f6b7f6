"""Fetching from sources that die, freeze and come late; over plain gRPC on Unix sockets."""

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
from protocol.errors import GoneError, StorageError, UnreachableError
from protocol.murmur_pb2 import Chunk, FetchRequest
from tests.protocol.blobs.fake_sources import BLOB, DATA, ROOM, SHORT_TIMEOUTS, SMALL, ScriptedSource, SourcePool


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("data", [b"", b"x", SMALL, DATA[:PIECE_BYTES], DATA[: PIECE_BYTES + 1], DATA], ids=len)
async def test_a_blob_of_any_size_arrives(swarm: SourcePool, data: bytes) -> None:
    await swarm.add_honest("one", data)
    await swarm.fetch(Blob.of(data))
    assert swarm.store.read(Blob.of(data).digest) == data
    await swarm.fetch(Blob.of(data))  # here already
    assert swarm.fetcher.bytes_received <= len(data) + len(piece_hashes(data))
    assert swarm.faults == []


@pytest.mark.parametrize("is_slow", [True, False])
async def test_on_a_slow_line_numbers_come_squeezed(
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
    """Says of whatever it sends that it is squeezed, to so many bytes."""

    said = 0

    async def Fetch(self, request: FetchRequest, context: Any) -> AsyncIterator[Chunk]:  # noqa: N802
        async for chunk in super().Fetch(request, context):
            yield Chunk(data=chunk.data[: self.said], squeezed=self.said)


@pytest.mark.parametrize("data", [DATA[:PIECE_BYTES], DATA], ids=len)
@pytest.mark.parametrize("said", [1, 9, CHUNK_BYTES - 1])
async def test_a_squeezed_piece_that_does_not_open_is_a_lie(swarm: SourcePool, data: bytes, said: int) -> None:
    liar = CompressingSource(data)
    liar.said = said
    await swarm.add_source("liar", liar)
    with pytest.raises(UnreachableError):
        await swarm.fetch(Blob.of(data), deadline=0.5)
    assert {peer for peer, _ in swarm.faults} == {"liar"}
    await swarm.add_honest("honest", data)
    await swarm.fetch(Blob.of(data))


async def test_several_sources_share_the_work_and_no_byte_comes_twice(swarm: SourcePool) -> None:
    services = [await swarm.add_honest(name, DATA) for name in ("one", "two", "three")]
    await swarm.fetch()
    assert swarm.store.read(BLOB.digest) == DATA
    assert swarm.fetcher.bytes_received == len(DATA) + len(piece_hashes(DATA))
    assert sum(service.total_bytes_served > PIECE_BYTES for service in services) >= 2


async def test_a_source_that_dies_costs_no_more_than_what_was_on_its_way(swarm: SourcePool) -> None:
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
async def test_a_cut_fetch_is_taken_up_where_it_was(swarm: SourcePool, restart: bool) -> None:
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
    # At least five whole pieces came before the cut: two of the seven may have been halves.
    assert second.total_bytes_served <= len(DATA) - 5 * PIECE_BYTES


@pytest.mark.parametrize("after", [0, PIECE_BYTES // 2, 4 * PIECE_BYTES])
async def test_frozen_sources_do_not_stop_the_others(swarm: SourcePool, after: int) -> None:
    for name in ("frozen 1", "frozen 2", "frozen 3"):
        frozen = ScriptedSource(DATA)
        frozen.frozen_after = after
        await swarm.add_source(name, frozen)
    await swarm.add_honest("honest", DATA)
    await asyncio.wait_for(swarm.fetch(), 15)
    assert swarm.store.read(BLOB.digest) == DATA
    assert swarm.faults == [], "slow is not a lie"


async def test_a_slow_source_that_gets_on_is_not_given_up(swarm: SourcePool) -> None:
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


async def test_a_fetch_from_frozen_sources_ends_by_its_deadline(swarm: SourcePool) -> None:
    frozen = ScriptedSource(DATA)
    frozen.frozen_after = 0
    await swarm.add_source("frozen", frozen)
    swarm.fetcher = swarm.new_fetcher(DownloadPolicy())  # whose time-outs are far longer than the deadline
    began = asyncio.get_running_loop().time()
    with pytest.raises(UnreachableError, match="not fetched within 0.5 s: 1 sources tried: frozen: "):
        await swarm.fetch(deadline=0.5)
    assert asyncio.get_running_loop().time() - began < 3


async def test_without_sources_it_says_so(swarm: SourcePool) -> None:
    with pytest.raises(UnreachableError, match="no source is known"):
        await swarm.fetch(deadline=0.2)


async def test_what_is_not_there_yet_is_asked_for_again(swarm: SourcePool) -> None:
    late = BlobStore(swarm.folder / "late", ROOM)
    await swarm.add_source("late", BlobService(late, lambda context: "fetcher"))
    swarm.servers["gone"] = grpc.aio.server()  # nothing listens there
    fetching = asyncio.create_task(swarm.fetch())
    await asyncio.wait([fetching], timeout=0.6)
    assert not fetching.done()
    late.put(DATA)
    await fetching
    assert swarm.store.read(BLOB.digest) == DATA


@pytest.mark.parametrize("patient", [False, True])
async def test_what_all_say_they_do_not_have_is_given_up_by_who_will_not_wait(swarm: SourcePool, patient: bool) -> None:
    for name in "abc":
        await swarm.add_source(name, BlobService(BlobStore(swarm.folder / name, ROOM), lambda context: "fetcher"))
    wanted = swarm.fetcher.fetch(BLOB, swarm.sources, 3.0 if patient else 30.0, wait_if_absent=patient)
    with pytest.raises(UnreachableError if patient else GoneError) as caught:
        await wanted
    assert isinstance(caught.value, GoneError) != patient


async def test_what_the_first_who_wait_cannot_have_others_may_name_a_source_for(swarm: SourcePool) -> None:
    await swarm.add_source("empty", BlobService(BlobStore(swarm.folder / "empty", ROOM), lambda context: "fetcher"))
    patient = asyncio.create_task(swarm.fetcher.fetch(BLOB, lambda: ["empty"], 30.0))
    with pytest.raises(GoneError):
        await swarm.fetcher.fetch(BLOB, lambda: ["empty"], 30.0, wait_if_absent=False)
    await swarm.add_honest("one", DATA)
    await swarm.fetcher.fetch(BLOB, lambda: ["one"], 30.0, wait_if_absent=False)
    await patient


async def test_who_cannot_be_reached_has_not_said_that_it_does_not_have_it(swarm: SourcePool) -> None:
    await swarm.add_source("empty", BlobService(BlobStore(swarm.folder / "empty", ROOM), lambda context: "fetcher"))
    swarm.servers["gone"] = grpc.aio.server()  # nothing listens there
    with pytest.raises(UnreachableError) as caught:
        await swarm.fetcher.fetch(BLOB, swarm.sources, 2.0, wait_if_absent=False)
    assert not isinstance(caught.value, GoneError)
    await swarm.add_honest("newcomer", DATA)
    await swarm.fetcher.fetch(BLOB, swarm.sources, 10.0, wait_if_absent=False)
    assert swarm.store.has(BLOB.digest)


async def test_a_newcomer_is_noticed(swarm: SourcePool) -> None:
    fetching = asyncio.create_task(swarm.fetch())
    await asyncio.wait([fetching], timeout=0.2)
    await swarm.add_honest("newcomer", DATA)
    await fetching
    assert swarm.store.has(BLOB.digest)


async def test_a_busy_source_is_asked_again(swarm: SourcePool) -> None:
    await swarm.add_honest("busy", DATA, limits=CallerLimits(calls=1))
    await swarm.fetch()
    assert swarm.store.read(BLOB.digest) == DATA
    assert swarm.faults == []


async def test_a_channel_closed_under_a_call_is_a_failure_and_no_cancel(swarm: SourcePool) -> None:
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


async def test_who_gives_up_leaves_the_download_to_the_others(swarm: SourcePool) -> None:
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


async def test_a_cancelled_fetch_leaves_no_task_and_can_be_begun_at_once(swarm: SourcePool) -> None:
    await swarm.add_honest("one", DATA)
    chance = random.Random(11)
    for _ in range(15):
        before = swarm.fetcher.bytes_received
        enough = before + chance.randrange(3 * PIECE_BYTES)
        fetching = asyncio.create_task(swarm.fetch())
        await wait_until(lambda: fetching.done() or swarm.fetcher.bytes_received > enough)  # noqa: B023
        fetching.cancel()
        again = asyncio.create_task(swarm.fetch())
        await asyncio.wait([fetching])
        await asyncio.wait([again], timeout=0.02)
        assert not again.cancelled(), "the one that comes next does not inherit the cancel"
        again.cancel()
        await asyncio.wait([again])
        left = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("fetch ")]
        assert left == []
    await swarm.fetch()
    assert swarm.store.read(BLOB.digest) == DATA


async def test_a_full_disk_ends_the_fetch_and_room_lets_it_go_on(
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


async def test_many_blobs_at_once_share_the_calls(swarm: SourcePool) -> None:
    datas = [random.Random(seed).randbytes(300_000 + seed) for seed in range(40)]
    services = [await swarm.add_honest(name, *datas) for name in ("one", "two", "three")]
    swarm.fetcher = swarm.new_fetcher(DownloadPolicy(late_after_seconds=10.0))  # a busy machine makes nobody late
    await asyncio.gather(*(swarm.fetch(Blob.of(data)) for data in datas))
    assert all(swarm.store.read(Blob.of(data).digest) == data for data in datas)
    assert sum(service.total_bytes_served for service in services) == sum(map(len, datas))
