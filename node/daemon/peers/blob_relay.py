"""Relay blobs: a reachable peer fetches and stores a blob for a peer that cannot reach its owner.

Between two peers that are both hidden behind NAT only small messages pass (see `protocol.transport.nat`). The peer that
needs a blob asks a third peer, reachable for both, to fetch it, and then downloads it from there and checks its hash as
usual. A relay fetches only blobs named in a message that their owner signed for the current round, and no more than a
few contributions' worth, so no peer can have other data stored here. The blobs are dropped with the round.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from node.daemon.peers.swarm_view import SwarmView
from node.daemon.run_limits import MAX_RELAYED_CONTRIBUTIONS
from node.daemon.state.replica_state import ReplicaState
from protocol.blobs.blob import Blob
from protocol.blobs.download import Downloader
from protocol.blobs.relay_quota import RelayQuota
from protocol.consensus.messages.kinds import Body, named_blobs, parse
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import LimitError, MalformedError, StaleError
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed

logger = logging.getLogger(__name__)

NAMING_KINDS = ("contribution", "part")  # kinds of messages in which an owner names blobs
MAX_CONTRIBUTIONS_PER_PEER = 2  # in bytes: relayed at once for one peer
MIN_BLOBS_PER_PEER = 32  # for contributions of few parts, much smaller than the largest
MAX_CALLS_PER_PEER = 16  # concurrent calls of one peer, as many as its connection allows
MAX_FETCHES_PER_PEER = 8  # concurrent fetches for one peer; its other calls wait


@dataclass
class _CallQueue:
    """The concurrent calls of one peer."""

    calls: int = 0
    fetch_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_FETCHES_PER_PEER))


class BlobRelay:
    """Fetches blobs of one run's round for peers that cannot reach their owners.

    `bytes_relayed` counts the bytes that peers had relayed.
    """

    def __init__(self, state: ReplicaState, downloader: Downloader, swarm_view: SwarmView) -> None:
        self._run_id = state.run_id
        self._limits = state.limits
        self._fetch_seconds = state.manifest.round.exchange_timeout
        self._downloader = downloader
        self._store = state.store
        self._chain = state.replicated.chain
        self._swarm_view = swarm_view
        contribution_bytes = state.planner.max_contribution_bytes
        self._quota = RelayQuota(
            MAX_RELAYED_CONTRIBUTIONS * contribution_bytes,
            MAX_CONTRIBUTIONS_PER_PEER * contribution_bytes,
            max(MIN_BLOBS_PER_PEER, MAX_CONTRIBUTIONS_PER_PEER * state.limits.parts),
        )
        self._queues: dict[PeerId, _CallQueue] = {}
        self.bytes_relayed = 0

    async def relay(self, peer: PeerId, named_by: Signed, digest: bytes) -> None:
        """Fetch a blob for a peer; it is in the store when this returns.

        Raises PeerFault if the request is not valid, UnreachableError or StorageError if the fetch fails.
        """
        blob, message = self._admit(peer, named_by, digest)
        if not self._store.has(blob.digest):
            self._quota.reserve(peer, blob, message.body.round)
            async with self._fetch_slot(peer):
                await self._downloader.fetch(blob, lambda: (message.sender,), self._fetch_seconds)
        self.bytes_relayed += blob.size
        logger.debug("relayed %s of %s for %s", blob.name[:12], message.sender, peer)

    def held_digests(self) -> set[bytes]:
        """Return the digests of the blobs relayed in the open round, which must stay in the store."""
        self._quota.release_before(self._chain.round)
        return self._quota.digests()

    def _admit(self, peer: PeerId, named_by: Signed, digest: bytes) -> tuple[Blob, SignedMessage[Body]]:
        """Check a request cheaply first: its message may name thousands of blobs."""
        self._require_member(peer)
        if named_by.kind not in NAMING_KINDS:
            raise MalformedError(f"{peer} requests the relay of a blob named by a {named_by.kind[:20]!r}")
        message, current = parse(named_by, self._run_id, self._limits), self._chain.round
        if message.body.round not in (current, current + 1):  # a peer may be a moment ahead
            raise StaleError(f"{peer} requests a relay for round {message.body.round}, but the round is {current}")
        self._require_member(message.sender)
        blob = next((entry.blob for entry in named_blobs(message) if entry.blob.digest == digest), None)
        if blob is None:
            raise MalformedError(f"{peer} requests the relay of a blob that {message.sender} did not name")
        return blob, message

    def _require_member(self, peer: PeerId) -> None:
        if not self._swarm_view.is_trainer(peer):
            raise StaleError(f"{peer} is not a trainer of the run")

    @asynccontextmanager
    async def _fetch_slot(self, peer: PeerId) -> AsyncIterator[None]:
        """Limit the concurrent fetches for one peer, because each may take until its timeout."""
        queue = self._queues.setdefault(peer, _CallQueue())
        if queue.calls >= MAX_CALLS_PER_PEER:
            raise LimitError(f"{peer} requests {queue.calls} relays at once")
        queue.calls += 1
        try:
            async with queue.fetch_slots:
                yield
        finally:
            queue.calls -= 1
            if not queue.calls:
                del self._queues[peer]
