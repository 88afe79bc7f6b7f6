"""Measure the cost of a large run's page for its host, with virtual peers that change twice a second, and readers.

    python benchmarks/page.py [--minutes 30] [--peers 200] [--pages 3] [--round 10] [--http 127.0.0.1:0] [--json]

The server, the journal and the picture are real, as are the readers over loopback; only the peers' records are made up.
A round is committed every so many seconds. Prints each minute's share of one core and the process's resident memory,
and where the page is served, so that it can be looked at in a browser. Exit code 1 where the share is above a tenth of
a core, or the memory at the end more than a tenth above that of the tenth minute.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil

from node.dashboard.event_log import EventLog
from node.dashboard.events import LogOpened
from node.dashboard.swarm_watcher import TICK_SECONDS
from protocol.identity import Identity
from tests.node.dashboard.example_events import FACTS, committed
from tests.node.dashboard.serving.many_peers import peer_records, serve_to_readers
from tests.node.dashboard.test_swarm_watcher import FakeDirectory, FakeNodeHandle, watcher_of

MAX_SHARE = 0.10  # of one core
MAX_GROWTH = 0.10
SETTLED = 10  # minutes: by then what is kept for a while is kept
LINE = "{minute:4.0f} min {share:6.1%} of a core {rss_mb:8.1f} MB"
Minute = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--peers", type=int, default=200)
    parser.add_argument("--pages", type=int, default=3)
    parser.add_argument("--round", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--http", default="127.0.0.1:0")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    minutes = asyncio.run(measure(options))
    if options.json:
        print(json.dumps(minutes))
    return int(missed(minutes))


async def measure(options: argparse.Namespace) -> list[Minute]:
    process, minutes = psutil.Process(), list[Minute]()
    with tempfile.TemporaryDirectory() as folder:
        opened = LogOpened(at=time.time(), facts=FACTS)
        crowd = Crowd(EventLog.open(Path(folder) / "events.jsonl", opened), options.peers, options.round)
        async with serve_to_readers(crowd.recorder, options.pages, options.http):
            for minute in range(options.minutes):
                spent = time.process_time()
                await crowd.live(seconds=60)
                share = (time.process_time() - spent) / 60
                minutes.append({"minute": minute + 1, "share": share, "rss_mb": process.memory_info().rss / 1e6})
                print(LINE.format(**minutes[-1]), file=sys.stderr)
        crowd.recorder.close()
    return minutes


class Crowd:
    """Virtual peers that change at each look; `period`: seconds a round."""

    def __init__(self, recorder: EventLog, peers: int, period: float) -> None:
        self.recorder = recorder
        self._directory = FakeDirectory()
        self._watch = watcher_of(FakeNodeHandle(self._directory), recorder)
        self._names = [Identity.create().peer_id for _ in range(peers)]
        self._period = period
        self._began = time.monotonic()
        self._looks = 0

    async def live(self, seconds: float) -> None:
        for _ in range(int(seconds / TICK_SECONDS)):
            number, known = int(self._looks * TICK_SECONDS / self._period), len(self.recorder.state.rows)
            self._directory.records = peer_records(self._names, self._looks, number)
            if number > known:
                self.recorder.record(committed(known, self._names, at=time.time()))
            self._watch.poll(time.time())
            self._looks += 1
            await asyncio.sleep(max(0.0, self._began + self._looks * TICK_SECONDS - time.monotonic()))


def missed(minutes: list[Minute]) -> bool:
    share = sum(minute["share"] for minute in minutes) / len(minutes)
    settled = minutes[min(SETTLED, len(minutes)) - 1]["rss_mb"]
    return share > MAX_SHARE or minutes[-1]["rss_mb"] > (1 + MAX_GROWTH) * settled


if __name__ == "__main__":
    sys.exit(main())
