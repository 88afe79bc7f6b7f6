"""The kind `custom`: a model of which a run knows the parameters only; training loops of the users compute it.

The organiser describes them in a file, in the form of a safetensors header with first values:

    {"layer.weight": {"dtype": "F32", "shape": [64, 32], "first": "normal 0.02"}, ...}

Nothing is read but these three keys. The order in the file is that of the flat vector.
"""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from node.model.config_keys import join_faults, read_json_object
from node.model.interface import LanguageModel, ModelFamily
from node.model.shapes import WHOLE, Cut, Entry
from node.own_loops import WEIGHTS_ONLY
from protocol.errors import ManifestError, UsageError
from protocol.fault_words import shorten
from protocol.manifest.model import CUSTOM_KIND, ModelSection, format_tensor, parse_tensor

METADATA: Final = "__metadata__"
TRAINED_TYPE: Final = "F32"


class CustomFamily(ModelFamily):
    """Models by the lines of `model.tensors`; each tensor is a block of its own."""

    kind = CUSTOM_KIND
    title = "purpose-built"

    def blocks(self, config: ModelSection) -> Iterator[tuple[Entry, ...]]:
        """Yield each tensor by itself."""
        for line in config.tensors:
            tensor = parse_tensor(line)
            yield ((tensor.name, tensor.shape),)

    def block_range(self, config: ModelSection, cut: Cut) -> range:
        """Return the numbers of all tensors; raises ManifestError for a part of the model."""
        if cut.stages > 1:
            reason = "murmur cannot cut a model whose code it does not have; write 1"
            raise ManifestError(f"pipeline.stages: {reason}", ("pipeline", "stages"))
        return range(len(config.tensors))

    def first_values(self, config: ModelSection, entry: Entry) -> tuple[float, float]:
        """Return mean and standard deviation that the organiser has chosen."""
        first = _first_values(config.tensors)[entry[0]]
        assert first is not None, "the manifest has first values, or hashes of the weights"
        return first

    def layer_activation_bytes(self, config: ModelSection) -> float:
        """Return 0, because nobody knows: the activations belong to the user's process."""
        return 0.0

    def build(self, config: ModelSection, device: torch.device | str = "cpu", cut: Cut = WHOLE) -> LanguageModel:
        """Raise UsageError: no code travels with a run."""
        _refuse()

    def build_compiled(self, config: ModelSection, device: torch.device | str = "cpu") -> LanguageModel:
        """Raise UsageError: no code travels with a run."""
        _refuse()

    def build_layerwise(
        self, config: ModelSection, device: torch.device | str, place: torch.device | str
    ) -> LanguageModel:
        """Raise UsageError: no code travels with a run."""
        _refuse()

    def hugging_face_config(self, config: ModelSection) -> dict[str, Any]:
        """Raise UsageError: transformers does not know the model."""
        raise UsageError(f'a model of the kind "{CUSTOM_KIND}" has no config.json; build it by your own code')


@lru_cache(maxsize=4)
def _first_values(lines: tuple[str, ...]) -> dict[str, tuple[float, float] | None]:
    return {tensor.name: tensor.first for tensor in map(parse_tensor, lines)}


def _refuse() -> NoReturn:
    raise UsageError(WEIGHTS_ONLY)


def read_tensor_file(path: Path) -> list[str]:
    """Return the lines of `model.tensors` that a file stands for.

    Raises:
        MissingFileError: it cannot be read.
        ManifestError: one line that names each tensor that cannot be used.
    """
    entries = read_json_object(path, "write it by murmuration.describe")
    entries.pop(METADATA, None)
    faults = [fault for name, entry in entries.items() if (fault := _fault(name, entry))]
    if not entries:
        faults = ["it names no tensor"]
    if faults:
        raise ManifestError(f"{path}: {join_faults(faults)}")
    return [format_tensor(name, entry["shape"], entry.get("first", "")) for name, entry in entries.items()]


def to_text(tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> str:
    """Return the text of a file with shapes and first values, by name."""
    lines = (
        f"  {json.dumps(name)}: {json.dumps({'dtype': TRAINED_TYPE, 'shape': list(shape), 'first': first})}"
        for name, (shape, first) in tensors.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _fault(name: str, entry: Any) -> str:
    return next(_faults(name, entry), "")


def _faults(name: str, entry: Any) -> Iterator[str]:
    shown = shorten(name)
    if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
        yield f"{shown} has no shape"
        return
    if entry.get("dtype", TRAINED_TYPE) != TRAINED_TYPE:
        yield f"{shown} has the type {shorten(str(entry['dtype']))}; parameters are F32, and autocast computes in less"
    if not all(type(size) is int for size in entry["shape"]) or not isinstance(entry.get("first", ""), str):
        yield f"{shown} has a shape or first values of the wrong type"
        return
    try:
        parse_tensor(format_tensor(name, entry["shape"], entry.get("first", "")))
    except ValueError as error:
        yield str(error)
