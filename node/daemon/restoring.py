"""Restore what a replica had before it stopped: its chain, outer state and contributions, or begin the run."""

import logging
from dataclasses import dataclass
from pathlib import Path

from node.checkpoints.checkpoint import Checkpoint, load_newest
from node.daemon.checkpointer import restore_contributions, restore_trainer_snapshot
from node.daemon.outer_state import OuterState
from node.daemon.run_limits import contribution_limits
from node.ipc.shared_memory import SharedMemory
from node.loop.contributions import ContributionFile, ContributionTracker
from node.model import cut_of, initial_weights, shapes_of
from node.monitoring.status import ErrorRecorder
from optim.round_plan import RoundPlanner
from protocol.blobs.store import BlobStore
from protocol.consensus.chain import Chain
from protocol.manifest import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestoreTargets:
    """The parts of a replica that receive the trainer's snapshot and the pending contribution."""

    shared_memory: SharedMemory
    store: BlobStore
    contribution_file: ContributionFile
    errors: ErrorRecorder


@dataclass(frozen=True)
class RestoredRun:
    """The chain of a replica, the outer state at its head, and its contributions."""

    chain: Chain
    state: OuterState
    contributions: ContributionTracker


def restore_run(manifest: Manifest, planner: RoundPlanner, folder: Path, targets: RestoreTargets) -> RestoredRun:
    """Restore a run from the newest checkpoint in a folder, or begin it if there is none. Raises MurmurError."""
    saved = _load_checkpoint(manifest, folder, targets)
    contributions = restore_contributions(
        saved, planner, targets.shared_memory, targets.store, targets.contribution_file, targets.errors
    )
    if saved is not None:
        chain = saved.chain.restore(manifest.admission, contribution_limits(manifest, planner))
        return RestoredRun(chain, OuterState(saved.anchor, saved.outer), contributions)
    weights = initial_weights(manifest.model, manifest.run.seed, cut_of(manifest))
    chain = Chain.from_genesis(manifest.run_id, manifest.admission)
    return RestoredRun(chain, OuterState.initial(weights, planner.method), contributions)


def _load_checkpoint(manifest: Manifest, folder: Path, targets: RestoreTargets) -> Checkpoint | None:
    saved, skipped = load_newest(folder, manifest.run_id, shapes_of(manifest))
    for line in skipped:
        targets.errors.record_recovered("checkpoint skipped", line)
    if saved is not None:
        logger.info("resuming from the checkpoint of round %d", saved.round)
        restore_trainer_snapshot(saved, targets.shared_memory)
    return saved
