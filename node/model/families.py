"""The families of models by `model.kind`, and the functions through which all other code meets them."""

import os
import shutil
from typing import Final

import torch

from node.model.adapter import FrozenWeights
from node.model.custom import CustomFamily
from node.model.decoders.family import LlamaFamily
from node.model.decoders.olmo2 import Olmo2Family
from node.model.decoders.qwen3 import Qwen3Family, Qwen3MoeFamily
from node.model.interface import LanguageModel, ModelFamily
from node.model.shapes import WHOLE, Cut, ShapeTable, all_cuts, cut_of, cuts_of
from protocol.errors import ManifestError
from protocol.manifest.model import ModelSection
from protocol.manifest.run import Manifest

FAMILIES: Final[dict[str, ModelFamily]] = {
    family.kind: family for family in (LlamaFamily(), Qwen3Family(), Qwen3MoeFamily(), Olmo2Family(), CustomFamily())
}
COMPILERS: Final = ("g++", "clang++")


def model_family(config: ModelSection) -> ModelFamily:
    """Return the family that the manifest names; raises ManifestError unless there is one that its keys fit."""
    family = FAMILIES.get(config.kind)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        reason = f"no kind of model is called {config.kind!r}; known kinds: {known}"
        raise ManifestError(f"model.kind: {reason}", ("model", "kind"))
    family.require_fit(config)
    return family


def shape_table(config: ModelSection, cut: Cut = WHOLE) -> ShapeTable:
    """Return names, shapes and order of the model's parameters, or of a stage's, without building it.

    Raises ManifestError if the model cannot be cut so, as all functions that take a cut.
    """
    return model_family(config).shape_table(config, cut)


def shapes_of(manifest: Manifest) -> ShapeTable:
    """Return the shape table of the model, or of the stage, that a manifest is for."""
    return shape_table(manifest.model, cut_of(manifest))


def smallest_cut(manifest: Manifest) -> Cut:
    """Return the part of the model that a machine must be able to hold: its stage if it has one, else the smallest."""
    if not manifest.pipeline.is_cut or cut_of(manifest) != WHOLE:
        return cut_of(manifest)
    return min(cuts_of(manifest), key=lambda cut: shape_table(manifest.model, cut).numel)


def stage_slice(config: ModelSection, cut: Cut) -> slice:
    """Return the place of a stage's flat vector in that of the whole model."""
    before = sum(shape_table(config, other).numel for other in all_cuts(cut.stages, cut.speeds)[: cut.stage])
    return slice(before, before + shape_table(config, cut).numel)


def build_model(
    config: ModelSection, device: torch.device | str = "cpu", cut: Cut = WHOLE, frozen: FrozenWeights | None = None
) -> LanguageModel:
    """Build the model, or a stage of it, on `device`, with all weights zero: `load_flat` gives it values.

    A model with an adapter computes only with its `frozen` weights (`node.model.weight_files.read_frozen`).
    """
    model = model_family(config).build(config, device, cut)
    if frozen is not None:
        model.hold_frozen(frozen)
    return model


def build_compiled_model(config: ModelSection, device: torch.device | str = "cpu") -> LanguageModel:
    """Build the model for long runs: compiled at its first use, with matrix products in bf16.

    On a CPU with bf16 matrix units a step of a small model takes a third of the time. Losses differ by rounding.
    Compiling takes some seconds to a minute, once for all models of one shape, and is kept between processes.
    """
    return model_family(config).build_compiled(config, device)


def build_layerwise_model(
    config: ModelSection, device: torch.device | str, place: torch.device | str = "cpu"
) -> LanguageModel:
    """Build the model for long runs on several devices like `device`; its weights are on `place` at first."""
    return model_family(config).build_layerwise(config, device, place)


def has_compiler() -> bool:
    """Return whether torch would find a C++ compiler: CXX, or a common name."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), *COMPILERS) if name)
