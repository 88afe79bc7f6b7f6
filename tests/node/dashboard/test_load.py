"""What a crowd costs the host: 200 peers that all change twice a second, and pages that listen."""

import asyncio
import time
import tracemalloc
from pathlib import Path

from node.dashboard.event_log import EventLog
from node.dashboard.events import LogOpened
from node.dashboard.swarm_watcher import TICK_SECONDS, SwarmWatcher
from protocol.identity import Identity
from tests.node.dashboard.example_events import FACTS, committed
from tests.node.dashboard.many_peers import peer_records, serve_to_readers
from tests.node.dashboard.test_swarm_watcher import FakeDirectory, FakeNodeHandle

PEERS, PAGES = 200, 3
LOOKS, WARM, WEIGHED = 120, 40, 60
MAX_SHARE = 0.10  # of one core
MAX_GROWTH = 256 * 1024  # bytes in half of the weighed looks; a round of 200 peers stays a while, with some 40 KiB


async def test_two_hundred_peers_take_little_of_a_core_and_no_growing_memory(tmp_path: Path) -> None:
    names = [Identity.create().peer_id for _ in range(PEERS)]
    directory, recorder = FakeDirectory(), EventLog.open(tmp_path / "events.jsonl", LogOpened(at=0.0, facts=FACTS))
    watch = SwarmWatcher(FakeNodeHandle(directory), recorder)  # type: ignore[arg-type]
    crowd = [peer_records(names, moment, 0) for moment in range(2)]

    async def look(moment: int) -> None:
        for record in crowd[moment % 2].values():
            record.sequence, record.step, record.bytes_sent = moment + 1, moment * 3, moment * 100_000
        directory.records = dict(crowd[moment % 2])
        if moment % 20 == 19:
            recorder.record(committed(moment // 20, names))
        watch.poll(moment * TICK_SECONDS)
        await asyncio.sleep(0.002)  # the server writes in between

    async with serve_to_readers(recorder, PAGES):
        for moment in range(WARM):
            await look(moment)
        spent = time.process_time()
        for moment in range(WARM, WARM + LOOKS):
            await look(moment)
        share = (time.process_time() - spent) / (LOOKS * TICK_SECONDS)
        assert recorder.subscriber_count == PAGES
        tracemalloc.start()
        held = []
        for moment in range(WARM + LOOKS, WARM + LOOKS + WEIGHED):
            await look(moment)
            held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    recorder.close()
    growth = min(held[-10:]) - min(held[WEIGHED // 2 - 10 : WEIGHED // 2])
    print(f"{share:.1%} of a core; {growth / 1024:.0f} KiB more after {WEIGHED // 2} looks")
    assert share < MAX_SHARE
    assert growth < MAX_GROWTH
