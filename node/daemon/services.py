"""Serve the calls of other peers; each names a run, and the replica of that run answers.

The node verifies all messages of a call at once, one signature after another, and everything else waits meanwhile: a
roster of a thousand takes a fifth of a second. So it limits the bytes per peer, because signatures fill them. A member
may send as much as the leader of the largest possible round, which repeats its roster or its proposal at every
retransmission, and much more in a burst. Unknown peers share a small quota, because creating an identity costs nothing;
it suffices for the messages of a new peer before its record is known. A refused call costs one retransmission.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import grpc

from node.daemon.inbox import MessageReceiver
from node.daemon.peers.peer_rpc import MAX_BATCH_BYTES
from node.daemon.state.offered_states import OfferedStates
from node.loop.round_loop import RoundLoop
from node.loop.steering import Steering
from protocol.blobs.blob import Blob
from protocol.consensus.history.chain import Chain
from protocol.consensus.history.trust import TrustPoint
from protocol.consensus.messages.contributions import MAX_CONTRIBUTIONS
from protocol.consensus.state import RETRANSMITS_PER_TIMEOUT
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
from protocol.traffic import ControlTraffic
from protocol.transport.nat import DialBackResponder
from protocol.transport.rate_limit import SharedTokenBuckets, TokenBuckets
from protocol.transport.transport import UNKNOWN_CALLER, caller

if TYPE_CHECKING:
    from node.daemon.replica import Replica

Served = TypeVar("Served")

CONTRIBUTION_BYTES, PART_BYTES = 320, 48  # size of a signed one, rounded up
MIN_CALL_BYTES = 1024  # least charge of a call
MIN_MESSAGE_BYTES = 256  # least charge of a message
MEMBER_BURST_MESSAGES = 8  # of the largest size: those of a round, and earlier decisions
MIN_MEMBER_RATE = 64 * 1024
ALL_UNKNOWN_BURST_BYTES, ALL_UNKNOWN_RATE = 1024 * 1024, 128 * 1024  # of all unknown peers together
UNKNOWN_PEER_RATE = 8 * 1024


class InboundQuota:
    """Limits the bytes that each peer delivers; `max_parts` is the most parts of a contribution."""

    def __init__(self, max_parts: int, leader_timeout: float) -> None:
        contribution = CONTRIBUTION_BYTES + max_parts * PART_BYTES
        largest = min(MAX_BATCH_BYTES, MAX_CONTRIBUTIONS * contribution)
        rate = max(MIN_MEMBER_RATE, largest * RETRANSMITS_PER_TIMEOUT / leader_timeout)
        self._members = TokenBuckets(MEMBER_BURST_MESSAGES * largest, rate)
        per_peer = TokenBuckets(2 * contribution + 16 * MIN_CALL_BYTES, UNKNOWN_PEER_RATE)
        self._unknown_peers = SharedTokenBuckets(per_peer, TokenBuckets(ALL_UNKNOWN_BURST_BYTES, ALL_UNKNOWN_RATE))

    def charge(self, peer: PeerId, sizes: list[int], is_member: bool, now: float) -> None:
        """Charge a call with messages of these sizes. Raises LimitError if it exceeds the quota for now."""
        size = max(MIN_CALL_BYTES, sum(max(MIN_MESSAGE_BYTES, size) for size in sizes))
        if is_member:
            if not self._members.try_take(peer, now, size):
                raise LimitError(f"{peer} delivers more than a leader needs to; retry later")
        elif lack := self._unknown_peers.charge(peer, now, size):
            excess = f"delivers {size} bytes" if lack == "caller" else "delivers while too many unknown peers do"
            raise LimitError(f"{peer} {excess} and is not known as a member; retry later")


logger = logging.getLogger(__name__)

MAX_MESSAGES_PER_CALL = 64  # in one call
FLOOD_LOG_SECONDS = 10.0  # between two log lines about refused calls
MAX_REPLY_BYTES = 512 * 1024  # of commits in one reply


class RefusalRecorder(Protocol):
    def record_refusal(self, peer: PeerId, fault: PeerFault, /) -> None:
        """Count and log a refused call."""


class ChainSource(Protocol):
    """A chain, and the blob of the state at its head, None before there is one."""

    @property
    def chain(self) -> Chain: ...

    @property
    def blob(self) -> Blob | None: ...


@dataclass(frozen=True)
class ServedChain:
    """A chain that this node serves, and the revisions of the manifest that it has adopted."""

    source: ChainSource
    steering: Steering
    has_shared_state: bool = True

    @property
    def trust_point(self) -> TrustPoint | None:
        """Return the trust point at the head; None before the first round."""
        chain, blob = self.source.chain, self.source.blob
        if not chain.round or blob is None:
            return None
        state = blob.digest if self.has_shared_state else b""
        return TrustPoint.of(chain.round, chain.digest, state, chain.electorate.digest)


class DeliveryParts(Protocol):
    """The parts of a replica that take messages (`node.daemon.peers.connections`)."""

    @property
    def receiver(self) -> MessageReceiver: ...
    @property
    def quota(self) -> InboundQuota: ...
    @property
    def traffic(self) -> ControlTraffic: ...


class ServedReplica(Protocol):
    """A replica as callers of its rounds see it."""

    @property
    def loop(self) -> RoundLoop: ...
    @property
    def peers(self) -> DeliveryParts: ...
    @property
    def offered_states(self) -> OfferedStates: ...


class RoundsService(RoundsServicer):
    """Serves the round RPCs of the replicas, and chains that may be a host's, found by the run id of a request.

    `refusals` counts calls above the quota by reason, without a log line for each.
    """

    def __init__(
        self, replicas: Mapping[RunId, ServedReplica], chains: Mapping[RunId, ServedChain], recorder: RefusalRecorder
    ) -> None:
        self._replicas = replicas
        self._chains = chains
        self._recorder = recorder
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
        chain, state = served.source.chain, served.source.blob
        # A peer that asks for more than is kept gets the oldest commits, and asks again for those that do not fit.
        log = chain.log_since(min(request.after_round, chain.round)) or chain.log
        if state is not None and (replica := self._replicas.get(request.run.hex())) is not None:
            replica.offered_states.show(state.digest, chain.round - request.after_round, time.monotonic())
        return ChainReply(
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
            self._recorder.record_refusal(peer, fault)
            return await _abort(context, fault)
        return peer, found


class CarriersService(CarriersServicer):
    """Serves relay requests with the replicas, found by the run id of a request."""

    def __init__(self, replicas: Mapping[RunId, "Replica"], recorder: RefusalRecorder) -> None:
        self._replicas = replicas
        self._recorder = recorder

    async def Carry(self, request: CarryRequest, context: Any) -> CarryReply:  # noqa: N802
        peer = UNKNOWN_CALLER
        try:
            peer = caller(context)
            replica = _find_run(self._replicas, request.run, peer)
            await self._relay(replica, peer, request)
        except PeerFault as fault:
            self._recorder.record_refusal(peer, fault)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(fault))
        except (UnreachableError, StorageError):
            # Do not send the reason: it may name folders.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the relay could not fetch the blob either")
        return CarryReply()

    async def _relay(self, replica: "Replica", peer: PeerId, request: CarryRequest) -> None:
        try:
            await replica.blob_relay.relay(peer, request.statement, request.digest)
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


INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT


class RunsService(RunsServicer):
    """Serves peers that are about to join one of these runs."""

    def __init__(
        self, manifests: Mapping[RunId, run_manifest.Manifest], dial_back: DialBackResponder, recorder: RefusalRecorder
    ) -> None:
        self._manifests = manifests
        self._dial_back = dial_back
        self._recorder = recorder

    async def Manifest(self, request: ManifestRequest, context: Any) -> ManifestReply:  # noqa: N802
        _, manifest = await self._admit(request.run, context)
        return ManifestReply(toml=manifest.published().to_toml().encode())

    async def DialBack(self, request: DialBackRequest, context: Any) -> DialBackReply:  # noqa: N802
        peer, _ = await self._admit(request.run, context)
        try:
            return await self._dial_back.probe_ports(peer, request.ports, time.monotonic())
        except PeerFault as fault:
            self._recorder.record_refusal(peer, fault)
            status = grpc.StatusCode.RESOURCE_EXHAUSTED if isinstance(fault, LimitError) else INVALID_ARGUMENT
            await context.abort(status, str(fault))
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
            self._recorder.record_refusal(peer, fault)
            await context.abort(INVALID_ARGUMENT, str(fault))
            raise AssertionError("abort raises") from fault
        return peer, manifest
