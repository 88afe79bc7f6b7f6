"""Choose the stage that a node serves: as the user says, else as before, else by its key."""

import hashlib

from node.run_dir import RunDir
from protocol.errors import UsageError
from protocol.identity import PeerId
from protocol.manifest import Manifest
from protocol.pipeline.stage import StageManifest


def choose_stage(manifest: Manifest, wanted: int | None, folder: RunDir, peer_id: PeerId) -> Manifest:
    """Return the manifest of the stage that this node serves; of a run with one stage, the manifest itself.

    Raises UsageError if there is no such stage, or the folder holds the state of another one.
    """
    stages = manifest.pipeline.stages
    if not manifest.pipeline.is_cut:
        if wanted is not None:
            raise UsageError("--stage: every peer of this run trains the whole model; leave the option out")
        return manifest
    if wanted is not None and wanted >= stages:
        raise UsageError(f"--stage: this run has the stages 0 to {stages - 1}, not {wanted}")
    before = folder.read_stage()
    if before is not None and wanted not in (None, before):
        raise UsageError(f"--stage: {folder.path} holds stage {before}, not {wanted}; give the node another --dir")
    chosen = next(stage for stage in (wanted, before, _stage_by_key(peer_id, stages)) if stage is not None)
    folder.write_stage(chosen)
    return StageManifest.of(manifest, chosen)


def _stage_by_key(peer_id: PeerId, stages: int) -> int:
    """Return a stage that spreads keys evenly."""
    return int.from_bytes(hashlib.sha256(f"murmur stage of {peer_id}".encode()).digest()[:8], "big") % stages
