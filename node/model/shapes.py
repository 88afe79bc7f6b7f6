"""The shape table: names and shapes of a model's parameters, and the place of each in the flat vector.

Everything that leaves the trainer (anchors, contributions, checkpoints) is one flat fp32 vector; this table gives its
elements their names. A model family computes it from the manifest, without building the model. Tied weights appear
once.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from optim.layout import Layout

Entry = tuple[str, tuple[int, ...]]  # name and shape of a parameter


@dataclass(frozen=True)
class ShapeTable:
    """Parameter names and shapes in the order of the flat vector.

    `block_numbers` gives the block of each entry, ascending from 0. If it is empty, each entry is a block of its own.
    `experts` gives the number of the expert that each entry belongs to, -1 for none, if the model has experts.
    """

    entries: tuple[Entry, ...]
    block_numbers: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()

    @classmethod
    def from_blocks(cls, blocks: Iterable[Iterable[Entry]]) -> Self:
        """Build the table of a model whose parameters are given block by block."""
        numbered = [(entry, number) for number, block in enumerate(blocks) for entry in block]
        return cls(tuple(entry for entry, _ in numbered), tuple(number for _, number in numbered))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of all parameters."""
        return tuple(name for name, _ in self.entries)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of all parameters."""
        return tuple(shape for _, shape in self.entries)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Return the index of the first element of each parameter."""
        return tuple(itertools.accumulate(self.sizes[:-1], initial=0))

    @cached_property
    def numel(self) -> int:
        """Return the number of elements of the flat vector."""
        return sum(self.sizes)

    @cached_property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Return the parameter names of each block: embedding, layers, head. A model can be cut between blocks."""
        numbered = zip(self.block_numbers or range(len(self.names)), self.names, strict=True)
        grouped = itertools.groupby(numbered, key=lambda pair: pair[0])
        return tuple(tuple(name for _, name in pairs) for _, pairs in grouped)

    @cached_property
    def layout(self) -> Layout:
        """Return shapes and blocks for the methods, which need no names."""
        return Layout(self.shapes, self.block_numbers, self.experts)

    def hash(self) -> bytes:
        """Return the SHA-256 (32 bytes) of names, shapes and their order.

        Two peers with equal hashes mean the same by a flat vector.
        """
        return hashlib.sha256(b"murmur shapes 1\0" + json.dumps(self.entries).encode()).digest()

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return each parameter as a view of `flat` (numel,); raises ValueError if the length differs."""
        if flat.shape != (self.numel,):
            raise ValueError(f"a flat vector of this model has shape ({self.numel},), not {tuple(flat.shape)}")
        pieces = torch.split(flat, list(self.sizes))
        return {name: piece.view(shape) for (name, shape), piece in zip(self.entries, pieces, strict=True)}

    def copy_named(self, flat: Tensor, named: Mapping[str, Tensor]) -> None:
        """Copy every named parameter to its place in `flat`; raises ValueError if names or shapes differ."""
        if set(named) != set(self.names):
            raise ValueError(f"parameters differ: {sorted(set(named) ^ set(self.names))[:3]}")
        for name, view in self.views(flat).items():
            if named[name].shape != view.shape:
                raise ValueError(f"{name} has shape {tuple(named[name].shape)}, not {tuple(view.shape)}")
            view.copy_(named[name])
