"""What a host needs of the node that it looks through, be it one that trains or one that only watches.

A node that only watches: it knows everybody, helps others to find each other, and neither trains nor decides.
"""

import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import grpc

from node.daemon.node import MAX_TOKENS, Node
from node.daemon.services import RunsService
from node.model import shape_table
from node.options import NodeOptions
from node.run_dir import RunDir, reuse_last_port
from protocol.consensus.messages import MAX_PARTS, ContributionLimits
from protocol.identity import Identity, PeerId
from protocol.manifest import Manifest
from protocol.membership.clock import SwarmClock
from protocol.membership.directory import DirectoryOptions, PeerDirectory
from protocol.membership.rendezvous import Rendezvous
from protocol.murmur_pb2_grpc import add_RunsServicer_to_server
from protocol.transport.connection_supervisor import ConnectionLimits
from protocol.transport.nat import DialBackResponder, choose_relays, find_own_ip
from protocol.transport.transport import Transport

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


logger = logging.getLogger(__name__)


class ObserverNode:
    """Made by `watching`; `run` gossips until cancelled."""

    def __init__(self, handle: NodeHandle, rendezvous: Rendezvous) -> None:
        self.handle = handle
        self.rendezvous = rendezvous

    def refusal_counts(self) -> tuple[Mapping[str, int], ...]:
        window = self.handle
        return window.directory.refusals, window.transport.refusals, self.rendezvous.refusals


@contextlib.asynccontextmanager
async def open_observer_node(settings: NodeOptions, run_dir: RunDir, version: str) -> AsyncIterator[ObserverNode]:
    """On the network while inside; the folder is claimed. Raises TransportError."""
    manifest, identity = settings.manifest, Identity.load_or_create(run_dir.key)
    rng, clock = random.Random(os.urandom(16)), SwarmClock()
    contacts = (*settings.peers, *manifest.run.bootstrap)
    limits = ConnectionLimits(upload=settings.upload, download=settings.download)
    transport = Transport.create(run_dir.key, run_dir.path, limits)
    directory = PeerDirectory(
        DirectoryOptions(
            run_id=manifest.run_id,
            heartbeat=manifest.membership.heartbeat,
            expiry=manifest.membership.expiry,
            bootstrap=contacts,
            addresses_file=run_dir.peers,
        ),
        identity,
        transport,
        clock,
        rng,
    )
    runs = RunsService(manifest, DialBackResponder(transport.remote_addresses), directory.record_refusal)
    try:
        await transport.open(
            [directory.register, lambda server: add_RunsServicer_to_server(runs, server)],
            listen=await reuse_last_port(run_dir, settings.listen),
            relays=choose_relays(settings.listen, contacts, find_own_ip()),
        )
        directory.publish(role="observer", name=settings.name, version=version)
        rendezvous = Rendezvous(identity, transport, clock, directory, rng)
        yield ObserverNode(NodeHandle(manifest, identity, directory, transport, is_trainer=False), rendezvous)
    finally:
        await transport.stop()
