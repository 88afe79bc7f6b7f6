"""Build the components with which a replica communicates with the peers of its run."""

from node.daemon.inbox import Inbox, MessageReceiver
from node.daemon.node_parts import NodeParts
from node.daemon.peers.downloads import Downloads
from node.daemon.peers.peer_rpc import Outbox, PeerRpc
from node.daemon.peers.swarm_view import SwarmView
from node.daemon.services import InboundQuota
from node.monitoring.status_reporter import StatusReporter
from protocol.admission import AdmissionPolicy
from protocol.blobs.download import Downloader
from protocol.blobs.store import BlobStore
from protocol.consensus.messages.briefs.codec import Abridger
from protocol.consensus.messages.briefs.seen import SeenMessages
from protocol.consensus.messages.contributions import ContributionLimits
from protocol.manifest.run import Manifest
from protocol.pipeline.stages.stage import StageManifest
from protocol.traffic import ControlTraffic


class Connections:
    """A replica's view of the peers, its messages to and from them, and its downloads of their blobs."""

    def __init__(
        self,
        node: NodeParts,
        manifest: Manifest,
        limits: ContributionLimits,
        inbox: Inbox,
        store: BlobStore,
        status: StatusReporter,
    ) -> None:
        gate = AdmissionPolicy(manifest)
        node.metrics.add_refusal_counter(gate)
        stage = node.stages.records.record_of(manifest) if isinstance(manifest, StageManifest) else None
        self.swarm_view = SwarmView(node.directory, status, node.has_contacts, node.rng, gate, stage)
        self.quota = InboundQuota(limits.parts, manifest.round.leader_timeout)
        seen = SeenMessages()
        self.receiver = MessageReceiver(manifest.run_id, limits, seen, inbox, status)
        self.traffic = ControlTraffic()
        rpc = PeerRpc(manifest.run_id, node.transport, Abridger(seen), self.traffic)
        self.outbox = Outbox(rpc, self.receiver, node.directory, inbox, status)
        self.downloader = Downloader(store, node.transport.bulk, node.rng)
        self.downloads = Downloads(self.downloader, self.swarm_view, rpc, status)
