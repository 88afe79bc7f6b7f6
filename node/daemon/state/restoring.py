"""Restore what a replica had before it stopped: its chain, outer state and contributions, or begin the run."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from node.daemon.checkpoints.checkpoint import Checkpoint, load_newest
from node.daemon.run_limits import contribution_limits
from node.daemon.state.checkpointer import restore_contributions, restore_trainer_snapshot
from node.daemon.state.outer_state import OuterState
from node.daemon.state.outer_vectors import OuterVectors
from node.loop.contributions import ContributionFile, ContributionTracker
from node.model import cut_of, shapes_of
from node.model.weight_files import start_weights
from node.monitoring.status import ErrorRecorder
from node.trainer.ipc.shared_memory import SharedMemory
from optim.inner.base import WEIGHTS
from optim.round_plan import RoundPlanner
from protocol.blobs.store import BlobStore
from protocol.consensus.history.chain import Chain
from protocol.manifest.run import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestoreTargets:
    """The parts of a replica that receive vectors and the pending contribution."""

    shared_memory: SharedMemory
    outer_vectors: OuterVectors
    store: BlobStore
    contribution_file: ContributionFile
    errors: ErrorRecorder


@dataclass(frozen=True)
class RestoredRun:
    """The chain of a replica, the outer state at its head, and its contributions.

    Without `has_state` this machine lacks the weights of round 0: `state` is zero, and peers must send the true one.
    """

    chain: Chain
    state: OuterState
    contributions: ContributionTracker
    has_state: bool = True


def restore_run(
    manifest: Manifest, planner: RoundPlanner, folder: Path, base: Path, targets: RestoreTargets
) -> RestoredRun:
    """Restore a run from the newest checkpoint in `folder`, or begin it if there is none. Raises MurmurError.

    `base` is the folder that the manifest's paths start from.
    """
    saved = _load_checkpoint(manifest, folder, targets)
    contributions = restore_contributions(
        saved, planner, targets.shared_memory, targets.store, targets.contribution_file, targets.errors
    )
    if saved is not None:
        chain = saved.chain.restore(manifest.admission, contribution_limits(manifest, planner))
        return RestoredRun(chain, OuterState(saved.anchor, saved.outer), contributions)
    weights = start_weights(manifest, base, cut_of(manifest))
    chain = Chain.from_genesis(manifest.run_id, manifest.admission)
    anchor = torch.zeros(planner.numel) if weights is None else weights
    return RestoredRun(chain, OuterState.initial(anchor, planner.method), contributions, weights is not None)


def _load_checkpoint(manifest: Manifest, folder: Path, targets: RestoreTargets) -> Checkpoint | None:
    memory, outer = targets.shared_memory, targets.outer_vectors
    rooms = [{WEIGHTS: memory.anchor_weights(number), **outer.rooms(number)} for number in range(2)]
    saved, skipped = load_newest(folder, manifest.run_id, shapes_of(manifest), rooms)
    for line in skipped:
        targets.errors.record_recovered("checkpoint skipped", line)
    if saved is not None:
        logger.info("resuming from the checkpoint of round %d", saved.round)
        restore_trainer_snapshot(saved, targets.shared_memory)
    return saved
