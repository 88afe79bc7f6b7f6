"""The shape table, and the cut of a model into pipeline stages, between blocks.

Everything that leaves the trainer (anchors, contributions, checkpoints) is one flat fp32 vector; the table gives its
elements names, shapes and places. A model family computes it from the manifest, without building the model. Tied
weights appear once.

A stage is a model itself: its blocks, its flat vector, its shape table. The first stage has the embedding, the last one
the final norm and the output matrix. The flat vector of the whole model is those of the stages one after the other.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

import torch
from torch import Tensor

from optim.layout import Layout
from protocol.errors import ManifestError
from protocol.manifest.run import Manifest
from protocol.pipeline.stage import StageManifest

Entry = tuple[str, tuple[int, ...]]  # name and shape of a parameter


@dataclass(frozen=True)
class Cut:
    """One stage of a model, by its number; a model with a single stage is whole.

    `speeds`: of the peers of each stage together; empty if all are alike.
    """

    stage: int = 0
    stages: int = 1
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.stage < self.stages:
            raise ValueError(f"there is no stage {self.stage} of {self.stages}")

    @property
    def has_embedding(self) -> bool:
        """Return whether the stage takes token ids."""
        return self.stage == 0

    @property
    def has_head(self) -> bool:
        """Return whether the stage returns logits or the loss."""
        return self.stage == self.stages - 1


WHOLE: Final = Cut()


def cut_of(manifest: Manifest) -> Cut:
    """Return the part of the model that a manifest is for."""
    return cuts_of(manifest)[manifest.stage] if isinstance(manifest, StageManifest) else WHOLE


def cuts_of(manifest: Manifest) -> tuple[Cut, ...]:
    """Return the cuts of a run's model into its stages, in order."""
    return all_cuts(manifest.pipeline.stages, manifest.pipeline.speeds)


def all_cuts(stages: int, speeds: tuple[float, ...] = ()) -> tuple[Cut, ...]:
    """Return the cuts of a model with `stages` stages, in order."""
    return tuple(Cut(stage, stages, speeds) for stage in range(stages))


def require_stages(stages: int, layers: int, tied: bool) -> None:
    """Raise ManifestError, one line that names the key to change, unless a model can have this many stages."""
    if stages > layers:
        reason = f"{stages} stages need as many layers, and model.layers is {layers}"
        raise ManifestError(f"pipeline.stages: {reason}; write at most {layers}", ("pipeline", "stages"))
    if stages > 1 and tied:
        reason = "the embedding is in the first stage and the output layer in the last, so they cannot share weights"
        raise ManifestError(f"model.tied: {reason}; write tied = false", ("model", "tied"))


def deal_blocks(work: Sequence[float], stages: int, speeds: Sequence[float] = ()) -> tuple[range, ...]:
    """Return the block numbers of each stage, so that the slowest stage is as fast as possible.

    Args:
        work: of embedding, layers and head; at least `stages` layers, all of which cost the same.
        stages: number of stages.
        speeds: of the peers of each stage together; empty if all are alike.
    """
    layers, layer, speeds = len(work) - 2, work[1], speeds or (1.0,) * stages
    counts, loads = [1] * stages, [layer] * stages
    loads[0] += work[0]
    loads[-1] += work[-1]
    for _ in range(layers - stages):
        lightest = min(range(stages), key=lambda stage: (loads[stage] + layer) / speeds[stage])
        counts[lightest] += 1
        loads[lightest] += layer
    ends = [1 + sum(counts[: stage + 1]) for stage in range(stages)]
    starts = [0, *ends[:-1]]
    ends[-1] += 1
    return tuple(range(start, end) for start, end in zip(starts, ends, strict=True))


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
