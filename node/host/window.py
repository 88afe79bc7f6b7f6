"""What a host needs of the node that it looks through, be it one that trains or one that only watches."""

from dataclasses import dataclass

import grpc

from node.daemon.assembly import MAX_TOKENS, Assembly
from node.model import shape_table
from protocol.identity import Identity, PeerId
from protocol.manifest import Manifest
from protocol.membership.gossip import Directory
from protocol.network.transport import Transport
from protocol.rounds.statements import MAX_PARTS, Terms

MAX_BLOB_BYTES = 1 << 40  # nothing is fetched: the sizes are only shown


@dataclass(frozen=True)
class Window:
    """`trains`: whether the node behind it is a trainer itself, and thus one of those on the page."""

    manifest: Manifest
    identity: Identity
    directory: Directory
    transport: Transport
    trains: bool

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    def channel(self, peer: PeerId) -> grpc.aio.Channel:
        return self.transport.channel(peer)

    def terms(self) -> Terms:
        """Wide ones: the peers have checked their commits against the run's own."""
        manifest = self.manifest
        shapes = shape_table(manifest.model).hash()
        return Terms(manifest.method.recipe, shapes, MAX_PARTS, MAX_TOKENS, MAX_BLOB_BYTES)


def window_of(node: Assembly, identity: Identity, manifest: Manifest) -> Window:
    return Window(manifest, identity, node.directory, node.transport, trains=True)
