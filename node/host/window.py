"""What a host needs of the node that it looks through, be it one that trains or one that only watches."""

from dataclasses import dataclass

import grpc

from node.daemon.assembly import MAX_TOKENS, Node
from node.model import shape_table
from protocol.identity import Identity, PeerId
from protocol.manifest import Manifest
from protocol.membership.gossip import PeerDirectory
from protocol.network.transport import Transport
from protocol.rounds.statements import MAX_PARTS, ContributionLimits

MAX_SHOWN_BLOB_BYTES = 1 << 40  # nothing is fetched: the sizes are only shown


@dataclass(frozen=True)
class NodeHandle:
    """`trains`: whether the node behind it is a trainer itself, and thus one of those on the page."""

    manifest: Manifest
    identity: Identity
    directory: PeerDirectory
    transport: Transport
    is_trainer: bool

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    def channel(self, peer: PeerId) -> grpc.aio.Channel:
        return self.transport.channel(peer)

    def contribution_limits(self) -> ContributionLimits:
        """Wide ones: the peers have checked their commits against the run's own."""
        manifest = self.manifest
        shapes = shape_table(manifest.model).hash()
        return ContributionLimits(manifest.method.recipe, shapes, MAX_PARTS, MAX_TOKENS, MAX_SHOWN_BLOB_BYTES)


def node_handle(node: Node, identity: Identity, manifest: Manifest) -> NodeHandle:
    return NodeHandle(manifest, identity, node.directory, node.transport, is_trainer=True)
