"""The kind `custom`: a model of which a run knows the parameters only; training loops of the users compute it."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NoReturn

import torch

from node.model.cut import WHOLE, Cut
from node.model.interface import LanguageModel, ModelFamily
from node.model.shapes import Entry
from node.own_loops import WEIGHTS_ONLY
from protocol.errors import ManifestError, UsageError
from protocol.manifest.model import CUSTOM_KIND, ModelSection, parse_tensor


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
