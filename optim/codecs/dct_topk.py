"""The k largest discrete cosine coefficients of each tile of 64 x 64 values, with a transform that is reproducible.

A matrix product sums in an order that depends on the library and the processor. The orthonormal transform here gives
the same bits on every machine, because all its sums are exact:

    T[u, i] = c(u) cos(pi (2 i + 1) u / (2 s)),  c(0) = sqrt(1/s), c(u) = sqrt(2/s);  forward T X T^T, and X T^T of rows

T is rounded to integers / 2^24, each tile to integers of 24 bits and a shared power of two. No row of T has a 1-norm
above 8 (s is at most 64), so all partial sums are integers below 2^53, which fp64 holds exactly. The integers of the
table come from `math.cos`, whose last bit may differ between systems; 2^-24 is 2^28 times coarser than that bit.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from typing import ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.codecs.base import Codec, Payload, matrix_shape
from optim.codecs.bits.magnitudes import largest_magnitude
from optim.codecs.topk import ChunkTopK
from optim.kernels.buffer_pool import empty
from optim.kernels.parallel import parallel_for
from optim.kernels.vectors import Floats, Vector, slabs
from optim.layout import Layout
from optim.options import STRICT

MAX_SIDE: Final = 64  # of the largest tile
PRECISION_BITS: Final = 24


@lru_cache(maxsize=MAX_SIDE)
def dct_table(side: int) -> torch.Tensor:
    """Return the (side, side) fp64 table of T * 2^24."""
    norms = [math.sqrt((1 if u == 0 else 2) / side) for u in range(side)]
    cosines = [[math.cos(math.pi * (2 * i + 1) * u / (2 * side)) for i in range(side)] for u in range(side)]
    return torch.from_numpy(np.rint(np.array(cosines) * np.array(norms)[:, None] * 2.0**PRECISION_BITS))


def dct(tiles: Floats) -> Floats:
    """Return the coefficients of (count, height, width) finite values; tiles of height 1 are vectors."""
    return _transform(tiles, dct_table(tiles.shape[1]), dct_table(tiles.shape[2]).T)


def inverse_dct(tiles: Floats) -> Floats:
    """Undo `dct`, to about 2^-22 of a tile's largest coefficient."""
    return _transform(tiles, dct_table(tiles.shape[1]).T, dct_table(tiles.shape[2]))


def _transform(tiles: Floats, left: torch.Tensor, right: torch.Tensor) -> Floats:
    whole, exponents = _to_integers(torch.from_numpy(tiles).double())
    product = (whole.reshape(-1, len(right)) @ right).reshape(whole.shape)
    if len(left) > 1:
        product, shifts = _to_integers(product)
        product = torch.matmul(left, product)
        exponents += shifts - PRECISION_BITS
    product *= _powers_of_two(exponents - PRECISION_BITS)
    transformed: Floats = product.float().numpy()
    return transformed


def _to_integers(tiles: torch.Tensor) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
    """Round each tile to integers of at most 24 bits, to be multiplied by 2^exponent. Overwrites `tiles`."""
    flat = tiles.reshape(len(tiles), -1)
    largest = torch.maximum(flat.amax(1), -flat.amin(1)).numpy()
    exponents = np.frexp(largest)[1] - np.int32(PRECISION_BITS)
    tiles *= _powers_of_two(-exponents)
    return tiles.round_(), exponents


def _powers_of_two(exponents: npt.NDArray[np.int32]) -> torch.Tensor:
    """Return 2^exponent; multiplying fp64 by it is exact so far from the ends of its range."""
    return torch.from_numpy(np.ldexp(1.0, exponents))[:, None, None]


TILE_SIZE = MAX_SIDE * MAX_SIDE
BAND_SIZE = 1 << 16  # values; their fp64 copies are twice as large


