"""Store and forward: a peer that others can call fetches a blob for one that cannot get it itself, and holds it.

Between two peers that are both hidden behind routers only small things pass (see `protocol.network.reach`). So the one
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

from node.daemon.metrics import Setback
from protocol.blobs.blob import Blob
from protocol.blobs.burden import Burden
from protocol.blobs.fetch import Fetcher
from protocol.blobs.store import BlobStore
from protocol.errors import LimitError, MalformedError, PeerFault, StaleError, StorageError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.murmur_pb2 import CarryReply, CarryRequest
from protocol.murmur_pb2_grpc import CarriersServicer
from protocol.network.transport import SOMEBODY, caller
from protocol.rounds.kinds import Body, named_blobs, parse
from protocol.rounds.statements import Statement, Terms

logger = logging.getLogger(__name__)

NAMING = ("contribution", "part")  # kinds of statements by which an owner names blobs
MESSAGES = 16  # of a peer: so much is carried at once for all others together,
MESSAGES_EACH = 2  # and for one of them
LEAST_BLOBS_EACH = 32  # where a message has few parts, and may be much smaller than the largest
CALLS_EACH = 16  # of one peer at once, as many as its connection takes;
RUNNING_EACH = 8  # so many of them are fetched for at once, the others wait behind these


@dataclass
class Surroundings:
    """`round`: the one at hand. `is_member`: of the run, and live. `refused`: hears of what is not carried."""

    round: Callable[[], int]
    is_member: Callable[[PeerId], bool]
    refused: Callable[[PeerId, PeerFault], None]
    set_back: Callable[[Setback, str], None]


@dataclass
class _Queue:
    """The calls of one peer."""

    calls: int = 0
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(RUNNING_EACH))


class Carrying(CarriersServicer):
    """`message_bytes`: what one peer sends in a round at most; `seconds`: that a fetch may take.

    `bytes_carried` counts what was passed on at somebody's request.
    """

    def __init__(
        self, run_id: RunId, terms: Terms, message_bytes: int, seconds: float, fetcher: Fetcher, store: BlobStore,
        around: Surroundings,
    ) -> None:  # fmt: skip
        self._run_id = run_id
        self._terms = terms
        self._seconds = seconds
        self._fetcher = fetcher
        self._store = store
        self._around = around
        blobs_each = max(LEAST_BLOBS_EACH, MESSAGES_EACH * terms.parts)
        self._burden = Burden(MESSAGES * message_bytes, MESSAGES_EACH * message_bytes, blobs_each)
        self._queues: dict[PeerId, _Queue] = {}
        self.bytes_carried = 0

    async def Carry(self, request: CarryRequest, context: Any) -> CarryReply:  # noqa: N802
        peer = SOMEBODY
        try:
            peer = caller(context)
            await self._carry(peer, *self._admitted(peer, request))
        except PeerFault as fault:
            self._around.refused(peer, fault)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(fault))
        except (UnreachableError, StorageError) as error:
            self._around.set_back("not carried", f"for {peer}: {error}")
            # The reason stays here: it may name folders.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it could not be fetched here either")
        return CarryReply()

    def held(self) -> set[bytes]:
        """Digests of what is carried in the round at hand, and is to stay."""
        self._burden.drop_before(self._around.round())
        return self._burden.digests()

    def _admitted(self, peer: PeerId, request: CarryRequest) -> tuple[Blob, Statement[Body]]:
        """Raises PeerFault for what is not to be carried."""
        if request.run.hex() != self._run_id:
            raise StaleError(f"{peer} asks about another run")
        # Before its statement costs us much: others may have thousands in them.
        self._require_member(peer)
        if request.statement.kind not in NAMING:
            raise MalformedError(f"{peer} has a blob carried that a {request.statement.kind[:20]!r} names")
        statement, now = parse(request.statement, self._run_id, self._terms), self._around.round()
        if statement.body.round not in (now, now + 1):  # whoever is a moment ahead is not refused
            raise StaleError(f"{peer} has something of round {statement.body.round} carried, now is {now}")
        self._require_member(statement.sender)
        blob = next((entry.blob for entry in named_blobs(statement) if entry.blob.digest == request.digest), None)
        if blob is None:
            raise MalformedError(f"{peer} has a blob carried that {statement.sender} has not named")
        return blob, statement

    def _require_member(self, peer: PeerId) -> None:
        if not self._around.is_member(peer):
            raise StaleError(f"{peer} takes no part in the run")

    async def _carry(self, peer: PeerId, blob: Blob, statement: Statement[Body]) -> None:
        if not self._store.has(blob.digest):
            self._burden.take(peer, blob, statement.body.round)
            async with self._turn_of(peer):
                await self._fetcher.fetch(blob, lambda: (statement.sender,), self._seconds)
        self.bytes_carried += blob.size
        logger.debug("carried %s of %s for %s", blob.name[:12], statement.sender, peer)

    @asynccontextmanager
    async def _turn_of(self, peer: PeerId) -> AsyncIterator[None]:
        """Who has much carried waits behind itself: what does not come costs us a fetch for as long as it may take."""
        queue = self._queues.setdefault(peer, _Queue())
        if queue.calls >= CALLS_EACH:
            raise LimitError(f"{peer} has {queue.calls} blobs carried at once")
        queue.calls += 1
        try:
            async with queue.places:
                yield
        finally:
            queue.calls -= 1
            if not queue.calls:
                del self._queues[peer]
