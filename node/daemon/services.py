"""PURE: how much a peer may bring to our rounds; the caller passes the time (seconds, monotonic).

All that is brought is checked at once, signature by signature, and everything else waits meanwhile: a roster of a
thousand takes a fifth of a second. So what one peer brings is limited, in bytes, as its signatures fill them.

A member may bring as much as the leader of the largest round there can be, which says its roster or its proposal again
at every repetition, and far more at once. Of whom the directory does not know yet little is taken, and little of all of
them together, as anybody has as many names as he likes: enough for what a newcomer says before its record is about.
What is refused costs no more than a repetition.

The Rounds service of a node.

The Runs service of a node, for those who are about to join: the run's manifest, and whether they can be reached.

The manifest goes to whoever knows the run's id, which is its hash.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import grpc

from node.daemon.inbox import MessageReceiver
from node.daemon.outer_state import ReplicatedState
from node.daemon.peer_rpc import MAX_BATCH_BYTES
from node.loop.round_loop import RoundLoop
from protocol.consensus.messages import MAX_CONTRIBUTIONS
from protocol.consensus.state import RETRANSMITS_PER_TIMEOUT
from protocol.errors import LimitError, PeerFault, StaleError, TransportError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest import Manifest, RunId
from protocol.murmur_pb2 import (
    ChainReply,
    ChainRequest,
    DeliverReply,
    DeliverRequest,
    DialBackReply,
    DialBackRequest,
    ManifestReply,
    ManifestRequest,
    Signed,
)
from protocol.murmur_pb2_grpc import RoundsServicer, RunsServicer
from protocol.transport.nat import DialBackResponder
from protocol.transport.rate_limit import SharedTokenBuckets, TokenBuckets
from protocol.transport.transport import UNKNOWN_CALLER, caller

CONTRIBUTION_BYTES, PART_BYTES = 320, 48  # of a signed one, rounded up
MIN_CALL_BYTES = 1024  # that any call counts at least
MIN_MESSAGE_BYTES = 256  # and any statement
MEMBER_BURST_MESSAGES = 8  # of the largest statements: a round's, and the decisions of those before
MIN_MEMBER_RATE = 64 * 1024
ALL_UNKNOWN_BURST_BYTES, ALL_UNKNOWN_RATE = 1024 * 1024, 128 * 1024  # all of them together
UNKNOWN_PEER_RATE = 8 * 1024


class InboundQuota:
    """`parts`: the most that a contribution has."""

    def __init__(self, max_parts: int, leader_timeout: float) -> None:
        contribution = CONTRIBUTION_BYTES + max_parts * PART_BYTES
        largest = min(MAX_BATCH_BYTES, MAX_CONTRIBUTIONS * contribution)
        rate = max(MIN_MEMBER_RATE, largest * RETRANSMITS_PER_TIMEOUT / leader_timeout)
        self._members = TokenBuckets(MEMBER_BURST_MESSAGES * largest, rate)
        each = TokenBuckets(2 * contribution + 16 * MIN_CALL_BYTES, UNKNOWN_PEER_RATE)
        self._unknown_peers = SharedTokenBuckets(each, TokenBuckets(ALL_UNKNOWN_BURST_BYTES, ALL_UNKNOWN_RATE))

    def charge(self, peer: PeerId, sizes: list[int], is_member: bool, now: float) -> None:
        """`sizes`: of the statements of one call. LimitError: it is too much for now."""
        size = max(MIN_CALL_BYTES, sum(max(MIN_MESSAGE_BYTES, size) for size in sizes))
        if is_member:
            if not self._members.try_take(peer, now, size):
                raise LimitError(f"{peer} delivers more than a leader has to say; later again")
        elif lack := self._unknown_peers.charge(peer, now, size):
            much = f"delivers {size} bytes" if lack == "caller" else "delivers while too many such do"
            raise LimitError(f"{peer} {much} and is not known as a member; later again")


logger = logging.getLogger(__name__)

MAX_MESSAGES_PER_CALL = 64  # of one call
FLOOD_LOG_SECONDS = 10.0  # between two lines about calls that are too many
MAX_REPLY_BYTES = 512 * 1024  # of commits in one answer


class RoundsService(RoundsServicer):
    """`refused` hears of the calls that are not answered, but for those that are too much: `refusals` counts these, by
    reason, as whoever is flooded must not flood its log."""

    def __init__(
        self, run_id: RunId, loop: RoundLoop, receiver: MessageReceiver, replica: ReplicatedState,
        quota: InboundQuota, record_refusal: Callable[[PeerId, PeerFault], None],
    ) -> None:  # fmt: skip
        self._run_id = run_id
        self._loop = loop
        self._receiver = receiver
        self._replica = replica
        self._record_refusal = record_refusal
        self._quota = quota
        self.refusals: Counter[str] = Counter()
        self._quiet_until = float("-inf")

    async def Deliver(self, request: DeliverRequest, context: Any) -> DeliverReply:  # noqa: N802
        peer = await self._admit(request, context, len(request.statements))
        try:
            sizes = [signed.ByteSize() for signed in request.statements]
            self._quota.charge(peer, sizes, self._loop.is_known(peer), time.monotonic())
        except LimitError as fault:
            self._record_flood(fault)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(fault))
        return DeliverReply(statements=self._receiver.receive(peer, request.statements))

    async def Chain(self, request: ChainRequest, context: Any) -> ChainReply:  # noqa: N802
        await self._admit(request, context, 0)
        chain = self._replica.chain
        commits = chain.commits_since(request.after_round) or ()
        return ChainReply(
            commits=_fit_in_reply([commit.signed for commit in commits]),
            round=chain.round,
            digest=chain.digest,
            chain_tokens=chain.tokens,
            state=self._replica.blob.to_wire(),
        )

    def _record_flood(self, fault: LimitError) -> None:
        self.refusals[fault.metric_label] += 1
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + FLOOD_LOG_SECONDS
            logger.warning("refused what comes too fast: %s", fault)

    async def _admit(self, request: DeliverRequest | ChainRequest, context: Any, message_count: int) -> PeerId:
        peer = UNKNOWN_CALLER
        try:
            peer = caller(context)
            if request.run.hex() != self._run_id:
                raise StaleError(f"{peer} asks about another run")
            if message_count > MAX_MESSAGES_PER_CALL:
                raise LimitError(f"{peer} delivers {message_count} statements at once")
        except PeerFault as fault:
            self._record_refusal(peer, fault)
            return await _abort(context, fault)
        return peer


async def _abort(context: Any, fault: PeerFault) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(fault))
    raise AssertionError("abort always raises")


def _fit_in_reply(commits: list[Signed]) -> list[Signed]:
    """As many of the oldest as one message may carry; a peer that needs more asks again."""
    total, kept = 0, []
    for signed in commits:
        total += signed.ByteSize()
        if total > MAX_REPLY_BYTES:
            break
        kept.append(signed)
    return kept


INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT


class RunsService(RunsServicer):
    """`refused` hears of the calls that are not answered."""

    def __init__(
        self, manifest: Manifest, dial_back: DialBackResponder, record_refusal: Callable[[PeerId, PeerFault], None]
    ) -> None:
        self._run_id = manifest.run_id
        self._dial_back = dial_back
        self._record_refusal = record_refusal
        self._manifest_toml = manifest.to_toml().encode()

    async def Manifest(self, request: ManifestRequest, context: Any) -> ManifestReply:  # noqa: N802
        await self._admit(request.run, context)
        return ManifestReply(toml=self._manifest_toml)

    async def DialBack(self, request: DialBackRequest, context: Any) -> DialBackReply:  # noqa: N802
        peer = await self._admit(request.run, context)
        try:
            return await self._dial_back.probe_ports(peer, request.ports, time.monotonic())
        except PeerFault as fault:
            self._record_refusal(peer, fault)
            status = grpc.StatusCode.RESOURCE_EXHAUSTED if isinstance(fault, LimitError) else INVALID_ARGUMENT
            await context.abort(status, str(fault))
        except (TransportError, UnreachableError) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise AssertionError("abort raises")

    async def _admit(self, run: bytes, context: Any) -> PeerId:
        peer = UNKNOWN_CALLER
        try:
            peer = caller(context)
            if run.hex() != self._run_id:
                raise StaleError("this node takes part in another run")
        except PeerFault as fault:
            self._record_refusal(peer, fault)
            await context.abort(INVALID_ARGUMENT, str(fault))
        return peer
