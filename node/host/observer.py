"""A node that only watches: it knows everybody, helps others to find each other, and neither trains nor decides."""

import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator, Mapping

from node.config import NodeSettings
from node.daemon.runs_service import RunsService
from node.daemon.usual_port import usual_listen
from node.folder import RunFolder
from node.host.window import Window
from protocol.identity import Identity
from protocol.membership.clock import Clock
from protocol.membership.gossip import Directory
from protocol.membership.rendezvous import Rendezvous
from protocol.murmur_pb2_grpc import add_RunsServicer_to_server
from protocol.network.dial_back import DialBack
from protocol.network.reach import own_address, relays_for
from protocol.network.transport import Transport
from protocol.network.tunnel import TunnelLimits

logger = logging.getLogger(__name__)


class Observer:
    """Made by `watching`; `run` gossips until cancelled."""

    def __init__(self, window: Window, rendezvous: Rendezvous) -> None:
        self.window = window
        self.rendezvous = rendezvous

    def refusals(self) -> tuple[Mapping[str, int], ...]:
        window = self.window
        return window.directory.refusals, window.transport.refusals, {"dht": self.rendezvous.refused}


@contextlib.asynccontextmanager
async def watching(settings: NodeSettings, folder: RunFolder, version: str) -> AsyncIterator[Observer]:
    """On the network while inside; the folder is claimed. Raises TransportError."""
    manifest, identity = settings.manifest, Identity.load_or_create(folder.key)
    rng, clock = random.Random(os.urandom(16)), Clock()
    contacts = (*settings.peers, *manifest.run.bootstrap)
    limits = TunnelLimits(upload=settings.upload, download=settings.download)
    transport = Transport.create(folder.key, folder.path, limits)
    directory = Directory(
        identity, manifest.run_id, transport, clock, manifest.membership.heartbeat, manifest.membership.expiry, rng,
        contacts, folder.peers,
    )  # fmt: skip
    runs = RunsService(manifest, DialBack(transport.remote_addresses), directory.refuse)
    try:
        await transport.open(
            [directory.register, lambda server: add_RunsServicer_to_server(runs, server)],
            listen=await usual_listen(folder, settings.listen),
            relays=relays_for(settings.listen, contacts, own_address()),
        )
        directory.publish(role="observer", name=settings.name, version=version)
        rendezvous = Rendezvous(
            identity, manifest.run_id, transport, clock, directory.neighbours, directory.remember, rng
        )
        yield Observer(Window(manifest, identity, directory, transport, trains=False), rendezvous)
    finally:
        await transport.stop()
