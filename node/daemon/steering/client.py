"""Exchange the organiser's revisions with peers of a run, under a temporary key."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from node.daemon.peers.run_contacts import MAX_PEERS_ASKED, connect_to_peers, read_peer_table, temporary_transport
from node.daemon.steering.revision_store import exchange_revisions
from protocol.consensus.messages.signed import Digest
from protocol.errors import PeerFault, UnreachableError, UsageError
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.steering import NO_REVISION, RevisionLog, SignedRevision, open_revision
from protocol.transport.transport import Transport

logger = logging.getLogger(__name__)


@dataclass
class RunContact:
    """The reached peers of a run, and their revisions and rounds."""

    manifest: Manifest
    transport: Transport
    log: RevisionLog = field(default_factory=RevisionLog)
    adopted: Digest = NO_REVISION  # by the chain of the most advanced peer that has one
    adopted_at: int = -1
    round: int = 0
    tokens: int = 0
    round_seconds: float = 0.0
    peers: list[PeerId] = field(default_factory=list)

    async def reach(self, addresses: Sequence[str]) -> None:
        """Connect to peers, then to others that they know, and fetch all revisions. Raises UnreachableError."""
        found = await connect_to_peers(self.transport, addresses[:MAX_PEERS_ASKED])
        if not found:
            raise UnreachableError("no peer of the run answers; start one, or name the run by the URL of its host")
        tables = await asyncio.gather(*(read_peer_table(self.manifest, self.transport, peer) for peer in found))
        records = {peer: record for table in tables for peer, record in table.items()}
        further = [record.addresses[0] for peer, record in records.items() if peer not in found and record.addresses]
        self.peers = [*found, *await connect_to_peers(self.transport, further[: MAX_PEERS_ASKED - len(found)])]
        self.round = max((record.round for record in records.values()), default=0)
        self.tokens = max((record.chain_tokens for record in records.values()), default=0)
        if not await self.publish(()):
            raise UnreachableError("no peer of the run answers the question for revisions; update murmur there")

    @property
    def revisions(self) -> tuple[SignedRevision, ...]:
        """Return the revisions that the run follows, oldest first."""
        return self.log.list_to(self.log.newest(self.adopted)) or ()

    async def publish(self, revisions: Sequence[SignedRevision]) -> int:
        """Send revisions to all reached peers; return how many replied."""
        return sum(await asyncio.gather(*(self._exchange(peer, revisions) for peer in self.peers)))

    async def _exchange(self, peer: PeerId, revisions: Sequence[SignedRevision]) -> bool:
        envelopes = [revision.signed for revision in revisions]
        try:
            reply = await exchange_revisions(self.manifest.run_id, self.transport.channel, peer, envelopes)
            for signed in reply.revisions:
                self.log.add(open_revision(signed, self.manifest.run_id, self.manifest.run.organiser_key))
        except (UnreachableError, PeerFault) as error:
            logger.warning("%s does not take part: %s", peer, error)
            return False
        if reply.adopted in self.log and reply.adopted and reply.round > self.adopted_at:
            self.adopted, self.adopted_at = reply.adopted, reply.round
        self.round = max(self.round, reply.round)
        self.round_seconds = max(self.round_seconds, reply.round_seconds)
        return True


@asynccontextmanager
async def contact_run(manifest: Manifest, addresses: Sequence[str]) -> AsyncIterator[RunContact]:
    """Reach the peers of a run inside the context. Raises UsageError without addresses, UnreachableError."""
    if not addresses:
        raise UsageError("the manifest names no peer to ask; name the run by its host's URL or by a node's directory")
    async with temporary_transport() as transport:
        contact = RunContact(manifest, transport)
        await contact.reach(addresses)
        yield contact
