"""Records of many peers as a directory holds them, and processes that read the host's event stream."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence

from node.dashboard.event_log import EventLog
from node.dashboard.server import DashboardData, build_app
from node.monitoring.http_server import open_listener, serve
from node.units import parse_host_port
from protocol.murmur_pb2 import PeerRecord

READER = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as reader:
    reader.sendall(b"GET /api/v1/events HTTP/1.1\\r\\nHost: here\\r\\n\\r\\n")
    while reader.recv(1 << 20):
        pass
"""


def peer_records(names: Sequence[str], moment: int, number: int) -> dict[str, PeerRecord]:
    """Return the records of all peers at the given poll and round."""
    return {
        name: PeerRecord(
            sequence=moment + 1,
            role="trainer",
            device="NVIDIA GeForce RTX 4090",
            name=f"volunteer {place}",
            addresses=[f"/ip4/203.0.113.7/tcp/4001/p2p/{name}"],
            round=number,
            step=moment * 3,
            tokens=moment * 30_000,
            loss=3.0 + place / 100,
            tokens_per_second=9000.0 + moment % 100,
            bytes_sent=moment * 100_000,
            compute_seconds=moment * 0.4,
        )
        for place, name in enumerate(names)
    }


@contextlib.asynccontextmanager
async def serve_to_readers(event_log: EventLog, reader_count: int, http: str = "127.0.0.1:0") -> AsyncIterator[int]:
    """Serve to readers in their own processes, so that their CPU time is not counted. Yields the port."""

    async def nothing() -> bytes:
        return b""

    listener = open_listener(*parse_host_port(http, "--http"), "--http")
    async with serve(build_app(DashboardData(event_log, nothing)), listener, 64) as port:
        print(f"page http://127.0.0.1:{port}/", file=sys.stderr, flush=True)
        readers = [
            await asyncio.create_subprocess_exec(sys.executable, "-c", READER, str(port)) for _ in range(reader_count)
        ]
        try:
            async with asyncio.timeout(20):
                while event_log.subscriber_count < reader_count:
                    await asyncio.sleep(0.01)
            yield port
        finally:
            for reader in readers:
                reader.kill()
                await reader.wait()
