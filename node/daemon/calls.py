"""Calls to another node's daemon. What goes wrong comes back as UnreachableError or PeerFault, nothing else."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import grpc

from protocol.errors import LimitError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.murmur_pb2 import CarryRequest, ChainReply, ChainRequest, DeliverReply, DeliverRequest, Signed
from protocol.murmur_pb2_grpc import CarriersStub, RoundsStub
from protocol.replies import Reply, require_reply

# A decision comes with the acknowledgements of a majority; the bytes are bounded by the transport.
MAX_REPLY_MESSAGES = 1024
MAX_DETAIL_CHARACTERS = 200  # characters of what a peer says of its refusal
CHAIN_SECONDS = 10.0
IDLE_CHANNEL_SECONDS = 1.0  # for an answer by a direct connection that may have died unnoticed
REFUSAL_CODES = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
ChannelTo = Callable[[PeerId], grpc.aio.Channel]


class PeerChannels(Protocol):
    """How calls go to a peer."""

    def channel(self, peer: PeerId) -> grpc.aio.Channel: ...
    def idle_channel(self, peer: PeerId) -> AbstractContextManager[Any]: ...  # a channel, or None
    def fallback_channel(self, peer: PeerId) -> AbstractContextManager[Any]: ...  # the same


async def deliver(
    run_id: RunId, channels: PeerChannels, peer: PeerId, messages: Sequence[Signed], seconds: float
) -> Iterable[Signed]:
    """Bring statements to a peer, in so many seconds; returns what it thinks we lack."""
    request, clock = DeliverRequest(run=bytes.fromhex(run_id), statements=messages), asyncio.get_running_loop().time
    ends = clock() + seconds

    async def by(channel: Any, seconds: float) -> DeliverReply:
        return await await_reply(peer, lambda: RoundsStub(channel).Deliver(request, timeout=seconds))

    reply = await _call_by_best_channel(channels, peer, by, lambda: ends - clock())
    if len(reply.statements) > MAX_REPLY_MESSAGES:
        raise LimitError(f"{peer} answers with {len(reply.statements)} statements")
    return list(reply.statements)


async def _call_by_best_channel(
    channels: PeerChannels, peer: PeerId, call: Callable[[Any, float], Awaitable[Reply]], seconds_left: Callable[[], float]
) -> Reply:
    """By a direct connection that has nothing to do, as libp2p costs more than a small call; by libp2p, where that does
    not answer soon; and as a round need not wait for a dial that libp2p puts off, or for a p2pd that is being started
    again, by a direct connection that may be busy."""
    with channels.idle_channel(peer) as direct:
        if direct is not None:
            with suppress(UnreachableError):
                return await call(direct, min(IDLE_CHANNEL_SECONDS, seconds_left() / 2))
    try:
        return await call(channels.channel(peer), seconds_left())
    except UnreachableError:
        with channels.fallback_channel(peer) as direct:
            if direct is None or seconds_left() <= 0:
                raise
            return await call(direct, seconds_left())


async def request_chain(run_id: RunId, channel: ChannelTo, peer: PeerId, after_round: int) -> ChainReply:
    """Its head, the name of its state, and its commits after that round, as far as it has them."""
    request = ChainRequest(run=bytes.fromhex(run_id), after_round=after_round)
    return await await_reply(peer, lambda: RoundsStub(channel(peer)).Chain(request, timeout=CHAIN_SECONDS))


async def request_relay(
    run_id: RunId, channel: ChannelTo, peer: PeerId, message: Signed, digest: bytes, seconds: float
) -> None:
    """Have the peer fetch a blob that the statement names; it has it when this returns."""
    request = CarryRequest(run=bytes.fromhex(run_id), statement=message, digest=digest)
    await await_reply(peer, lambda: CarriersStub(channel(peer)).Carry(request, timeout=seconds))


async def await_reply(peer: PeerId, call: Callable[[], Awaitable[Reply | None]]) -> Reply:
    """What a call of ours to that peer comes to."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()  # of earlier times: who catches a cancel may leave it counted
    try:
        return require_reply(await call())
    except grpc.aio.AioRpcError as error:
        reason = f"{error.code().name.lower()}: {(error.details() or '')[:MAX_DETAIL_CHARACTERS]}"
        if error.code() in REFUSAL_CODES:
            raise LimitError(f"{peer} refuses the call ({reason})") from error
        raise UnreachableError(f"{peer} does not answer ({reason})") from error
    except grpc.aio.UsageError as error:
        raise UnreachableError(f"the channel to {peer} is closed") from error
    except asyncio.CancelledError as cancelled:
        # A call ends as cancelled, too, when its channel is closed under it because the peer counts as gone.
        if task.cancelling() > before:
            raise
        raise UnreachableError(f"the channel to {peer} was closed") from cancelled
