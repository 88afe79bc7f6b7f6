"""Bound what a run may ask of a node: contributions, the blob store, and the memory of its vectors."""

from node.daemon.state.outer_state import state_bytes
from node.model import Cut, shapes_of
from node.model.memory_estimate import PROCESS_BYTES, fixed_bytes, microbatch_bytes, run_microbatch
from node.trainer.ipc.shared_memory import SharedLayout
from optim.round_plan import RoundPlanner
from protocol.blobs.store import DEFAULT_MEMORY_BYTES
from protocol.consensus.messages.contributions import MAX_MULTIPLE, ContributionLimits
from protocol.manifest.run import Manifest

TEMPORARY_BYTES = 8  # a parameter: an exporting process, or a state that is taken over; a trainer's start; messages
LEAST_BLOB_MEMORY_BYTES = 1 << 24
STORE_STATES = 16  # size of the store, in states
STORE_EXTRA_BYTES = 1 << 30
MAX_RELAYED_CONTRIBUTIONS = 16  # in bytes: for all peers together, at once


def contribution_limits(manifest: Manifest, planner: RoundPlanner) -> ContributionLimits:
    """Return the limits that every contribution to the run must keep."""
    shapes = shapes_of(manifest).hash()
    recipe, organiser = manifest.method.recipe, manifest.run.organiser_key
    table, batch = manifest.pipeline, manifest.train.batch_tokens
    count = table.step_microbatches(batch, manifest.model.context) if table.is_exact else 0
    most = batch if table.is_exact else MAX_MULTIPLE * planner.max_steps * batch
    bounds = planner.max_parts, most, planner.max_part_bytes
    credited = MAX_MULTIPLE * planner.max_steps * manifest.rl.groups if manifest.rl is not None else 0
    return ContributionLimits(
        recipe, shapes, *bounds, organiser, manifest.whole_run_id, count, bool(manifest.audits.share), credited
    )


def max_store_bytes(planner: RoundPlanner) -> int:
    """Return the most bytes that the blobs of a run may take on disk."""
    states = STORE_STATES * state_bytes(planner.numel, planner.method)
    return states + MAX_RELAYED_CONTRIBUTIONS * planner.max_contribution_bytes + STORE_EXTRA_BYTES


def blob_memory_bytes(planner: RoundPlanner) -> int:
    """Return the bytes of fetched blobs that a node keeps in memory: about one a parameter. The others are on disk."""
    return min(DEFAULT_MEMORY_BYTES, max(LEAST_BLOB_MEMORY_BYTES, planner.numel))


def host_bytes(planner: RoundPlanner) -> int:
    """Return the bytes of main memory that the vectors of a run take at the most, in daemon and trainer together.

    The shared memory has the anchors and all that the trainer keeps; on a CPU also its weights and gradient. Files on
    disk do not count, and the other vectors of the outer optimizer are in one (`benchmarks/memory.py`).
    """
    return SharedLayout.of(planner).total_bytes + TEMPORARY_BYTES * planner.numel


def peer_bytes(manifest: Manifest, planner: RoundPlanner, device: str, cut: Cut) -> int:
    """Return the bytes of main memory of a peer that trains this cut of the model, without Python and libraries.

    Args:
        device: "cpu" or "mps", on which the activations are in main memory too, or "cuda". On "mps" the trainer has a
            copy of the vectors that it shares with the daemon.
    """
    held = manifest.pipeline.memory if cut.stages > 1 else 0
    activations = microbatch_bytes(manifest, run_microbatch(manifest)[1], device, cut) if device != "cuda" else 0
    copies = fixed_bytes(manifest, device, cut) if device == "mps" else 0
    return host_bytes(planner) + held + activations + copies


def trainer_bytes(manifest: Manifest, planner: RoundPlanner, free: int, cut: Cut) -> int:
    """Return how many bytes of free main memory a trainer on a CPU may take, besides what its daemon shares with it.

    Memory that both take for a while is in the estimates of both, and counts once.
    """
    return max(0, free - PROCESS_BYTES - host_bytes(planner) + fixed_bytes(manifest, "cpu", cut))
