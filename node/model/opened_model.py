"""A model on this machine with all that `murmur generate` and `murmur eval` need of it.

It is in the folder of a node or of several, in one checkpoint, or in a folder of Hugging Face.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from node.daemon.checkpoints.checkpoint_folders import is_checkpoint
from node.daemon.checkpoints.trained_weights import TrainedWeights, load_checkpoint_weights, load_trained_weights
from node.data.tokenizer import FileTokenizer, TextTokenizer, open_node_tokenizer
from node.model.config_file import CONFIG_FILE, read_config
from node.model.families import build_model
from node.model.interface import LanguageModel
from node.model.weight_files import WeightFiles, read_frozen
from node.paths import find_trained_dir
from node.run_dir import TOKENIZER, tokenizer_path
from protocol.errors import ManifestError
from protocol.fault_words import describe_faults
from protocol.manifest.model import ModelSection
from protocol.manifest.run import Manifest


@dataclass(frozen=True)
class RunOfModel:
    """The run that made a model, and its place in it; `node` is the folder of a node, `None` for fetched weights."""

    manifest: Manifest
    round: int
    tokens: int | None
    node: Path | None


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """Sizes, weights (flat fp32, numel) and tokenizer of a model; `run` is `None` for a folder of Hugging Face."""

    config: ModelSection
    weights: Tensor
    tokenizer: TextTokenizer
    tokenizer_file: Path | None  # `None` means bytes
    run: RunOfModel | None = None

    @classmethod
    def of(cls, trained: TrainedWeights, folder: Path, node: Path | None = None) -> "OpenedModel":
        """Return the model with these weights of a run, whose tokenizer is in a folder. Raises DataError."""
        manifest = trained.manifest
        file = tokenizer_path(folder, manifest) if manifest.data.tokenizer else None
        run = RunOfModel(manifest, trained.round, trained.tokens, node)
        return cls(manifest.model, trained.anchor, open_node_tokenizer(folder, manifest), file, run)

    @property
    def _folder(self) -> Path:
        return Path() if self.run is None or self.run.node is None else self.run.node

    def build(self, device: torch.device | str = "cpu") -> LanguageModel:
        """Build the module on `device`."""
        model = build_model(self.config, device, frozen=read_frozen(self.config, self._folder))
        model.use_memory(self.weights.to(device))
        return model


def open_folder(path: Path) -> OpenedModel:
    """Open the newest model in a folder, or the one that the folder is.

    Raises MissingFileError, CheckpointError, DataError or ManifestError, one line.
    """
    if is_checkpoint(path):
        path = path.resolve()
        return _open_trained(load_checkpoint_weights(path), path.parent.parent)
    if (path / CONFIG_FILE).is_file():
        return _open_export(path)
    node = find_trained_dir(path)
    return _open_trained(load_trained_weights(node), node)


def _open_trained(trained: TrainedWeights, node: Path) -> OpenedModel:
    return OpenedModel.of(trained, node, node)


def _open_export(folder: Path) -> OpenedModel:
    values = read_config(folder / CONFIG_FILE)
    try:
        config = ModelSection.model_validate(values)
    except ValidationError as error:
        raise ManifestError(f"{folder / CONFIG_FILE}: {describe_faults(error)}") from error
    file = (folder / TOKENIZER).resolve()
    tokenizer = FileTokenizer(file)
    with WeightFiles(folder, config) as files:
        return OpenedModel(config, files.load(), tokenizer, file)
