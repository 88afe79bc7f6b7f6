"""Ask peers of a run for their peer tables, with a temporary key: for those that do not take part, or not yet."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from node.daemon.peers.peer_rpc import request_peer_table
from protocol.errors import PeerFault, TransportError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.membership.peer_table import PeerTable
from protocol.murmur_pb2 import PeerRecord
from protocol.transport.transport import Transport

logger = logging.getLogger(__name__)

DIAL_SECONDS = 10.0
CALL_SECONDS = 10.0
MAX_PEERS_ASKED = 8
FIND_SECONDS = 20.0  # for all of it


@asynccontextmanager
async def temporary_transport() -> AsyncIterator[Transport]:
    """Run a transport with a temporary key inside the context. Raises TransportError."""
    with tempfile.TemporaryDirectory(prefix="murmur-") as folder:
        transport = await Transport.start(Path(folder) / "key", Path(folder), [])
        try:
            yield transport
        finally:
            await transport.stop()


async def connect_to_peers(transport: Transport, addresses: Sequence[str]) -> list[PeerId]:
    """Connect to all addresses at once; return the peers that answer."""
    results = await asyncio.gather(*(_connect(transport, address) for address in addresses))
    return list(dict.fromkeys(peer for peer in results if peer is not None))


async def _connect(transport: Transport, address: str) -> PeerId | None:
    try:
        return await transport.connect(address, DIAL_SECONDS)
    except UnreachableError as error:
        logger.info("%s", error)
        return None


async def read_peer_table(manifest: Manifest, transport: Transport, peer: PeerId) -> dict[PeerId, PeerRecord]:
    """Return the records of live peers that a peer knows; none if it does not answer."""
    try:
        reply = await request_peer_table(manifest.whole_run_id, transport.channel, peer, CALL_SECONDS)
        table = PeerTable(manifest.whole_run_id, manifest.membership.expiry)
        for signed in reply.records:
            table.merge(signed, reply.time)
    except (UnreachableError, PeerFault) as error:
        logger.info("%s does not send its peer table: %s", peer, error)
        return {}
    return dict(table.live(reply.time))


async def find_records(manifest: Manifest, addresses: Sequence[str]) -> dict[PeerId, PeerRecord]:
    """Return the newest records of the run's peers, by the peers at these addresses; none if nobody answers in time."""
    try:
        async with temporary_transport() as transport, asyncio.timeout(FIND_SECONDS):
            peers = await connect_to_peers(transport, addresses[:MAX_PEERS_ASKED])
            tables = await asyncio.gather(*(read_peer_table(manifest, transport, peer) for peer in peers))
    except (TimeoutError, TransportError) as error:
        logger.info("cannot ask for the peers of the run: %s", error or "no answer in time")
        return {}
    records = sorted((entry for table in tables for entry in table.items()), key=lambda entry: entry[1].sequence)
    return dict(records)
