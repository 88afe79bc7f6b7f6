"""The shape table: which parameters a model has and where each stands in the flat vector of all of them.

Everything that leaves the trainer (anchors, messages, checkpoints) is one flat fp32 vector; this table gives its
elements their Hugging Face names. It is arithmetic on the manifest alone: no model is built. Tied weights stand once.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from optim.layout import Layout
from protocol.manifest import ModelSection

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class ShapeTable:
    """Parameter names and shapes in the order in which they stand in the flat vector."""

    entries: tuple[tuple[str, tuple[int, ...]], ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.entries)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(shape for _, shape in self.entries)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Index of the first element of each parameter."""
        return tuple(sum(self.sizes[:index]) for index in range(len(self.sizes)))

    @cached_property
    def numel(self) -> int:
        return sum(self.sizes)

    @cached_property
    def layout(self) -> Layout:
        """For the methods: the embedding, each layer, and what comes after the last one are a block each."""
        layers = 1 + max((layer for layer in map(_layer_number, self.names) if layer is not None), default=-1)
        return Layout(self.shapes, tuple(self._block_number(name, layers) for name in self.names))

    @staticmethod
    def _block_number(name: str, layers: int) -> int:
        layer = _layer_number(name)
        return 0 if name == EMBEDDING else 1 + (layers if layer is None else layer)

    def hash(self) -> bytes:
        """SHA-256 over names, shapes and their order (32 bytes): equal tables, equal meaning of a flat vector."""
        return hashlib.sha256(b"murmur shapes 1\0" + json.dumps(self.entries).encode()).digest()

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter as a view into `flat` (numel,); nothing is copied. ValueError when the length differs."""
        if flat.shape != (self.numel,):
            raise ValueError(f"a flat vector of this model has shape ({self.numel},), not {tuple(flat.shape)}")
        pieces = torch.split(flat, list(self.sizes))
        return {name: piece.view(shape) for (name, shape), piece in zip(self.entries, pieces, strict=True)}

    def copy_named(self, flat: Tensor, named: Mapping[str, Tensor]) -> None:
        """The inverse of `views`: copy every named parameter to its place. ValueError when names or shapes differ."""
        if set(named) != set(self.names):
            raise ValueError(f"parameters differ: {sorted(set(named) ^ set(self.names))[:3]}")
        for name, view in self.views(flat).items():
            if named[name].shape != view.shape:
                raise ValueError(f"{name} has shape {tuple(named[name].shape)}, not {tuple(view.shape)}")
            view.copy_(named[name])


def shape_table(config: ModelSection) -> ShapeTable:
    return ShapeTable(tuple(_list_entries(config)))


def _list_entries(config: ModelSection) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield EMBEDDING, (config.vocabulary, config.width)
    for layer in range(config.layers):
        for name, shape in _layer_entries(config):
            yield f"model.layers.{layer}.{name}.weight", shape
    yield FINAL_NORM, (config.width,)
    if not config.tied:
        yield OUTPUT, (config.vocabulary, config.width)


def _layer_entries(config: ModelSection) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Query, key and value stand side by side, as do gate and up: the model multiplies by each group at once."""
    keys = config.width // config.heads * (config.kv_heads or config.heads)
    yield "self_attn.q_proj", (config.width, config.width)
    yield "self_attn.k_proj", (keys, config.width)
    yield "self_attn.v_proj", (keys, config.width)
    yield "self_attn.o_proj", (config.width, config.width)
    yield "mlp.gate_proj", (config.hidden, config.width)
    yield "mlp.up_proj", (config.hidden, config.width)
    yield "mlp.down_proj", (config.width, config.hidden)
    yield "input_layernorm", (config.width,)
    yield "post_attention_layernorm", (config.width,)


def _layer_number(name: str) -> int | None:
    """Number of the layer that a parameter belongs to."""
    found = LAYER.match(name)
    return int(found[1]) if found else None
