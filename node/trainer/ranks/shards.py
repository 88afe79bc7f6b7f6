"""Deal parameters and batches to ranks: pure arithmetic.

A parameter is cut along its first dimension into parts of equally many rows, as FSDP does; the last ranks get fewer, or
none. A batch is cut into nearly equal parts, and each part into equally many passes, because every pass of one rank
needs all the others.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from node.data.batches import count_targets
from optim.layout import Layout, Shape, Span


@dataclass(frozen=True)
class Shard:
    """A rank's part of a parameter: its place in the flat vector of the model, and in the vectors of the rank.

    `tensor` is the place of the whole parameter, `largest` the number of values of the largest part.
    """

    shape: Shape  # of the part
    whole: Span
    own: Span
    tensor: Span
    largest: int

    @property
    def is_empty(self) -> bool:
        return self.own[0] == self.own[1]


@dataclass(frozen=True)
class Piece:
    """The windows (sequences, context + 1) of one pass, and their weight in the mean over the batch."""

    windows: Tensor
    weight: float


def own_rows(rows: int, ranks: int, rank: int) -> range:
    """Return the rows of a parameter that a rank holds."""
    size = -(-rows // ranks)
    return range(min(rank * size, rows), min((rank + 1) * size, rows))


def own_shards(layout: Layout, ranks: int, rank: int) -> tuple[Shard, ...]:
    """Return a rank's part of each parameter, in the order of the flat vector; a part may be empty."""
    shards: list[Shard] = []
    filled = 0
    for shape, (start, stop) in layout.iter_tensors():
        rows, values = own_rows(shape[0], ranks, rank), math.prod(shape[1:])
        whole = (start + rows.start * values, start + rows.stop * values)
        own, largest = (filled, filled + len(rows) * values), -(-shape[0] // ranks) * values
        shards.append(Shard((len(rows), *shape[1:]), whole, own, (start, stop), largest))
        filled += len(rows) * values
    return tuple(shards)


def own_pieces(windows: Tensor, ranks: int, rank: int, microbatch: int) -> list[Piece]:
    """Return the passes of a rank over its part of a batch; a pass that is only for company has weight 0."""
    part = torch.tensor_split(windows, ranks)[rank]
    passes = -(-len(windows) // (ranks * microbatch))
    pieces = torch.tensor_split(part, passes)
    total = max(1, count_targets(windows))
    return [Piece(piece if len(piece) else windows[:1], count_targets(piece) / total) for piece in pieces]
