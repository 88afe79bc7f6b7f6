"""Load the trained weights in a node's folder, or those of a pipeline's stages in the folders of several nodes.

Two stages may be one round apart, and nodes keep several checkpoints, so the newest round that all stages have is
joined.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from node.checkpoints.checkpoint import list_checkpoints, load_anchor
from node.model.families import shapes_of
from node.run_dir import RunDir
from protocol.errors import CheckpointError
from protocol.manifest import Manifest, load_manifest
from protocol.pipeline.stage import StageManifest


@dataclass(frozen=True)
class TrainedWeights:
    """The newest weights in a folder, and their run."""

    manifest: Manifest
    round: int
    anchor: Tensor  # flat fp32 (numel,)


def load_trained_weights(folder: Path) -> TrainedWeights:
    """Load the newest weights of the whole model. Raises CheckpointError if there are none.

    Args:
        folder: of a node; of a run that is cut into stages, the folder above those of the nodes.
    """
    manifest = load_manifest(folder / "run.toml")
    if manifest.pipeline.is_cut:
        return _join_stages(folder, manifest)
    number, anchor = load_anchor(folder / "checkpoints", manifest.run_id, shapes_of(manifest))
    return TrainedWeights(manifest, number, anchor)


def _join_stages(folder: Path, manifest: Manifest) -> TrainedWeights:
    stages = manifest.pipeline.stages
    held = _held_rounds(folder)
    missing = [str(stage) for stage in range(stages) if not held[stage]]
    if missing:
        raise CheckpointError(
            f"{folder} has no checkpoint of stage {', '.join(missing)} of {stages}; name the folder above those of "
            "nodes that serve all stages"
        )
    common = set.intersection(*(set(held[stage]) for stage in range(stages)))
    if not common:
        raise CheckpointError(f"the stages in {folder} have no round in common; let the nodes finish another one")
    newest, anchors = max(common), []
    for stage in range(stages):
        of_stage, node = StageManifest.of(manifest, stage), held[stage][newest]
        anchors.append(load_anchor(node / "checkpoints", of_stage.run_id, shapes_of(of_stage), newest)[1])
    return TrainedWeights(manifest, newest, torch.cat(anchors))


def _held_rounds(folder: Path) -> defaultdict[int, dict[int, Path]]:
    """Return by stage which node in a folder holds which round."""
    held: defaultdict[int, dict[int, Path]] = defaultdict(dict)
    for node in sorted(path.parent for path in folder.glob("*/checkpoints")):
        stage = RunDir(node).read_stage()
        if stage is not None:
            held[stage] |= {saved.round: node for saved in list_checkpoints(node / "checkpoints")}
    return held
