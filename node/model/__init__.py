"""The model: its shape table, its initial weights and its arithmetic."""

from node.model.initialization import initial_weights
from node.model.llama import CompiledLlama, Llama
from node.model.shapes import ShapeTable, shape_table

__all__ = ["CompiledLlama", "Llama", "ShapeTable", "initial_weights", "shape_table"]
