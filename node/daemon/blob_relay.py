"""Store and forward: a peer that others can call fetches a blob for one that cannot get it itself, and holds it.

Between two peers that are both hidden behind routers only small things pass (see `protocol.transport.nat`). So the one
that wants a blob asks a third, which both can call, to fetch it, and then fetches it there, checked by its hash as
ever. What is carried is named by a statement that its owner signed for the round at hand: nobody has anything else
brought here, and no more of it than a few messages' worth. With the round it is dropped.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from node.monitoring.status import RecoveredErrorKind
from protocol.blobs.blob import Blob
from protocol.blobs.download import Downloader
from protocol.blobs.relay_quota import RelayQuota
from protocol.blobs.store import BlobStore
from protocol.consensus.message_kinds import Body, named_blobs, parse
from protocol.consensus.messages import ContributionLimits, SignedMessage
from protocol.errors import LimitError, MalformedError, PeerFault, StaleError, StorageError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.murmur_pb2 import CarryReply, CarryRequest
from protocol.murmur_pb2_grpc import CarriersServicer
from protocol.transport.transport import UNKNOWN_CALLER, caller

logger = logging.getLogger(__name__)

NAMING_KINDS = ("contribution", "part")  # kinds of statements by which an owner names blobs
MAX_CONTRIBUTIONS = 16  # of a peer: so much is carried at once for all others together,
MAX_CONTRIBUTIONS_PER_PEER = 2  # and for one of them
MIN_BLOBS_PER_PEER = 32  # where a message has few parts, and may be much smaller than the largest
MAX_CALLS_PER_PEER = 16  # of one peer at once, as many as its connection takes;
MAX_FETCHES_PER_PEER = 8  # so many of them are fetched for at once, the others wait behind these


@dataclass
class RelayContext:
    """`round`: the one at hand. `is_member`: of the run, and live. `refused`: hears of what is not carried."""

    round: Callable[[], int]
    is_member: Callable[[PeerId], bool]
    record_refusal: Callable[[PeerId, PeerFault], None]
    record_recovered: Callable[[RecoveredErrorKind, str], None]


@dataclass
class _CallQueue:
    """The calls of one peer."""

    calls: int = 0
    fetch_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_FETCHES_PER_PEER))


class BlobRelayService(CarriersServicer):
    """`message_bytes`: what one peer sends in a round at most; `seconds`: that a fetch may take.

    `bytes_carried` counts what was passed on at somebody's request.
    """

    def __init__(
        self,
        run_id: RunId,
        limits: ContributionLimits,
        contribution_bytes: int,
        fetch_seconds: float,
        downloader: Downloader,
        store: BlobStore,
        context: RelayContext,
    ) -> None:
        self._run_id = run_id
        self._limits = limits
        self._fetch_seconds = fetch_seconds
        self._downloader = downloader
        self._store = store
        self._context = context
        blobs_each = max(MIN_BLOBS_PER_PEER, MAX_CONTRIBUTIONS_PER_PEER * limits.parts)
        self._quota = RelayQuota(
            MAX_CONTRIBUTIONS * contribution_bytes, MAX_CONTRIBUTIONS_PER_PEER * contribution_bytes, blobs_each
        )
        self._queues: dict[PeerId, _CallQueue] = {}
        self.bytes_relayed = 0

    async def Carry(self, request: CarryRequest, context: Any) -> CarryReply:  # noqa: N802
        peer = UNKNOWN_CALLER
        try:
            peer = caller(context)
            await self._relay(peer, *self._admit(peer, request))
        except PeerFault as fault:
            self._context.record_refusal(peer, fault)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(fault))
        except (UnreachableError, StorageError) as error:
            self._context.record_recovered("not carried", f"for {peer}: {error}")
            # The reason stays here: it may name folders.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it could not be fetched here either")
        return CarryReply()

    def relayed_digests(self) -> set[bytes]:
        """Digests of what is carried in the round at hand, and is to stay."""
        self._quota.release_before(self._context.round())
        return self._quota.digests()

    def _admit(self, peer: PeerId, request: CarryRequest) -> tuple[Blob, SignedMessage[Body]]:
        """Raises PeerFault for what is not to be carried."""
        if request.run.hex() != self._run_id:
            raise StaleError(f"{peer} asks about another run")
        # Before its statement costs us much: others may have thousands in them.
        self._require_member(peer)
        if request.statement.kind not in NAMING_KINDS:
            raise MalformedError(f"{peer} has a blob carried that a {request.statement.kind[:20]!r} names")
        statement, now = parse(request.statement, self._run_id, self._limits), self._context.round()
        if statement.body.round not in (now, now + 1):  # whoever is a moment ahead is not refused
            raise StaleError(f"{peer} has something of round {statement.body.round} carried, now is {now}")
        self._require_member(statement.sender)
        blob = next((entry.blob for entry in named_blobs(statement) if entry.blob.digest == request.digest), None)
        if blob is None:
            raise MalformedError(f"{peer} has a blob carried that {statement.sender} has not named")
        return blob, statement

    def _require_member(self, peer: PeerId) -> None:
        if not self._context.is_member(peer):
            raise StaleError(f"{peer} takes no part in the run")

    async def _relay(self, peer: PeerId, blob: Blob, message: SignedMessage[Body]) -> None:
        if not self._store.has(blob.digest):
            self._quota.reserve(peer, blob, message.body.round)
            async with self._fetch_slot(peer):
                await self._downloader.fetch(blob, lambda: (message.sender,), self._fetch_seconds)
        self.bytes_relayed += blob.size
        logger.debug("carried %s of %s for %s", blob.name[:12], message.sender, peer)

    @asynccontextmanager
    async def _fetch_slot(self, peer: PeerId) -> AsyncIterator[None]:
        """Who has much carried waits behind itself: what does not come costs us a fetch for as long as it may take."""
        queue = self._queues.setdefault(peer, _CallQueue())
        if queue.calls >= MAX_CALLS_PER_PEER:
            raise LimitError(f"{peer} has {queue.calls} blobs carried at once")
        queue.calls += 1
        try:
            async with queue.fetch_slots:
                yield
        finally:
            queue.calls -= 1
            if not queue.calls:
                del self._queues[peer]
