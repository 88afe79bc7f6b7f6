"""A node that only watches: it knows everybody, helps others to find each other, and neither trains nor decides."""

import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator, Mapping

from node.config import NodeOptions
from node.daemon.runs_service import RunsService
from node.daemon.usual_port import reuse_last_port
from node.folder import RunDir
from node.host.window import NodeHandle
from protocol.identity import Identity
from protocol.membership.clock import SwarmClock
from protocol.membership.gossip import PeerDirectory
from protocol.membership.rendezvous import Rendezvous
from protocol.murmur_pb2_grpc import add_RunsServicer_to_server
from protocol.network.dial_back import DialBackResponder
from protocol.network.reach import find_own_ip, choose_relays
from protocol.network.transport import Transport
from protocol.network.tunnel import ConnectionLimits

logger = logging.getLogger(__name__)


class ObserverNode:
    """Made by `watching`; `run` gossips until cancelled."""

    def __init__(self, handle: NodeHandle, rendezvous: Rendezvous) -> None:
        self.handle = handle
        self.rendezvous = rendezvous

    def refusal_counts(self) -> tuple[Mapping[str, int], ...]:
        window = self.handle
        return window.directory.refusals, window.transport.refusals, {"dht": self.rendezvous.refused_count}


@contextlib.asynccontextmanager
async def open_observer_node(settings: NodeOptions, run_dir: RunDir, version: str) -> AsyncIterator[ObserverNode]:
    """On the network while inside; the folder is claimed. Raises TransportError."""
    manifest, identity = settings.manifest, Identity.load_or_create(run_dir.key)
    rng, clock = random.Random(os.urandom(16)), SwarmClock()
    contacts = (*settings.peers, *manifest.run.bootstrap)
    limits = ConnectionLimits(upload=settings.upload, download=settings.download)
    transport = Transport.create(run_dir.key, run_dir.path, limits)
    directory = PeerDirectory(
        identity, manifest.run_id, transport, clock, manifest.membership.heartbeat, manifest.membership.expiry, rng,
        contacts, run_dir.peers,
    )  # fmt: skip
    runs = RunsService(manifest, DialBackResponder(transport.remote_addresses), directory.record_refusal)
    try:
        await transport.open(
            [directory.register, lambda server: add_RunsServicer_to_server(runs, server)],
            listen=await reuse_last_port(run_dir, settings.listen),
            relays=choose_relays(settings.listen, contacts, find_own_ip()),
        )
        directory.publish(role="observer", name=settings.name, version=version)
        rendezvous = Rendezvous(
            identity, manifest.run_id, transport, clock, directory.known_addresses, directory.add_contact, rng
        )
        yield ObserverNode(NodeHandle(manifest, identity, directory, transport, is_trainer=False), rendezvous)
    finally:
        await transport.stop()
