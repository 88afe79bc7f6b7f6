"""Hold what a replica has in memory and on disk, and restore it: its chain, outer state, blobs and contributions."""

import logging
from collections.abc import Set
from typing import Final

import torch

from node.daemon.audits.work_log import record_interrupted
from node.daemon.checkpoints.checkpoint import Checkpoint, load_newest
from node.daemon.checkpoints.vote_log import ConvictionFile, ProofFile, VoteLog
from node.daemon.node_network import NodeNetwork
from node.daemon.peers.chain_sync import ServedChain
from node.daemon.run_limits import blob_memory_bytes, contribution_limits, max_store_bytes
from node.daemon.state.contributions import ContributionFile, restore_contributions, restore_trainer_snapshot
from node.daemon.state.outer_state import (
    OuterState,
    OuterVectors,
    ReplicatedState,
    RoundCompute,
    TrainerAnchors,
    state_bytes,
)
from node.disk_budget import choose_budget
from node.from_manifest import rate_of_outer_steps, topology_class
from node.loop.peers.catch_up import RETAINED_ROUNDS
from node.loop.steering import Steering
from node.model import cut_of, shapes_of
from node.model.weight_files import start_weights
from node.monitoring.status import ErrorRecorder
from node.processes.workers import Workers
from node.run_dir import RunDir
from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
from optim.inner.base import WEIGHTS
from optim.round_plan import RoundPlanner
from protocol.blobs.store import BlobStore
from protocol.consensus.chain import Chain
from protocol.manifest.run import Manifest
from protocol.recent import RecentSet

logger = logging.getLogger(__name__)

OFFER_SECONDS: Final = 60.0  # from the answer to the first request for the state, also by a slow daemon
MAX_OFFERS: Final = 64


class OfferedStates:
    """Remembers the states that this node has just shown to peers that need one.

    A peer asks for our chain, judges it, and fetches the state that the answer names. Where rounds are faster than
    that, the state would be gone before its first byte is requested, at each attempt. So a state that was shown counts
    as requested for a while.
    """

    def __init__(self) -> None:
        self._shown = RecentSet[bytes](OFFER_SECONDS, MAX_OFFERS)

    def show(self, digest: bytes, rounds_behind: int, now: float) -> None:
        """Remember a state that was shown to a peer, which is `rounds_behind` our head."""
        # A peer a few rounds behind replays them; one with more rounds than we have is on another chain.
        if not 0 <= rounds_behind <= RETAINED_ROUNDS:
            self._shown.add(digest, now)

    def recent(self, now: float) -> Set[bytes]:
        """Return the states that a peer may be about to fetch."""
        return self._shown.members(now)


class ReplicaState:
    """The chain, outer state, blobs, votes and contributions of one replica, in memory and in its folder.

    Without `has_state` this machine lacks the weights of round 0: the state is zero, and peers must send the true one.
    """

    def __init__(
        self,
        node: NodeNetwork,
        manifest: Manifest,
        run_dir: RunDir,
        planner: RoundPlanner,
        workers: Workers,
        errors: ErrorRecorder,
    ) -> None:
        """Restore the newest checkpoint, or begin the run. Raises MurmurError."""
        self.manifest = manifest
        self.run_id = manifest.run_id
        self.run_dir = run_dir
        self.planner = planner
        self.method = planner.method
        self.workers = workers
        self.shapes = shapes_of(manifest)
        self.limits = contribution_limits(manifest, planner)
        self.state_bytes = state_bytes(planner.numel, planner.method)
        self.has_shared_state = topology_class(planner.method).has_shared_state
        self.disk_budget = choose_budget(run_dir.path, node.options.disk)
        self.max_store_bytes = min(max_store_bytes(planner), self.disk_budget // 2)
        self.store = BlobStore(run_dir.blobs, self.max_store_bytes, blob_memory_bytes(planner))
        self.shared_memory = SharedMemory.create(SharedLayout.of(planner), run_dir.path)
        self.outer_vectors = OuterVectors(run_dir.path, planner)
        self.anchors = TrainerAnchors(self.shared_memory, planner, workers.compute)
        self.contribution_file = ContributionFile(run_dir.contribution_file)
        self.vote_log = VoteLog(run_dir.vote_log, self.run_id, self.limits)
        self.proof_file = ProofFile(run_dir.proofs, self.run_id, self.limits)
        self.conviction_file = ConvictionFile(run_dir.convictions, self.run_id, self.limits)
        self.offered_states = OfferedStates()

        saved = self._load_checkpoint(errors)
        self.contributions = restore_contributions(
            saved, planner, self.shared_memory, self.store, self.contribution_file, errors
        )
        if manifest.audits.share and (pending := self.contributions.pending) is not None:
            self.contributions.pending = record_interrupted(self.store.put, pending)
        chain, state, self.has_state = self._begin(node) if saved is None else self._resume(saved)
        self.revisions = node.revisions_of(manifest, run_dir)
        self.revisions.adopted = chain.head.revision
        self.steering = Steering(manifest, chain, self.revisions.log)
        self.compute = RoundCompute(planner, self.store, rate_of_outer_steps(self.steering, planner))
        self.anchors.write(chain.round, state.shared_vectors(self.method))
        placed = self.outer_vectors.place(chain.round, self.anchors.place(chain.round, state))
        self.replicated = ReplicatedState(chain, placed, self.compute, workers.compute, workers.low_priority)
        replicated = self.replicated
        self.served_chain = ServedChain(chain, lambda: replicated.blob, self.steering, self.has_shared_state)

    def _load_checkpoint(self, errors: ErrorRecorder) -> Checkpoint | None:
        memory, outer = self.shared_memory, self.outer_vectors
        # Vectors are read to the memory where they stay, so that a large state is in main memory only once.
        rooms = [{WEIGHTS: memory.anchor_weights(number), **outer.rooms(number)} for number in range(2)]
        saved, skipped = load_newest(self.run_dir.checkpoints, self.run_id, self.shapes, rooms)
        for line in skipped:
            errors.record_recovered("checkpoint skipped", line)
        if saved is not None:
            logger.info("resuming from the checkpoint of round %d", saved.round)
            restore_trainer_snapshot(saved, memory)
        return saved

    def _resume(self, saved: Checkpoint) -> tuple[Chain, OuterState, bool]:
        chain = saved.chain.restore(self.manifest.admission, self.limits)
        return chain, OuterState(saved.anchor, saved.outer), True

    def _begin(self, node: NodeNetwork) -> tuple[Chain, OuterState, bool]:
        """Return the start of the run, and whether this machine has its weights."""
        weights = start_weights(self.manifest, node.options.base, cut_of(self.manifest))
        chain = Chain.from_genesis(self.run_id, self.manifest.admission)
        anchor = torch.zeros(self.planner.numel) if weights is None else weights
        return chain, OuterState.initial(anchor, self.method), weights is not None
