"""The parts that all replicas of a node share."""

import random
from dataclasses import dataclass

from node.daemon.stages.stage_effects import NodeStages
from node.daemon.steering.keeper import RevisionKeeper
from node.monitoring.metrics import Metrics
from node.options import NodeOptions
from node.processes.workers import Workers
from protocol.blobs.server import BlobService
from protocol.identity import Identity
from protocol.membership.directory import PeerDirectory
from protocol.transport.transport import Transport


@dataclass(frozen=True, kw_only=True)
class NodeParts:
    """The parts that all replicas of a node share."""

    options: NodeOptions
    identity: Identity
    transport: Transport
    directory: PeerDirectory
    stages: NodeStages
    revisions: RevisionKeeper
    blob_service: BlobService
    metrics: Metrics
    workers: Workers
    rng: random.Random

    @property
    def has_contacts(self) -> bool:
        return bool(self.options.contacts)
