"""Serve the calls of other peers; each names a run, and the replica of that run answers."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import grpc

from node.daemon.peers.chain_sync import ServedChain
from node.daemon.replica import Replica
from protocol.consensus.chain import ChainLog
from protocol.electorate import NOBODY
from protocol.errors import LimitError, PeerFault, StaleError, StorageError, TransportError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest import run as run_manifest
from protocol.manifest.run import RunId
from protocol.murmur_pb2 import (
    CarryReply,
    CarryRequest,
    ChainReply,
    ChainRequest,
    DeliverReply,
    DeliverRequest,
    DialBackReply,
    DialBackRequest,
    ManifestReply,
    ManifestRequest,
)
from protocol.murmur_pb2_grpc import CarriersServicer, RoundsServicer, RunsServicer
from protocol.transport.nat import DialBackResponder
from protocol.transport.transport import UNKNOWN_CALLER, caller

logger = logging.getLogger(__name__)

Served = TypeVar("Served")
RecordRefusal = Callable[[PeerId, PeerFault], None]  # counts and logs a refused call
MAX_MESSAGES_PER_CALL = 64  # in one call
FLOOD_LOG_SECONDS = 10.0  # between two log lines about refused calls
MAX_REPLY_BYTES = 512 * 1024  # of commits in one reply


class RoundsService(RoundsServicer):
    """Serves the round RPCs of the replicas, and chains that may be a host's, found by the run id of a request.

    `refusals` counts calls above the quota by reason, without a log line for each.
    """

    def __init__(
        self, replicas: Mapping[RunId, Replica], chains: Mapping[RunId, ServedChain], record_refusal: RecordRefusal
    ) -> None:
        self._replicas = replicas
        self._chains = chains
        self._record_refusal = record_refusal
        self.refusals: Counter[str] = Counter()
        self._quiet_until = float("-inf")

    async def Deliver(self, request: DeliverRequest, context: Any) -> DeliverReply:  # noqa: N802
        count = len(request.statements) + len(request.briefs)
        peer, replica = await self._admit(self._replicas, request, context, count)
        whole = request.statements
        restored, unresolved = replica.peers.receiver.restore(peer, request.briefs)
        try:
            sizes = [signed.ByteSize() for signed in (*whole, *restored)]
            replica.peers.quota.charge(peer, sizes, replica.loop.is_known(peer), time.monotonic())
        except LimitError as fault:
            self._record_flood(fault)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(fault))
        replica.peers.traffic.record_received("deliver", request)
        answers = replica.peers.receiver.receive(peer, [*whole, *restored])
        reply = DeliverReply(statements=answers, unresolved=unresolved)
        replica.peers.traffic.record_sent("deliver", reply)
        return reply

    async def Chain(self, request: ChainRequest, context: Any) -> ChainReply:  # noqa: N802
        _, served = await self._admit(self._chains, request, context, 0)
        chain, state = served.chain, served.state()
        # A peer that asks for more than is kept gets the oldest commits, and asks again for those that do not fit.
        log = chain.log_since(min(request.after_round, chain.round)) or chain.log
        if state is not None and (replica := self._replicas.get(request.run.hex())) is not None:
            replica.state.offered_states.show(state.digest, chain.round - request.after_round, time.monotonic())
        decided = served.decided()
        return ChainReply(
            decided=ChainLog(NOBODY, (decided,)).to_wire() if decided is not None else None,
            log=log.to_wire(MAX_REPLY_BYTES),
            round=chain.round,
            digest=chain.digest,
            chain_tokens=chain.tokens,
            state=state.to_wire() if state else None,
            revision=chain.head.revision,
            revisions=[entry.signed for entry in served.steering.adopted],
        )

    def _record_flood(self, fault: LimitError) -> None:
        self.refusals[fault.metric_label] += 1
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + FLOOD_LOG_SECONDS
            logger.warning("refused a call above the quota: %s", fault)

    async def _admit(
        self, served: Mapping[RunId, Served], request: DeliverRequest | ChainRequest, context: Any, message_count: int
    ) -> tuple[PeerId, Served]:
        peer = UNKNOWN_CALLER
        try:
            peer = caller(context)
            found = _find_run(served, request.run, peer)
            if message_count > MAX_MESSAGES_PER_CALL:
                raise LimitError(
                    f"{peer} delivers {message_count} messages in one call; at most {MAX_MESSAGES_PER_CALL}"
                )
        except PeerFault as fault:
            self._record_refusal(peer, fault)
            return await _abort(context, fault)
        return peer, found


class CarriersService(CarriersServicer):
    """Serves relay requests with the replicas, found by the run id of a request."""

    def __init__(self, replicas: Mapping[RunId, Replica], record_refusal: RecordRefusal) -> None:
        self._replicas = replicas
        self._record_refusal = record_refusal

    async def Carry(self, request: CarryRequest, context: Any) -> CarryReply:  # noqa: N802
        peer = UNKNOWN_CALLER
        try:
            peer = caller(context)
            replica = _find_run(self._replicas, request.run, peer)
            await self._relay(replica, peer, request)
        except PeerFault as fault:
            self._record_refusal(peer, fault)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(fault))
        except (UnreachableError, StorageError):
            # Do not send the reason: it may name folders.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the relay could not fetch the blob either")
        return CarryReply()

    async def _relay(self, replica: Replica, peer: PeerId, request: CarryRequest) -> None:
        try:
            await replica.peers.relay.relay(peer, request.statement, request.digest)
        except (UnreachableError, StorageError) as error:
            replica.status_reporter.record_recovered("not relayed", f"for {peer}: {error}")
            raise


def _find_run(served: Mapping[RunId, Served], run: bytes, peer: PeerId) -> Served:
    found = served.get(run.hex())
    if found is None:
        raise StaleError(f"{peer} requests another run")
    return found


async def _abort(context: Any, fault: PeerFault) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(fault))
    raise AssertionError("abort always raises")


async def abort_refused(context: Any, fault: PeerFault) -> NoReturn:
    """End a call that its caller must not repeat as it is, or not so soon."""
    codes, is_limit = grpc.StatusCode, isinstance(fault, LimitError)
    await context.abort(codes.RESOURCE_EXHAUSTED if is_limit else codes.INVALID_ARGUMENT, str(fault))
    raise AssertionError("abort always raises")


class RunsService(RunsServicer):
    """Serves peers that are about to join one of these runs."""

    def __init__(
        self,
        manifests: Mapping[RunId, run_manifest.Manifest],
        dial_back: DialBackResponder,
        record_refusal: RecordRefusal,
    ) -> None:
        self._manifests = manifests
        self._dial_back = dial_back
        self._record_refusal = record_refusal

    async def Manifest(self, request: ManifestRequest, context: Any) -> ManifestReply:  # noqa: N802
        _, manifest = await self._admit(request.run, context)
        return ManifestReply(toml=manifest.published().to_toml().encode())

    async def DialBack(self, request: DialBackRequest, context: Any) -> DialBackReply:  # noqa: N802
        peer, _ = await self._admit(request.run, context)
        try:
            return await self._dial_back.probe_ports(peer, request.ports, time.monotonic())
        except PeerFault as fault:
            self._record_refusal(peer, fault)
            await abort_refused(context, fault)
        except (TransportError, UnreachableError) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise AssertionError("abort raises")

    async def _admit(self, run: bytes, context: Any) -> tuple[PeerId, run_manifest.Manifest]:
        peer = UNKNOWN_CALLER
        try:
            peer = caller(context)
            manifest = self._manifests.get(run.hex())
            if manifest is None:
                raise StaleError("this node takes part in another run")
        except PeerFault as fault:
            self._record_refusal(peer, fault)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(fault))
            raise AssertionError("abort raises") from fault
        return peer, manifest
