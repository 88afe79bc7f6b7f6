"""Serve blobs to other peers: piece hashes and byte ranges, from any store of the node.

A range is sent in chunks of 256 KiB (smaller if our upload is limited), with one piece in memory at a time. A piece is
checked before it is sent: a corrupted blob is deleted, not served, so peers do not mistake it for misbehaviour. A
caller that asks for compression gets it where it pays; a piece that several callers want within a moment, as the parts
of a contribution are, is compressed once. Limits apply to each caller; the number of calls is also limited for all
callers together.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Set
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

import grpc

from protocol.blobs.blob import CHUNK_BYTES, PIECE_BYTES, Blob, Bytes, check_digest
from protocol.blobs.wire_format import BLOBS_SERVICE, Chunk, compress_piece
from protocol.errors import LimitError, MalformedError, MissingFileError, MurmurError, StorageError
from protocol.identity import PeerId
from protocol.murmur_pb2 import FetchRequest, PiecesReply, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsServicer
from protocol.recent import RecentSet, RecentTable

logger = logging.getLogger(__name__)

MAX_COUNTED_CALLERS = 1024
CHUNK_SECONDS = 0.05
MIN_CHUNK_BYTES = 4096
RECENT_SECONDS = 60.0  # for this long after a call a blob counts as being fetched
MAX_RECENT_BLOBS = 256
MAX_PACKED = 16  # compressed pieces that are kept, of at most a MiB each


Range = tuple[bytes, int, int]  # digest, offset, length


class BlobReader(Protocol):
    """The part of a store that serves blobs: a BlobStore or a StoreGroup."""

    def blob(self, digest: bytes) -> Blob: ...

    def hashes(self, digest: bytes) -> bytes: ...

    def read_piece(self, digest: bytes, piece: int) -> Bytes: ...


class OwnedStore(BlobReader, Protocol):
    def has(self, digest: bytes) -> bool: ...


class StoreGroup:
    """The stores of a node. Each owner decides which of its blobs stay."""

    def __init__(self) -> None:
        self._stores: list[OwnedStore] = []

    def add(self, store: OwnedStore) -> None:
        self._stores.append(store)

    def remove(self, store: OwnedStore) -> None:
        """Serve the blobs of a store no longer."""
        self._stores.remove(store)

    def blob(self, digest: bytes) -> Blob:
        return self._find(digest).blob(digest)

    def hashes(self, digest: bytes) -> bytes:
        return self._find(digest).hashes(digest)

    def read_piece(self, digest: bytes, piece: int) -> Bytes:
        return self._find(digest).read_piece(digest, piece)

    def _find(self, digest: bytes) -> OwnedStore:
        check_digest(digest)
        for store in self._stores:
            if store.has(digest):
                return store
        raise MissingFileError(f"no blob {digest.hex()} here; fetch it first")


class RangeError(MurmurError):
    """The range ends behind the end of the blob."""


_STATUS: dict[type[Exception], tuple[grpc.StatusCode, str]] = {  # status code, and the reason by which it is counted
    MissingFileError: (grpc.StatusCode.NOT_FOUND, "blob not found"),
    RangeError: (grpc.StatusCode.OUT_OF_RANGE, "malformed"),
    MalformedError: (grpc.StatusCode.INVALID_ARGUMENT, "malformed"),
    LimitError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "limit"),
    StorageError: (grpc.StatusCode.UNAVAILABLE, "disk"),
    TimeoutError: (grpc.StatusCode.DEADLINE_EXCEEDED, "slow reader"),
}


@dataclass(frozen=True)
class CallerLimits:
    """Limits of one caller, and the seconds it may take to accept one chunk.

    `all_calls` limits the calls of all callers together, because each holds a piece in memory.
    """

    calls: int = 32
    all_calls: int = 512
    bytes_asked: int = 64 * PIECE_BYTES
    chunk_seconds: float = 40.0
    chunk_bytes: int = CHUNK_BYTES

    @classmethod
    def at_rate(cls, upload: float) -> Self:
        """Choose a chunk size for an upload rate in bytes a second.

        All concurrent callers must get a chunk before they give us up.
        """
        return cls(chunk_bytes=int(min(CHUNK_BYTES, max(MIN_CHUNK_BYTES, upload * CHUNK_SECONDS))))


@dataclass
class CallerLoad:
    """The running calls of one caller."""

    calls: int = 0
    bytes_asked: int = 0


class BlobService(BlobsServicer):
    """Serves the store's blobs to other peers.

    `caller` returns the peer behind a call, or raises MalformedError.

    `bytes_served` counts by peer for the last 1024 peers served, `total_bytes_served` for all; `refusals` counts
    refused calls by reason.
    """

    def __init__(self, store: BlobReader, caller: Callable[[Any], PeerId], limits: CallerLimits | None = None) -> None:
        self.bytes_served = RecentTable[PeerId, int](MAX_COUNTED_CALLERS)
        self.total_bytes_served = 0
        self.refusals: Counter[str] = Counter()
        self._store = store
        self._caller = caller
        self._limits = limits or CallerLimits()
        self._loads: dict[PeerId, CallerLoad] = {}
        self._requested = RecentSet[bytes](RECENT_SECONDS, MAX_RECENT_BLOBS)
        self._packed = RecentTable[Range, asyncio.Future[bytes | None]](MAX_PACKED)

    def recently_requested(self) -> Set[bytes]:
        """Return the digests of blobs that were requested recently.

        They may be requested again.
        """
        return self._requested.members(time.monotonic())

    async def Pieces(self, request: PiecesRequest, context: Any) -> PiecesReply:  # noqa: N802
        async with self._translate_errors(context) as peer:
            with self._admit(peer, 0):
                blob = self._store.blob(request.digest)
                hashes = await asyncio.to_thread(self._store.hashes, blob.digest)
                self._count_bytes(peer, len(hashes))
        return PiecesReply(size=blob.size, pieces=hashes)

    # Written with context.write instead of yield, because only then can a slow reader be given a deadline.
    async def Fetch(self, request: FetchRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        async with self._translate_errors(context) as peer:
            blob = self._store.blob(request.digest)
            _check_range(blob, request.offset, request.length)
            with self._admit(peer, request.length):
                self._requested.add(blob.digest, time.monotonic())
                async for chunk in self._chunks(blob, request):
                    async with asyncio.timeout(self._limits.chunk_seconds):
                        await context.write(chunk)
                    self._count_bytes(peer, len(chunk.data))

    async def _chunks(self, blob: Blob, request: FetchRequest) -> AsyncIterator[Chunk]:
        offset, end = request.offset, request.offset + request.length
        is_one_piece = offset // PIECE_BYTES == (end - 1) // PIECE_BYTES
        while offset < end:
            length = min(end, (offset // PIECE_BYTES + 1) * PIECE_BYTES) - offset
            wanted = blob.digest, offset, length
            packed, data = await self._pack(wanted) if request.squeezed and is_one_piece else (None, None)
            if packed is None and data is None:
                data = await self._read(wanted)
            for chunk in _split_chunks(packed or data or b"", self._limits.chunk_bytes):
                yield Chunk(chunk, len(packed or b""))
            offset += length

    async def _read(self, wanted: Range) -> memoryview:
        """Read a range that lies in one piece."""
        digest, offset, length = wanted
        piece, start = divmod(offset, PIECE_BYTES)
        data = await asyncio.to_thread(self._store.read_piece, digest, piece)
        return memoryview(data)[start : start + length]

    async def _pack(self, wanted: Range) -> tuple[bytes | None, memoryview | None]:
        """Return a range compressed, None if that does not pay, and the range itself if it was read for this call."""
        data = None
        if wanted not in self._packed:
            data = await self._read(wanted)
        if wanted not in self._packed:  # still, after the read
            self._packed[wanted] = asyncio.ensure_future(asyncio.to_thread(compress_piece, data or b""))
        # The call of one caller may end while others wait for the same piece.
        return await asyncio.shield(self._packed[wanted]), data

    @asynccontextmanager
    async def _translate_errors(self, context: Any) -> AsyncIterator[PeerId]:
        """Yield the caller's peer id, and turn errors raised inside into a status.

        The reason is logged here.
        """
        peer = "somebody unknown"
        try:
            peer = self._caller(context)
            yield peer
        except tuple(_STATUS) as error:
            status, label = next(answer for kind, answer in _STATUS.items() if isinstance(error, kind))
            self.refusals[label] += 1
            reason = str(error) or "the caller does not read"
            logger.debug("blob call of %s refused: %s: %s", peer, status.name, reason)
            # The reason is not sent, because it names folders.
            await context.abort(status)

    @contextmanager
    def _admit(self, peer: PeerId, length: int) -> Iterator[None]:
        if sum(load.calls for load in self._loads.values()) >= self._limits.all_calls:
            raise LimitError(f"all {self._limits.all_calls} slots are in use")
        load = self._loads.get(peer, CallerLoad())
        if load.calls >= self._limits.calls or load.bytes_asked + length > self._limits.bytes_asked:
            raise LimitError(f"at most {self._limits.calls} calls and {self._limits.bytes_asked} bytes at once")
        self._loads[peer] = load
        load.calls += 1
        load.bytes_asked += length
        try:
            yield
        finally:
            load.calls -= 1
            load.bytes_asked -= length
            if load.calls == 0:
                del self._loads[peer]

    def _count_bytes(self, peer: PeerId, size: int) -> None:
        self.total_bytes_served += size
        self.bytes_served[peer] = self.bytes_served.get(peer, 0) + size


def register_blob_service(service: BlobService, server: Any) -> None:
    """Register the service with our own serializer of chunks.

    Otherwise this does the same as gRPC's generated code.
    """
    handlers = {
        "Pieces": grpc.unary_unary_rpc_method_handler(
            service.Pieces, PiecesRequest.FromString, PiecesReply.SerializeToString
        ),
        "Fetch": grpc.unary_stream_rpc_method_handler(service.Fetch, FetchRequest.FromString, Chunk.serialize),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(BLOBS_SERVICE, handlers),))
    server.add_registered_method_handlers(BLOBS_SERVICE, handlers)


def _split_chunks(data: Bytes, size: int) -> Iterator[memoryview]:
    return (memoryview(data)[start : start + size] for start in range(0, len(data), size))


def _check_range(blob: Blob, offset: int, length: int) -> None:
    if length == 0:
        raise MalformedError("a range must have at least one byte")
    if offset + length > blob.size:
        raise RangeError("the blob ends before that range")
