"""The two calls by which a blob comes, each with deadlines, and what may go wrong with them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, Protocol

import grpc

from protocol.blobs.blob import CHUNK_BYTES, PIECE_BYTES, Blob, Bytes
from protocol.blobs.scheduler import DownloadScheduler, InFlightLimit, PieceRequest, RequestFailure
from protocol.blobs.wire_format import FETCH_METHOD, decompress_piece, parse_chunk
from protocol.errors import LimitError, MalformedError, PeerFault, TransportError, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import FetchRequest, PiecesReply, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsStub
from protocol.replies import require_reply

_FAILURE_BY_STATUS = {
    grpc.StatusCode.NOT_FOUND: RequestFailure.ABSENT,
    # The size we were told may be wrong: no reason to blame the source.
    grpc.StatusCode.OUT_OF_RANGE: RequestFailure.ABSENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: RequestFailure.BUSY,
    grpc.StatusCode.DEADLINE_EXCEEDED: RequestFailure.SLOW,
}
RESCHEDULE_SHARE = 0.05  # of the seconds in which nothing may come: by so much a deadline may lie too early


class RequestFailedError(Exception):
    """A call that did not deliver, and why."""

    def __init__(self, failure: RequestFailure, reason: str) -> None:
        super().__init__(reason)
        self.failure = failure
        self.reason = reason


class UnattributedMismatchError(Exception):
    """A blob of one piece came out wrong: either its source or whoever told its size lied."""


class ChannelLease(Protocol):
    """A channel for one call, and what its lender is to hear of the call."""

    @property
    def channel(self) -> object: ...  # of gRPC's kind
    def record_received(self, size: int) -> None: ...
    def report_broken(self, reason: str) -> None: ...


class ChannelPool(Protocol):
    """What a fetch needs of the network: channels for its calls, and how many at once are of use to a peer's link."""

    def lease_channel(self, peer: PeerId) -> AbstractContextManager[ChannelLease]: ...
    def parallelism(self, peer: PeerId) -> int: ...


class BlobClient:
    """The two calls, each with a deadline. While little comes in, it asks for compressed pieces."""

    def __init__(self, channels: ChannelPool, stall: float, in_flight_limit: InFlightLimit) -> None:
        self.bytes_received = 0
        self._in_flight_limit = in_flight_limit
        self._channels = channels
        self._stall = stall
        self._timeouts: dict[PeerId, dict[asyncio.Timeout, float]] = {}  # of the calls that run, to their ends

    async def fetch_hashes(self, blob: Blob, piece_request: PieceRequest) -> PiecesReply:
        """Unchecked."""
        with self._lease_channel(piece_request) as lease:
            request = PiecesRequest(digest=blob.digest)
            reply: PiecesReply = require_reply(
                await BlobsStub(lease.channel).Pieces(request, timeout=piece_request.seconds)
            )
            lease.record_received(len(reply.pieces))
        self.bytes_received += len(reply.pieces)
        return reply

    async def fetch_piece(
        self,
        blob: Blob,
        scheduler: DownloadScheduler,
        piece_request: PieceRequest,
        store_piece: Callable[[bytearray], object],
    ) -> None:
        """`keep` checks the piece and writes it, in a thread; the piece takes up memory until it has."""
        length = blob.piece_length(piece_request.piece)
        with self._lease_channel(piece_request) as lease:
            data = await self._stream_piece(blob, scheduler, piece_request, lease)
        with translate_errors():
            if len(data) < length:
                data = await asyncio.to_thread(decompress_piece, data, length)
            await asyncio.to_thread(store_piece, data)

    async def _stream_piece(
        self, blob: Blob, plan: DownloadScheduler, call: PieceRequest, lease: ChannelLease
    ) -> bytearray:
        """The piece; squeezed, where it has fewer bytes."""
        data, received = bytearray(blob.piece_length(call.piece)), 0
        request = FetchRequest(digest=blob.digest, offset=call.piece * PIECE_BYTES, length=len(data))
        request.squeezed = self._in_flight_limit.is_slow
        stream = _open_stream(lease.channel, request, call.seconds)
        try:
            async with self._call_deadline(call):
                async for chunk in stream:
                    if not received and 0 < require_reply(chunk).squeezed < len(data):
                        data = bytearray(chunk.squeezed)
                    came = len(chunk.data)
                    received = _append_bytes(data, received, chunk.data)
                    # Empty chunks are no progress.
                    if came:
                        self._extend_timeouts(call.peer)
                        self.bytes_received += came
                        lease.record_received(came)
                        plan.record_received(call, came)
        finally:
            stream.cancel()
        if received != len(data):
            raise MalformedError("fewer bytes than were asked for")
        return data

    @asynccontextmanager
    async def _call_deadline(self, call: PieceRequest) -> AsyncIterator[None]:
        """TimeoutError at the end of its time, or where nothing comes from its peer. On one connection calls come one
        after the other, however they were begun: what comes for another call of the peer is a sign of life."""
        clock, limits = asyncio.get_running_loop().time, self._timeouts.setdefault(call.peer, {})
        end = clock() + call.seconds
        async with asyncio.timeout_at(min(end, clock() + self._stall)) as limit:
            limits[limit] = end
            try:
                yield
            finally:
                del limits[limit]
                if not limits:
                    self._timeouts.pop(call.peer, None)

    def _extend_timeouts(self, peer: PeerId) -> None:
        """Deadlines are moved on seldom: a fast link brings a thousand chunks in a second."""
        silent = asyncio.get_running_loop().time() + self._stall
        for limit, end in self._timeouts[peer].items():
            later = min(end, silent)
            if not limit.expired() and later - (limit.when() or 0.0) > self._stall * RESCHEDULE_SHARE:
                limit.reschedule(later)

    @contextmanager
    def _lease_channel(self, call: PieceRequest) -> Iterator[ChannelLease]:
        with translate_errors(), self._channels.lease_channel(call.peer) as lease:
            try:
                with translate_errors():
                    yield lease
            except RequestFailedError as error:
                if error.failure in (RequestFailure.LOST, RequestFailure.SLOW):
                    lease.report_broken(error.reason)
                raise


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turns what may go wrong with a source into a CallFailedError; a fault of our own disk passes."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        failure = _FAILURE_BY_STATUS.get(error.code(), RequestFailure.LOST)
        raise RequestFailedError(failure, f"{failure} ({error.code().name})") from error
    except TimeoutError as error:
        raise RequestFailedError(RequestFailure.SLOW, "no bytes for too long") from error
    except PeerFault as fault:
        raise RequestFailedError(RequestFailure.LIED, str(fault)) from fault
    except (TransportError, UnreachableError, grpc.aio.UsageError) as error:
        raise RequestFailedError(RequestFailure.LOST, str(error)) from error


def _open_stream(channel: Any, request: FetchRequest, seconds: float) -> Any:
    """The stub's call, but for who reads the chunks."""
    call = channel.unary_stream(
        FETCH_METHOD, request_serializer=FetchRequest.SerializeToString, response_deserializer=parse_chunk
    )
    return call(request, timeout=seconds)


def _append_bytes(data: bytearray, received: int, came: Bytes) -> int:
    """Behind the bytes received so far; how many there are then."""
    stop = received + len(came)
    if len(came) > CHUNK_BYTES or stop > len(data):
        raise LimitError("more bytes than were asked for")
    data[received:stop] = came
    return stop
