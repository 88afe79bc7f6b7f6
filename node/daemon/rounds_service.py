"""The Rounds service of a node."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import grpc

from node.daemon.deliveries import InboundQuota
from node.daemon.replica import ReplicatedState
from node.daemon.rounds import Effects
from protocol.errors import LimitError, PeerFault, StaleError
from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.murmur_pb2 import ChainReply, ChainRequest, DeliverReply, DeliverRequest, Signed
from protocol.murmur_pb2_grpc import RoundsServicer
from protocol.network.transport import UNKNOWN_CALLER, caller

logger = logging.getLogger(__name__)

MAX_MESSAGES_PER_CALL = 64  # of one call
FLOOD_LOG_SECONDS = 10.0  # between two lines about calls that are too many
MAX_REPLY_BYTES = 512 * 1024  # of commits in one answer


class RoundsService(RoundsServicer):
    """`refused` hears of the calls that are not answered, but for those that are too much: `refusals` counts these, by
    reason, as whoever is flooded must not flood its log."""

    def __init__(
        self, run_id: RunId, driver: Effects, replica: ReplicatedState, quota: InboundQuota,
        record_refusal: Callable[[PeerId, PeerFault], None],
    ) -> None:  # fmt: skip
        self._run_id = run_id
        self._driver = driver
        self._replica = replica
        self._record_refusal = record_refusal
        self._quota = quota
        self.refusals: Counter[str] = Counter()
        self._quiet_until = float("-inf")

    async def Deliver(self, request: DeliverRequest, context: Any) -> DeliverReply:  # noqa: N802
        peer = await self._admit(request, context, len(request.statements))
        try:
            sizes = [signed.ByteSize() for signed in request.statements]
            self._quota.charge(peer, sizes, self._driver.knows(peer), time.monotonic())
        except LimitError as fault:
            self._record_flood(fault)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(fault))
        return DeliverReply(statements=self._driver.take(peer, request.statements))

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
