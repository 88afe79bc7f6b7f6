"""The k largest cosine coefficients of each tile of 64 x 64 values (arXiv 2411.19870).

The vector is cut into tiles of 4096 neighbours, the last filled up with zeros, and what the transform makes of them is
sent as by `ChunkTopK`. The paper cuts each matrix into square tiles; here a tile is 64 rows of 64 neighbours in the
flat vector, which are the same coefficients as the paper's only for matrices of 64 columns and, with `dimensions` = 1,
for vectors.

Payload: head, payload of the inner codec.
"""

from functools import partial
from typing import ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.codecs.codec import Codec, Payload
from optim.codecs.cosine import SIDE, TILE, Dimensions, forward, inverse
from optim.codecs.dense import largest_magnitude
from optim.codecs.topk import ChunkTopK
from optim.parts import STRICT
from optim.vectors import DenseVector, Floats, Vector, slabs


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CosineTopK(Codec):
    kind: ClassVar[str] = "dct-topk"
    number: ClassVar[int] = 9
    version: ClassVar[int] = 1

    k: int = Field(default=64, ge=1, le=TILE, description="coefficients kept of each tile of 4096")
    bits: int = Field(default=2, ge=1, le=3, description="bits of a kept coefficient, its sign included")
    dimensions: Dimensions = 2

    @property
    def alignment(self) -> int:
        return TILE

    def max_bytes(self, numel: int) -> int:
        return 2 + self._inner.max_bytes(_padded(numel))

    def write(self, values: Floats, subtract: bool) -> bytes:
        largest_magnitude(values)
        coefficients = np.empty(_padded(values.size), np.float32)
        for part in slabs(coefficients.size):
            slab = values[part]
            tiles = np.pad(slab, (0, -slab.size % TILE)).reshape(-1, SIDE, SIDE)
            coefficients[part] = forward(tiles, self.dimensions).ravel()
        payload = self.head() + self._inner.write(coefficients, subtract=False)
        if subtract:
            decoded = self.read(payload, values.size)
            for part in slabs(values.size):
                values[part] -= decoded.span(part)
        return payload

    def read(self, payload: Payload, numel: int) -> DenseVector:
        reader = self.open(payload, numel)
        kept = self._inner.read(reader.rest(), _padded(numel))
        return DenseVector(numel, partial(self._restore, kept))

    @property
    def _inner(self) -> ChunkTopK:
        return ChunkTopK(k=self.k, chunk=TILE, bits=self.bits)

    def _restore(self, kept: Vector, part: slice) -> Floats:
        first = part.start // TILE * TILE
        tiles = kept.span(slice(first, _padded(part.stop))).reshape(-1, SIDE, SIDE)
        return inverse(tiles, self.dimensions).ravel()[part.start - first : part.stop - first]


def _padded(numel: int) -> int:
    return -(-numel // TILE) * TILE
