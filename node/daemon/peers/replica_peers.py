"""Connect a replica to the peers of its run: who they are, messages to and from them, and their blobs and chains."""

from node.daemon.inbox import InboundQuota, Inbox, MessageReceiver
from node.daemon.node_network import NodeNetwork
from node.daemon.peers.blob_relay import BlobRelay
from node.daemon.peers.chain_sync import ChainReader, ChainSyncClient
from node.daemon.peers.downloads import Downloads
from node.daemon.peers.peer_rpc import Outbox, PeerRpc
from node.daemon.peers.swarm_view import SwarmView
from node.daemon.state.replica_state import ReplicaState
from node.monitoring.status_reporter import StatusReporter
from protocol.blobs.download import Downloader
from protocol.consensus.messages.briefs import BriefCache, SeenMessages
from protocol.pipeline.stage import StageManifest
from protocol.traffic import ControlTraffic


class ReplicaPeers:
    """One replica's view of its peers, its messages to and from them, and its downloads of their blobs and chains."""

    def __init__(self, node: NodeNetwork, state: ReplicaState, inbox: Inbox, status: StatusReporter) -> None:
        manifest = state.manifest
        stage = node.stages.records.record_of(manifest) if isinstance(manifest, StageManifest) else None
        self.swarm_view = SwarmView(node.admitted, status, bool(node.options.contacts), node.rng, stage)
        self.quota = InboundQuota(state.limits.parts, manifest.round.leader_timeout)
        seen = SeenMessages()
        self.receiver = MessageReceiver(state.run_id, state.limits, seen, inbox, status)
        self.traffic = ControlTraffic()
        rpc = PeerRpc(state.run_id, node.transport, BriefCache(seen), self.traffic)
        self.outbox = Outbox(rpc, self.receiver.receive, node.directory.suspect, inbox, status)
        self.downloader = Downloader(state.store, node.transport.bulk, node.rng)
        self.downloads = Downloads(self.downloader, self.swarm_view, rpc, status)
        self.relay = BlobRelay(state, self.downloader, self.swarm_view)
        self.sync_client = ChainSyncClient(
            ChainReader(state.run_id, state.limits, node.transport.channel, manifest.admission),
            state.replicated.chain,
            node.options.contact_ids,
            self.swarm_view,
            state.state_bytes,
            state.has_shared_state,
        )