@plain_dataclass(frozen=True)
class TiledTensor:
    """The tiles of one tensor.

    `start` is the place of its values in the vector, `coefficient_start` that of its coefficients among all of them.
    """

    start: int
    coefficient_start: int
    rows: int
    columns: int
    height: int
    width: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    def bands(self) -> Iterator[slice]:
        """Return spans of values, relative to the tensor, of whole rows of tiles, about as large as fits the cache."""
        band = self.height * self.columns
        return slabs(self.rows * self.columns, max(1, BAND_SIZE // band) * band)

    def enclosing_bands(self, first: int, last: int) -> slice:
        """Return the least whole rows of tiles that contain these values, relative to the tensor."""
        band = self.height * self.columns
        return slice(first // band * band, -(-last // band) * band)

    def transform(self, values: Floats) -> Floats:
        """Return the coefficients, tile after tile, of whole rows of tiles."""
        across = self.columns // self.width
        tiles = values.reshape(-1, self.height, across, self.width).transpose(0, 2, 1, 3)
        return dct(tiles.reshape(-1, self.height, self.width)).ravel()

    def inverse_transform(self, coefficients: Floats) -> Floats:
        """Undo `transform`."""
        across = self.columns // self.width
        tiles = inverse_dct(coefficients.reshape(-1, self.height, self.width))
        return tiles.reshape(-1, across, self.height, self.width).transpose(0, 2, 1, 3).ravel()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DctTopK(Codec):
    """The k largest cosine coefficients of each tile of 64 x 64 values (arXiv 2411.19870).

    A matrix is cut into tiles whose height and width are the largest divisors of its own up to 64, a vector into
    stretches; a tensor of more than two dimensions counts as a matrix of its first dimension and all others. With
    `dimensions` = 1 all tiles are stretches of rows. A codec that is not bound to tensors treats the vector as rows of
    64, filled up with zeros to whole tiles.

    The coefficients of all tiles, tiles of 4096 first, are sent like the values of `ChunkTopK`. (The paper keeps k of
    each tile whatever its size, which for small tiles is all of it; here small tiles share the k of a chunk of 4096.)

    Payload: header, payload of the inner codec.
    """

    kind: ClassVar[str] = "dct-topk"
    number: ClassVar[int] = 9
    version: ClassVar[int] = 2

    k: int = Field(default=64, ge=1, le=TILE_SIZE, description="coefficients kept of every 4096")
    bits: int = Field(default=2, ge=1, le=3, description="bits per kept coefficient, including the sign")
    dimensions: Literal[1, 2] = 2

    @property
    def alignment(self) -> int:
        return TILE_SIZE

    def max_bytes(self, numel: int) -> int:
        return 2 + self._coefficient_codec.max_bytes(self._tile(numel)[1])

    def bits_per_parameter(self, numel: int) -> float:
        return 16 / numel + self._coefficient_codec.bits_per_parameter(numel)

    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        largest_magnitude(values)
        tensors, count = self._tile(values.size)
        coefficients = empty(count)

        def transform(job: tuple[TiledTensor, slice]) -> None:
            tiles, band = job
            found = tiles.transform(_zero_padded(values, tiles.start + band.start, tiles.start + band.stop))
            coefficients[tiles.coefficient_start + band.start : tiles.coefficient_start + band.stop] = found

        parallel_for(transform, ((tiles, band) for tiles in tensors for band in tiles.bands()))
        payload = b"".join((self.header(), self._coefficient_codec.encode_array(coefficients, subtract=False)))
        if subtract:
            self.decode_vector(payload, values.size).subtract_from(values)
        return payload

    def decode_vector(self, payload: Payload, numel: int) -> "TiledVector":
        tensors, count = self._tile(numel)
        return TiledVector(
            numel, tensors, self._coefficient_codec.decode_vector(self.open_payload(payload, numel).read_rest(), count)
        )

    @property
    def _coefficient_codec(self) -> ChunkTopK:
        return ChunkTopK(k=self.k, chunk=TILE_SIZE, bits=self.bits)

    def _tile(self, numel: int) -> tuple[list[TiledTensor], int]:
        """Return the tiles of all tensors in the order of the vector, and the number of coefficients."""
        tensors: dict[int, TiledTensor] = {}
        coefficient_start = 0
        layout = self.bound_layout(numel) or Layout(((-(-numel // TILE_SIZE) * MAX_SIDE, MAX_SIDE),))
        sizes = [(*matrix_shape(shape), start) for shape, (start, _) in layout.iter_tensors()]
        shaped = [
            (rows, columns, start, self._tile_height(rows), _tile_side(columns)) for rows, columns, start in sizes
        ]
        for rows, columns, start, height, width in sorted(shaped, key=lambda tensor: tensor[3] * tensor[4] < TILE_SIZE):
            tensors[start] = TiledTensor(start, coefficient_start, rows, columns, height, width)
            coefficient_start += rows * columns
        return [tensors[start] for start in sorted(tensors)], coefficient_start

    def _tile_height(self, rows: int) -> int:
        return _tile_side(rows) if self.dimensions == 2 else 1


@plain_dataclass(frozen=True)
class TiledVector(Vector):
    """A vector whose coefficients are transformed back on demand."""

    numel: int
    tensors: list[TiledTensor]
    transformed: Vector

    @property
    def coefficients(self) -> Vector:
        return self.transformed

    def with_coefficients(self, coefficients: Vector) -> "TiledVector":
        return TiledVector(self.numel, self.tensors, coefficients)

    def decode_slabs(self) -> Iterator[slice]:
        for tiles in self.tensors:
            for band in tiles.bands():
                yield slice(tiles.start + band.start, min(tiles.start + band.stop, self.numel))

    def decode_into(self, slab: slice, out: Floats) -> None:
        for tiles in self.tensors:
            first, last = max(tiles.start, slab.start), min(tiles.stop, slab.stop)
            if first < last:
                around = tiles.enclosing_bands(first - tiles.start, last - tiles.start)
                found = tiles.inverse_transform(
                    self.transformed.decode_slab(
                        slice(tiles.coefficient_start + around.start, tiles.coefficient_start + around.stop)
                    )
                )
                origin = tiles.start + around.start
                out[first - slab.start : last - slab.start] = found[first - origin : last - origin]


def _tile_side(length: int) -> int:
    """Return the largest divisor up to 64."""
    return next(side for side in range(min(length, MAX_SIDE), 0, -1) if length % side == 0)


def _zero_padded(values: Floats, start: int, stop: int) -> Floats:
    part = values[start:stop]
    return np.pad(part, (0, stop - start - part.size)) if part.size < stop - start else part
