"""Calls to another node's daemon. What goes wrong comes back as UnreachableError or PeerFault, nothing else."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import grpc

from protocol.errors import LimitError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.murmur_pb2 import CarryRequest, ChainReply, ChainRequest, DeliverReply, DeliverRequest, Signed
from protocol.murmur_pb2_grpc import CarriersStub, RoundsStub
from protocol.replies import Reply, parsed

# A decision comes with the acknowledgements of a majority; the bytes are bounded by the transport.
MAX_ANSWERS = 1024
MAX_DETAILS = 200  # characters of what a peer says of its refusal
CHAIN_SECONDS = 10.0
REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
Channels = Callable[[PeerId], grpc.aio.Channel]


class Ways(Protocol):
    """How calls go to a peer."""

    def channel(self, peer: PeerId) -> grpc.aio.Channel: ...
    def spare(self, peer: PeerId) -> AbstractContextManager[Any]: ...  # a channel, or None


async def deliver(
    run_id: RunId, ways: Ways, peer: PeerId, statements: Sequence[Signed], seconds: float
) -> Iterable[Signed]:
    """Bring statements to a peer; returns what it thinks we lack. A round need not wait for libp2p, which calls a peer
    again only some time after a dial that failed, nor for a p2pd that is being started again: a direct path serves too.
    """
    request, clock = DeliverRequest(run=bytes.fromhex(run_id), statements=statements), asyncio.get_running_loop().time
    ends = clock() + seconds

    async def by(channel: Any) -> DeliverReply:
        return await answered(peer, lambda: RoundsStub(channel).Deliver(request, timeout=ends - clock()))

    try:
        reply = await by(ways.channel(peer))
    except UnreachableError:
        with ways.spare(peer) as direct:
            if direct is None or clock() >= ends:
                raise
            reply = await by(direct)
    if len(reply.statements) > MAX_ANSWERS:
        raise LimitError(f"{peer} answers with {len(reply.statements)} statements")
    return list(reply.statements)


async def ask_chain(run_id: RunId, channel: Channels, peer: PeerId, after_round: int) -> ChainReply:
    """Its head, the name of its state, and its commits after that round, as far as it has them."""
    request = ChainRequest(run=bytes.fromhex(run_id), after_round=after_round)
    return await answered(peer, lambda: RoundsStub(channel(peer)).Chain(request, timeout=CHAIN_SECONDS))


async def ask_to_carry(
    run_id: RunId, channel: Channels, peer: PeerId, statement: Signed, digest: bytes, seconds: float
) -> None:
    """Have the peer fetch a blob that the statement names; it has it when this returns."""
    request = CarryRequest(run=bytes.fromhex(run_id), statement=statement, digest=digest)
    await answered(peer, lambda: CarriersStub(channel(peer)).Carry(request, timeout=seconds))


async def answered(peer: PeerId, call: Callable[[], Awaitable[Reply | None]]) -> Reply:
    """What a call of ours to that peer comes to."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()  # of earlier times: who catches a cancel may leave it counted
    try:
        return parsed(await call())
    except grpc.aio.AioRpcError as error:
        reason = f"{error.code().name.lower()}: {(error.details() or '')[:MAX_DETAILS]}"
        if error.code() in REFUSALS:
            raise LimitError(f"{peer} refuses the call ({reason})") from error
        raise UnreachableError(f"{peer} does not answer ({reason})") from error
    except grpc.aio.UsageError as error:
        raise UnreachableError(f"the channel to {peer} is closed") from error
    except asyncio.CancelledError as cancelled:
        # A call ends as cancelled, too, when its channel is closed under it because the peer counts as gone.
        if task.cancelling() > before:
            raise
        raise UnreachableError(f"the channel to {peer} was closed") from cancelled
