"""The orthonormal discrete cosine transform of 64 values or of 64 x 64, to the same bits on every machine.

    T[u, i] = c(u) cos(pi (2 i + 1) u / 128),  c(0) = sqrt(1/64), c(u) = sqrt(2/64);  forward X T^T, in 2-D T X T^T

A matrix product sums in an order that depends on the library and the processor. Here all sums are exact, so that the
order does not matter: T is rounded to integers / 2^24, each tile to integers of 24 bits and a shared power of two, and
as no row of T has a 1-norm above 8, all partial sums are integers below 2^53, which fp64 holds exactly. The table's
integers come from `math.cos`, whose last bit may differ between systems; 2^-24 is 2^28 times coarser than that bit.
"""

import math
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from optim.vectors import Floats

SIDE: Final = 64
TILE: Final = SIDE * SIDE
PRECISION: Final = 24
Doubles = npt.NDArray[np.float64]
Dimensions = Literal[1, 2]


def _table() -> Doubles:
    share = [math.sqrt((1 if u == 0 else 2) / SIDE) for u in range(SIDE)]
    cosines = [[math.cos(math.pi * (2 * i + 1) * u / (2 * SIDE)) for i in range(SIDE)] for u in range(SIDE)]
    table: Doubles = np.rint(np.array(cosines) * np.array(share)[:, None] * 2.0**PRECISION)
    return table


TABLE: Final = _table()
TRANSPOSED: Final = np.ascontiguousarray(TABLE.T)


def forward(tiles: Floats, dimensions: Dimensions) -> Floats:
    """Coefficients of (count, 64, 64) finite values; in one dimension, of each row of 64."""
    return _transform(tiles, TABLE, TRANSPOSED, dimensions)


def inverse(tiles: Floats, dimensions: Dimensions) -> Floats:
    """Undo `forward`, to 2^-22 of a tile's largest coefficient or so."""
    return _transform(tiles, TRANSPOSED, TABLE, dimensions)


def _transform(tiles: Floats, left: Doubles, right: Doubles, dimensions: Dimensions) -> Floats:
    whole, exponents = _whole(tiles.astype(np.float64))
    product = whole @ right
    if dimensions == 2:
        product, shifts = _whole(product)
        product = left @ product
        exponents += shifts - PRECISION
    product *= np.ldexp(1.0, exponents - PRECISION)[:, None, None]
    return product.astype(np.float32)


def _whole(tiles: Doubles) -> tuple[Doubles, npt.NDArray[np.int32]]:
    """Each tile as integers of at most 24 bits, to be multiplied by 2^exponent. Changes `tiles`."""
    flat = tiles.reshape(len(tiles), -1)
    largest = np.maximum(flat.max(axis=1), -flat.min(axis=1))
    exponents = np.frexp(largest)[1] - np.int32(PRECISION)
    # Multiplying fp64 by a power of two is exact so far from the ends of its range.
    tiles *= np.ldexp(1.0, -exponents)[:, None, None]
    return np.rint(tiles, out=tiles), exponents
