"""A node that only watches: it knows everybody, helps others to find each other, and neither trains nor decides."""

import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator, Sequence

from node.daemon.assembly import usual_listen
from node.daemon.runs_service import RunsService
from node.folder import RunFolder
from node.host.window import Window
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.membership.clock import Clock
from protocol.membership.gossip import Directory
from protocol.membership.rendezvous import Rendezvous
from protocol.murmur_pb2_grpc import add_RunsServicer_to_server
from protocol.network.transport import Transport

logger = logging.getLogger(__name__)


class Observer:
    """Made by `watching`; `run` gossips until cancelled."""

    def __init__(self, window: Window, rendezvous: Rendezvous) -> None:
        self.window, self.rendezvous = window, rendezvous


@contextlib.asynccontextmanager
async def watching(
    manifest: Manifest, folder: RunFolder, peers: Sequence[str], listen: Sequence[str], name: str, version: str
) -> AsyncIterator[Observer]:
    """On the network while inside; the folder is claimed. Raises TransportError."""
    identity = Identity.load_or_create(folder.key)
    rng, clock = random.Random(os.urandom(16)), Clock()
    transport = Transport.create(folder.key, folder.path)
    directory = Directory(
        identity, manifest.run_id, transport, clock, manifest.membership.heartbeat, manifest.membership.expiry, rng,
        (*peers, *manifest.run.bootstrap), folder.peers,
    )  # fmt: skip
    runs = RunsService(manifest)
    try:
        await transport.open(
            [directory.register, lambda server: add_RunsServicer_to_server(runs, server)],
            listen=usual_listen(folder, listen),
        )
        directory.publish(role="observer", name=name, version=version)
        rendezvous = Rendezvous(
            identity, manifest.run_id, transport, clock, directory.neighbours, directory.remember, rng
        )
        yield Observer(Window(manifest, identity, directory, transport, trains=False), rendezvous)
    finally:
        await transport.stop()
