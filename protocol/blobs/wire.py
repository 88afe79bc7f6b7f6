"""The two calls by which a blob comes, each with deadlines, and what may go wrong with them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, Protocol

import grpc

from protocol.blobs.blob import CHUNK_BYTES, PIECE_BYTES, Blob, Bytes
from protocol.blobs.chunk import FETCH, read
from protocol.blobs.plan import Call, Failure, Plan
from protocol.blobs.squeeze import unsqueezed
from protocol.errors import LimitError, MalformedError, PeerFault, TransportError, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import FetchRequest, PiecesReply, PiecesRequest
from protocol.murmur_pb2_grpc import BlobsStub
from protocol.replies import parsed

_FAILURES = {
    grpc.StatusCode.NOT_FOUND: Failure.ABSENT,
    # The size we were told may be wrong: no reason to blame the source.
    grpc.StatusCode.OUT_OF_RANGE: Failure.ABSENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Failure.BUSY,
    grpc.StatusCode.DEADLINE_EXCEEDED: Failure.SLOW,
}
SELDOM = 0.05  # of the seconds in which nothing may come: by so much a deadline may lie too early


class CallFailedError(Exception):
    """A call that did not deliver, and why."""

    def __init__(self, failure: Failure, trouble: str) -> None:
        super().__init__(trouble)
        self.failure = failure
        self.trouble = trouble


class UncertainError(Exception):
    """A blob of one piece came out wrong: either its source or whoever told its size lied."""


class Lease(Protocol):
    """A channel for one call, and what its lender is to hear of the call."""

    @property
    def channel(self) -> object: ...  # of gRPC's kind
    def received(self, size: int) -> None: ...
    def broken(self, reason: str) -> None: ...


class Carrier(Protocol):
    """What a fetch needs of the network: channels for its calls, and how many at once are of use to a peer's link."""

    def lease(self, peer: PeerId) -> AbstractContextManager[Lease]: ...
    def places(self, peer: PeerId) -> int: ...


class Wire:
    """The two calls, each with a deadline."""

    def __init__(self, carrier: Carrier, stall: float, is_thrifty: Callable[[], bool]) -> None:
        """`is_thrifty`: whether what comes is to be squeezed: work for both ends, and fewer bytes."""
        self.bytes_received = 0
        self._is_thrifty = is_thrifty
        self._carrier = carrier
        self._stall = stall
        self._limits: dict[PeerId, dict[asyncio.Timeout, float]] = {}  # of the calls that run, to their ends

    async def hashes(self, blob: Blob, call: Call) -> PiecesReply:
        """Unchecked."""
        with self._leased(call) as lease:
            request = PiecesRequest(digest=blob.digest)
            reply: PiecesReply = parsed(await BlobsStub(lease.channel).Pieces(request, timeout=call.seconds))
            lease.received(len(reply.pieces))
        self.bytes_received += len(reply.pieces)
        return reply

    async def piece(self, blob: Blob, plan: Plan, call: Call, keep: Callable[[bytearray], object]) -> None:
        """`keep` checks the piece and writes it, in a thread; the piece takes up memory until it has."""
        length = blob.piece_length(call.piece)
        with self._leased(call) as lease:
            data = await self._stream(blob, plan, call, lease)
        with failures():
            if len(data) < length:
                data = await asyncio.to_thread(unsqueezed, data, length)
            await asyncio.to_thread(keep, data)

    async def _stream(self, blob: Blob, plan: Plan, call: Call, lease: Lease) -> bytearray:
        """The piece; squeezed, where it has fewer bytes."""
        data, received = bytearray(blob.piece_length(call.piece)), 0
        request = FetchRequest(digest=blob.digest, offset=call.piece * PIECE_BYTES, length=len(data))
        request.squeezed = self._is_thrifty()
        stream = _fetch(lease.channel, request, call.seconds)
        try:
            async with self._deadline(call):
                async for chunk in stream:
                    if not received and 0 < parsed(chunk).squeezed < len(data):
                        data = bytearray(chunk.squeezed)
                    came = len(chunk.data)
                    received = _place(data, received, chunk.data)
                    # Empty chunks are no progress.
                    if came:
                        self._hear(call.peer)
                        self.bytes_received += came
                        lease.received(came)
                        plan.received(call, came)
        finally:
            stream.cancel()
        if received != len(data):
            raise MalformedError("fewer bytes than were asked for")
        return data

    @asynccontextmanager
    async def _deadline(self, call: Call) -> AsyncIterator[None]:
        """TimeoutError at the end of its time, or where nothing comes from its peer. On one connection calls come one
        after the other, however they were begun: what comes for another call of the peer is a sign of life."""
        clock, limits = asyncio.get_running_loop().time, self._limits.setdefault(call.peer, {})
        end = clock() + call.seconds
        async with asyncio.timeout_at(min(end, clock() + self._stall)) as limit:
            limits[limit] = end
            try:
                yield
            finally:
                del limits[limit]
                if not limits:
                    self._limits.pop(call.peer, None)

    def _hear(self, peer: PeerId) -> None:
        """Deadlines are moved on seldom: a fast link brings a thousand chunks in a second."""
        silent = asyncio.get_running_loop().time() + self._stall
        for limit, end in self._limits[peer].items():
            later = min(end, silent)
            if not limit.expired() and later - (limit.when() or 0.0) > self._stall * SELDOM:
                limit.reschedule(later)

    @contextmanager
    def _leased(self, call: Call) -> Iterator[Lease]:
        with failures(), self._carrier.lease(call.peer) as lease:
            try:
                with failures():
                    yield lease
            except CallFailedError as error:
                if error.failure in (Failure.LOST, Failure.SLOW):
                    lease.broken(error.trouble)
                raise


@contextmanager
def failures() -> Iterator[None]:
    """Turns what may go wrong with a source into a CallFailedError; a fault of our own disk passes."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        failure = _FAILURES.get(error.code(), Failure.LOST)
        raise CallFailedError(failure, f"{failure} ({error.code().name})") from error
    except TimeoutError as error:
        raise CallFailedError(Failure.SLOW, "no bytes for too long") from error
    except PeerFault as fault:
        raise CallFailedError(Failure.LIED, str(fault)) from fault
    except (TransportError, UnreachableError, grpc.aio.UsageError) as error:
        raise CallFailedError(Failure.LOST, str(error)) from error


def _fetch(channel: Any, request: FetchRequest, seconds: float) -> Any:
    """The stub's call, but for who reads the chunks."""
    call = channel.unary_stream(FETCH, request_serializer=FetchRequest.SerializeToString, response_deserializer=read)
    return call(request, timeout=seconds)


def _place(data: bytearray, received: int, came: Bytes) -> int:
    """Behind the bytes received so far; how many there are then."""
    stop = received + len(came)
    if len(came) > CHUNK_BYTES or stop > len(data):
        raise LimitError("more bytes than were asked for")
    data[received:stop] = came
    return stop
