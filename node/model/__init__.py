"""The model: families by `model.kind`, the shape table, initial weights and the torch module."""

from node.model.families import build_compiled_model, build_model, has_compiler, model_family, shape_table
from node.model.initialization import initial_weights
from node.model.interface import LanguageModel, ModelFamily
from node.model.shapes import ShapeTable

__all__ = [
    "LanguageModel",
    "ModelFamily",
    "ShapeTable",
    "build_compiled_model",
    "build_model",
    "has_compiler",
    "initial_weights",
    "model_family",
    "shape_table",
]
