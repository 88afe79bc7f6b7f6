"""A run that starts from a folder of random weights."""

from pathlib import Path

from node.daemon.checkpoints.trained_weights import TrainedWeights
from node.data.tokenizer import ByteTokenizer
from node.model import initial_weights
from node.model.export import write_export
from node.model.weight_files import block_digests
from protocol.manifest.run import Manifest


def start_from_weights(manifest: Manifest, folder: Path) -> Manifest:
    """Write random weights as a folder of Hugging Face; return the manifest of the run that starts from them."""
    weights = initial_weights(manifest.model, 9)
    write_export(TrainedWeights(manifest, 0, weights), ByteTokenizer(), folder)
    named = {"from_": str(folder), "weights": block_digests(manifest.model, weights)}
    return manifest.model_copy(update={"model": manifest.model.model_copy(update=named)})
