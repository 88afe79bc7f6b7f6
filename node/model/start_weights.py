"""The weights of round 0: drawn from the seed, or read from the folder that the manifest names."""

from pathlib import Path

from torch import Tensor

from node.model.cut import WHOLE, Cut
from node.model.hugging_face.hub import weights_folder
from node.model.hugging_face.weight_files import WeightFiles, block_digests, expected_digests
from node.model.initialization import initial_weights
from protocol.errors import CheckpointError
from protocol.manifest.model import ModelSection
from protocol.manifest.run import Manifest


def start_weights(manifest: Manifest, base: Path, cut: Cut = WHOLE) -> Tensor | None:
    """Return the weights of round 0, of the model or of a stage: flat fp32 (numel,) on the CPU.

    `None` means that this machine has no copy of the weights with which the run starts, so peers must send them.

    Args:
        base: folder of the manifest; a relative `model.from` starts here.

    Raises:
        MissingFileError, CheckpointError: the folder does not have the weights of this run.
        UsageError, UnreachableError: they are on the hub, and cannot be downloaded.
    """
    model = manifest.model
    if not model.weights:
        return initial_weights(model, manifest.run.seed, cut)
    if not model.from_:
        return None
    folder = weights_folder(model.from_, base)
    with WeightFiles(folder, model) as files:
        flat = files.load(cut)
    if not is_start(model, flat, cut):
        raise CheckpointError(f"{folder} has other weights than this run began with; name the right folder")
    return flat


def is_start(model: ModelSection, flat: Tensor, cut: Cut = WHOLE) -> bool:
    """Return whether weights are those that the manifest names; any are if it names none."""
    return not model.weights or block_digests(model, flat, cut) == expected_digests(model, cut)
