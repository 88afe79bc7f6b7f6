"""Bound what a run may ask of a node: the size of contributions and of the blob store."""

from node.daemon.blob_relay import MAX_CONTRIBUTIONS
from node.daemon.outer_state import state_bytes
from node.model import shapes_of
from optim.round_plan import RoundPlanner
from protocol.consensus.messages import ContributionLimits
from protocol.consensus.weights import MAX_MULTIPLE
from protocol.manifest import Manifest

STORE_STATES = 16  # size of the store, in states
STORE_EXTRA_BYTES = 1 << 30


def contribution_limits(manifest: Manifest, planner: RoundPlanner) -> ContributionLimits:
    """Return the limits that every contribution to the run must keep."""
    shapes = shapes_of(manifest).hash()
    recipe, organiser = manifest.method.recipe, manifest.run.organiser_key
    most = MAX_MULTIPLE * planner.max_steps * manifest.train.batch_tokens
    return ContributionLimits(recipe, shapes, planner.max_parts, most, planner.max_part_bytes, organiser)


def max_store_bytes(planner: RoundPlanner) -> int:
    """Return the most bytes that the blobs of a run may take on disk."""
    states = STORE_STATES * state_bytes(planner.numel, planner.method)
    return states + MAX_CONTRIBUTIONS * planner.max_contribution_bytes + STORE_EXTRA_BYTES
