"""Measure the rate and the cost of the two paths between peers.

Two processes on this machine, one stream of gRPC from one to the other in messages of 256 KiB, in turns by libp2p and
directly. Counted is the processor time of both processes and of both their p2pd, whichever path is used.

    python benchmarks/paths.py [--turns 5] [--json]
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from protocol.blobs.blob import CHUNK_BYTES
from protocol.murmur_pb2 import Chunk, FetchRequest, PiecesReply, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsServicer, BlobsStub, add_BlobsServicer_to_server
from protocol.transport.multipath_policy import BulkPath as Way
from protocol.transport.transport import Transport

SIZE = 64 << 20
SECONDS = 120.0


class Source(BlobsServicer):
    async def Pieces(self, request: PiecesRequest, context: Any) -> PiecesReply:  # noqa: N802
        raise NotImplementedError

    async def Fetch(self, request: FetchRequest, context: Any) -> AsyncIterator[Chunk]:  # noqa: N802
        for _ in range(request.length // CHUNK_BYTES):
            yield Chunk(data=bytes(CHUNK_BYTES))


async def opened(folder: Path) -> Transport:
    """Serves, and has said on standard output who it is and where."""
    services = [lambda server: add_BlobsServicer_to_server(Source(), server)]
    transport = await Transport.start(folder / "key", folder, services, direct=0)
    print(json.dumps([transport.peer_id, await transport.addresses(), transport.direct_port]), flush=True)
    return transport


async def serve(folder: Path) -> None:
    await opened(folder)
    await asyncio.Event().wait()


def processor_seconds(pids: list[int]) -> float:
    """Of these processes and their children, so far."""
    found = [psutil.Process(pid) for pid in pids]
    family = [*found, *(child for process in found for child in process.children(recursive=True))]
    return sum(sum(process.cpu_times()[:2]) for process in family)


async def measured(transport: Transport, peer: str, way: Way, other: int) -> tuple[float, float]:
    """MB a second, and processor seconds."""
    link = transport.bulk._connections_of(peer)
    while True:
        with transport.bulk.lease_channel(peer) as lease:
            if lease._path is way:
                stream = BlobsStub(lease.channel).Fetch(FetchRequest(length=CHUNK_BYTES), timeout=SECONDS)
                assert [len(chunk.data) async for chunk in stream] == [CHUNK_BYTES]
                pids = [psutil.Process().pid, other]
                began, used = time.monotonic(), processor_seconds(pids)
                stream = BlobsStub(lease.channel).Fetch(FetchRequest(length=SIZE), timeout=SECONDS)
                assert sum([len(chunk.data) async for chunk in stream]) == SIZE
                return SIZE / 1e6 / (time.monotonic() - began), processor_seconds(pids) - used
        # Whatever the product would choose: by turns.
        link.path_selector.is_direct_verified = way is Way.DIRECT and bool(link.last_host)
        await asyncio.sleep(0.05)


Found = dict[Way, list[tuple[float, float]]]


@dataclass(frozen=True)
class Report:
    """Medians. `times_the_cost`: of libp2p's processor time over that of direct, by turns."""

    rates: dict[str, float]
    seconds: dict[str, float]
    times_the_cost: float
    least: float
    most: float


async def compare(turns: int) -> Found:
    with tempfile.TemporaryDirectory(prefix="murmur-") as name:
        source = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "ignore", __file__, "serve", f"{name}/source", stdout=asyncio.subprocess.PIPE
        )
        assert source.stdout
        peer, addresses, port = json.loads(await source.stdout.readline())
        transport = await Transport.start(Path(name) / "taker/key", Path(name) / "taker", [])
        transport.introduce(peer, addresses, port)
        try:
            found: Found = {way: [] for way in Way}
            for _ in range(turns):
                for way in Way:
                    found[way].append(await measured(transport, peer, way, source.pid))
            return found
        finally:
            source.terminate()
            await source.wait()
            await transport.stop()


def summed_up(found: Found) -> Report:
    rates, seconds = ({str(way): statistics.median(turn[i] for turn in found[way]) for way in found} for i in (0, 1))
    ratios = [usual[1] / direct[1] for usual, direct in zip(found[Way.LIBP2P], found[Way.DIRECT], strict=True)]
    return Report(rates, seconds, statistics.median(ratios), min(ratios), max(ratios))


def table(report: Report) -> str:
    lines = ["| path | MB/s | processor seconds a 64 MiB |", "|---|---|---|"]
    lines += [f"| {way} | {rate:.0f} | {report.seconds[way]:.3f} |" for way, rate in report.rates.items()]
    costs = f"{report.times_the_cost:.1f} times as much ({report.least:.1f} to {report.most:.1f})"
    return "\n".join((*lines, f"libp2p costs {costs}"))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args(arguments)
    report = summed_up(asyncio.run(compare(words.turns)))
    print(json.dumps(asdict(report)) if words.json else table(report))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(Path(sys.argv[2])))
    else:
        main(sys.argv[1:])
