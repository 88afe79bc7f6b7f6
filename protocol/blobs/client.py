"""The two RPCs that transfer a blob, with deadlines, and the translation of their errors."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, Protocol

import grpc

from protocol.blobs.blob import CHUNK_BYTES, PIECE_BYTES, Blob, Bytes
from protocol.blobs.scheduler import DownloadScheduler, InFlightLimit, PieceRequest, RequestFailure
from protocol.blobs.wire_format import FETCH_METHOD, decompress_piece, parse_chunk
from protocol.errors import LimitError, MalformedError, PeerFault, TransportError, UnreachableError, require_reply
from protocol.identity import PeerId
from protocol.murmur_pb2 import FetchRequest, PiecesReply, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsStub

_FAILURE_BY_STATUS = {
    grpc.StatusCode.NOT_FOUND: RequestFailure.ABSENT,
    # The size that we were given may be wrong, so the source is not to blame.
    grpc.StatusCode.OUT_OF_RANGE: RequestFailure.ABSENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: RequestFailure.BUSY,
    grpc.StatusCode.DEADLINE_EXCEEDED: RequestFailure.SLOW,
}
RESCHEDULE_SHARE = 0.05  # a deadline may be this share of the stall timeout too early, to save reschedules


class RequestFailedError(Exception):
    """Raised when a request did not deliver; says why."""

    def __init__(self, failure: RequestFailure, reason: str) -> None:
        super().__init__(reason)
        self.failure = failure
        self.reason = reason


class UnattributedMismatchError(Exception):
    """Raised when a one-piece blob does not match.

    Either the source lied, or the peer that named its size.
    """


class ChannelLease(Protocol):
    """A channel for one call, with reports about the call to its lender."""

    @property
    def channel(self) -> object: ...  # a gRPC channel
    def record_received(self, size: int) -> None: ...
    def report_broken(self, reason: str) -> None: ...


class ChannelPool(Protocol):
    """The network of a downloader.

    It provides channels for calls, and says how many parallel calls a peer's link can use.
    """

    def lease_channel(self, peer: PeerId) -> AbstractContextManager[ChannelLease]: ...
    def parallelism(self, peer: PeerId) -> int: ...


class BlobClient:
    """Performs the two RPCs, each with a deadline, and counts the received bytes.

    It requests compressed pieces (fewer bytes, more CPU) while the link is slow.
    """

    def __init__(self, channels: ChannelPool, stall: float, in_flight_limit: InFlightLimit) -> None:
        self.bytes_received = 0
        self._in_flight_limit = in_flight_limit
        self._channels = channels
        self._stall = stall
        self._timeouts: dict[PeerId, dict[asyncio.Timeout, float]] = {}  # of running calls, with their final deadlines

    async def fetch_hashes(self, blob: Blob, piece_request: PieceRequest) -> PiecesReply:
        """Fetch the piece hashes; they are not checked yet."""
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
        """Fetch a piece and pass it to `store_piece`.

        `store_piece` checks and writes it in a thread.
        """
        length = blob.piece_length(piece_request.piece)
        with self._lease_channel(piece_request) as lease:
            data = await self._stream_piece(blob, scheduler, piece_request, lease)
        with translate_errors():
            if len(data) < length:
                data = await asyncio.to_thread(decompress_piece, data, length)
            await asyncio.to_thread(store_piece, data)

    async def _stream_piece(
        self, blob: Blob, scheduler: DownloadScheduler, request: PieceRequest, lease: ChannelLease
    ) -> bytearray:
        """Return the received bytes of a piece.

        They are compressed if there are fewer than the piece's length.
        """
        data, received = bytearray(blob.piece_length(request.piece)), 0
        message = FetchRequest(digest=blob.digest, offset=request.piece * PIECE_BYTES, length=len(data))
        message.squeezed = self._in_flight_limit.is_slow
        stream = _open_stream(lease.channel, message, request.seconds)
        try:
            async with self._call_deadline(request):
                async for chunk in stream:
                    if not received and 0 < require_reply(chunk).squeezed < len(data):
                        data = bytearray(chunk.squeezed)
                    arrived = len(chunk.data)
                    received = _append_bytes(data, received, chunk.data)
                    # Empty chunks do not count as progress.
                    if arrived:
                        self._extend_timeouts(request.peer)
                        self.bytes_received += arrived
                        lease.record_received(arrived)
                        scheduler.record_received(request, arrived)
        finally:
            stream.cancel()
        if received != len(data):
            raise MalformedError("fewer bytes than were asked for")
        return data

    @asynccontextmanager
    async def _call_deadline(self, call: PieceRequest) -> AsyncIterator[None]:
        """Raise TimeoutError when the call's time ends or its peer stalls.

        One connection carries the calls of a peer one after the other, in any order, so bytes for another call of the
        same peer count as a sign of life.
        """
        clock, timeouts = asyncio.get_running_loop().time, self._timeouts.setdefault(call.peer, {})
        end = clock() + call.seconds
        async with asyncio.timeout_at(min(end, clock() + self._stall)) as timeout:
            timeouts[timeout] = end
            try:
                yield
            finally:
                del timeouts[timeout]
                if not timeouts:
                    self._timeouts.pop(call.peer, None)

    def _extend_timeouts(self, peer: PeerId) -> None:
        """Extend the peer's deadlines.

        This does not happen at each chunk, because a fast link delivers a thousand chunks a second.
        """
        stall_deadline = asyncio.get_running_loop().time() + self._stall
        for timeout, end in self._timeouts[peer].items():
            deadline = min(end, stall_deadline)
            if not timeout.expired() and deadline - (timeout.when() or 0.0) > self._stall * RESCHEDULE_SHARE:
                timeout.reschedule(deadline)

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
    """Turn the errors that a source can cause into RequestFailedError.

    Errors of our own disk pass.
    """
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
    """Call Fetch as the stub does, but with our own parser of chunks."""
    call = channel.unary_stream(
        FETCH_METHOD, request_serializer=FetchRequest.SerializeToString, response_deserializer=parse_chunk
    )
    return call(request, timeout=seconds)


def _append_bytes(data: bytearray, received: int, arrived: Bytes) -> int:
    """Write bytes behind those received so far, and return the new count."""
    stop = received + len(arrived)
    if len(arrived) > CHUNK_BYTES or stop > len(data):
        raise LimitError("more bytes than were asked for")
    data[received:stop] = arrived
    return stop


def failure_of(task: asyncio.Task[None]) -> RequestFailedError | None:
    """Return the failure of a request's task, None if it succeeded. Raises any other error."""
    # A request also ends as cancelled when its channel is closed.
    if task.cancelled():
        return RequestFailedError(RequestFailure.LOST, "the channel was closed")
    error = task.exception()
    if error is None or isinstance(error, RequestFailedError):
        return error
    raise error
