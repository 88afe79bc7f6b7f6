"""Store and forward: a peer that others can call fetches a blob for one that cannot get it itself, and holds it.

Between two peers that are both hidden behind routers only small things pass (see `protocol.transport.nat`). So the one
that wants a blob asks a third, which both can call, to fetch it, and then fetches it there, checked by its hash as
ever. What is carried is named by a statement that its owner signed for the round at hand: nobody has anything else
brought here, and no more of it than a few messages' worth. With the round it is dropped.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from protocol.blobs.blob import Blob
from protocol.blobs.download import Downloader
from protocol.blobs.relay_quota import RelayQuota
from protocol.blobs.store import BlobStore
from protocol.consensus.chain import Chain
from protocol.consensus.message_kinds import Body, named_blobs, parse
from protocol.consensus.messages import ContributionLimits, SignedMessage
from protocol.errors import LimitError, MalformedError, StaleError
from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.murmur_pb2 import Signed

logger = logging.getLogger(__name__)

NAMING_KINDS = ("contribution", "part")  # kinds of statements by which an owner names blobs
MAX_CONTRIBUTIONS = 16  # of a peer: so much is carried at once for all others together,
MAX_CONTRIBUTIONS_PER_PEER = 2  # and for one of them
MIN_BLOBS_PER_PEER = 32  # where a message has few parts, and may be much smaller than the largest
MAX_CALLS_PER_PEER = 16  # of one peer at once, as many as its connection takes;
MAX_FETCHES_PER_PEER = 8  # so many of them are fetched for at once, the others wait behind these


@dataclass(frozen=True, kw_only=True)
class RelayOptions:
    """Limits of a run: bytes that one peer contributes to a round at most, and seconds that a fetch may take."""

    run_id: RunId
    limits: ContributionLimits
    contribution_bytes: int
    fetch_seconds: float


class MemberView(Protocol):
    def is_trainer(self, peer: PeerId) -> bool:
        """Return whether it is a live member of the run."""


@dataclass
class _CallQueue:
    """The calls of one peer."""

    calls: int = 0
    fetch_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_FETCHES_PER_PEER))


class BlobRelay:
    """Fetches blobs of one run's round for peers that cannot reach their owners.

    `bytes_relayed` counts the bytes that peers had relayed.
    """

    def __init__(
        self,
        options: RelayOptions,
        downloader: Downloader,
        store: BlobStore,
        chain: Chain,
        members: MemberView,
    ) -> None:
        limits, contribution_bytes = options.limits, options.contribution_bytes
        self._options = options
        self._downloader = downloader
        self._store = store
        self._chain = chain
        self._members = members
        blobs_each = max(MIN_BLOBS_PER_PEER, MAX_CONTRIBUTIONS_PER_PEER * limits.parts)
        self._quota = RelayQuota(
            MAX_CONTRIBUTIONS * contribution_bytes, MAX_CONTRIBUTIONS_PER_PEER * contribution_bytes, blobs_each
        )
        self._queues: dict[PeerId, _CallQueue] = {}
        self.bytes_relayed = 0

    async def relay(self, peer: PeerId, named_by: Signed, digest: bytes) -> None:
        """Have the blob in the store when this returns.

        Raises PeerFault if it is not to be relayed, UnreachableError or StorageError if it cannot be had.
        """
        blob, message = self._admit(peer, named_by, digest)
        if not self._store.has(blob.digest):
            self._quota.reserve(peer, blob, message.body.round)
            async with self._fetch_slot(peer):
                await self._downloader.fetch(blob, lambda: (message.sender,), self._options.fetch_seconds)
        self.bytes_relayed += blob.size
        logger.debug("carried %s of %s for %s", blob.name[:12], message.sender, peer)

    def held_digests(self) -> set[bytes]:
        """Return the digests of blobs that are relayed in the open round, and must stay."""
        self._quota.release_before(self._chain.round)
        return self._quota.digests()

    def _admit(self, peer: PeerId, named_by: Signed, digest: bytes) -> tuple[Blob, SignedMessage[Body]]:
        """Check the request before its message costs us much: others may name thousands of blobs."""
        self._require_member(peer)
        if named_by.kind not in NAMING_KINDS:
            raise MalformedError(f"{peer} has a blob carried that a {named_by.kind[:20]!r} names")
        message, now = parse(named_by, self._options.run_id, self._options.limits), self._chain.round
        if message.body.round not in (now, now + 1):  # whoever is a moment ahead is not refused
            raise StaleError(f"{peer} has something of round {message.body.round} carried, now is {now}")
        self._require_member(message.sender)
        blob = next((entry.blob for entry in named_blobs(message) if entry.blob.digest == digest), None)
        if blob is None:
            raise MalformedError(f"{peer} has a blob carried that {message.sender} has not named")
        return blob, message

    def _require_member(self, peer: PeerId) -> None:
        if not self._members.is_trainer(peer):
            raise StaleError(f"{peer} takes no part in the run")

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
