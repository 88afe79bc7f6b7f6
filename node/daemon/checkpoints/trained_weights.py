"""Load the trained weights in a node's folder, or those of a pipeline's stages in the folders of several nodes.

Two stages may be one round apart, and nodes keep several checkpoints, so the newest round that all stages have is
joined.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from node.daemon.checkpoints.checkpoint import load_anchor
from node.model.families import shapes_of
from node.paths import stage_checkpoints
from protocol.errors import CheckpointError
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from protocol.pipeline.stage import StageManifest


@dataclass(frozen=True)
class TrainedWeights:
    """Weights of a run: flat fp32 (numel,), after `rounds` and `tokens`; `None` if nobody noted these."""

    manifest: Manifest
    round: int
    anchor: Tensor
    tokens: int | None = None


def load_trained_weights(folder: Path) -> TrainedWeights:
    """Load the newest weights of the whole model. Raises CheckpointError if there are none.

    Args:
        folder: of a node; of a run that is cut into stages, the folder above those of the nodes.
    """
    manifest = load_manifest(folder / "run.toml")
    if manifest.pipeline.is_cut:
        return _join_stages(folder, manifest)
    saved = load_anchor(folder / "checkpoints", manifest.run_id, shapes_of(manifest))
    return TrainedWeights(manifest, saved.round, saved.anchor, saved.tokens)


def load_checkpoint_weights(path: Path) -> TrainedWeights:
    """Load the weights of one checkpoint in a node's folder. Raises CheckpointError."""
    manifest = load_manifest(path.parent.parent / "run.toml")
    if manifest.pipeline.is_cut:
        raise CheckpointError(f"{path} holds one stage of {manifest.pipeline.stages}; name the folder above the nodes'")
    saved = load_anchor(path.parent, manifest.run_id, shapes_of(manifest), path.name)
    return TrainedWeights(manifest, saved.round, saved.anchor, saved.tokens)


def _join_stages(folder: Path, manifest: Manifest) -> TrainedWeights:
    stages = manifest.pipeline.stages
    held = stage_checkpoints(folder)
    missing = [str(stage) for stage in range(stages) if not held.get(stage)]
    if missing:
        raise CheckpointError(
            f"{folder} has no checkpoint of stage {', '.join(missing)} of {stages}; name the folder above those of "
            "nodes that serve all stages, or the run itself: `murmur export RUN OUT` asks its peers"
        )
    common = set.intersection(*(set(held[stage]) for stage in range(stages)))
    if not common:
        raise CheckpointError(f"the stages in {folder} have no round in common; let the nodes finish another one")
    newest, parts = max(common), []
    for stage in range(stages):
        of_stage, saved = StageManifest.of(manifest, stage), held[stage][newest]
        parts.append(load_anchor(saved.parent, of_stage.run_id, shapes_of(of_stage), saved.name))
    return TrainedWeights(manifest, newest, torch.cat([part.anchor for part in parts]), parts[0].tokens)
