"""The host's load with 200 peers that all change twice a second, and open pages."""

import asyncio
import time
import tracemalloc
from pathlib import Path

import pytest

from node.dashboard.event_log import EventLog
from node.dashboard.events import LogOpened
from node.dashboard.swarm_watcher import TICK_SECONDS
from protocol.identity import Identity
from tests.node.dashboard.example_events import FACTS, committed
from tests.node.dashboard.serving.many_peers import peer_records, serve_to_readers
from tests.node.dashboard.test_swarm_watcher import FakeDirectory, FakeNodeHandle, watcher_of

pytestmark = pytest.mark.slow

PEERS, PAGES = 200, 3
POLLS, WARM, MEASURED = 120, 40, 60
MAX_CPU = 0.10  # of one core
MAX_GROWTH = 256 * 1024  # bytes over half of the measured polls; a round of 200 peers keeps some 40 KiB for a while


async def test_two_hundred_peers_use_little_cpu_and_constant_memory(tmp_path: Path) -> None:
    names = [Identity.create().peer_id for _ in range(PEERS)]
    directory, event_log = FakeDirectory(), EventLog.open(tmp_path / "events.jsonl", LogOpened(at=0.0, facts=FACTS))
    watcher = watcher_of(FakeNodeHandle(directory), event_log)
    records = [peer_records(names, moment, 0) for moment in range(2)]

    async def poll(moment: int) -> None:
        for record in records[moment % 2].values():
            record.sequence, record.step, record.bytes_sent = moment + 1, moment * 3, moment * 100_000
        directory.records = dict(records[moment % 2])
        if moment % 20 == 19:
            event_log.record(committed(moment // 20, names))
        watcher.poll(moment * TICK_SECONDS)
        await asyncio.sleep(0.002)  # the server writes in between

    async with serve_to_readers(event_log, PAGES):
        for moment in range(WARM):
            await poll(moment)
        started = time.process_time()
        for moment in range(WARM, WARM + POLLS):
            await poll(moment)
        cpu = (time.process_time() - started) / (POLLS * TICK_SECONDS)
        assert event_log.subscriber_count == PAGES
        tracemalloc.start()
        held = []
        for moment in range(WARM + POLLS, WARM + POLLS + MEASURED):
            await poll(moment)
            held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    event_log.close()
    growth = min(held[-10:]) - min(held[MEASURED // 2 - 10 : MEASURED // 2])
    print(f"{cpu:.1%} of a core; {growth / 1024:.0f} KiB more after {MEASURED // 2} polls")
    assert cpu < MAX_CPU
    assert growth < MAX_GROWTH
