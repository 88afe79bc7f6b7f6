"""Measure the memory that a daemon keeps of a peer that comes back again and again.

One process calls a peer over both paths; the peer's network ends and starts anew, with the same key. After each return
the memory of the caller's own (resident and not shared, after collecting cycles and giving back) is noted; the line of
least squares through these, behind a warm-up, says what a return costs. Once with threads that share one arena of
malloc, as a daemon's do, and once without, as the control.

    python benchmarks/returns.py [--times 60] [--json]

Takes 5 minutes on two cores. Exit code 1 where a return costs 10 KB and more.
"""

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import psutil

from benchmarks.paths import opened
from node.processes.process_memory import enable_frequent_gc, trim, use_one_malloc_arena
from protocol.blobs.blob import CHUNK_BYTES
from protocol.murmur_pb2 import FetchRequest
from protocol.murmur_pb2_grpc import BlobsStub
from protocol.transport.transport import Transport

WARM_UP = 10  # returns
CALLS = 6  # over each path, in each life
SECONDS = 20.0
ALLOWED_KILOBYTES = 10.0


@dataclass(frozen=True)
class Report:
    """KB that each return costs for good, by what malloc was told."""

    one_arena: float
    usual: float


async def serve(folder: Path) -> None:
    """A new network for each line of standard input."""
    while True:
        transport = await opened(folder)
        line = await asyncio.to_thread(sys.stdin.readline)
        await transport.stop()
        if not line:
            return


async def call(transport: Transport, peer: str) -> None:
    """Over either path, as far as it leads."""
    request = FetchRequest(length=CHUNK_BYTES)
    for _ in range(CALLS):
        with transport.bulk.lease_channel(peer) as lease:
            for channel in (lease.channel, transport.channel(peer)):
                try:
                    async for _ in BlobsStub(channel).Fetch(request, timeout=SECONDS):
                        pass
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.1)  # the path of its last life


async def take(times: int, folder: Path) -> list[float]:
    """KB of memory after each return."""
    command = [sys.executable, "-W", "ignore", __file__, "serve", str(folder / "source")]
    source = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert source.stdin and source.stdout
    transport = await Transport.start(folder / "taker/key", folder / "taker", [])
    enable_frequent_gc()
    taken = []
    try:
        for _ in range(times):
            async with asyncio.timeout(SECONDS):
                peer, addresses, port = json.loads(await source.stdout.readline())
            transport.introduce(peer, addresses, port)
            await call(transport, peer)
            taken.append(own_kilobytes())
            source.stdin.write(b"\n")
    finally:
        source.stdin.close()
        async with asyncio.timeout(SECONDS):
            await source.wait()
        await transport.stop()
    return taken


def own_kilobytes() -> float:
    gc.collect()
    trim()
    memory = psutil.Process().memory_info()
    return (memory.rss - memory.shared) / 1e3


def cost(taken: Sequence[float]) -> float:
    """KB a return, behind the warm-up."""
    behind = taken[WARM_UP:]
    return statistics.linear_regression(range(len(behind)), behind).slope


def measured(times: int, arenas: str) -> float:
    """In a process of its own, as arenas stay."""
    with tempfile.TemporaryDirectory(prefix="murmur-") as folder:
        command = [sys.executable, "-W", "ignore", __file__, "take", str(times), folder, arenas]
        told = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    return cost(json.loads(told))


def table(report: Report) -> str:
    lines = ["| arenas of malloc | KB kept of each return |", "|---|---|"]
    return "\n".join([*lines, f"| one | {report.one_arena:.1f} |", f"| as usual | {report.usual:.1f} |"])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args(arguments)
    report = Report(measured(words.times, "one"), measured(words.times, "usual"))
    print(json.dumps(asdict(report)) if words.json else table(report))
    return int(report.one_arena >= ALLOWED_KILOBYTES)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(Path(sys.argv[2])))
    elif sys.argv[1:2] == ["take"]:
        if sys.argv[4] == "one":
            use_one_malloc_arena()
        print(json.dumps(asyncio.run(take(int(sys.argv[2]), Path(sys.argv[3])))))
    else:
        sys.exit(main(sys.argv[1:]))
