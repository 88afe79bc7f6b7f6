"""The model: families by `model.kind`, the cut into stages, the shape table, initial weights and the torch module."""

from node.model.families import (
    build_compiled_model,
    build_layerwise_model,
    build_model,
    has_compiler,
    model_family,
    shape_table,
    shapes_of,
    smallest_cut,
    stage_slice,
)
from node.model.initialization import initial_weights
from node.model.interface import LanguageModel, ModelFamily
from node.model.shapes import WHOLE, Cut, ShapeTable, all_cuts, cut_of, cuts_of

__all__ = [
    "WHOLE",
    "Cut",
    "LanguageModel",
    "ModelFamily",
    "ShapeTable",
    "all_cuts",
    "build_compiled_model",
    "build_layerwise_model",
    "build_model",
    "cut_of",
    "cuts_of",
    "has_compiler",
    "initial_weights",
    "model_family",
    "shape_table",
    "shapes_of",
    "smallest_cut",
    "stage_slice",
]
