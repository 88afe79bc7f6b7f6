"""Build what a node has on the network of its run, whatever it trains there: identity, transport, directory, blobs."""

import os
import random

from node.daemon.checkpoints.vote_log import ContradictionFile
from node.daemon.peers.admitted_peers import AdmittedPeers
from node.daemon.stages.calls import stage_calls
from node.daemon.stages.stage_chains import StageChains, build_decisions
from node.daemon.stages.stage_effects import NodeStages
from node.daemon.steering.revision_store import RevisionStore
from node.injected_faults import injected_faults
from node.monitoring.metrics import Metrics
from node.options import NodeOptions
from node.run_dir import RunDir
from protocol.admission import AdmissionPolicy
from protocol.blobs.server import BlobService, CallerLimits, StoreGroup
from protocol.identity import Identity
from protocol.manifest.run import Manifest
from protocol.membership.clock import SwarmClock
from protocol.membership.directory import PeerDirectory
from protocol.membership.gossip import DirectoryOptions
from protocol.pipeline.stage import stage_run_ids
from protocol.transport.transport import Transport, caller
from protocol.transport.tunnel import ConnectionLimits


class NodeNetwork:
    """The identity, transport, directory, revisions, blob service and metrics that all replicas of a node share."""

    def __init__(self, options: NodeOptions, run_dir: RunDir, rng: random.Random) -> None:
        manifest = options.manifest
        self.options = options
        self.run_dir = run_dir
        self.rng = rng
        self.identity = Identity.load_or_create(run_dir.key)
        self.peer_id = self.identity.peer_id
        limits = ConnectionLimits(upload=options.upload, download=options.download)
        self.transport = Transport.create(run_dir.key, run_dir.path, limits)
        self.clock = SwarmClock()
        self.directory = PeerDirectory(
            DirectoryOptions(
                run_id=manifest.run_id,
                heartbeat=manifest.membership.heartbeat,
                expiry=manifest.membership.expiry,
                bootstrap=options.contacts,
                addresses_file=run_dir.peers,
            ),
            self.identity,
            self.transport,
            self.clock,
            rng,
        )
        gate = AdmissionPolicy(manifest)
        contradictions = ContradictionFile(run_dir.contradictions)
        stages, run_id = manifest.pipeline.stages, manifest.whole_run_id
        self.admitted = AdmittedPeers(self.directory, gate, stages, contradictions.load(stage_run_ids(run_id, stages)))
        decisions = build_decisions(manifest)
        calls = stage_calls(self.transport, injected_faults(os.environ, manifest.run.name))
        self.stages = NodeStages(self.admitted, calls, decisions, contradictions)
        self.stage_chains: StageChains | None = None
        if manifest.pipeline.is_cut:
            self.stage_chains = StageChains(
                manifest, self.admitted, self.transport.channel, options.contact_ids, decisions, rng
            )
        self.revisions = RevisionStore(manifest, run_dir.revisions, self.directory, self.transport.channel)
        self.stores = StoreGroup()
        self.blob_service = BlobService(self.stores, caller, CallerLimits.at_rate(options.upload))
        self.metrics = Metrics()
        self.metrics.add_refusal_counter(gate)

    def revisions_of(self, manifest: Manifest, run_dir: RunDir) -> RevisionStore:
        """Return the revisions of a run: the node's, or other ones for a run that is not a stage of the node's run."""
        if manifest.whole_run_id == self.directory.run_id:
            return self.revisions
        return RevisionStore(manifest, run_dir.revisions, self.directory, self.transport.channel)
