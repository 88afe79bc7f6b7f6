"""The k largest cosine coefficients of each tile of 64 x 64 values (arXiv 2411.19870).

A matrix is cut into tiles whose height and width are the largest divisors of its own up to 64, a vector into stretches;
a tensor of more than two dimensions counts as a matrix of its first dimension and all others. With `dimensions` = 1 all
tiles are stretches of rows. A codec that is not bound to tensors takes the vector as rows of 64, filled up with zeros
to whole tiles.

The coefficients of all tiles, whole tiles of 4096 first, are sent as by `ChunkTopK`. (The paper keeps k of each tile
whatever its size, which for small tiles is all there is; here the k of a chunk of 4096 are shared by its small tiles.)

Payload: head, payload of the inner codec.
"""

from collections.abc import Iterator
from dataclasses import dataclass as plain_dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.codecs.codec import Codec, Payload, two_dimensions
from optim.codecs.cosine import SIDE, forward, inverse
from optim.codecs.dense import largest_magnitude
from optim.codecs.topk import ChunkTopK
from optim.layout import Layout
from optim.memory import empty
from optim.parts import STRICT
from optim.threads import each
from optim.vectors import Floats, Vector, slabs

TILE = SIDE * SIDE
BAND = 1 << 16  # values; as fp64 they are twice as long


@plain_dataclass(frozen=True)
class Tiles:
    """Those of one tensor. `start`: of its values in the vector; `place`: of its coefficients among all."""

    start: int
    place: int
    rows: int
    columns: int
    height: int
    width: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    def bands(self) -> Iterator[slice]:
        """Values, counted from the tensor's start, in whole rows of tiles, not many more than the cache holds."""
        band = self.height * self.columns
        return slabs(self.rows * self.columns, max(1, BAND // band) * band)

    def around(self, first: int, last: int) -> slice:
        """The least whole rows of tiles that hold these values, counted from the tensor's start."""
        band = self.height * self.columns
        return slice(first // band * band, -(-last // band) * band)

    def coefficients(self, values: Floats) -> Floats:
        """Tile after tile, of whole rows of tiles."""
        across = self.columns // self.width
        tiles = values.reshape(-1, self.height, across, self.width).transpose(0, 2, 1, 3)
        return forward(tiles.reshape(-1, self.height, self.width)).ravel()

    def values(self, coefficients: Floats) -> Floats:
        """Undo `coefficients`."""
        across = self.columns // self.width
        tiles = inverse(coefficients.reshape(-1, self.height, self.width))
        return tiles.reshape(-1, across, self.height, self.width).transpose(0, 2, 1, 3).ravel()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CosineTopK(Codec):
    kind: ClassVar[str] = "dct-topk"
    number: ClassVar[int] = 9
    version: ClassVar[int] = 2

    k: int = Field(default=64, ge=1, le=TILE, description="coefficients kept of each 4096")
    bits: int = Field(default=2, ge=1, le=3, description="bits of a kept coefficient, its sign included")
    dimensions: Literal[1, 2] = 2

    @property
    def alignment(self) -> int:
        return TILE

    def max_bytes(self, numel: int) -> int:
        return 2 + self._inner.max_bytes(self._tiled(numel)[1])

    def bits_per_parameter(self, numel: int) -> float:
        return 16 / numel + self._inner.bits_per_parameter(numel)

    def write(self, values: Floats, subtract: bool) -> Payload:
        largest_magnitude(values)
        tensors, count = self._tiled(values.size)
        coefficients = empty(count)

        def transform(job: tuple[Tiles, slice]) -> None:
            tiles, band = job
            found = tiles.coefficients(_filled(values, tiles.start + band.start, tiles.start + band.stop))
            coefficients[tiles.place + band.start : tiles.place + band.stop] = found

        each(transform, ((tiles, band) for tiles in tensors for band in tiles.bands()))
        payload = b"".join((self.head(), self._inner.write(coefficients, subtract=False)))
        if subtract:
            self.read(payload, values.size).subtract_from(values)
        return payload

    def read(self, payload: Payload, numel: int) -> "TiledVector":
        tensors, count = self._tiled(numel)
        return TiledVector(numel, tensors, self._inner.read(self.open(payload, numel).rest(), count))

    @property
    def _inner(self) -> ChunkTopK:
        return ChunkTopK(k=self.k, chunk=TILE, bits=self.bits)

    def _tiled(self, numel: int) -> tuple[list[Tiles], int]:
        """All tensors' tiles in the order of the vector, and the number of coefficients."""
        tensors: dict[int, Tiles] = {}
        place = 0
        layout = self.layout_of(numel) or Layout(((-(-numel // TILE) * SIDE, SIDE),))
        sizes = [(*two_dimensions(shape), start) for shape, (start, _) in layout.tensors()]
        shaped = [(rows, columns, start, self._height(rows), _side(columns)) for rows, columns, start in sizes]
        for rows, columns, start, height, width in sorted(shaped, key=lambda tensor: tensor[3] * tensor[4] < TILE):
            tensors[start] = Tiles(start, place, rows, columns, height, width)
            place += rows * columns
        return [tensors[start] for start in sorted(tensors)], place

    def _height(self, rows: int) -> int:
        return _side(rows) if self.dimensions == 2 else 1


@plain_dataclass(frozen=True)
class TiledVector(Vector):
    """`kept`: the coefficients. Transformed back on demand."""

    numel: int
    tensors: list[Tiles]
    kept: Vector

    @property
    def sent(self) -> Vector:
        return self.kept

    def decoded(self, sent: Vector) -> "TiledVector":
        return TiledVector(self.numel, self.tensors, sent)

    def pieces(self) -> Iterator[slice]:
        for tiles in self.tensors:
            for band in tiles.bands():
                yield slice(tiles.start + band.start, min(tiles.start + band.stop, self.numel))

    def restore(self, part: slice, out: Floats) -> None:
        for tiles in self.tensors:
            first, last = max(tiles.start, part.start), min(tiles.stop, part.stop)
            if first < last:
                around = tiles.around(first - tiles.start, last - tiles.start)
                found = tiles.values(self.kept.span(slice(tiles.place + around.start, tiles.place + around.stop)))
                origin = tiles.start + around.start
                out[first - part.start : last - part.start] = found[first - origin : last - origin]


def _side(length: int) -> int:
    """The largest divisor up to 64."""
    return next(side for side in range(min(length, SIDE), 0, -1) if length % side == 0)


def _filled(values: Floats, start: int, stop: int) -> Floats:
    part = values[start:stop]
    return np.pad(part, (0, stop - start - part.size)) if part.size < stop - start else part
