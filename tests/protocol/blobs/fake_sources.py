"""Honest and misbehaving blob sources over plain gRPC on Unix sockets."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from protocol.blobs.blob import CHUNK_BYTES, PIECE_BYTES, Blob, piece_hashes
from protocol.blobs.download import Downloader
from protocol.blobs.scheduler import DownloadPolicy
from protocol.blobs.server import BlobService, CallerLimits, register_blob_service
from protocol.blobs.store import BlobStore
from protocol.murmur_pb2 import Chunk, FetchRequest, PiecesReply, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsServicer, add_BlobsServicer_to_server
from tests.protocol.blobs.direct_channels import DirectChannels

SHORT_TIMEOUTS = DownloadPolicy(stall_seconds=0.6, late_after_seconds=0.3)
DATA = random.Random(1).randbytes(12 * PIECE_BYTES + 777)
BLOB = Blob.of(DATA)
SMALL = random.Random(2).randbytes(5000)
ROOM = 1 << 30


class RecordingDownloader(Downloader):
    def __init__(self, faults: list[tuple[str, str]], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._faults = faults

    def record_lie(self, peer: str, reason: str) -> None:
        super().record_lie(peer, reason)
        self._faults.append((peer, reason))


class ScriptedSource(BlobsServicer):
    """A source of `data` that tampers with its bytes or stops sending."""

    def __init__(self, data: bytes, size: int | None = None, hashes: bytes | None = None) -> None:
        self.data = data
        self.size = len(data) if size is None else size
        self.hashes = piece_hashes(data) if hashes is None else hashes
        self.calls = 0
        self.bytes_sent = 0
        self.frozen_after: float = float("inf")
        self.tamper: Callable[[bytes], bytes] = bytes

    async def Pieces(self, request: PiecesRequest, context: Any) -> PiecesReply:  # noqa: N802
        return PiecesReply(size=self.size, pieces=self.hashes)

    async def Fetch(self, request: FetchRequest, context: Any) -> AsyncIterator[Chunk]:  # noqa: N802
        self.calls += 1
        data = self.tamper(self.data[request.offset : request.offset + request.length])
        for start in range(0, len(data), CHUNK_BYTES):
            if self.bytes_sent >= self.frozen_after:
                await asyncio.Event().wait()
            chunk = data[start : start + CHUNK_BYTES]
            self.bytes_sent += len(chunk)
            yield Chunk(data=chunk)


def flip_last_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


class SourcePool:
    """Sources with a server each, and a store and downloader to fetch into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: dict[str, grpc.aio.Server] = {}
        self.faults: list[tuple[str, str]] = []
        self.store = BlobStore(folder / "fetched", ROOM)
        self.fetcher = self.new_fetcher()
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def add_source(self, name: str, service: BlobsServicer) -> None:
        server = self.servers[name] = grpc.aio.server()
        if isinstance(service, BlobService):
            register_blob_service(service, server)
        else:
            add_BlobsServicer_to_server(service, server)
        server.add_insecure_port(f"unix:{self.folder}/{name}.sock")
        await server.start()

    async def add_honest(self, name: str, *blobs: bytes, limits: CallerLimits | None = None) -> BlobService:
        store = BlobStore(self.folder / name, ROOM)
        for data in blobs:
            store.put(data)
        service = BlobService(store, lambda context: "fetcher", limits)
        await self.add_source(name, service)
        return service

    def channel(self, peer: str) -> grpc.aio.Channel:
        if peer not in self._channels:
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
            self._channels[peer] = grpc.aio.insecure_channel(f"unix:{self.folder}/{peer}.sock", options=options)
        return self._channels[peer]

    def sources(self) -> list[str]:
        return list(self.servers)

    def new_fetcher(self, policy: DownloadPolicy = SHORT_TIMEOUTS, seed: int = 0) -> Downloader:
        channels, rng = DirectChannels(self.channel), random.Random(seed)
        return RecordingDownloader(self.faults, self.store, channels, rng, policy)

    async def fetch(self, blob: Blob = BLOB, deadline: float = 30.0) -> None:
        await self.fetcher.fetch(blob, self.sources, deadline)

    async def stop(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        for server in self.servers.values():
            await server.stop(None)
